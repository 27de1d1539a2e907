//! Lookups of blocks by the offset at which they begin, and which blocks may be freed that way.
//!
//! A block belongs to whoever holds its key. Only a block whose owner has allowed it may be freed by its
//! address: the owner of any other block still uses it.

use super::UNIT;
use super::index::OffsetIndex;
use super::state::{BlockKey, LaneState};
use super::table::BlockState;
use crate::Result;

impl LaneState {
    /// The live block that begins at `offset`, if any.
    pub fn block_at(&self, offset: u64) -> Option<BlockKey> {
        let units = u32::try_from(offset / UNIT).ok().filter(|_| offset.is_multiple_of(UNIT))?;
        let index = self.index.get_or_init(|| OffsetIndex::of(&self.table));
        let id = index.get(units)?;
        let block = self.table.get(id);
        (block.state == BlockState::Live).then_some(BlockKey { id, counter: block.counter })
    }

    /// The live block in which a byte lies, if any. Where it is not the first byte of the block, this looks at all blocks.
    pub(super) fn block_around(&self, offset: u64) -> Option<BlockKey> {
        if let Some(key) = self.block_at(offset) {
            return Some(key);
        }
        let units = u32::try_from(offset / UNIT).ok()?;
        let around = |id: &u32| {
            let block = self.table.get(*id);
            block.offset <= units && units < block.end() && block.state == BlockState::Live
        };
        let id = self.table.ids().find(around)?;
        Some(BlockKey { id, counter: self.table.get(id).counter })
    }

    /// Lets whoever knows a live block's address free it from now on. This is no event of the lane.
    pub fn allow_free_by_address(&mut self, key: BlockKey) -> Result<()> {
        self.check_live(key)?;
        self.table.get_mut(key.id).free_by_address = true;
        Ok(())
    }

    /// Whether a live block may be freed by its address.
    pub fn may_free_by_address(&self, key: BlockKey) -> bool {
        self.check_live(key).is_ok_and(|block| block.free_by_address)
    }
}
