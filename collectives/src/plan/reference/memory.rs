//! The memory of ranks, byte by byte, and what callers do with it between calls.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::model::{Buffer, Collective, Span};
use super::values::UNDEFINED;
use super::{CallSeries, has_input};

/// The bytes that a caller has in memory that a call does not read: pseudo-random, and others for each rank and call.
#[derive(Clone, Copy, Debug)]
pub struct Caller(pub u64);

impl Caller {
    fn bytes(self, rank: u32, call: usize, length: usize) -> Vec<u8> {
        let mut word = self.0 ^ (u64::from(rank) << 48) ^ ((call as u64) << 32);
        let mut bytes = vec![0; length];
        for eight in bytes.chunks_mut(8) {
            word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            eight.copy_from_slice(&(word ^ (word >> 29)).to_le_bytes()[..eight.len()]);
        }
        bytes
    }
}

/// Access of an operation that it should not have made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touched {
    /// An operation accessed the input or output of a rank that was not in the call.
    Outside {
        /// The rank whose operation it is, and its index there.
        by: (u32, usize),
        /// Whose memory.
        of: u32,
    },
    /// A rank's input was not what it had been, when the rank left.
    Input {
        /// Whose input.
        of: u32,
    },
    /// A rank's buffers were written when it had left.
    Written {
        /// Whose buffers.
        of: u32,
    },
}

/// Where a chunk lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChunkPlace {
    rank: u32,
    region: ChunkRegion,
    /// The byte at which it begins.
    start: usize,
    /// Bytes that are there.
    room: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ChunkRegion {
    Data,
    Scratch(usize),
}

impl ChunkPlace {
    pub(super) fn is_same_memory(&self, other: &Self) -> bool {
        (self.rank, self.region) == (other.rank, other.region)
            && self.start < other.start + other.room
            && other.start < self.start + self.room
    }
}

struct RankMemory {
    /// Input and output: one behind the other, or one in the other.
    data: Vec<u8>,
    input: Range<usize>,
    output: Range<usize>,
    scratch: [Vec<u8>; 2],
    is_inside: bool,
    /// Copy of `data` from when the rank entered or left.
    known: Vec<u8>,
}

pub(super) struct ReferenceMemory {
    ranks: Vec<RankMemory>,
    caller: Caller,
    layout: super::ChunkLayout,
    size: usize,
    touched: Vec<Touched>,
    /// The number of the value that each chunk holds, by rank, region and first byte.
    held: BTreeMap<(u32, ChunkRegion, usize), usize>,
    in_place: Vec<bool>,
}

impl ReferenceMemory {
    pub(super) fn new(calls: &CallSeries<'_>, caller: Caller) -> Self {
        let CallSeries { plan, layout, dtype, in_place, .. } = calls;
        let size = dtype.size();
        let rank = |rank: u32| {
            let input = if has_input(plan, rank) || in_place[rank as usize] {
                layout.total(plan.chunks) * size
            } else {
                0
            };
            let output = layout.total(plan.output_chunks(rank)) * size;
            let own = rank as usize * layout.count() * size;
            let (input, output) = match (in_place[rank as usize], &plan.collective) {
                (false, _) => (0..input, input..input + output),
                (true, Collective::AllGather) => (own..own + input, 0..output),
                (true, Collective::ReduceScatter) => (0..input, own..own + output),
                (true, _) => (0..input, 0..output),
            };
            let scratch = layout.each() * size * plan.scratch as usize;
            let halves = [0, 1].map(|half: usize| caller.bytes(rank, 1000 + half, scratch));
            let data = caller.bytes(rank, 2000, input.end.max(output.end));
            let known = data.clone();
            RankMemory { data, input, output, scratch: halves, is_inside: false, known }
        };
        let ranks = (0..plan.world).map(rank).collect();
        let (layout, in_place) = (*layout, in_place.clone());
        Self { ranks, caller, layout, size, touched: Vec::new(), held: BTreeMap::new(), in_place }
    }

    /// Returns the accesses that should not have been made.
    pub(super) fn touched(mut self) -> Vec<Touched> {
        for rank in 0..self.ranks.len() {
            self.expect_untouched(rank as u32);
        }
        self.touched
    }

    fn expect_untouched(&mut self, rank: u32) {
        let of = &self.ranks[rank as usize];
        if of.data != of.known {
            self.touched.push(Touched::Written { of: rank });
        }
    }

    /// The caller gives the rank's buffers to a call.
    pub(super) fn enter(&mut self, rank: u32, data: &[u8], call: usize) {
        self.expect_untouched(rank);
        self.held.retain(|(of, region, _), _| *of != rank || *region != ChunkRegion::Data);
        let of = &mut self.ranks[rank as usize];
        of.data = self.caller.bytes(rank, call, of.data.len());
        let input = of.input.start..of.input.start + data.len();
        of.data[input].copy_from_slice(data);
        of.known.clone_from(&of.data);
        of.is_inside = true;
    }

    /// The caller takes the rank's buffers back, and does something else with them. Returns the output.
    pub(super) fn leave(&mut self, rank: u32, call: usize) -> Vec<u8> {
        let is_in_place = self.in_place[rank as usize];
        let of = &mut self.ranks[rank as usize];
        if !is_in_place && of.data[of.input.clone()] != of.known[of.input.clone()] {
            self.touched.push(Touched::Input { of: rank });
        }
        let output = of.data[of.output.clone()].to_vec();
        of.data = self.caller.bytes(rank, 3000 + call, of.data.len());
        of.known.clone_from(&of.data);
        of.is_inside = false;
        output
    }

    pub(super) fn input_chunk(&self, rank: u32, index: u32) -> ChunkPlace {
        self.data_chunk(rank, self.ranks[rank as usize].input.start, index)
    }

    pub(super) fn output_chunk(&self, rank: u32, index: u32) -> ChunkPlace {
        self.data_chunk(rank, self.ranks[rank as usize].output.start, index)
    }

    fn data_chunk(&self, rank: u32, begin: usize, index: u32) -> ChunkPlace {
        let (start, length) = (self.layout.start(index), self.layout.length(index));
        let start = begin + start * self.size;
        let room = length * self.size;
        ChunkPlace { rank, region: ChunkRegion::Data, start, room }
    }

    /// Where a chunk of a span lies, in that half of scratch.
    pub(super) fn chunk(&self, span: Span, offset: u32, half: usize) -> ChunkPlace {
        let Span { rank, buffer, index, .. } = span;
        let index = index + offset;
        match buffer {
            Buffer::Input => self.input_chunk(rank, index),
            Buffer::Output => self.output_chunk(rank, index),
            Buffer::Scratch => {
                let room = self.layout.each() * self.size;
                let (region, start) = (ChunkRegion::Scratch(half), index as usize * room);
                ChunkPlace { rank, region, start, room }
            }
        }
    }

    /// Returns the value that a chunk holds.
    pub(super) fn held(&self, place: ChunkPlace) -> usize {
        let held = self.held.get(&(place.rank, place.region, place.start));
        held.copied().filter(|_| place.room > 0).unwrap_or(UNDEFINED)
    }

    pub(super) fn hold(&mut self, place: ChunkPlace, value: usize) {
        // Chunks without elements lie where others begin.
        if place.room > 0 {
            self.held.insert((place.rank, place.region, place.start), value);
        }
    }

    /// The elements of a chunk.
    pub(super) fn length(&self, place: ChunkPlace) -> usize {
        place.room / self.size
    }

    fn bytes_of(&mut self, by: (u32, usize), place: ChunkPlace) -> &mut Vec<u8> {
        let of = &mut self.ranks[place.rank as usize];
        match place.region {
            ChunkRegion::Data => {
                if !of.is_inside {
                    self.touched.push(Touched::Outside { by, of: place.rank });
                }
                &mut of.data
            }
            ChunkRegion::Scratch(half) => &mut of.scratch[half],
        }
    }

    pub(super) fn read(
        &mut self,
        by: (u32, usize),
        place: ChunkPlace,
        elements: &Range<usize>,
    ) -> Vec<u8> {
        let size = self.size;
        let bytes = self.bytes_of(by, place);
        let at = place.start + elements.start * size;
        let end = place.start + elements.end * size;
        // A rank that has nothing to broadcast has no memory there, and is read as a pattern.
        bytes.get(at..end).map_or_else(|| vec![0xee; end - at], <[u8]>::to_vec)
    }

    pub(super) fn write(&mut self, by: (u32, usize), place: ChunkPlace, first: usize, data: &[u8]) {
        let at = place.start + first * self.size;
        let bytes = self.bytes_of(by, place);
        if let Some(to) = bytes.get_mut(at..at + data.len()) {
            to.copy_from_slice(data);
        }
    }
}
