//! A lane's calls about uses of its blocks that only this rank has; `local_uses` keeps them.

use super::backing::Backing;
use super::state::{BlockKey, LaneState};
use crate::Result;
use crate::driver::Stream;

impl LaneState {
    /// Notes that a block is used on a stream of this rank, of which the other ranks need not know: after the block is freed,
    /// whoever reuses its memory first waits, on the device, for that stream's work up to the free (rule D4). Changes
    /// nothing else, and is no event of the lane.
    ///
    /// Work of `CU_STREAM_PER_THREAD` counts up to this call. What is captured into a graph does not count: a graph's memory
    /// lives as long as the graph. What the stream was given before the capture does.
    pub fn note_use(
        &mut self,
        key: BlockKey,
        stream: Stream,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        let home = self.check_live(key)?.stream;
        if self.streams.of_ordinal(home) == Some(stream) && !stream.is_per_thread() {
            return Ok(());
        }
        self.local_uses.note(key.counter, stream, backing)
    }

    /// Notes a use like [`note_use`](Self::note_use), for the live block in which a byte of the lane lies. False if
    /// there is none.
    pub fn note_use_at(
        &mut self,
        offset: u64,
        stream: Stream,
        backing: &mut dyn Backing,
    ) -> Result<bool> {
        match self.block_around(offset) {
            Some(key) => self.note_use(key, stream, backing).map(|()| true),
            None => Ok(false),
        }
    }

    /// Records what still uses a block that is freed. You must call this before anything changes.
    #[inline]
    pub(super) fn end_uses(&mut self, key: BlockKey, backing: &mut dyn Backing) -> Result<()> {
        let block = self.table.get(key.id);
        let home = self.streams.of_ordinal(block.stream).filter(|stream| stream.is_per_thread());
        if home.is_none() && self.local_uses.blocks.is_empty() {
            return Ok(());
        }
        let (start, end) = (block.offset, block.end());
        let ended = self.local_uses.end(key.counter, home, backing);
        let events = ended.map_err(|error| self.failed(error))?;
        self.local_uses.add_range(start, end, events);
        Ok(())
    }

    /// Whether a block was freed while a stream that uses it was captured: then it may be reused when the device has done all
    /// that it was given. From then on that is forgotten.
    pub(crate) fn take_missed_uses(&mut self) -> bool {
        std::mem::take(&mut self.local_uses.missed)
    }

    /// Makes a stream wait for what may still use `[start, end)`, in units.
    #[inline]
    pub(super) fn wait_for_uses(
        &mut self,
        range: (u32, u32),
        stream: Stream,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        self.local_uses.wait(range, stream, backing)
    }

    /// Forgets uses of `[start, end)`, in units, for which somebody has waited.
    #[inline]
    pub(super) fn take_uses(&mut self, (start, end): (u32, u32), backing: &mut dyn Backing) {
        if !self.local_uses.is_idle() {
            self.local_uses.take_range(start, end, backing);
        }
    }

    /// Has uses on a stream that is about to be destroyed end now.
    pub(super) fn forget_uses(&mut self, stream: Stream, backing: &mut dyn Backing) -> Result<()> {
        let forgotten = self.local_uses.forget(stream, backing);
        forgotten.map_err(|error| self.failed(error))
    }

    /// Forgets uses when the device is idle, but for those of blocks that were allocated before event `first`.
    pub(super) fn clear_uses(&mut self, first: u64, backing: &mut dyn Backing) {
        self.local_uses.clear(first, backing);
    }
}
