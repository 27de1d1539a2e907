//! Calls that name blocks by their addresses, for callers that keep no [`Block`](super::Block).

use crate::driver::Stream;
use crate::lane::{BlockKey, LaneState, here};
use crate::{Error, Result};

use super::free_queue::QueuedCall;
use super::lane_memory::LaneInner;
use super::{Lane, Pool};

const NOT_A_BLOCK: &str = "no live block begins there (freed before?)";
const HELD: &str =
    "it is held by a Block, whose drop frees it; give it up with Block::into_address first";

impl Pool {
    /// Records a use like [`Block::record_use`](super::Block::record_use), of the live block in which `address` lies,
    /// in any lane. False if it lies in no block of this rank.
    pub fn record_use_address(&self, address: u64, stream: Stream) -> Result<bool> {
        for lane in &self.0.lanes {
            let base = lane.heap().layout().address(lane.heap().layout().rank, lane.base);
            if let Some(offset) = address.checked_sub(base).filter(|&offset| offset < lane.range) {
                let LaneInner { state, memory } = &mut *lane.lock()?;
                return state.note_use_at(offset, stream, memory);
            }
        }
        Ok(false)
    }
}

impl Lane {
    /// Notes that the block that begins at `address` is used on `stream` too; see
    /// [`Block::record_stream`](super::Block::record_stream). Does not wait for a commit under way, like
    /// [`try_alloc_bytes`](Self::try_alloc_bytes).
    #[track_caller]
    pub fn record_stream_address(&self, address: u64, stream: Stream) -> Result<()> {
        let site = here();
        let offset = self.offset_of(address)?;
        let mut inner = self.0.lock_unless_committing().map_err(|error| self.named(error))?;
        let key = inner.state.block_at(offset);
        let key = key.ok_or_else(|| self.not_live(address, NOT_A_BLOCK))?;
        inner.state.record_stream(key, stream, site)
    }

    /// Frees the block that begins at `address`, in order. For callers that keep addresses, not blocks
    /// (see [`Block::into_address`](super::Block::into_address)). [`Error::is_invalid_argument`] for an
    /// address at which no block of the lane begins, and for memory that a [`Block`](super::Block) still owns.
    #[track_caller]
    pub fn free_address(&self, address: u64) -> Result<()> {
        self.free_address_sized(address).map(drop)
    }

    /// Frees like [`free_address`](Self::free_address); returns the bytes freed, in whole units of 512.
    #[track_caller]
    pub fn free_address_sized(&self, address: u64) -> Result<u64> {
        let site = here();
        let offset = self.offset_of(address)?;
        let LaneInner { state, memory } = &mut *self.0.lock()?;
        let key = self.block_to_free(state, address, offset)?;
        let before = state.allocated();
        state.free(key, site, memory)?;
        Ok(before - state.allocated())
    }

    /// Frees the block that begins at `address`, without order (rule D5). Never waits for a commit under way:
    /// while another thread has the lane's lock the free is queued, and an address that is refused later is
    /// only logged.
    #[track_caller]
    pub fn free_address_unordered(&self, address: u64) -> Result<()> {
        let site = here();
        let offset = self.offset_of(address)?;
        match self.0.try_lock()? {
            Some(mut inner) => {
                let LaneInner { state, memory } = &mut *inner;
                let key = self.block_to_free(state, address, offset)?;
                state.free_unordered(key, site, memory)
            }
            None => {
                self.0.free_queue.push(QueuedCall::FreeAt(offset));
                Ok(())
            }
        }
    }

    /// The block that begins at an offset, if it may be freed by its address.
    fn block_to_free(&self, state: &LaneState, address: u64, offset: u64) -> Result<BlockKey> {
        let key = state.block_at(offset).ok_or_else(|| self.not_live(address, NOT_A_BLOCK))?;
        if state.may_free_by_address(key) { Ok(key) } else { Err(self.refused(address, HELD)) }
    }

    /// The offset in the lane of an address of this rank.
    fn offset_of(&self, address: u64) -> Result<u64> {
        let (heap, layout) = (self.0.heap(), self.0.heap().layout());
        let (slot, offset) = layout
            .locate(address)
            .ok_or_else(|| self.not_live(address, "it is outside the heap"))?;
        if slot != layout.rank {
            let rank = heap.ranks()[slot as usize];
            let why = format!("it is rank {rank}'s memory, which only that rank frees");
            return Err(self.not_live(address, &why));
        }
        offset
            .checked_sub(self.0.base)
            .filter(|&offset| offset < self.0.range)
            .ok_or_else(|| self.not_live(address, "it belongs to another lane"))
    }

    fn not_live(&self, address: u64, why: &str) -> Error {
        self.refused(address, &format!("not a live block: {why}"))
    }

    fn refused(&self, address: u64, why: &str) -> Error {
        Error::invalid_argument(format!(
            "address {address:#x} of lane {:?} on rank {}: {why}",
            self.0.name,
            self.0.heap().rank()
        ))
    }
}
