//! The public interface of a lane: allocation, trim, and its numbers.

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;

use super::Block;
use super::lane_memory::{AtOnce, LaneInner};
use super::shared_lane::SharedLane;
use crate::driver::Stream;
use crate::lane::{
    AllocationRequest, Backing, BlockView, Digest, LaneStats, Placed, Segment, Site, here,
};
use crate::{Error, Result};

/// A lane of a pool. Cloning is cheap; clones are the same lane.
///
/// Threads that share a symmetric lane must use it in an order that is the same on every rank; threads with
/// a lane each need no order between them (rule D7). A commit, a resync and a collective that commits are part
/// of every symmetric lane's sequence. When one begins, all threads must have reached the same place of their
/// sequences as on other ranks, so wait for them first. Frees without order are outside the sequence: they may
/// come at any time and from any thread, and never wait for a commit under way.
#[derive(Clone)]
pub struct Lane(pub(super) Arc<SharedLane>);

impl Lane {
    /// The lane's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Whether commits share its memory with the other ranks. That of a local lane is this rank's alone.
    pub fn is_symmetric(&self) -> bool {
        self.0.is_symmetric()
    }

    /// Allocates `count` elements on the default stream; see [`Lane::alloc_on`].
    #[track_caller]
    pub fn alloc<T: Pod>(&self, count: usize) -> Result<Block<T>> {
        self.alloc_on(count, Stream::DEFAULT)
    }

    /// Allocates `count` elements for use on `stream`, aligned for `T` and to 512 bytes. In host memory, new
    /// memory holds zeros and reused memory holds its old contents. Dropping the block frees it, in order.
    ///
    /// Never communicates with other ranks.
    ///
    /// # Errors
    ///
    /// [`Error::is_out_of_memory`] if the lane's range, its limit or the device is used up;
    /// [`Error::is_invalid_argument`] if the size overflows or the lane knows 64 other streams. Every call of a
    /// lane that can fail gives [`Error::is_invalid_state`] in a forked child, and for ever once a call has
    /// panicked inside the lane.
    #[track_caller]
    pub fn alloc_on<T: Pod>(&self, count: usize, stream: Stream) -> Result<Block<T>> {
        let align = (align_of::<T>() as u64).max(crate::lane::UNIT);
        self.place(count, align, stream, here())
    }

    /// Allocates `bytes` bytes for use on `stream`, at an address that is a multiple of `align` on every rank.
    /// `align` must be a power of two of at most the driver's granularity (usually 2 MiB), to which heaps are
    /// aligned; else [`Error::is_invalid_argument`]. Other errors as for [`alloc_on`](Self::alloc_on).
    #[track_caller]
    pub fn alloc_bytes(&self, bytes: usize, align: u64, stream: Stream) -> Result<Block<u8>> {
        self.place(bytes, align, stream, here())
    }

    /// Allocates like [`alloc_bytes`](Self::alloc_bytes) on the default stream, for a block of which little may ever
    /// be used. In host memory its pages come with their first accesses, and its size is not compared with the memory
    /// available.
    #[track_caller]
    pub fn alloc_sparsely(&self, bytes: usize, align: u64) -> Result<Block<u8>> {
        let request =
            AllocationRequest { bytes: bytes as u64, align, stream: Stream::DEFAULT, site: here() };
        let placed = {
            let LaneInner { state, memory } = &mut *self.0.lock()?;
            memory.sparsely = true;
            let placed = state.alloc(request, memory);
            memory.sparsely = false;
            placed
        };
        let Placed { key, offset, .. } = placed.map_err(|error| self.named(error))?;
        Ok(Block::new(self.0.clone(), key, self.0.base + offset, bytes))
    }

    /// Allocates like [`alloc_bytes`](Self::alloc_bytes), but never waits for a commit under way in another thread:
    /// that is [`Error::is_invalid_state`]. Any other failure makes a commit due, as
    /// [`note_failure`](Self::note_failure) does. For allocator hooks, whose callers hold locks and get no error
    /// message.
    #[track_caller]
    pub fn try_alloc_bytes(&self, bytes: usize, align: u64, stream: Stream) -> Result<Block<u8>> {
        let site = here();
        let request = AllocationRequest { bytes: bytes as u64, align, stream, site };
        let placed = {
            let mut inner = self.0.lock_unless_committing().map_err(|error| self.named(error))?;
            let LaneInner { state, memory } = &mut *inner;
            state.alloc(request, memory).inspect_err(|error| {
                // The program may go on without the memory, while other ranks did get it.
                memory.due();
                state.note_failure(error);
            })
        };
        let Placed { key, offset, .. } = placed.map_err(|error| self.named(error))?;
        Ok(Block::new(self.0.clone(), key, self.0.base + offset, bytes))
    }

    /// Allocates like [`alloc_bytes`](Self::alloc_bytes) on the default stream, in a step of all ranks that shares
    /// the block at once: no commit is due for it. A rank that has no memory for the block has it all the same, until
    /// all ranks give it up; so their sequences stay alike. Returns the block, unless the lane itself has no place
    /// for it, and whether there is memory.
    pub(super) fn alloc_at_once(
        &self,
        bytes: u64,
        align: u64,
        site: Site,
    ) -> (Option<Block<u8>>, Result<()>) {
        let request = AllocationRequest { bytes, align, stream: Stream::DEFAULT, site };
        let (placed, made) = match self.0.lock() {
            Ok(mut inner) => {
                let LaneInner { state, memory } = &mut *inner;
                let mut alloc = |pretends| state.alloc(request, &mut AtOnce { memory, pretends });
                match alloc(false) {
                    Ok(placed) => (Some(placed), Ok(())),
                    Err(why) => (alloc(true).ok(), Err(why)),
                }
            }
            Err(why) => (None, Err(why)),
        };
        let block = placed.map(|Placed { key, offset, .. }| {
            Block::new(self.0.clone(), key, self.0.base + offset, bytes as usize)
        });
        (block, made.map_err(|error| self.named(error)))
    }

    fn place<T: Pod>(
        &self,
        count: usize,
        align: u64,
        stream: Stream,
        site: Site,
    ) -> Result<Block<T>> {
        let bytes = count.checked_mul(size_of::<T>()).ok_or_else(|| {
            Error::invalid_argument(format!(
                "{count} elements of {} bytes overflow the address space",
                size_of::<T>()
            ))
        })?;
        let request = AllocationRequest { bytes: bytes as u64, align, stream, site };
        let placed = {
            let LaneInner { state, memory } = &mut *self.0.lock()?;
            state.alloc(request, memory)
        };
        let Placed { key, offset, .. } = placed.map_err(|error| self.named(error))?;
        Ok(Block::new(self.0.clone(), key, self.0.base + offset, count))
    }

    /// Reserves memory on the default stream; see [`Lane::reserve_on`].
    #[track_caller]
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        self.reserve_on(bytes, Stream::DEFAULT)
    }

    /// Makes sure that one more block of `bytes` can be allocated on `stream` without growing. Part of the
    /// lane's sequence. Errors as for [`Lane::alloc_on`].
    #[track_caller]
    pub fn reserve_on(&self, bytes: u64, stream: Stream) -> Result<()> {
        let site = here();
        let LaneInner { state, memory } = &mut *self.0.lock()?;
        state.reserve(bytes, stream, site, memory).map_err(|error| self.named(error))
    }

    /// Forgets a stream that is about to be destroyed: the lane does not use it any more. The next stream that
    /// is new to the lane takes over its memory, after waiting for its work. A lane so serves any number of
    /// streams, of which it can know 64 at a time. Part of the lane's sequence. Blocks that were allocated on
    /// the stream stay as they are. Does nothing if the lane does not know the stream.
    ///
    /// # Errors
    ///
    /// [`Error::is_invalid_state`] while the stream is being captured, and in a forked child.
    #[track_caller]
    pub fn forget_stream(&self, stream: Stream) -> Result<()> {
        let site = here();
        let LaneInner { state, memory } = &mut *self.0.lock()?;
        if state.knows(stream) && self.0.heap().driver().is_capturing(stream) {
            return Err(self.named(Error::invalid_state(format!(
                "stream {:#x} is being captured into a graph; call forget_stream after the capture",
                stream.raw()
            ))));
        }
        state.forget_stream(stream, site, memory).map_err(|error| self.named(error))
    }

    /// Notes that this rank cannot do what all ranks are about to do in this lane, and why. This makes a
    /// commit due. If other ranks went on, that commit fails on all ranks with `why`, which explains more than
    /// that their sequences differ. If no rank could do it, sequences are equal and the commit succeeds.
    ///
    /// Does nothing in a forked child, and in a lane in which a call has panicked: that is an error of every
    /// commit already.
    pub fn note_failure(&self, why: &Error) {
        let Ok(mut inner) = self.0.lock() else { return };
        let LaneInner { state, memory } = &mut *inner;
        memory.due();
        state.note_failure(why);
    }

    /// Releases every segment that is wholly free, and returns their bytes. Part of the lane's sequence. The
    /// memory of a symmetric lane is given back by the next commit, that of a local lane immediately, after
    /// waiting for the device.
    #[track_caller]
    pub fn trim(&self) -> Result<u64> {
        let site = here();
        let LaneInner { state, memory } = &mut *self.0.lock()?;
        if state.is_local() {
            // Kernels that use this memory may still run.
            self.0.heap().driver().synchronize()?;
        }
        let bytes = state.trim(site);
        if state.is_local() && state.has_retired() {
            let mut outcome = Ok(());
            for segment in state.take_retired() {
                outcome = outcome.and(memory.drop_segment(&segment));
            }
            outcome?;
        }
        Ok(bytes)
    }

    /// The lane's present numbers. This and the queries below give [`Error::is_invalid_state`] as every call of
    /// the lane does (see [`Lane::alloc_on`]).
    pub fn stats(&self) -> Result<LaneStats> {
        Ok(self.0.lock()?.state.stats())
    }

    /// Bytes of physical memory that the lane holds. The same number as in [`stats`](Self::stats), found faster.
    pub fn reserved(&self) -> Result<u64> {
        Ok(self.0.lock()?.state.reserved())
    }

    /// Blocks that are not free. The same number as in [`stats`](Self::stats), found faster.
    pub fn live_blocks(&self) -> Result<u64> {
        Ok(self.0.lock()?.state.live())
    }

    /// The lane's counter: how many events its sequence has so far.
    pub fn counter(&self) -> Result<u64> {
        Ok(self.0.lock()?.state.counter())
    }

    /// Digest of the lane's events: equal on all ranks at equal counters, unless they have diverged.
    pub fn digest(&self) -> Result<Digest> {
        Ok(self.0.lock()?.state.digest())
    }

    /// A map of the lane: its segments by offset, and all its ranges in address order.
    pub fn map(&self) -> Result<(Vec<Segment>, Vec<BlockView>)> {
        let inner = self.0.lock()?;
        Ok((inner.state.segments().to_vec(), inner.state.blocks().collect()))
    }

    /// Where the lane begins in a slot, and the length of its range, in bytes.
    pub fn range(&self) -> (u64, u64) {
        (self.0.base, self.0.range)
    }

    pub(super) fn named(&self, error: Error) -> Error {
        error.context(format!("rank {}", self.0.heap().rank()))
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane")
            .field("name", &self.0.name)
            .field("base", &self.0.base)
            .field("range", &self.0.range)
            .finish_non_exhaustive()
    }
}
