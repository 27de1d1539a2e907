//! Invariants of a lane, which hold after every call. Used by tests.

use super::free::{Free, Near};
use super::table::{BlockState, NIL};
use super::{LaneState, UNIT, WindowPolicy};

impl LaneState {
    /// Panics with the reason unless the lane's structures agree with each other.
    pub(super) fn assert_sound(&self) {
        let mut at = 0;
        let mut prev: Option<u32> = None;
        let mut listed: Vec<Vec<Free>> = vec![Vec::new(); self.free.len()];
        let mut allocated = 0;
        for id in self.table.ids() {
            let block = self.table.get(id);
            assert_eq!(block.offset, at, "ranges follow each other without gaps");
            assert_eq!(block.prev, prev.unwrap_or(NIL));
            assert!(block.size > 0);
            if let Some(before) = prev.map(|prev| self.table.get(prev)) {
                let unmerged = before.state == BlockState::Free
                    && block.state == BlockState::Free
                    && before.stream == block.stream
                    && !block.at_boundary;
                assert!(!unmerged, "free neighbours of a stream are one block");
            }
            if !matches!(block.state, BlockState::Retired | BlockState::Hole) {
                let begins = self.segments.live().iter().any(|s| s.offset == u64::from(at) * UNIT);
                let at_boundary = begins && self.policy() == WindowPolicy::PerSegment;
                assert_eq!(
                    block.at_boundary, at_boundary,
                    "blocks are kept apart where they may not cross"
                );
            }
            match block.state {
                BlockState::Free => {
                    let free = Free { offset: block.offset, size: block.size, id };
                    listed[usize::from(block.stream)].push(free);
                }
                BlockState::Live | BlockState::Deferred => {
                    allocated += block.bytes();
                    let index = self.index.get();
                    assert!(index.is_none_or(|index| index.get(block.offset) == Some(id)));
                }
                BlockState::Retired | BlockState::Hole => {}
            }
            at = block.end();
            prev = Some(id);
        }
        assert_eq!(self.table.last(), prev);
        assert!(u64::from(at) * UNIT <= self.range, "nothing lies past the lane's range");
        for (list, listed) in self.free.iter().zip(listed) {
            assert_eq!(list.iter().collect::<Vec<_>>(), listed, "every free block is in its list");
            for free in list.iter() {
                list.place_of(free.offset, Near::default());
            }
        }
        let stats = self.stats();
        assert_eq!(stats.allocated, allocated);
        self.assert_segments_cover();
    }

    fn assert_segments_cover(&self) {
        let segments = self.segments.live();
        assert_eq!(self.stats().reserved, segments.iter().map(|s| s.bytes).sum::<u64>());
        for id in self.table.ids() {
            let block = self.table.get(id);
            let (mut from, end) = (u64::from(block.offset) * UNIT, u64::from(block.end()) * UNIT);
            if matches!(block.state, BlockState::Retired | BlockState::Hole) {
                assert!(segments.iter().all(|s| s.end() <= from || s.offset >= end));
                continue;
            }
            let whole = segments.iter().any(|s| s.offset <= from && end <= s.end());
            assert!(whole || self.policy() == WindowPolicy::Contiguous, "blocks stay inside");
            while from < end {
                let at = segments.partition_point(|s| s.offset <= from);
                assert!(at > 0 && segments[at - 1].end() > from, "memory behind every block");
                from = segments[at - 1].end();
            }
        }
    }
}
