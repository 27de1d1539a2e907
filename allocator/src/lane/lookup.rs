//! Blocks by where they begin, and who may free them so.
//!
//! A block is its allocator's, who has its key. One that was given up to its address is anybody's who
//! knows that: only such a block is freed by address, as the owner of another still uses it.

use super::UNIT;
use super::index::Index;
use super::state::{BlockKey, LaneState};
use super::table::BlockState;
use crate::Result;

impl LaneState {
    /// The live block that begins at `offset`, if any.
    pub fn block_at(&self, offset: u64) -> Option<BlockKey> {
        let units = u32::try_from(offset / UNIT).ok().filter(|_| offset.is_multiple_of(UNIT))?;
        let index = self.index.get_or_init(|| Index::of(&self.table));
        let id = index.get(units)?;
        let block = self.table.get(id);
        (block.state == BlockState::Live).then_some(BlockKey { id, counter: block.counter })
    }

    /// Gives a live block up to its address: from now on whoever knows that may free it. No event.
    pub fn give_up(&mut self, key: BlockKey) -> Result<()> {
        self.check_live(key)?;
        self.table.get_mut(key.id).by_address = true;
        Ok(())
    }

    /// Whether a live block was given up to its address.
    pub fn is_given_up(&self, key: BlockKey) -> bool {
        self.check_live(key).is_ok_and(|block| block.by_address)
    }
}
