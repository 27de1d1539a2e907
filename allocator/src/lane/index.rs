//! From an offset to the block that begins there: an open-addressed table.
//!
//! Reached when a caller frees or asks by address, and made when that happens first; no placement
//! depends on it. Its order is never looked at and its multiplier is a constant (rule D1). Entries are eight bytes, offset and id
//! together, so that ten thousand live blocks take 128 KiB and a lookup touches one cache line.

use super::table::{BlockState, BlockTable};

/// No block. Ids stay below `u32::MAX`.
const EMPTY: u64 = u64::MAX;
/// A table that was needed once is not made smaller than this.
const LEAST: usize = 64;

#[derive(Clone, Debug, Default)]
pub(super) struct OffsetIndex {
    /// Offset above, id below; a power of two of them, or none.
    slots: Vec<u64>,
    used: usize,
}

impl OffsetIndex {
    /// Of all blocks that are handed out.
    pub(super) fn of(table: &BlockTable) -> Self {
        let mut index = Self::default();
        for id in table.ids() {
            let block = table.get(id);
            if matches!(block.state, BlockState::Live | BlockState::Deferred) {
                index.insert(block.offset, id);
            }
        }
        index
    }

    pub(super) fn insert(&mut self, offset: u32, id: u32) {
        if (self.used + 1) * 8 > self.slots.len() * 3 {
            self.resize((self.slots.len() * 2).max(LEAST));
        }
        let entry = (u64::from(offset) << 32) | u64::from(id);
        let mut at = self.home(offset);
        while self.slots[at] != EMPTY {
            if self.slots[at] >> 32 == u64::from(offset) {
                self.slots[at] = entry;
                return;
            }
            at = self.after(at);
        }
        self.slots[at] = entry;
        self.used += 1;
    }

    /// Forgets the block that begins at `offset`.
    pub(super) fn remove(&mut self, offset: u32) {
        let Some(mut gap) = self.find(offset) else { return };
        self.used -= 1;
        // Entries further on that may lie here move up, so that no search ends at the gap.
        let mut at = self.after(gap);
        while self.slots[at] != EMPTY {
            let home = self.home((self.slots[at] >> 32) as u32);
            let mask = self.slots.len() - 1;
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                self.slots[gap] = self.slots[at];
                gap = at;
            }
            at = self.after(at);
        }
        self.slots[gap] = EMPTY;
    }

    pub(super) fn get(&self, offset: u32) -> Option<u32> {
        self.find(offset).map(|at| self.slots[at] as u32)
    }

    /// Gives back memory that is not needed any more.
    pub(super) fn shrink(&mut self) {
        let wanted = (self.used * 4).next_power_of_two().max(LEAST);
        if wanted < self.slots.len() {
            self.resize(wanted);
        }
    }

    fn find(&self, offset: u32) -> Option<usize> {
        if self.slots.is_empty() {
            return None;
        }
        let mut at = self.home(offset);
        while self.slots[at] != EMPTY {
            if self.slots[at] >> 32 == u64::from(offset) {
                return Some(at);
            }
            at = self.after(at);
        }
        None
    }

    fn resize(&mut self, slots: usize) {
        let old = std::mem::replace(&mut self.slots, vec![EMPTY; slots]);
        for entry in old.into_iter().filter(|&entry| entry != EMPTY) {
            let mut at = self.home((entry >> 32) as u32);
            while self.slots[at] != EMPTY {
                at = self.after(at);
            }
            self.slots[at] = entry;
        }
    }

    /// Where a search begins. The multiplier is 2^32 over the golden ratio: it spreads offsets,
    /// which come in strides, evenly over the high bits.
    fn home(&self, offset: u32) -> usize {
        let bits = self.slots.len().trailing_zeros();
        (offset.wrapping_mul(0x9e37_79b1) >> (32 - bits)) as usize & (self.slots.len() - 1)
    }

    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.slots.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn finds_what_was_put_in_and_nothing_else() {
        let mut index = OffsetIndex::default();
        index.remove(3);
        for offset in [0, 1, 511, 512, 1 << 20, (1 << 31) - 1] {
            assert_eq!(index.get(offset), None);
            index.insert(offset, offset + 7);
        }
        assert_eq!(index.get(512), Some(519));
        assert_eq!(index.get(513), None);
        index.remove(512);
        assert_eq!(index.get(512), None);
        index.shrink();
        assert_eq!(index.get(511), Some(518));
    }

    proptest! {
        #[test]
        fn agrees_with_a_map(
            ops in prop::collection::vec((any::<bool>(), 0_u32..200, 0_u32..31), 1..2000),
        ) {
            let (mut index, mut map) = (OffsetIndex::default(), BTreeMap::new());
            for (id, (insert, low, shift)) in (0..).zip(ops) {
                // Strides of all sizes, as offsets have.
                let offset = (low << shift) & (u32::MAX >> 1);
                if insert {
                    index.insert(offset, id);
                    map.insert(offset, id);
                } else {
                    index.remove(offset);
                    map.remove(&offset);
                }
                if id % 64 == 0 {
                    index.shrink();
                }
                prop_assert_eq!(index.used, map.len());
                prop_assert_eq!(index.get(offset), map.get(&offset).copied());
            }
            for (&offset, &id) in &map {
                prop_assert_eq!(index.get(offset), Some(id));
            }
        }
    }
}
