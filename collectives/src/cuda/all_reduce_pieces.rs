//! All-reduces by copy engines that leave a device's SMs to other kernels, and those into ordinary memory:
//! `two_shot_copy` in pieces (`copy_pieces`).
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

use std::ops::Range;

use symmpool_allocator::Result;

use super::all_reduce_copy::within;
use super::copy_pieces::{SLOTS, emptied, filled, pieces, room, slot};
use super::engine::CudaEngine;
use super::kernel_spec::KernelSpec;
use super::reductions::Work;
use crate::jit::sources::TWO_SHOT_COPY;

/// How many pieces are sent between a piece and its results, in the order in which streams are given them.
const LAG: usize = SLOTS - 2;
/// Slots of inputs and of results.
pub(super) const SLOTS_OF_BOTH: usize = 2 * SLOTS;
/// Most bytes of a piece: longer ones leave links idle for longer before the first reduction.
const LONGEST: u64 = 16 << 20;

/// The engine's events of a call: behind each of the last reductions, and behind the results of each of the last pieces,
/// when they have arrived and are copied out of scratch.
fn reduced(nth: usize) -> usize {
    nth % SLOTS
}

fn taken(nth: usize) -> usize {
    SLOTS + nth % SLOTS
}

impl CudaEngine {
    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`].
    pub(super) unsafe fn two_shot_copy_in_pieces(&mut self, work: &Work) -> Result<()> {
        let reduction = KernelSpec::reduces(&TWO_SHOT_COPY, (work.dtype, work.op));
        let reduce = self.kernel(reduction)?.without_waits().after_copies();
        let room = room(&self.control, self.world(), SLOTS_OF_BOTH);
        let ranges = pieces(work.share(0, self.world()).1, room, LONGEST);
        // Ranks on which the same algorithm is not in pieces differ in this.
        let call = work.call.peer_blocks(ranges.len() as u32);
        let work = &Work { call, root: 1, ..*work };
        let (kernels, copies) = (work.stream, self.copy_stream);
        let peers: Vec<u32> = self.peers_in_rotated_order().collect();
        self.switch_to(kernels)?;
        self.fork(kernels, copies)?;
        self.handshake_only(work.call, kernels)?;
        // Behind the handshake, which names a rank that does not come.
        self.fork(kernels, self.companion_stream)?;
        self.fork(kernels, self.result_stream)?;
        let count = ranges.len();
        for (nth, range) in ranges.iter().enumerate() {
            if let Some(before) = nth.checked_sub(SLOTS) {
                self.wait_for(taken(before), copies)?;
            }
            for peer in &peers {
                self.copy_input(work, *peer, range.clone(), slot(nth, room))?;
            }
            self.signal_behind_copies(&peers, filled(nth))?;
            self.await_copied(&peers, filled(nth), kernels)?;
            self.reduce_copied(reduce, work, range.clone(), slot(nth, room))?;
            self.record(reduced(nth), kernels)?;
            if let Some(before) = nth.checked_sub(LAG) {
                self.exchange_results(work, (before, &ranges[before]), room, &peers)?;
            }
        }
        for (left, range) in ranges.iter().enumerate().skip(count.saturating_sub(LAG)) {
            self.exchange_results(work, (left, range), room, &peers)?;
        }
        self.fork(self.signal_stream, kernels)?;
        self.fork(self.result_stream, kernels)?;
        self.wait_for(taken(count - 1), kernels)?;
        self.handshake_after_copies(work.call, kernels)
    }

    /// Copies this rank's results of a piece into all peers' scratch, and takes theirs.
    fn exchange_results(
        &mut self,
        work: &Work,
        (nth, range): (usize, &Range<u64>),
        room: u64,
        peers: &[u32],
    ) -> Result<()> {
        let (copies, local) = (self.result_stream, self.companion_stream);
        // Slots of results come after those of inputs.
        let slot = SLOTS as u64 * room + slot(nth, room);
        self.wait_for(reduced(nth), copies)?;
        let (from, bytes) = within(work.share(self.rank(), self.world()), range.clone());
        for peer in peers {
            let to = self.slot_from(self.rank(), *peer) + slot;
            self.copy_by_engine(to, work.output + from, bytes, copies)?;
        }
        self.signal_copied(peers, emptied(nth), copies)?;
        self.await_copied(peers, emptied(nth), local)?;
        for peer in peers {
            let (to, bytes) = within(work.share(*peer, self.world()), range.clone());
            let from = self.slot_from(*peer, self.rank()) + slot;
            self.copy_by_engine(work.output + to, from, bytes, local)?;
        }
        self.record(taken(nth), local)
    }
}
