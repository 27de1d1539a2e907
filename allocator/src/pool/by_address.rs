//! Blocks by their addresses: for callers that keep no [`Block`](super::Block).

use crate::driver::Stream;
use crate::lane::{BlockKey, here};
use crate::{Error, Result};

use super::Lane;
use super::lane::LaneInner;
use super::late::Late;

const NOT_A_BLOCK: &str = "no live block begins there (freed before?)";

impl Lane {
    /// Notes that the block that begins at `address` is used on `stream` too; see
    /// [`Block::record_stream`]. Waits for no commit, as [`try_alloc_bytes`](Self::try_alloc_bytes).
    #[track_caller]
    pub fn record_stream_address(&self, address: u64, stream: Stream) -> Result<()> {
        let site = here();
        let offset = self.offset_of(address)?;
        let mut inner = self.0.lock_unless_committing().map_err(|error| self.named(error))?;
        let key = inner.state.block_at(offset);
        let key = key.ok_or_else(|| self.not_live(address, NOT_A_BLOCK))?;
        inner.state.record_stream(key, stream, site)
    }

    /// Frees the block that begins at `address`, in order. For callers that keep addresses, not
    /// [`Block`]s (see [`Block::into_address`]). A foreign or freed address is
    /// [`Error::is_invalid_argument`].
    #[track_caller]
    pub fn free_address(&self, address: u64) -> Result<()> {
        let site = here();
        self.0.free(self.find(address)?, site)
    }

    /// [`free_address`](Self::free_address), saying how many bytes that were, in whole units.
    #[track_caller]
    pub fn free_address_sized(&self, address: u64) -> Result<u64> {
        let site = here();
        let offset = self.offset_of(address)?;
        let LaneInner { state, memory } = &mut *self.0.lock();
        let key = state.block_at(offset).ok_or_else(|| self.not_live(address, NOT_A_BLOCK))?;
        let before = state.allocated();
        state.free(key, site, memory)?;
        Ok(before - state.allocated())
    }

    /// Frees the block that begins at `address`, without order (rule D5). Never waits for a commit
    /// under way: beside another thread's call an address that is no live block's is not refused but
    /// logged, and nothing is freed.
    #[track_caller]
    pub fn free_address_unordered(&self, address: u64) -> Result<()> {
        let site = here();
        let offset = self.offset_of(address)?;
        match self.0.unlocked() {
            Some(mut inner) => {
                let key = inner.state.block_at(offset);
                let key = key.ok_or_else(|| self.not_live(address, NOT_A_BLOCK))?;
                let LaneInner { state, memory } = &mut *inner;
                state.free_unordered(key, site, memory)
            }
            None => {
                self.0.late.push(Late::At(offset));
                Ok(())
            }
        }
    }

    fn find(&self, address: u64) -> Result<BlockKey> {
        let key = self.0.lock().state.block_at(self.offset_of(address)?);
        key.ok_or_else(|| self.not_live(address, NOT_A_BLOCK))
    }

    /// The offset in the lane of an address of this rank.
    fn offset_of(&self, address: u64) -> Result<u64> {
        let layout = self.0.heap().layout();
        let (rank, offset) = layout
            .locate(address)
            .ok_or_else(|| self.not_live(address, "it is outside the heap"))?;
        if rank != layout.rank {
            let why = format!("it is rank {rank}'s memory, which only that rank frees");
            return Err(self.not_live(address, &why));
        }
        offset
            .checked_sub(self.0.base)
            .filter(|&offset| offset < self.0.range)
            .ok_or_else(|| self.not_live(address, "it belongs to another lane"))
    }

    fn not_live(&self, address: u64, why: &str) -> Error {
        Error::invalid_argument(format!(
            "address {address:#x} is not a live block of lane {:?} on rank {}: {why}",
            self.0.name,
            self.0.heap().layout().rank
        ))
    }
}
