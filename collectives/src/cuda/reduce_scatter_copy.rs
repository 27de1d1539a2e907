//! Reduce-scatters carried by copy engines: the algorithm `copy`. They leave more of the links than stores do, need no
//! windows, and take SMs only while they reduce.
//!
//! Where calls have the device to themselves, one stream has nothing but copies, and kernels on the caller's stream reduce
//! what has arrived. A call takes as many rounds as the scratch requires. In a round each peer gets its data in one copy,
//! and the last peer in several, each half as long as the one before: after each of them the kernel reduces what has
//! arrived from all, so that little is left to reduce when the last copy has ended. Kernels begin with a barrier of all
//! ranks, which says that the copies have arrived, and between rounds that scratch is empty again.
//!
//! Beside compute they go in pieces (`copy_pieces`). A rank sends piece `n` when all peers have said that they have reduced
//! piece `n - 4`, whose slot it uses. They say it behind the reduction, which is behind their wait for the piece itself; so
//! whoever signals has taken the signal before on either channel, and so has its peer.

#![allow(unsafe_code)] // passes on the caller's promises

use std::ops::Range;

use symmpool_allocator::Result;

use super::copy_pieces::{SLOTS, emptied, filled, pieces, room};
use super::engine::CudaEngine;
use super::kernel_spec::KernelSpec;
use super::params::Control;
use super::reductions::Work;
use crate::algorithm::COPY;
use crate::jit::sources::TWO_SHOT_COPY;

/// Copies of the last peer's data are halved down to so many bytes: reducing as many takes about as long as starting another
/// copy.
const SHORTEST: u64 = 4 << 20;
/// Most bytes of a piece beside compute.
const LONGEST: u64 = 48 << 20;
/// Copy engines are faster than stores where a rank sends at least so many bytes, in rounds of at least so many.
const MIN_SENT_BYTES: u64 = 32 << 20;

/// Whether copy engines reduce and scatter parts of so many bytes faster than stores do.
pub(super) fn pays_off(control: &Control, world: u32, part: u64) -> bool {
    let peers = u64::from(world.max(2) - 1);
    let round = part.min(control.scratch_room(world));
    round.saturating_mul(peers) >= MIN_SENT_BYTES
}

/// The ranges of parts of `part` bytes, by rounds of at most `room` bytes: those of the last peer's copies. All begin at
/// multiples of a cache line.
fn rounds(part: u64, room: u64) -> impl Iterator<Item = Vec<Range<u64>>> {
    let each = part.div_ceil(part.div_ceil(room)).next_multiple_of(128);
    (0..part.div_ceil(each)).map(move |nth| halved(nth * each..part.min((nth + 1) * each)))
}

fn halved(mut left: Range<u64>) -> Vec<Range<u64>> {
    let mut all = Vec::new();
    while left.end - left.start >= 2 * SHORTEST {
        let middle = left.start + ((left.end - left.start) / 2).next_multiple_of(128);
        all.push(left.start..middle);
        left.start = middle;
    }
    all.push(left);
    all
}

impl CudaEngine {
    /// # Safety
    ///
    /// As [`CudaEngine::reduce_scatter`].
    pub(super) unsafe fn scatter_by_copies(&mut self, work: &Work) -> Result<()> {
        if self.beside_compute {
            return self.scatter_in_pieces(work);
        }
        let peers: Vec<u32> = self.peers_in_rotated_order().collect();
        let Some((&last, all_but_last)) = peers.split_last() else {
            return self.handshake_only(work.call, work.stream);
        };
        let reduction = KernelSpec::reduces(&TWO_SHOT_COPY, (work.dtype, work.op));
        let reduce = self.kernel(reduction)?.after_copies();
        let (call, kernels, copies) = (work.call.algorithm(COPY), work.stream, self.copy_stream);
        self.switch_to(kernels)?;
        self.fork(kernels, copies)?;
        self.handshake_only(call, kernels)?;
        for (nth, ranges) in rounds(work.bytes, self.control.scratch_room(self.world())).enumerate()
        {
            if nth > 0 {
                // When all ranks have run this, no rank reads what is in the scratch any more.
                self.fork(copies, kernels)?;
                self.reduce_copied(reduce, work, 0..0, 0)?;
                self.fork(kernels, copies)?;
            }
            let (from, to) = (ranges[0].start, ranges[ranges.len() - 1].end);
            for peer in all_but_last {
                self.copy_input(work, *peer, from..to, 0)?;
            }
            for range in ranges {
                let offset = range.start - from;
                self.copy_input(work, last, range.clone(), offset)?;
                self.fork(copies, kernels)?;
                self.reduce_copied(reduce, work, range, offset)?;
            }
        }
        // What is in this rank's scratch was reduced when it takes part in this handshake.
        self.handshake_after_copies(call, kernels)
    }

    fn scatter_in_pieces(&mut self, work: &Work) -> Result<()> {
        let reduction = KernelSpec::reduces(&TWO_SHOT_COPY, (work.dtype, work.op));
        let reduce = self.kernel(reduction)?.without_waits().after_copies();
        let room = room(&self.control, self.world(), SLOTS);
        let ranges = pieces(work.bytes, room, LONGEST);
        // Ranks on which the same algorithm is not in pieces differ in this.
        let call = work.call.algorithm(COPY).peer_blocks(ranges.len() as u32);
        let work = &Work { call, root: 1, ..*work };
        let slot = |nth: usize| (nth % SLOTS) as u64 * room;
        let (kernels, copies) = (work.stream, self.copy_stream);
        let peers: Vec<u32> = self.peers_in_rotated_order().collect();
        self.switch_to(kernels)?;
        self.fork(kernels, copies)?;
        self.handshake_only(work.call, kernels)?;
        for (nth, range) in ranges.iter().enumerate() {
            if let Some(before) = nth.checked_sub(SLOTS) {
                self.await_copied(&peers, emptied(before), copies)?;
            }
            for peer in &peers {
                self.copy_input(work, *peer, range.clone(), slot(nth))?;
            }
            self.signal_behind_copies(&peers, filled(nth))?;
            self.await_copied(&peers, filled(nth), kernels)?;
            self.reduce_copied(reduce, work, range.clone(), slot(nth))?;
            if nth + SLOTS < ranges.len() {
                self.signal_copied(&peers, emptied(nth), kernels)?;
            }
        }
        self.fork(self.signal_stream, kernels)?;
        self.handshake_after_copies(work.call, kernels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_leave_nothing_out_and_fit() {
        for part in [1, 16, 4 << 20, (8 << 20) - 2, (8 << 20) + 6, 204 << 20, (5 << 30) - 48] {
            for room in [1 << 20, (22 << 20) / 3 / 128 * 128, 64 << 20, 1 << 40] {
                let mut at = 0;
                for ranges in rounds(part, room) {
                    let from = at;
                    for range in &ranges {
                        assert_eq!(range.start, at);
                        assert!(!range.is_empty() && range.start.is_multiple_of(128));
                        at = range.end;
                    }
                    assert!(at - from <= room, "{from}..{at} of {room}");
                }
                assert_eq!(at, part, "in {room}");
            }
        }
    }

    #[test]
    fn copies_are_halved_until_another_one_would_cost_as_much_as_it_saves() {
        let mib = |range: &Range<u64>| (range.end - range.start) >> 20;
        let lengths: Vec<u64> = halved(0..32 << 20).iter().map(mib).collect();
        assert_eq!(lengths, [16, 8, 4, 4]);
        assert_eq!(halved(0..(8 << 20) - 2).len(), 1);
    }
}
