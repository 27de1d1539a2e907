//! Reduce-scatters carried by copy engines: the algorithm `copy`. Copies move more over the links than stores do, need no
//! windows, and leave SMs alone but while what has arrived is reduced.
//!
//! Where calls have the device to themselves, one stream has nothing but copies, and kernels on the caller's stream reduce
//! what has arrived. Parts that the scratch holds go in pieces each half as long as the one before, so that little is left to
//! reduce when the last copy has ended. Longer ones go in pieces of equal length, which use three slots of the scratch in
//! turn. Kernels begin with a barrier of all ranks, which says that the copies have arrived; and as ranks arrive there in
//! order, it says as well that all have reduced the piece before. So a rank sends piece `n` behind its own kernel of piece
//! `n - 2`, when all have reduced piece `n - 3`, whose slot it uses.
//!
//! Beside compute, two ranks whose inputs are windows need no scratch: each one's copy engine takes its part of the peer's
//! input to its output, in up to four pieces each half as long as the one before, and a kernel adds its own input to each. The
//! ranks meet before the first copy and behind the last reduction, and nowhere between. Kernels wait for this rank's copies alone;
//! and a call needs few calls of the driver, where signals of pieces through scratch would need hundreds.
//!
//! Others go in pieces through scratch there (`pieces`). A rank sends piece `n` when all peers have said that they have
//! reduced piece `n - 4`, whose slot it uses. They say it behind the reduction, which is behind their wait for the piece
//! itself; so whoever signals has taken the signal before on either channel, and so has its peer.

#![allow(unsafe_code)] // passes on the caller's promises

use std::ops::Range;

use symmpool_allocator::Result;

use super::pieces::{emptied, equal_pieces};
use super::reduce_arrived::Copied;
use super::reduce_arrived::PromisedReduction;
use crate::algorithm::COPY;
use crate::cuda::all_reduce::two_shot_copy;
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::memory_channels::SLOTS;

/// Bytes down to which pieces are halved: to reduce as many takes about as long as to start another copy.
const SHORTEST: u64 = 4 << 20;
/// The last piece that copy engines take from a peer's window is at least such a part of all. Each piece costs the host four
/// calls of the driver, some 10 us each in a program whose caches hold other things.
const LAST_OF: u64 = 8;
/// Slots that pieces use in turn where calls have the device to themselves.
const SLOTS_IN_TURN: usize = 3;
/// Most bytes of a piece beside compute.
const LONGEST: u64 = 48 << 20;
/// A piece of a part, where it lies in scratch, and the piece behind whose kernel it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    range: Range<u64>,
    offset: u64,
    behind: Option<usize>,
}

/// The pieces of parts of `part` bytes, with `room` bytes of scratch. All begin at multiples of a cache line.
fn sequence(part: u64, room: u64) -> Vec<Piece> {
    if part <= room {
        let whole = halved(0..part, SHORTEST).into_iter();
        return whole.map(|range| Piece { offset: range.start, range, behind: None }).collect();
    }
    let slot = room / SLOTS_IN_TURN as u64 / 128 * 128;
    let equal = equal_pieces(part, slot).into_iter().enumerate();
    let place = |(nth, range)| Piece {
        range,
        offset: (nth % SLOTS_IN_TURN) as u64 * slot,
        behind: if nth < SLOTS_IN_TURN { None } else { Some(nth - SLOTS_IN_TURN + 1) },
    };
    equal.map(place).collect()
}

/// Pieces each half as long as the one before, down to `shortest` bytes.
fn halved(mut left: Range<u64>, shortest: u64) -> Vec<Range<u64>> {
    let mut all = Vec::new();
    while left.end - left.start >= 2 * shortest {
        let middle = left.start + ((left.end - left.start) / 2).next_multiple_of(128);
        all.push(left.start..middle);
        left.start = middle;
    }
    all.push(left);
    all
}

impl CudaEngine {
    /// Runs a reduce-scatter whose data copy engines carry.
    pub(in crate::cuda) fn scatter_by_copies(&mut self, work: &PromisedReduction) -> Result<()> {
        if self.goes_in_pieces() {
            let from_windows = work.call.has_input_window() && !work.call.is_in_place();
            if from_windows && self.world() == 2 {
                self.scatter_from_windows(work)
            } else {
                self.scatter_in_pieces(work)
            }
        } else {
            self.scatter_behind_barriers(work)
        }
    }

    fn scatter_behind_barriers(&mut self, work: &PromisedReduction) -> Result<()> {
        let peers: Vec<u32> = self.peers_in_rotated_order().collect();
        let reduction = KernelSpec::reduces(&two_shot_copy::KERNEL, (work.dtype, work.op));
        let reduce = self.kernel(reduction)?.after_copies();
        let (call, kernels, copies) = (work.call.algorithm(COPY), work.stream, self.copy_stream);
        self.switch_to(kernels)?;
        self.fork(kernels, copies)?;
        self.handshake_before_copies(call, kernels)?;
        let room = self.control.scratch_room(self.world());
        let mut left = &peers[..];
        if work.bytes <= room
            && let Some((_, all_but_last)) = peers.split_last()
        {
            // Each copy costs time, so only the last peer's are as many as there are pieces.
            for peer in all_but_last {
                self.copy_input(work, *peer, 0..work.bytes, 0)?;
            }
            left = &peers[all_but_last.len()..];
        }
        for (nth, piece) in sequence(work.bytes, room).into_iter().enumerate() {
            let Piece { range, offset, behind } = piece;
            if let Some(before) = behind {
                self.wait_for(before % SLOTS_IN_TURN, copies)?;
            }
            for peer in left {
                self.copy_input(work, *peer, range.clone(), offset)?;
            }
            self.fork(copies, kernels)?;
            self.reduce_copied(reduce, work, range, Copied::AwaitsBarrier(offset))?;
            self.record(nth % SLOTS_IN_TURN, kernels)?;
        }
        // Data in this rank's scratch was reduced when it takes part in this handshake.
        self.handshake_after_copies(call, kernels)
    }

    fn scatter_from_windows(&mut self, work: &PromisedReduction) -> Result<()> {
        let ranges = halved(0..work.bytes, SHORTEST.max(work.bytes / LAST_OF));
        // Ranks on which the same algorithm is not in such pieces differ in this.
        let call = work.call.algorithm(COPY).peer_blocks(ranges.len() as u32);
        tracing::debug!(part = work.bytes, pieces = ranges.len(), from = "windows", %call);
        let work = &work.described(call);
        let reduction = KernelSpec::reduces(&two_shot_copy::KERNEL, (work.dtype, work.op));
        let kernel = self.kernel(reduction)?.without_waits().after_copies();
        let (copies, kernels) = (self.copy_stream, work.stream);
        self.switch_to(kernels)?;
        self.handshake_before_copies(call, kernels)?;
        self.fork(kernels, copies)?;
        let theirs =
            self.at_peer(work.input, 1 - self.rank()) + u64::from(self.rank()) * work.stride;
        for range in ranges {
            let (from, to) = (theirs + range.start, work.output + range.start);
            // SAFETY: the promises of `work` are kept, and its inputs are windows at one offset of all ranks, as the handshake
            // has compared. The range lies within the peer's input for this rank, and within this rank's output.
            unsafe { self.copy_by_engine(to, from, range.end - range.start, copies) }?;
            self.fork(copies, kernels)?;
            self.reduce_copied(kernel, work, range, Copied::InOutput)?;
        }
        self.handshake_after_copies(call, kernels)
    }

    fn scatter_in_pieces(&mut self, work: &PromisedReduction) -> Result<()> {
        let work = &work.described(work.call.algorithm(COPY));
        let call = self.plan_reduction(work, SLOTS, LONGEST)?;
        let others = Vec::from_iter(self.stream_of_waits(call.ranges.len()));
        self.begin_pieces(call.work.call, work.stream, &others)?;
        for nth in 0..call.ranges.len() {
            if let Some(before) = nth.checked_sub(SLOTS) {
                self.await_emptied(&call.peers, before)?;
            }
            self.reduce_piece(&call, nth)?;
            if nth + SLOTS < call.ranges.len() {
                self.signal_copied(&call.peers, emptied(nth), work.stream)?;
            }
        }
        self.end_pieces(call.work.call, work.stream, &others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_leave_nothing_out_and_fit() {
        for part in [1, 16, 4 << 20, (8 << 20) - 2, (8 << 20) + 6, 204 << 20, (5 << 30) - 48] {
            for room in [1 << 20, (22 << 20) / 3 / 128 * 128, 64 << 20, 1 << 40] {
                let mut at = 0;
                let all = sequence(part, room);
                for (nth, Piece { range, offset, behind }) in all.iter().enumerate() {
                    assert_eq!(range.start, at);
                    assert!(!range.is_empty() && range.start.is_multiple_of(128));
                    let end = offset + (range.end - range.start);
                    assert!(offset.is_multiple_of(128) && end <= room, "{offset}..{end} of {room}");
                    // Whatever was there before was reduced by all ranks when that kernel runs.
                    for (other, earlier) in all[..nth].iter().enumerate() {
                        let length = earlier.range.end - earlier.range.start;
                        if earlier.offset < end && *offset < earlier.offset + length {
                            assert!(behind.is_some_and(|behind| other < behind), "{nth} {other}");
                        }
                    }
                    at = range.end;
                }
                assert_eq!(at, part, "in {room}");
            }
        }
    }

    #[test]
    fn copies_are_halved_until_another_one_would_cost_as_much_as_it_saves() {
        let mib = |range: &Range<u64>| (range.end - range.start) >> 20;
        let lengths: Vec<u64> = halved(0..32 << 20, SHORTEST).iter().map(mib).collect();
        assert_eq!(lengths, [16, 8, 4, 4]);
        assert_eq!(halved(0..(8 << 20) - 2, SHORTEST).len(), 1);
        let eighth: Vec<u64> = halved(0..256 << 20, 32 << 20).iter().map(mib).collect();
        assert_eq!(eighth, [128, 64, 32, 32]);
    }
}
