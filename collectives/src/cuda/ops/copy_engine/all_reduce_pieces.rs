//! All-reduces by copy engines that leave a device's SMs to other kernels, and those into ordinary memory:
//! `two_shot_copy` in pieces (`pieces`).
//!
//! A piece of the inputs is sent, then it is reduced, then its results are sent. Inputs and results leave by two streams,
//! so that links have something to do while one of them waits. Nothing but the reductions takes SMs, and those wait for
//! nobody, so they may wait for SMs.
//!
//! Results come into scratch, and a stream of its own copies them from there to the output, which needs no links. They could
//! go into outputs that are windows directly. But copies cannot be called off, so after a failure they would write into the
//! memory of a rank that may not have made the call.
//!
//! Scratch has four slots for inputs and four for results, which pieces use in turn. A rank sends piece `n` when it has
//! taken the results of piece `n - 4` from all peers: so they have reduced what was in its slot. It sends results of piece
//! `n` after it has received that piece's inputs, and so after every peer has taken what was in the slot of these results.

#![allow(unsafe_code)] // passes on the caller's promises

use symmpool_allocator::Result;

use super::pieces::{PiecewiseReduction, emptied, slot};
use super::reduce_arrived::PromisedReduction;
use super::reduce_arrived::within;
use crate::cuda::engine::CudaEngine;
use crate::cuda::layout::memory_channels::SLOTS;
use crate::cuda::layout::piece_slots::SLOTS_OF_BOTH;

/// How many pieces are sent between a piece and its results, in the order in which streams are given them.
const LAG: usize = SLOTS - 2;
/// Most bytes of a piece: longer ones leave links idle for longer before the first reduction.
const LONGEST: u64 = 16 << 20;

/// The engine's event behind the reduction of a piece, one of the last `SLOTS`.
fn reduced(nth: usize) -> usize {
    nth % SLOTS
}

/// The engine's event behind the results of a piece, when they have arrived and are copied out of scratch.
fn taken(nth: usize) -> usize {
    SLOTS + nth % SLOTS
}

impl CudaEngine {
    /// Runs an all-reduce in pieces, of which several are under way.
    pub(in crate::cuda) fn two_shot_copy_in_pieces(
        &mut self,
        work: &PromisedReduction,
    ) -> Result<()> {
        let call = self.plan_reduction(work, SLOTS_OF_BOTH, LONGEST)?;
        let others = [self.companion_stream, self.result_stream];
        self.begin_pieces(call.work.call, work.stream, &others)?;
        let count = call.ranges.len();
        for nth in 0..count {
            if let Some(before) = nth.checked_sub(SLOTS) {
                self.wait_for(taken(before), self.copy_stream)?;
            }
            self.reduce_piece(&call, nth)?;
            self.record(reduced(nth), work.stream)?;
            if let Some(before) = nth.checked_sub(LAG) {
                self.exchange_results(&call, before)?;
            }
        }
        for left in count.saturating_sub(LAG)..count {
            self.exchange_results(&call, left)?;
        }
        self.end_pieces(call.work.call, work.stream, &others)
    }

    /// Copies this rank's results of a piece into all peers' scratch, and takes theirs.
    fn exchange_results(&mut self, call: &PiecewiseReduction, nth: usize) -> Result<()> {
        let PiecewiseReduction { work, ranges, room, peers, .. } = call;
        let (copies, local, range) = (self.result_stream, self.companion_stream, &ranges[nth]);
        // Slots of results come after those of inputs.
        let slot = SLOTS as u64 * room + slot(nth, *room);
        self.wait_for(reduced(nth), copies)?;
        let (from, bytes) = within(work.share(self.rank(), self.world()), range.clone());
        for peer in peers {
            let to = self.slot_from(self.rank(), *peer) + slot;
            // SAFETY: the promises of `work` are kept, and the range is this rank's share of its output. The peer's scratch is a
            // window, in which this slot is this rank's alone and has room for a piece; the peer has emptied it.
            unsafe { self.copy_by_engine(to, work.output + from, bytes, copies) }?;
        }
        self.signal_copied(peers, emptied(nth), copies)?;
        self.await_copied(peers, emptied(nth), local)?;
        for peer in peers {
            let (to, bytes) = within(work.share(*peer, self.world()), range.clone());
            let from = self.slot_from(*peer, self.rank()) + slot;
            // SAFETY: the promises of `work` are kept, and the range is the peer's share of its output, which nothing else
            // writes. The peer has filled the slot of this rank's scratch, and fills it again when it was told to.
            unsafe { self.copy_by_engine(work.output + to, from, bytes, local) }?;
        }
        self.record(taken(nth), local)
    }
}
