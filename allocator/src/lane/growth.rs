//! How a lane gets memory, moves it, and releases it.

use super::backing::Backing;
use super::free::{Free, FreeList, Near};
use super::segments::{Growing, Growth, Move};
use super::state::LaneState;
use super::streams::bit;
use super::table::{BlockEntry, BlockState, NIL};
use super::{EventKind, LaneKind, Segment, Site, UNIT, WindowPolicy};
use crate::byte_size::ByteSize;
use crate::{Error, Result};

impl LaneState {
    /// Makes sure that one more block of `bytes` can be allocated on `stream` without growing.
    pub fn reserve(
        &mut self,
        bytes: u64,
        stream: crate::Stream,
        site: Site,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        if bytes > self.range {
            return Err(Error::out_of_memory(format!(
                "lane {:?}: cannot reserve {:#} in a range of {}",
                self.config.name,
                ByteSize(bytes),
                ByteSize(self.range)
            )));
        }
        let ordinal = self.streams.ordinal(stream)?;
        let size = bytes.div_ceil(UNIT) as u32;
        let free = self.free.get(usize::from(ordinal));
        let fits = size == 0 || free.is_some_and(|free| free.first_fit(size, 1).is_some());
        if !fits {
            self.grow_on(stream, size, 1, ordinal, backing)?;
        }
        let entered = self.streams.enter(ordinal, stream, self.history.counter(), backing);
        entered.map_err(|error| self.failed(error))?;
        self.history.push(EventKind::Reserve { bytes, stream: ordinal }, site);
        Ok(())
    }

    /// Grows like [`grow`](LaneState::grow), for a stream that may be new to the lane. If growing fails, the stream
    /// stays new, because ordinals follow from events alone (rule D3).
    pub(super) fn grow_on(
        &mut self,
        stream: crate::Stream,
        size: u32,
        align: u32,
        ordinal: u16,
        backing: &mut dyn Backing,
    ) -> Result<u64> {
        let event = self.history.counter();
        self.streams.learn(ordinal, stream, event);
        let grown = self.grow(size, align, ordinal, backing);
        if grown.is_err() {
            self.streams.forget_since(event, backing);
        }
        grown
    }

    /// Makes room for a block of `size` units at a multiple of `align` units, on the stream with ordinal
    /// `stream`; returns the bytes of segments made and moved. What can fail comes first, so that an error
    /// leaves the lane as it was.
    pub(super) fn grow(
        &mut self,
        size: u32,
        align: u32,
        stream: u16,
        backing: &mut dyn Backing,
    ) -> Result<u64> {
        let (at, need) = self.missing(size, align, stream)?;
        let growth = self.plan(at, need, stream)?;
        backing.due();
        let ready =
            self.wait_for(at, &growth, stream, backing).and_then(|()| backing.grow(&growth));
        if let Err(error) = ready {
            let error = self.failed(error);
            return Err(error.context(format!("growing lane {:?}", self.config.name)));
        }
        let event = self.history.counter();
        for step in &growth.moves {
            self.vacate(step.from_offset, step.to.bytes, BlockState::Retired);
            self.take_uses(units(step.from_offset, step.to.bytes), backing);
        }
        self.segments.apply(&growth, event);
        if self.free.len() <= usize::from(stream) {
            self.free.resize_with(usize::from(stream) + 1, FreeList::default);
        }
        self.add_range(at, growth.bytes(), stream);
        Ok(growth.bytes())
    }

    /// Makes `stream` wait for all work that may still use the memory it is about to get: the segments
    /// that move, and the free blocks that the new range will merge with (rule D4).
    fn wait_for(
        &mut self,
        at: u64,
        growth: &Growth,
        stream: u16,
        backing: &mut dyn Backing,
    ) -> Result<()> {
        let (mut owners, mut waits) = (0, 0);
        let waiter = self.streams.of_ordinal(stream).unwrap_or_default();
        for step in &growth.moves {
            self.wait_for_uses(units(step.from_offset, step.to.bytes), waiter, backing)?;
            let from = self.table.get(self.holder(step.from_offset, step.to.bytes).id);
            if from.stream != stream {
                owners |= bit(from.stream);
            }
            waits |= from.waits;
        }
        if self.policy() == WindowPolicy::Contiguous {
            let (start, end) = ((at / UNIT) as u32, ((at + growth.bytes()) / UNIT) as u32);
            for free in self.free.get(usize::from(stream)).into_iter().flat_map(FreeList::iter) {
                if free.offset + free.size == start || free.offset == end {
                    waits |= self.table.get(free.id).waits;
                    let range = (free.offset, free.offset + free.size);
                    self.local_uses.wait(range, waiter, backing)?;
                }
            }
        }
        self.streams.record(owners, backing)?;
        self.streams.wait(stream, owners | waits, backing)
    }

    /// The free block in which `[offset, offset + bytes)` lies.
    fn holder(&self, offset: u64, bytes: u64) -> Free {
        let (start, size) = ((offset / UNIT) as u32, (bytes / UNIT) as u32);
        let holder = self
            .free
            .iter()
            .flat_map(FreeList::iter)
            .find(|free| free.offset <= start && start + size <= free.offset + free.size);
        holder.expect("the segment lies in a free block")
    }

    /// Where new segments go, and how many bytes of them are needed at least: both in bytes.
    fn missing(&self, size: u32, align: u32, stream: u16) -> Result<(u64, u64)> {
        let bytes = u64::from(size) * UNIT;
        let end = u64::from(self.table.end()) * UNIT;
        let tail = match self.policy() {
            WindowPolicy::PerSegment => 0,
            WindowPolicy::Contiguous => self.table.last().map_or(0, |last| {
                let last = self.table.get(last);
                let start = last.offset.next_multiple_of(align);
                let usable = last.state == BlockState::Free && last.stream == stream;
                if usable { u64::from(last.end().saturating_sub(start)) * UNIT } else { 0 }
            }),
        };
        let need = (bytes - tail).next_multiple_of(self.granularity);
        if end + need <= self.range {
            return Ok((end, need));
        }
        // The lane's range is used up: take the lowest hole that is large enough.
        let need = bytes.next_multiple_of(self.granularity);
        let hole = self
            .table
            .ids()
            .map(|id| self.table.get(id))
            .find(|block| block.state == BlockState::Hole && block.bytes() >= need);
        match hole {
            Some(hole) => Ok((u64::from(hole.offset) * UNIT, need)),
            None => Err(Error::out_of_memory(format!(
                "lane {:?}: {} more do not fit in its address range of {}; build the pool with a \
                 longer range, or trim and commit so that released ranges can be used again",
                self.config.name,
                ByteSize(need),
                ByteSize(self.range)
            ))),
        }
    }

    /// Decides which segments are moved to `at` and which are made behind them, to have `need` bytes
    /// there. Changes nothing.
    fn plan(&self, at: u64, need: u64, stream: u16) -> Result<Growth> {
        let room = self.room_at(at);
        let mut growth = Growth::default();
        let mut counter = self.segments.next_counter();
        let mut end = at;
        let mut missing = need;
        let growing = Growing::of(&self.config);
        let step = self.segments.step(growing, need, self.granularity);
        let limit = self.config.limit.unwrap_or(u64::MAX);
        let over = |new: u64| self.segments.held().saturating_add(new) > limit;
        let move_first = self.segments.may_move(step, self.counts.peak_allocated) || over(step);
        if self.policy() == WindowPolicy::Contiguous && move_first {
            let mut candidates = self.movable(stream);
            while missing > 0 && !candidates.is_empty() {
                // The smallest segment that suffices, or else the largest.
                let fit = candidates.partition_point(|segment| segment.bytes < missing);
                let Segment { counter: from, offset, bytes, .. } =
                    candidates.remove(fit.min(candidates.len() - 1));
                if end + bytes - at > room {
                    break;
                }
                let to = super::NewSegment { counter, offset: end, bytes };
                growth.moves.push(Move { from, from_offset: offset, to });
                counter += 1;
                end += bytes;
                missing = missing.saturating_sub(bytes);
            }
        }
        if missing > 0 {
            let mut new = self.segments.step(growing, missing, self.granularity);
            if over(new) || new > room - (end - at) {
                new = missing;
            }
            if over(new) {
                return Err(Error::out_of_memory(format!(
                    "lane {:?}: {} more would exceed its limit of {}; {} are held, {} of them in \
                     use. Free blocks, then trim and commit, or raise the limit",
                    self.config.name,
                    ByteSize(new),
                    ByteSize(limit),
                    ByteSize(self.segments.held()),
                    ByteSize(self.counts.allocated)
                )));
            }
            growth.new = self.segments.pieces(growing, counter, end, new, self.granularity);
        }
        Ok(growth)
    }

    /// Bytes of address space from `at` to the end of the hole that begins there, or of the lane.
    fn room_at(&self, at: u64) -> u64 {
        if at == u64::from(self.table.end()) * UNIT {
            return self.range - at;
        }
        let hole = self.table.ids().map(|id| self.table.get(id));
        hole.filter(|block| u64::from(block.offset) * UNIT == at).map(BlockEntry::bytes).sum()
    }

    /// Segments that are wholly free, by size, then offset. Those in a free block of `stream` at the end
    /// of the lane are left out: the new memory joins them anyway.
    fn movable(&self, stream: u16) -> Vec<Segment> {
        let tail = self.table.last().map(|last| self.table.get(last));
        let tail = tail.filter(|last| last.state == BlockState::Free && last.stream == stream);
        let tail_from = tail.map_or(u64::MAX, |last| u64::from(last.offset) * UNIT);
        let mut found: Vec<Segment> =
            self.free_segments().into_iter().filter(|segment| segment.offset < tail_from).collect();
        found.sort_by_key(|segment| (segment.bytes, segment.offset));
        found
    }

    /// Whether a segment of this counter or a later one is wholly free.
    pub(crate) fn has_free_segment_since(&self, counter: u64) -> bool {
        self.free_segments().iter().any(|segment| segment.counter >= counter)
    }

    /// Segments that lie wholly in one free block, by stream, then offset.
    fn free_segments(&self) -> Vec<Segment> {
        let segments = self.segments.live();
        let mut found = Vec::new();
        for free in self.free.iter().flat_map(FreeList::iter) {
            let from = u64::from(free.offset) * UNIT;
            let end = from + u64::from(free.size) * UNIT;
            let first = segments.partition_point(|segment| segment.offset < from);
            found.extend(segments[first..].iter().take_while(|segment| segment.end() <= end));
        }
        found
    }

    /// Cuts `[offset, offset + bytes)` out of the free block that holds it, and gives it `state`.
    fn vacate(&mut self, offset: u64, bytes: u64, state: BlockState) {
        let (start, size) = ((offset / UNIT) as u32, (bytes / UNIT) as u32);
        let Free { id, .. } = self.holder(offset, bytes);
        let block = self.table.get(id).clone();
        let list = &mut self.free[usize::from(block.stream)];
        list.remove(list.place_of(block.offset, Near::default()));
        let next = block.next;
        self.table.remove(id);
        let piece = |from: u32, to: u32, state, at_boundary| BlockEntry {
            offset: from,
            size: to - from,
            prev: NIL,
            next: NIL,
            counter: 0,
            at_boundary,
            state,
            ..block.clone()
        };
        if block.offset < start {
            let low = piece(block.offset, start, BlockState::Free, block.at_boundary);
            let low = self.table.insert_before(next, low);
            list.insert(
                Free { offset: block.offset, size: start - block.offset, id: low },
                Near::default(),
            );
        }
        let at_boundary = block.at_boundary && block.offset == start;
        self.table.insert_before(next, piece(start, start + size, state, at_boundary));
        let end = start + size;
        if end < block.end() {
            let high = piece(end, block.end(), BlockState::Free, false);
            let high = self.table.insert_before(next, high);
            list.insert(Free { offset: end, size: block.end() - end, id: high }, Near::default());
        }
    }

    /// Adds new memory at `at`: the end of the lane, or the beginning of a hole.
    fn add_range(&mut self, at: u64, bytes: u64, stream: u16) {
        let (offset, size) = ((at / UNIT) as u32, (bytes / UNIT) as u32);
        let mut next = NIL;
        if offset < self.table.end() {
            let hole = self.table.ids().find(|&id| self.table.get(id).offset == offset);
            let hole = hole.expect("growth below the end goes into a hole");
            if self.table.get(hole).size == size {
                next = self.table.get(hole).next;
                self.table.remove(hole);
            } else {
                let rest = self.table.get_mut(hole);
                rest.offset += size;
                rest.size -= size;
                next = hole;
            }
        }
        let fresh = BlockEntry {
            offset,
            size,
            prev: NIL,
            next: NIL,
            counter: 0,
            waits: 0,
            stream,
            state: BlockState::Free,
            at_boundary: self.policy() == WindowPolicy::PerSegment,
            near: Near::default(),
            partial: false,
            free_by_address: false,
        };
        let id = self.table.insert_before(next, fresh);
        self.set_free(id);
    }

    /// Releases every segment that is wholly free; returns their bytes. The memory itself is given back
    /// by the next commit, when every rank has released it; in a local lane, when the caller unmaps what
    /// [`take_retired`](LaneState::take_retired) returns.
    pub fn trim(&mut self, site: Site) -> u64 {
        let free = self.free_segments();
        for segment in &free {
            self.vacate(segment.offset, segment.bytes, BlockState::Retired);
        }
        self.segments.retire(&free, self.history.counter());
        let bytes = free.iter().map(|segment| segment.bytes).sum();
        if let Some(index) = self.index.get_mut() {
            index.shrink();
        }
        self.history.push(EventKind::Trim { bytes }, site);
        bytes
    }

    /// The segments released or moved away since the last commit.
    pub fn retired(&self) -> impl Iterator<Item = Segment> + '_ {
        self.segments.retired()
    }

    /// Whether segments were released or moved away since the last commit.
    pub fn has_retired(&self) -> bool {
        self.segments.retired().next().is_some()
    }

    /// Returns the retired segments, and lets new segments use their ranges. The caller unmaps them: on
    /// this rank and, for a symmetric lane, on every other.
    pub fn take_retired(&mut self) -> Vec<Segment> {
        let retired = self.segments.clear_retired();
        let mut at = self.table.ids().next();
        while let Some(id) = at {
            let block = self.table.get_mut(id);
            if block.state == BlockState::Retired {
                block.state = BlockState::Hole;
            }
            let (state, prev) = (block.state, block.prev);
            at = Some(block.next).filter(|&next| next != NIL);
            if state == BlockState::Hole
                && prev != NIL
                && self.table.get(prev).state == BlockState::Hole
            {
                let size = self.table.get(id).size;
                self.table.get_mut(prev).size += size;
                self.table.remove(id);
            }
        }
        // A hole at the very end is unused range, and not kept.
        if let Some(last) = self.table.last()
            && self.table.get(last).state == BlockState::Hole
        {
            self.table.remove(last);
        }
        retired
    }

    /// Whether this lane takes part in commits.
    pub fn is_local(&self) -> bool {
        self.config.kind == LaneKind::Local
    }
}

/// A range of bytes in units: where it begins and where it ends.
fn units(offset: u64, bytes: u64) -> (u32, u32) {
    ((offset / UNIT) as u32, ((offset + bytes) / UNIT) as u32)
}
