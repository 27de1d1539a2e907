//! All-reduces by copy engines that leave a device's SMs to other kernels, and those into ordinary memory:
//! `two_shot_copy` in pieces. A program chooses them by name or by a table, for calls that run while its matrix products
//! do: alone they take longer than others.
//!
//! Every share of the data is cut into pieces, which go through a pipeline: a piece of the inputs is sent, then it is
//! reduced, then its results are sent. A rank's links carry one copy at a time, as two would slow each other down, so
//! inputs and results leave by one stream: inputs of a piece, then results of the second piece before. So a reduction has
//! the time of four copies until the links wait for it, and may wait for SMs itself.
//!
//! Results for outputs that are windows are copied there. Others come into scratch, and a stream of its own copies them
//! from there to the output, which needs no links.
//!
//! Ranks signal each other by memory operations, so nothing but the reductions takes SMs, and those wait for nobody: a
//! kernel that waited on a few SMs would delay every other kernel that needs all of them for as long. A signal follows
//! the inputs of each piece, and another one its results. Scratch has four slots for inputs and four for results, which
//! pieces use in turn. A rank sends piece `n` when it has taken the results of piece `n - 4` from all peers: so they have
//! reduced what was in its slot. It sends results of piece `n` after it has received that piece's inputs, and so after
//! every peer has taken what was in the slot of these results.
//!
//! Every operation waits for such as all ranks have given their streams before, in this order, so ranks do not wait for each
//! other in a circle.

#![allow(unsafe_code)] // copies by address, and passes on the caller's promises

use std::ops::Range;

use symmpool_allocator::{Result, Stream};

use super::all_reduce_copy::within;
use super::engine::CudaEngine;
use super::kernel_spec::KernelSpec;
use super::memory_operations::PIECE_CHANNELS;
use super::params::Control;
use super::reductions::Work;
use crate::jit::sources::TWO_SHOT_COPY;

/// How many pieces are sent between a piece and its results.
const LAG: usize = 2;
/// Slots of inputs in scratch, and of results.
const SLOTS: usize = LAG + 2;
/// Channels of the signals of pieces: one for each slot.
pub(super) const CHANNELS_OF_PIECES: u32 = 2 * SLOTS as u32;
/// A share has so many pieces, if they are neither shorter nor longer than they should be: shorter ones are sent in less
/// time than a copy takes to start, and longer ones leave links idle for longer before the first reduction.
const PIECES: u64 = 4;
const SHORTEST: u64 = 4 << 20;
const LONGEST: u64 = 16 << 20;

/// Bytes of a slot in scratch.
fn room(control: &Control, world: u32, direct: bool) -> u64 {
    let slots = if direct { SLOTS } else { 2 * SLOTS } as u64;
    control.scratch_room(world) / slots / 128 * 128
}

/// The pieces of shares of `share` bytes: of about equal length, at most `room` bytes, and multiples of a cache line but
/// for the last one.
fn pieces(share: u64, room: u64) -> Vec<Range<u64>> {
    let wanted = share.div_ceil(PIECES).clamp(SHORTEST, LONGEST).min(room);
    let each = share.div_ceil(share.div_ceil(wanted)).next_multiple_of(128);
    (0..share.div_ceil(each)).map(|nth| nth * each..share.min((nth + 1) * each)).collect()
}

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

/// The channel of the signal that follows a piece's inputs, or its results.
fn channel(nth: usize, of_results: bool) -> u32 {
    let slot = if of_results { SLOTS + nth % SLOTS } else { nth % SLOTS };
    PIECE_CHANNELS + slot as u32
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
        let room = room(&self.control, self.world(), direct);
        let ranges = pieces(work.share(0, self.world()).1, room);
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
        let count = pieces.ranges.len();
        for (nth, range) in pieces.ranges.iter().enumerate() {
            if let Some(before) = nth.checked_sub(SLOTS) {
                self.wait_for(taken(before), copies)?;
            }
            for peer in &peers {
                self.copy_input(work, *peer, range.clone(), pieces.slot(nth))?;
                self.signal_copied(*peer, channel(nth, false), copies)?;
            }
            for peer in &peers {
                self.await_copied(*peer, channel(nth, false), kernels)?;
            }
            self.reduce_copied(reduce, work, range.clone(), pieces.slot(nth))?;
            self.record(reduced(nth), kernels)?;
            if let Some(before) = nth.checked_sub(LAG) {
                self.exchange_results(&pieces, before, &peers)?;
            }
        }
        for left in count.saturating_sub(LAG)..count {
            self.exchange_results(&pieces, left, &peers)?;
        }
        self.fork(copies, kernels)?;
        self.wait_for(taken(count - 1), kernels)?;
        self.handshake_after_copies(work.call, kernels)
    }

    /// Copies this rank's results of a piece to all peers, into their outputs or into their scratch, and takes theirs.
    fn exchange_results(&mut self, pieces: &Pieces<'_>, nth: usize, peers: &[u32]) -> Result<()> {
        let Pieces { work, ranges, direct, .. } = pieces;
        let (copies, local) = (self.copy_stream, self.companion_stream);
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
            self.signal_copied(*peer, channel(nth, true), copies)?;
        }
        for peer in peers {
            self.await_copied(*peer, channel(nth, true), local)?;
            if !direct {
                let (to, bytes) = within(work.share(*peer, self.world()), range());
                let from = self.slot_from(*peer, self.rank()) + pieces.slot_of_results(nth);
                self.copy_by_engine(work.output + to, from, bytes, local)?;
            }
        }
        self.record(taken(nth), local)
    }

    /// Signals a peer behind the copies on a stream.
    fn signal_copied(&mut self, peer: u32, channel: u32, stream: Stream) -> Result<()> {
        let timeout = self.comm.timeout;
        let signalled = self.memory_operations.signal((peer, channel), timeout, false, stream);
        signalled.map_err(|error| self.decline(error, stream))
    }

    /// Makes a stream wait for a peer's copies.
    fn await_copied(&mut self, peer: u32, channel: u32, stream: Stream) -> Result<()> {
        let timeout = self.comm.timeout;
        let waits = self.memory_operations.wait((peer, channel), timeout, false, stream);
        waits.map_err(|error| self.decline(error, stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_leave_nothing_out_and_fit() {
        for share in [16, 128, 1 << 20, (12 << 20) + 16, 64 << 20, (5 << 30) - 48] {
            for room in [1 << 16, 1 << 20, (22 << 20) / 7 / 128 * 128, 1 << 30] {
                let found = pieces(share, room);
                let mut at = 0;
                for piece in &found {
                    assert_eq!(piece.start, at);
                    assert!(!piece.is_empty() && piece.end - piece.start <= room.min(LONGEST));
                    assert!(piece.end == share || piece.end.is_multiple_of(128));
                    at = piece.end;
                }
                assert_eq!(at, share, "in {room}");
            }
        }
        assert_eq!(pieces(40 << 20, 1 << 30).len(), PIECES as usize);
    }
}
