//! Ten thousand small traffic matrices, compared with a reference that moves one byte at a time: empty rows and
//! columns, all to one, nothing at all, unaligned places.

use crate::flat_heap::{FlatHeap, TestBuffer, small_scratch};
use crate::oracle::noise;
use symmpool_collectives::{Element, HostEngine, Place};

const MATRICES: u64 = 10_000;
/// Room for all of a rank's input or output, and for bytes around it that must not change.
const ROOM: usize = 4 * 2000 + 64;
const UNTOUCHED: u8 = 0xee;

/// A pseudo-random number less than `below`, the same on every rank for the same matrix.
fn draw(nth: u64, what: u64, below: u64) -> usize {
    (noise(nth, what) % below) as usize
}

/// The bytes that each rank sends to each: usually a few, in some matrices more than fit in one piece.
fn matrix(nth: u64, world: usize) -> Vec<Vec<usize>> {
    let pick = |what: u64| draw(nth, 1000 + what, world as u64);
    let most = if nth.is_multiple_of(16) { 2000 } else { 40 };
    let count = |from: usize, to: usize| {
        let any = draw(nth, (from * world + to) as u64, most);
        match nth % 8 {
            0 | 1 => any,
            // Zero: a row, a column, most counts, all counts but one, all counts.
            2 if from == pick(0) => 0,
            3 if to == pick(0) => 0,
            4 if !any.is_multiple_of(3) => 0,
            5 if (from, to) != (pick(0), pick(1)) => 0,
            6 => 0,
            // One rank sends and receives equal parts.
            7 if from == pick(0) || to == pick(0) => pick(1),
            _ => any,
        }
    };
    (0..world).map(|from| (0..world).map(|to| count(from, to)).collect()).collect()
}

/// The bytes that a rank sends.
fn data(nth: u64, rank: usize, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|at| noise(nth * 8 + rank as u64, at) as u8).collect()
}

/// The expected output of every rank, computed one byte at a time.
fn reference(nth: u64, matrix: &[Vec<usize>]) -> Vec<Vec<u8>> {
    let mut outputs = vec![Vec::new(); matrix.len()];
    for (from, row) in matrix.iter().enumerate() {
        let mut input = data(nth, from, row.iter().sum()).into_iter();
        for (to, count) in row.iter().enumerate() {
            for _ in 0..*count {
                outputs[to].push(input.next().unwrap());
            }
        }
    }
    outputs
}

/// A rank's engine and its inputs and outputs: one of each in a window, one in ordinary memory.
struct Rank {
    engine: HostEngine,
    me: usize,
    inputs: [TestBuffer; 2],
    outputs: [TestBuffer; 2],
}

impl Rank {
    fn new(heap: &FlatHeap, rank: u32) -> Self {
        let window = |nth: u64| TestBuffer::window(heap, rank, nth * ROOM as u64, ROOM);
        Self {
            engine: heap.engine(rank, 0, small_scratch()),
            me: rank as usize,
            inputs: [window(0), TestBuffer::plain(ROOM, 0)],
            outputs: [window(1), TestBuffer::plain(ROOM, 0)],
        }
    }

    /// Runs and checks the call of a matrix, with places that are some bytes into their buffers.
    fn check(&mut self, nth: u64, matrix: &[Vec<usize>]) {
        let me = self.me;
        let of_rank = |what: u64, below| draw(nth, 2000 + 10 * me as u64 + what, below);
        let (from, to) = (&self.inputs[of_rank(0, 2)], &self.outputs[of_rank(1, 2)]);
        let (skew, out_skew) = (of_rank(2, 17), of_rank(3, 17));
        let send = &matrix[me];
        let receive: Vec<usize> = matrix.iter().map(|row| row[me]).collect();
        let before = vec![UNTOUCHED; skew];
        from.write(&[before, data(nth, me, send.iter().sum())].concat());
        to.write(&[UNTOUCHED; ROOM]);
        let (input, output): (Place, Place) = (from.part(skew), to.part(out_skew));
        let even = send.iter().chain(&receive).all(|count| *count == send[0]);
        let done = if even {
            // SAFETY: the buffers have room for what is sent and received, and are this rank's.
            unsafe { self.engine.all_to_all(input, output, send[0], u8::DTYPE) }
        } else {
            // SAFETY: the buffers have room for what is sent and received, and are this rank's.
            unsafe { self.engine.all_to_all_v(input, send, output, &receive, u8::DTYPE) }
        };
        done.unwrap_or_else(|error| panic!("matrix {nth} of {matrix:?}: {error}"));
        let mut wanted = vec![UNTOUCHED; out_skew];
        wanted.extend(&reference(nth, matrix)[me]);
        wanted.resize(ROOM, UNTOUCHED);
        assert!(to.read::<u8>(ROOM) == wanted, "matrix {nth}, rank {me} of {matrix:?}");
    }
}

#[test]
fn ten_thousand_small_matrices_arrive_whole() {
    for world in 2..=4 {
        let heap = FlatHeap::new(world, 1, 2 * ROOM as u64, &small_scratch());
        heap.ranks(|rank| {
            let mut rank = Rank::new(&heap, rank);
            for nth in (0..MATRICES).filter(|nth| nth % 3 == u64::from(world - 2)) {
                rank.check(nth, &matrix(nth, world as usize));
            }
        });
    }
}
