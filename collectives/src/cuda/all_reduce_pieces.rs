//! All-reduces by copy engines that leave a device's SMs to other kernels, and those into ordinary memory:
//! `two_shot_copy` in pieces (`copy_pieces`).
//!
//! A piece of the inputs is sent, then it is reduced, then its results are sent. Inputs and results leave by two streams,
//! so that links have something to do while one of them waits. Nothing but the reductions takes SMs, and those wait for
//! nobody, so they may wait for SMs.
//!
//! Results for outputs that are windows are copied there. Others come into scratch, and a stream of its own copies them
//! from there to the output, which needs no links.
//!
//! Scratch has four slots for inputs and four for results, which pieces use in turn. A rank sends piece `n` when it has
//! taken the results of piece `n - 4` from all peers: so they have reduced what was in its slot. It sends results of piece
//! `n` after it has received that piece's inputs, and so after every peer has taken what was in the slot of these results.

#![allow(unsafe_code)] // passes on the caller's promises

use std::ops::Range;

use symmpool_allocator::Result;

use super::all_reduce_copy::within;
use super::copy_pieces::{SLOTS, emptied, filled, pieces, room};
use super::engine::CudaEngine;
use super::kernel_spec::KernelSpec;
use super::reductions::Work;
use crate::jit::sources::TWO_SHOT_COPY;

/// How many pieces are sent between a piece and its results, in the order in which streams are given them.
const LAG: usize = SLOTS - 2;
/// Most bytes of a piece: longer ones leave links idle for longer before the first reduction.
const LONGEST: u64 = 16 << 20;

/// The pieces of one call.
struct Pieces<'a> {
    work: &'a Work,
    ranges: Vec<Range<u64>>,
    /// Bytes of a slot.
    room: u64,
    /// Whether outputs are windows.
    direct: bool,
}

impl Pieces<'_> {
    /// Where the slot of a piece of the inputs lies in a sender's part of the scratch; those of results come after all of
    /// these.
    fn slot(&self, nth: usize) -> u64 {
        (nth % SLOTS) as u64 * self.room
    }

    fn slot_of_results(&self, nth: usize) -> u64 {
        SLOTS as u64 * self.room + self.slot(nth)
    }
}

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
    pub(super) unsafe fn two_shot_copy_in_pieces(
        &mut self,
        work: &Work,
        direct: bool,
    ) -> Result<()> {
        let reduction = KernelSpec::reduces(&TWO_SHOT_COPY, (work.dtype, work.op));
        let reduce = self.kernel(reduction)?.without_waits().after_copies();
        let room = room(&self.control, self.world(), if direct { SLOTS } else { 2 * SLOTS });
        let ranges = pieces(work.share(0, self.world()).1, room, LONGEST);
        // Ranks on which the same algorithm is not in pieces differ in this.
        let call = work.call.peer_blocks(ranges.len() as u32);
        let work = &Work { call, root: 1, ..*work };
        let pieces = Pieces { work, ranges, room, direct };
        let (kernels, copies) = (work.stream, self.copy_stream);
        let peers: Vec<u32> = self.peers_in_rotated_order().collect();
        self.switch_to(kernels)?;
        self.fork(kernels, copies)?;
        self.handshake_only(work.call, kernels)?;
        // Behind the handshake, which names a rank that does not come.
        self.fork(kernels, self.companion_stream)?;
        self.fork(kernels, self.result_stream)?;
        let count = pieces.ranges.len();
        for (nth, range) in pieces.ranges.iter().enumerate() {
            if let Some(before) = nth.checked_sub(SLOTS) {
                self.wait_for(taken(before), copies)?;
            }
            for peer in &peers {
                self.copy_input(work, *peer, range.clone(), pieces.slot(nth))?;
            }
            self.signal_behind_copies(&peers, filled(nth))?;
            self.await_copied(&peers, filled(nth), kernels)?;
            self.reduce_copied(reduce, work, range.clone(), pieces.slot(nth))?;
            self.record(reduced(nth), kernels)?;
            if let Some(before) = nth.checked_sub(LAG) {
                self.exchange_results(&pieces, before, &peers)?;
            }
        }
        for left in count.saturating_sub(LAG)..count {
            self.exchange_results(&pieces, left, &peers)?;
        }
        self.fork(self.signal_stream, kernels)?;
        self.fork(self.result_stream, kernels)?;
        self.wait_for(taken(count - 1), kernels)?;
        self.handshake_after_copies(work.call, kernels)
    }

    /// Copies this rank's results of a piece to all peers, into their outputs or into their scratch, and takes theirs.
    fn exchange_results(&mut self, pieces: &Pieces<'_>, nth: usize, peers: &[u32]) -> Result<()> {
        let Pieces { work, ranges, direct, .. } = pieces;
        let (copies, local) = (self.result_stream, self.companion_stream);
        let range = || ranges[nth].clone();
        self.wait_for(reduced(nth), copies)?;
        let (from, bytes) = within(work.share(self.rank(), self.world()), range());
        for peer in peers {
            let to = if *direct {
                self.at_peer(work.output, *peer) + from
            } else {
                self.slot_from(self.rank(), *peer) + pieces.slot_of_results(nth)
            };
            self.copy_by_engine(to, work.output + from, bytes, copies)?;
        }
        self.signal_copied(peers, emptied(nth), copies)?;
        self.await_copied(peers, emptied(nth), local)?;
        for peer in peers.iter().filter(|_| !direct) {
            let (to, bytes) = within(work.share(*peer, self.world()), range());
            let from = self.slot_from(*peer, self.rank()) + pieces.slot_of_results(nth);
            self.copy_by_engine(work.output + to, from, bytes, local)?;
        }
        self.record(taken(nth), local)
    }
}
