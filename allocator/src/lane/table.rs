//! The blocks of a lane: a slab, chained in address order.

use std::collections::BTreeMap;

use slab::Slab;

use super::UNIT;
use super::free::Near;
use super::streams::StreamMask;

/// The end of the chain.
pub(super) const NIL: u32 = u32::MAX;

/// What a range of the lane is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Backed by memory and free.
    Free,
    /// Handed to a caller.
    Live,
    /// Freed without order; waits until every rank has freed it (rule D5).
    SetAside,
    /// Its segment was released or moved away; used again only after a commit (rule D6).
    Retired,
    /// Address range with nothing behind it, open to new segments.
    Hole,
}

/// A range of the lane, for maps and tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockView {
    /// First byte, from the start of the lane.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// What it is.
    pub state: BlockState,
    /// Ordinal of the stream it belongs to.
    pub stream: u16,
    /// Counter of its allocation, for blocks that were handed out.
    pub counter: u64,
}

/// One range. Offsets and sizes in units.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) offset: u32,
    pub(super) size: u32,
    pub(super) prev: u32,
    pub(super) next: u32,
    pub(super) counter: u64,
    /// Streams whose events a reuse must wait for; while live, streams it was used on.
    pub(super) waits: StreamMask,
    pub(super) stream: u16,
    /// Where it was taken from its stream's free list.
    pub(super) near: Near,
    pub(super) state: BlockState,
    /// Never merged with its predecessor: a segment begins here that blocks may not cross.
    pub(super) wall: bool,
    /// Other ranks have freed it already, before a resync: freeing it here is no event.
    pub(super) partial: bool,
    /// Live without an owner that frees it: whoever knows its address may. Not the same on every
    /// rank, so no event and no part of a digest.
    pub(super) by_address: bool,
}

impl Block {
    pub(super) fn end(&self) -> u32 {
        self.offset + self.size
    }

    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.size) * UNIT
    }
}

/// All ranges of a lane, without gaps, in a chain from offset 0 to the lane's end.
#[derive(Debug)]
pub(super) struct Table {
    blocks: Slab<Block>,
    first: u32,
    last: u32,
}

impl Table {
    pub(super) fn new() -> Self {
        Self { blocks: Slab::new(), first: NIL, last: NIL }
    }

    pub(super) fn get(&self, id: u32) -> &Block {
        &self.blocks[id as usize]
    }

    pub(super) fn get_mut(&mut self, id: u32) -> &mut Block {
        &mut self.blocks[id as usize]
    }

    pub(super) fn try_get(&self, id: u32) -> Option<&Block> {
        self.blocks.get(id as usize)
    }

    pub(super) fn last(&self) -> Option<u32> {
        (self.last != NIL).then_some(self.last)
    }

    /// The end of the last range, in units.
    pub(super) fn end(&self) -> u32 {
        self.last().map_or(0, |last| self.get(last).end())
    }

    /// Puts a range into the chain in front of `next`, or at its end for [`NIL`].
    pub(super) fn insert_before(&mut self, next: u32, mut block: Block) -> u32 {
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
        let Block { prev, next, .. } = self.blocks.remove(id as usize);
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

    /// Empties the chain and forgets all ranges but the live ones, which [`append`](Table::append)
    /// puts back; returns their ids by counter.
    pub(super) fn keep_live(&mut self) -> BTreeMap<u64, u32> {
        self.blocks.retain(|_, block| block.state == BlockState::Live);
        self.first = NIL;
        self.last = NIL;
        self.blocks.iter().map(|(id, block)| (block.counter, id as u32)).collect()
    }

    /// Puts a range that is in no chain at the end of it.
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
