//! All-reduces carried by copy engines: `two_shot_copy`.
//!
//! A copy engine reaches 389 GB/s on the links of an H200, where stores of kernels reach 361, but only with one
//! copy under way at a time, and each copy costs 4 us more. So one stream has nothing but copies, as few as
//! possible, while kernels on the caller's stream reduce what has arrived. A call takes as many rounds as the
//! scratch requires. In a round, each peer gets its data in one copy, and the last peer in two: when the first half
//! of a rank's share has arrived from all, it is reduced while the second half is on the links; the second half is
//! reduced while the first half's results are sent to one peer. All other results are sent after the last round.
//!
//! Ranks copy to peers in rotated order. A rank that is ahead would copy to a peer that still receives from
//! another rank, and delay that rank further. So the ranks synchronize before every round but the first.
//!
//! This is for calls into windows that have the device to themselves. Others go in pieces (`all_reduce_pieces`).

#![allow(unsafe_code)] // copies by address, and passes on the caller's promises

use std::ops::Range;

use symmpool_allocator::Result;

use super::pieces::equal_pieces;
use super::reduce_arrived::PromisedReduction;
use super::reduce_arrived::{ByteRange, Copied, within};
use crate::cuda::all_reduce::two_shot_copy;
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::spec::KernelSpec;

/// The rounds of shares of `share` bytes, each in two halves. Rounds have about equal lengths of at most `room`
/// bytes, a multiple of a cache line; so are all bounds but the end of the last round.
fn rounds(share: u64, room: u64) -> impl Iterator<Item = [ByteRange; 2]> {
    equal_pieces(share, room).into_iter().map(|Range { start, end }| {
        let middle = end.min(start + (end - start).div_ceil(2).next_multiple_of(128));
        [start..middle, middle..end]
    })
}

impl CudaEngine {
    /// Runs an all-reduce as one call with the data, and one handshake at its end: when a rank has taken part in
    /// that, what it copied to its peers has arrived, and what they copied to it has been reduced.
    pub(in crate::cuda) fn two_shot_copy(
        &mut self,
        work: &PromisedReduction,
        output_window: bool,
    ) -> Result<()> {
        if self.goes_in_pieces() || !output_window {
            self.two_shot_copy_in_pieces(work)
        } else {
            self.two_shot_copy_in_rounds(work)
        }
    }

    fn two_shot_copy_in_rounds(&mut self, work: &PromisedReduction) -> Result<()> {
        let peers: Vec<u32> = self.peers_in_rotated_order().collect();
        let Some((&last, all_but_last)) = peers.split_last() else {
            return self.handshake_only(work.call, work.stream);
        };
        let reduction = KernelSpec::reduces(&two_shot_copy::KERNEL, (work.dtype, work.op));
        let reduce = self.kernel(reduction)?.after_copies();
        let share = work.share(0, self.world()).1;
        let (kernels, copies) = (work.stream, self.copy_stream);
        self.switch_to(kernels)?;
        self.fork(kernels, copies)?;
        self.handshake_before_copies(work.call, kernels)?;
        let mut sent = 0;
        for [first, second] in rounds(share, self.control.scratch_room(self.world())) {
            if first.start > 0 {
                // When all ranks have run this, no rank reads what is in the scratch any more.
                self.fork(copies, kernels)?;
                self.reduce_copied(reduce, work, 0..0, Copied::AwaitsBarrier(0))?;
                self.fork(kernels, copies)?;
            }
            for peer in all_but_last {
                self.copy_input(work, *peer, first.start..second.end, 0)?;
            }
            self.copy_input(work, last, first.clone(), 0)?;
            self.fork(copies, kernels)?;
            self.reduce_copied(reduce, work, first.clone(), Copied::AwaitsBarrier(0))?;
            let offset = second.start - first.start;
            self.copy_input(work, last, second.clone(), offset)?;
            self.fork(copies, kernels)?;
            // The results of the first half are sent while the second half is reduced.
            self.fork(kernels, copies)?;
            self.reduce_copied(reduce, work, second, Copied::AwaitsBarrier(offset))?;
            self.copy_result(work, peers[0], sent..first.end)?;
            sent = first.end;
        }
        self.fork(kernels, copies)?;
        for peer in &peers {
            let from = if *peer == peers[0] { sent } else { 0 };
            self.copy_result(work, *peer, from..share)?;
        }
        self.fork(copies, kernels)?;
        self.handshake_after_copies(work.call, kernels)
    }

    /// Copies a range of this rank's results into a peer's output. If the call is in place, the peer no longer
    /// needs what it had there: it was sent before the kernel reduced.
    fn copy_result(&mut self, work: &PromisedReduction, peer: u32, range: ByteRange) -> Result<()> {
        let (from, bytes) = within(work.share(self.rank(), self.world()), range);
        let to = self.at_peer(work.output, peer) + from;
        // SAFETY: the promises of `work` are kept, and its output is a window at one offset of all ranks, as the handshake has
        // compared. The range is this rank's share of it, which nobody else writes.
        unsafe { self.copy_by_engine(to, work.output + from, bytes, self.copy_stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_as_few_as_fit_and_leave_nothing_out() {
        for share in [16, 128, 1 << 20, (1 << 20) + 16, 64 << 20, (5 << 30) - 48] {
            for room in [128, 1024, 64 << 20, (192 << 20) / 7 / 128 * 128, 1 << 40] {
                if share / room > 1 << 20 {
                    continue;
                }
                let mut at = 0;
                let mut count = 0;
                for [first, second] in rounds(share, room) {
                    assert_eq!((at, first.end), (first.start, second.start));
                    assert!(!first.is_empty() && second.start <= second.end);
                    assert!(second.end - first.start <= room, "{first:?} {second:?} of {room}");
                    assert!(first.end == share || first.end.is_multiple_of(128));
                    at = second.end;
                    count += 1;
                }
                assert_eq!((at, count), (share, share.div_ceil(room)), "{share} by {room}");
            }
        }
    }
}
