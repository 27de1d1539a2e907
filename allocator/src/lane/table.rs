//! The blocks of a lane: a slab, chained in address order.

use std::collections::BTreeMap;

use slab::Slab;

use super::UNIT;
use super::free::Near;

/// The end of the chain.
pub(super) const NIL: u32 = u32::MAX;

/// State of a range of the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Backed by memory and free.
    Free,
    /// Handed to a caller.
    Live,
    /// Freed without order; returns to the lane once every rank has freed it (rule D5).
    Deferred,
    /// Its segment was released or moved away; used again only after a commit (rule D6).
    Retired,
    /// Address range without memory, where new segments may go.
    Hole,
}

/// A range of the lane, for maps and tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockView {
    /// First byte, from the start of the lane.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// State of the range.
    pub state: BlockState,
    /// Ordinal of the stream it belongs to.
    pub stream: u16,
    /// Counter of its allocation, for blocks that were handed out.
    pub counter: u64,
}

/// A set of streams by ordinal: a lane knows at most 64.
pub(super) type StreamMask = u64;

/// One range of the lane. Offsets and sizes are in units.
#[derive(Clone, Debug)]
pub(super) struct BlockEntry {
    pub(super) offset: u32,
    pub(super) size: u32,
    pub(super) prev: u32,
    pub(super) next: u32,
    pub(super) counter: u64,
    /// Streams whose latest events a reuse must wait for. While the block is live: the other streams on
    /// which it was used.
    pub(super) waits: StreamMask,
    pub(super) stream: u16,
    /// Where in its stream's free list it was, as a hint for putting it back.
    pub(super) near: Near,
    pub(super) state: BlockState,
    /// Whether it begins at a segment boundary that blocks may not cross. It is then never merged with
    /// its predecessor.
    pub(super) at_boundary: bool,
    /// Whether other ranks had freed it already when a resync kept it here. Freeing it is then no event.
    pub(super) partial: bool,
    /// Whether it may be freed by its address, because its owner has given up its key. Ranks may differ
    /// in this, so it is no event and no part of a digest.
    pub(super) free_by_address: bool,
}

impl BlockEntry {
    pub(super) fn end(&self) -> u32 {
        self.offset + self.size
    }

    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.size) * UNIT
    }
}

/// All ranges of a lane, without gaps, in a chain from offset 0 to the lane's end.
#[derive(Debug)]
pub(super) struct BlockTable {
    blocks: Slab<BlockEntry>,
    first: u32,
    last: u32,
}

impl BlockTable {
    pub(super) fn new() -> Self {
        Self { blocks: Slab::new(), first: NIL, last: NIL }
    }

    pub(super) fn get(&self, id: u32) -> &BlockEntry {
        &self.blocks[id as usize]
    }

    pub(super) fn get_mut(&mut self, id: u32) -> &mut BlockEntry {
        &mut self.blocks[id as usize]
    }

    pub(super) fn try_get(&self, id: u32) -> Option<&BlockEntry> {
        self.blocks.get(id as usize)
    }

    pub(super) fn last(&self) -> Option<u32> {
        (self.last != NIL).then_some(self.last)
    }

    /// The end of the last range, in units.
    pub(super) fn end(&self) -> u32 {
        self.last().map_or(0, |last| self.get(last).end())
    }

    /// Puts a range into the chain in front of `next`, or at the end of the chain if `next` is [`NIL`].
    pub(super) fn insert_before(&mut self, next: u32, mut block: BlockEntry) -> u32 {
        let prev = if next == NIL { self.last } else { self.get(next).prev };
        block.prev = prev;
        block.next = next;
        let id = u32::try_from(self.blocks.insert(block)).expect("fewer than 2^32 ranges");
        if prev == NIL {
            self.first = id;
        } else {
            self.get_mut(prev).next = id;
        }
        if next == NIL {
            self.last = id;
        } else {
            self.get_mut(next).prev = id;
        }
        id
    }

    pub(super) fn remove(&mut self, id: u32) {
        let BlockEntry { prev, next, .. } = self.blocks.remove(id as usize);
        if prev == NIL {
            self.first = next;
        } else {
            self.get_mut(prev).next = next;
        }
        if next == NIL {
            self.last = prev;
        } else {
            self.get_mut(next).prev = prev;
        }
    }

    /// Empties the chain and forgets all ranges but the live ones, which [`append`](BlockTable::append)
    /// puts back; returns their ids by counter.
    pub(super) fn keep_live(&mut self) -> BTreeMap<u64, u32> {
        self.blocks.retain(|_, block| block.state == BlockState::Live);
        self.first = NIL;
        self.last = NIL;
        self.blocks.iter().map(|(id, block)| (block.counter, id as u32)).collect()
    }

    /// Puts a range that is not in the chain at its end.
    pub(super) fn append(&mut self, id: u32) {
        let prev = std::mem::replace(&mut self.last, id);
        let block = self.get_mut(id);
        block.prev = prev;
        block.next = NIL;
        if prev == NIL {
            self.first = id;
        } else {
            self.get_mut(prev).next = id;
        }
    }

    /// The ids in address order.
    pub(super) fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors((self.first != NIL).then_some(self.first), |&id| {
            let next = self.get(id).next;
            (next != NIL).then_some(next)
        })
    }

    pub(super) fn views(&self) -> impl Iterator<Item = BlockView> + '_ {
        self.ids().map(|id| {
            let block = self.get(id);
            BlockView {
                offset: u64::from(block.offset) * UNIT,
                bytes: block.bytes(),
                state: block.state,
                stream: block.stream,
                counter: block.counter,
            }
        })
    }
}
