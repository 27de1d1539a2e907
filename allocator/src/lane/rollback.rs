//! Returning a lane to a state that all ranks share, after they diverged.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::backing::Backing;
use super::commit_trigger::CommitTrigger;
use super::free::{Free, FreeList, Near};
use super::state::LaneState;
use super::table::{BlockEntry, BlockState, NIL};
use super::{EventKind, Segment, UNIT, WindowPolicy};
use crate::{Error, Result};

/// A block that some rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Survivor {
    /// Counter of its allocation.
    pub(crate) counter: u64,
    /// In units, from the start of the lane; so is the size.
    offset: u32,
    size: u32,
    /// Ordinal of its stream.
    stream: u16,
}

/// The state that all ranks return to.
#[derive(Clone, Debug)]
pub(crate) struct AgreedState {
    /// The first event that is undone.
    pub(crate) first: u64,
    /// The counter from which all ranks continue.
    pub(crate) counter: u64,
    /// The serial number of the next segment.
    pub(crate) next_segment: u64,
    /// The digest that all ranks continue from.
    pub(crate) digest: u64,
    /// Ordinals of streams that any rank has forgotten, as a mask.
    pub(crate) forgotten: u64,
    /// Every block allocated before `first` that any rank holds, ascending, and whether all ranks hold it.
    pub(crate) survivors: Vec<(Survivor, bool)>,
}

impl LaneState {
    /// The blocks allocated before event `first` that are live here, ascending.
    pub(crate) fn survivors(&self, first: u64) -> Vec<Survivor> {
        let live = self.live_blocks().filter(|block| block.counter < first);
        let mut survivors: Vec<Survivor> = live
            .map(|block| Survivor {
                counter: block.counter,
                offset: block.offset,
                size: block.size,
                stream: block.stream,
            })
            .collect();
        survivors.sort_unstable();
        survivors
    }

    /// The streams that were forgotten on this rank before event `first` or since, as a mask of ordinals.
    pub(crate) fn forgotten(&self, first: u64) -> u64 {
        self.streams.forgotten_since(first)
    }

    /// How many live blocks were allocated by event `first` or later. They have no counterpart on
    /// other ranks.
    pub(crate) fn strays(&self, first: u64) -> u64 {
        self.live_blocks().filter(|block| block.counter >= first).count() as u64
    }

    fn live_blocks(&self) -> impl Iterator<Item = &BlockEntry> {
        self.table.ids().map(|id| self.table.get(id)).filter(|b| b.state == BlockState::Live)
    }

    /// Returns the lane to the agreed state. Blocks that are live here stay where they are; blocks
    /// that only other ranks still hold become deferred frees. No block allocated after the state may
    /// be live, and the device must be idle.
    ///
    /// Returns the segments that are no longer used, youngest first, for the caller to unmap. The
    /// memory of a moved segment belongs to the segment it was moved from.
    pub(crate) fn roll_back(
        &mut self,
        agreed: &AgreedState,
        backing: &mut dyn Backing,
    ) -> Result<Vec<Segment>> {
        let strays = self.strays(agreed.first);
        if strays > 0 {
            return Err(Error::invalid_state(format!(
                "lane {:?}: {strays} blocks allocated since event {} are still live",
                self.config.name, agreed.first
            )));
        }
        let dropped = self.segments.revert(agreed.first, agreed.next_segment);
        self.streams.forget_since(agreed.first, backing);
        self.clear_uses(agreed.first, backing);
        // A stream that one rank has forgotten may be destroyed there: all ranks forget it.
        self.streams.forget_idle(agreed.forgotten, backing);
        let ordinals =
            agreed.survivors.iter().map(|(block, _)| usize::from(block.stream) + 1).max();
        let ordinals = self.streams.count().max(ordinals.unwrap_or(0)).max(1);
        self.rebuild(&agreed.survivors, ordinals);
        // Its counts may differ between ranks.
        self.trigger = CommitTrigger::default();
        self.failure = None;
        self.history.restart(agreed.counter, agreed.digest);
        self.history.push(EventKind::Resync { digest: agreed.digest }, None);
        Ok(dropped)
    }

    /// Builds the chain and the free lists anew from the lane's segments and the blocks in them. All free
    /// memory goes to the stream with ordinal 0, because ranks may not agree on whose it was.
    fn rebuild(&mut self, survivors: &[(Survivor, bool)], streams: usize) {
        let live = self.table.keep_live();
        self.index = OnceLock::new();
        self.deferred.clear();
        self.free = vec![FreeList::default(); streams];
        self.counts.clear_live();
        let mut blocks = survivors.to_vec();
        blocks.sort_unstable_by_key(|(block, _)| block.offset);
        let mut blocks = blocks.into_iter().peekable();
        // Everything below `at`, in units, is in the chain already.
        let mut at = 0;
        for (segment, state) in self.segments.extents() {
            let start = (segment.offset / UNIT) as u32;
            let end = start + (segment.bytes / UNIT) as u32;
            at = self.append_range(at, start, BlockState::Hole, false);
            if state == BlockState::Retired {
                at = self.append_range(at, end, BlockState::Retired, false);
                continue;
            }
            let policy = self.config.policy;
            let begins_segment = |at| policy == WindowPolicy::PerSegment && at == start;
            while let Some((block, by_all)) = blocks.next_if(|(block, _)| block.offset < end) {
                self.append_range(at, block.offset, BlockState::Free, begins_segment(at));
                self.restore(&block, by_all, &live, begins_segment(block.offset));
                at = block.offset + block.size;
            }
            at = self.append_range(at, end, BlockState::Free, begins_segment(at));
        }
    }

    /// Appends the range `[from, to)`, in units, to the chain, unless it is empty; returns the new end.
    fn append_range(&mut self, from: u32, to: u32, state: BlockState, at_boundary: bool) -> u32 {
        if from >= to {
            return from;
        }
        let size = to - from;
        if let Some(last) = self.table.last()
            && state == BlockState::Free
            && !at_boundary
            && self.table.get(last).state == BlockState::Free
        {
            let low = self.table.get_mut(last);
            low.size += size;
            let (offset, size) = (low.offset, low.size);
            let place = self.free[0].place_of(offset, Near::default());
            self.free[0].resize(place, offset, size);
            return to;
        }
        let block = BlockEntry {
            offset: from,
            size,
            prev: NIL,
            next: NIL,
            counter: 0,
            waits: 0,
            stream: 0,
            state,
            at_boundary,
            near: Near::default(),
            partial: false,
            free_by_address: false,
        };
        let id = self.table.insert_before(NIL, block);
        if state == BlockState::Free {
            self.free[0].insert(Free { offset: from, size, id }, Near::default());
        }
        to
    }

    /// Appends a block that some rank holds: live if this rank holds it, else a deferred free.
    fn restore(
        &mut self,
        survivor: &Survivor,
        by_all: bool,
        live: &BTreeMap<u64, u32>,
        at_boundary: bool,
    ) {
        let Survivor { counter, offset, size, stream } = *survivor;
        match live.get(&counter) {
            Some(&id) => {
                self.table.append(id);
                let block = self.table.get_mut(id);
                block.at_boundary = at_boundary;
                block.partial |= !by_all;
            }
            None => {
                let state = BlockState::Deferred;
                let block = BlockEntry {
                    offset,
                    size,
                    prev: NIL,
                    next: NIL,
                    counter,
                    waits: 0,
                    stream,
                    state,
                    at_boundary,
                    near: Near::default(),
                    partial: false,
                    free_by_address: false,
                };
                let id = self.table.insert_before(NIL, block);
                self.deferred.insert(counter, id);
                self.counts.deferred += u64::from(size) * UNIT;
            }
        }
        self.counts.add_live(size);
    }
}
