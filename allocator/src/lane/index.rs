//! From an offset to the block that begins there: a hash table with open addressing.
//!
//! It is used only by callers that name blocks by their addresses, and made by their first call. No placement
//! depends on it: its order is never used, and its multiplier is a constant (rule D1). An entry is eight bytes,
//! offset and id together, and at most three eighths of the slots are used, so that a lookup usually reads one
//! cache line. Ten thousand live blocks take 256 KiB.

use super::table::{BlockState, BlockTable};

/// An unused slot. No entry equals it, because ids stay below `u32::MAX`.
const EMPTY: u64 = u64::MAX;
/// A table that is not empty has at least this many slots.
const MIN_SLOTS: usize = 64;

#[derive(Clone, Debug, Default)]
pub(super) struct OffsetIndex {
    /// Entries with the offset in the upper half and the id in the lower half. Their number is a power of two,
    /// or 0 in a new table.
    slots: Vec<u64>,
    /// Number of entries.
    used: usize,
}

impl OffsetIndex {
    /// An index of all blocks that are handed out, also of those whose free is deferred.
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
            self.resize((self.slots.len() * 2).max(MIN_SLOTS));
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

    /// Removes the block that begins at `offset`, if there is one.
    pub(super) fn remove(&mut self, offset: u32) {
        let Some(mut gap) = self.find(offset) else { return };
        self.used -= 1;
        // Later entries whose search passes the gap move into it, so that no search ends there too early.
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

    /// Makes the table smaller if few of its slots are used.
    pub(super) fn shrink(&mut self) {
        let wanted = (self.used * 4).next_power_of_two().max(MIN_SLOTS);
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

    /// The slot at which a search begins. The multiplier is 2^32 divided by the golden ratio, which distributes
    /// offsets evenly over the high bits, although they come in strides.
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
