//! Splitting free blocks for allocations, and merging freed blocks with their free neighbours.

use super::free::Free;
use super::state::LaneState;
use super::table::{BlockEntry, BlockState, BlockTable, NIL};

impl LaneState {
    /// Takes `[start, start + size)`, in units, out of a free block whose waits are done, and makes it
    /// live; returns its id.
    pub(super) fn take(
        &mut self,
        stream: u16,
        place: super::free::FreePosition,
        free: Free,
        start: u32,
        size: u32,
        counter: u64,
    ) -> u32 {
        let list = &mut self.free[usize::from(stream)];
        let before = start - free.offset;
        let after = free.size - before - size;
        let piece = |offset, size, state| BlockEntry {
            offset,
            size,
            prev: NIL,
            next: NIL,
            counter,
            waits: 0,
            stream,
            near: place.near(),
            state,
            at_boundary: false,
            partial: false,
            free_by_address: false,
        };
        match (before, after) {
            (0, 0) => {
                list.remove(place);
                let block = self.table.get_mut(free.id);
                block.state = BlockState::Live;
                block.counter = counter;
                block.near = place.near();
                block.free_by_address = false;
                free.id
            }
            (0, _) => {
                // The free block keeps its entry, with its high part.
                list.resize(place, start + size, after);
                let rest = self.table.get_mut(free.id);
                rest.offset = start + size;
                rest.size = after;
                let at_boundary = std::mem::take(&mut rest.at_boundary);
                let mut block = piece(start, size, BlockState::Live);
                block.at_boundary = at_boundary;
                self.table.insert_before(free.id, block)
            }
            _ => {
                // Alignment leaves a gap in front, which stays free under the old entry.
                list.resize(place, free.offset, before);
                self.table.get_mut(free.id).size = before;
                let next = self.table.get(free.id).next;
                let id = self.table.insert_before(next, piece(start, size, BlockState::Live));
                if after > 0 {
                    let rest = piece(start + size, after, BlockState::Free);
                    let rest = self.table.insert_before(next, rest);
                    let entry = Free { offset: start + size, size: after, id: rest };
                    self.free[usize::from(stream)].insert(entry, place.near());
                }
                id
            }
        }
    }

    /// Frees a live block or one whose free was deferred, and merges it with free neighbours of its
    /// stream. The caller has recorded events on the streams that a reuse must wait for.
    pub(super) fn give_back(&mut self, id: u32) {
        let (offset, size) = (self.table.get(id).offset, self.table.get(id).size);
        if let Some(index) = self.index.get_mut() {
            index.remove(offset);
        }
        self.counts.remove(size);
        self.set_free(id);
    }

    /// Puts a range that is in no free list into its stream's, merging it with its free neighbours.
    pub(super) fn set_free(&mut self, id: u32) {
        let block = self.table.get_mut(id);
        block.state = BlockState::Free;
        let BlockEntry { offset, size, prev, next, stream, near, waits, at_boundary, .. } = *block;
        let list = &mut self.free[usize::from(stream)];
        let mergeable = |table: &BlockTable, at: u32| {
            at != NIL && {
                let other = table.get(at);
                other.state == BlockState::Free && other.stream == stream
            }
        };
        let below = !at_boundary && mergeable(&self.table, prev);
        let above = mergeable(&self.table, next) && !self.table.get(next).at_boundary;
        match (below, above) {
            (false, false) => list.insert(Free { offset, size, id }, near),
            (true, false) => {
                self.table.remove(id);
                let low = self.table.get_mut(prev);
                low.size += size;
                low.waits |= waits;
                list.resize(list.place_of(low.offset, near), low.offset, low.size);
            }
            (false, true) => {
                self.table.remove(id);
                let high = self.table.get_mut(next);
                let place = list.place_of(high.offset, near);
                high.offset = offset;
                high.size += size;
                high.waits |= waits;
                high.at_boundary = at_boundary;
                list.resize(place, high.offset, high.size);
            }
            (true, true) => {
                let BlockEntry { size: high_size, waits: high_waits, .. } = *self.table.get(next);
                self.table.remove(next);
                self.table.remove(id);
                let low = self.table.get_mut(prev);
                low.size += size + high_size;
                low.waits |= waits | high_waits;
                let place = list.place_of(low.offset, near);
                list.remove(list.after(place));
                list.resize(place, low.offset, low.size);
            }
        }
    }
}
