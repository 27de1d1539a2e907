//! Going back to a state that all ranks share, after they diverged.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::commit_trigger::Turnover;
use super::free::{Free, FreeList, Near};
use super::state::{Backing, LaneState};
use super::table::{Block, BlockState, NIL};
use super::{EventKind, Segment, UNIT, WindowPolicy};
use crate::{Error, Result};

/// A block that some rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Survivor {
    /// Counter of its allocation.
    pub(crate) counter: u64,
    /// In units from the start of the lane.
    offset: u32,
    size: u32,
    /// Ordinal of its stream.
    stream: u16,
}

/// The state all ranks go back to.
#[derive(Clone, Debug)]
pub(crate) struct Agreed {
    /// The first event that is undone.
    pub(crate) first: u64,
    /// The counter from which all go on.
    pub(crate) counter: u64,
    /// The serial number of the next segment.
    pub(crate) next_segment: u64,
    /// Stands for everything before.
    pub(crate) digest: u64,
    /// Ordinals of streams that any rank has forgotten, as a mask.
    pub(crate) forgotten: u64,
    /// Every block allocated before `first` that any rank holds, ascending, and whether all do.
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

    /// The streams that are forgotten here in the state before event `first`, or were since, as a mask.
    pub(crate) fn forgotten(&self, first: u64) -> u64 {
        self.streams.forgotten_since(first)
    }

    /// How many blocks are live that were allocated by event `first` or later: no other rank has
    /// their like.
    pub(crate) fn strays(&self, first: u64) -> u64 {
        self.live_blocks().filter(|block| block.counter >= first).count() as u64
    }

    fn live_blocks(&self) -> impl Iterator<Item = &Block> {
        self.table.ids().map(|id| self.table.get(id)).filter(|b| b.state == BlockState::Live)
    }

    /// Goes back to the agreed state. Blocks that are live here stay where they are; ones that
    /// only others still hold become unordered frees. Nothing younger than the state may be live,
    /// and the device must be idle.
    ///
    /// Returns the segments that are no longer used, youngest first, for the caller to unmap. The
    /// memory of a moved one belongs to where it came from.
    pub(crate) fn resync(
        &mut self,
        agreed: &Agreed,
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
        // Streams that one rank has forgotten may be gone there: none has them any more.
        self.streams.forget_idle(agreed.forgotten, backing);
        let ordinals =
            agreed.survivors.iter().map(|(block, _)| usize::from(block.stream) + 1).max();
        let ordinals = self.streams.count().max(ordinals.unwrap_or(0)).max(1);
        self.rebuild(&agreed.survivors, ordinals);
        // Ranks had different ones.
        self.turnover = Turnover::default();
        self.failure = None;
        self.history.restart(agreed.counter, agreed.digest);
        self.history.push(EventKind::Resync { digest: agreed.digest }, None);
        Ok(dropped)
    }

    /// Lays the lane out anew from its segments and the blocks in them.
    fn rebuild(&mut self, survivors: &[(Survivor, bool)], ordinals: usize) {
        let live = self.table.keep_live();
        self.index = OnceLock::new();
        self.aside.clear();
        self.free = vec![FreeList::default(); ordinals];
        self.counts.clear_live();
        let mut blocks = survivors.to_vec();
        blocks.sort_unstable_by_key(|(block, _)| block.offset);
        let mut blocks = blocks.into_iter().peekable();
        // Up to here the chain is laid.
        let mut at = 0;
        for (segment, state) in self.segments.extents() {
            let start = (segment.offset / UNIT) as u32;
            let end = start + (segment.bytes / UNIT) as u32;
            at = self.lay(at, start, BlockState::Hole, false);
            if state == BlockState::Retired {
                at = self.lay(at, end, BlockState::Retired, false);
                continue;
            }
            let policy = self.config.policy;
            let wall = |at| policy == WindowPolicy::PerSegment && at == start;
            while let Some((block, by_all)) = blocks.next_if(|(block, _)| block.offset < end) {
                let walls = (wall(at), wall(block.offset));
                self.lay(at, block.offset, BlockState::Free, walls.0);
                self.restore(&block, by_all, &live, walls.1);
                at = block.offset + block.size;
            }
            let wall = wall(at);
            at = self.lay(at, end, BlockState::Free, wall);
        }
    }

    /// Appends `[from, to)` to the chain, unless it is empty; returns the new end.
    fn lay(&mut self, from: u32, to: u32, state: BlockState, wall: bool) -> u32 {
        if from >= to {
            return from;
        }
        let size = to - from;
        if let Some(last) = self.table.last()
            && state == BlockState::Free
            && !wall
            && self.table.get(last).state == BlockState::Free
        {
            let low = self.table.get_mut(last);
            low.size += size;
            let (offset, size) = (low.offset, low.size);
            let place = self.free[0].place_of(offset, Near::default());
            self.free[0].resize(place, offset, size);
            return to;
        }
        let block = Block {
            offset: from,
            size,
            prev: NIL,
            next: NIL,
            counter: 0,
            waits: 0,
            stream: 0,
            state,
            wall,
            near: Near::default(),
            partial: false,
            by_address: false,
        };
        let id = self.table.insert_before(NIL, block);
        if state == BlockState::Free {
            self.free[0].insert(Free { offset: from, size, id }, Near::default());
        }
        to
    }

    /// Appends a block that some rank holds: live if this one does, else set aside.
    fn restore(
        &mut self,
        survivor: &Survivor,
        by_all: bool,
        live: &BTreeMap<u64, u32>,
        wall: bool,
    ) {
        let Survivor { counter, offset, size, stream } = *survivor;
        match live.get(&counter) {
            Some(&id) => {
                self.table.append(id);
                let block = self.table.get_mut(id);
                block.wall = wall;
                block.partial |= !by_all;
            }
            None => {
                let state = BlockState::SetAside;
                let block = Block {
                    offset,
                    size,
                    prev: NIL,
                    next: NIL,
                    counter,
                    waits: 0,
                    stream,
                    state,
                    wall,
                    near: Near::default(),
                    partial: false,
                    by_address: false,
                };
                let id = self.table.insert_before(NIL, block);
                self.aside.insert(counter, id);
                self.counts.set_aside += u64::from(size) * UNIT;
            }
        }
        self.counts.add_live(size);
    }
}
