//! All-gathers by copy engines into ordinary memory: the algorithm `copy` in pieces (`pieces`). No SM works.
//!
//! Peers cannot write into such an output, so a piece goes into the receiver's scratch, and the receiver's own copy engine
//! takes it from there while the next piece arrives. A rank sends piece `n` when all peers have said that they have taken
//! piece `n - 4`, whose slot it uses. They say it behind their copy, which is behind their wait for the piece itself; so
//! whoever signals has taken the signal before on either channel, and so has its peer.

#![allow(unsafe_code)] // passes on the caller's promises

use symmpool_allocator::{Result, Stream};

use super::all_to_all::EqualParts;
use super::pieces::{emptied, filled, pieces, slot};
use crate::call::CallDescription;
use crate::cuda::all_to_all::row::{Exchange, Use};
use crate::cuda::engine::CudaEngine;
use crate::cuda::layout::memory_channels::SLOTS;
use crate::cuda::layout::piece_slots::room;

/// Bytes of a part from which on all-gathers of two ranks go by copies beside compute. A step of matrix products of two H200s
/// beside 32 MiB takes 0.93 to 0.97 of what it takes beside NCCL's.
const MIN_PART_BYTES: u64 = 24 << 20;
/// Most bytes of a piece.
const LONGEST: u64 = 32 << 20;

impl CudaEngine {
    /// Whether copy engines gather parts of `part` bytes, into any memory: straight into windows, and in pieces into other
    /// memory. The same on every rank.
    pub(in crate::cuda) fn gathers_by_copies(&self, by: &Exchange, part: u64) -> bool {
        match by.copies {
            Use::WhereFaster => part >= MIN_PART_BYTES && self.pieces_pay_off(),
            Use::Always => self.world() > 1 && part > 0 && self.streams_may_wait,
            Use::Never => false,
        }
    }

    /// Sends this rank's part to every peer.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_gather`], for the input and output in `parts`.
    pub(in crate::cuda) unsafe fn gather_in_pieces(
        &mut self,
        call: CallDescription,
        parts: EqualParts,
        stream: Stream,
    ) -> Result<()> {
        let EqualParts { from, to, part, .. } = parts;
        self.note_algorithm("copy", None);
        let room = room(&self.control, self.world(), SLOTS);
        let ranges = pieces(part, room, LONGEST);
        // Ranks whose outputs are windows do not go in pieces, and differ in this.
        let call = call.peer_blocks(ranges.len() as u32);
        tracing::debug!(part, pieces = ranges.len(), algorithm = "copy", %call);
        let (copies, local) = (self.copy_stream, self.companion_stream);
        let (rank, peers): (_, Vec<u32>) = (self.rank(), self.peers_in_rotated_order().collect());
        let others: Vec<Stream> =
            std::iter::once(local).chain(self.stream_of_waits(ranges.len())).collect();
        self.begin_pieces(call, stream, &others)?;
        let own = to + u64::from(rank) * part;
        if own != from {
            // SAFETY: the caller promised that the input has a part, and the output one for each rank: this is this rank's.
            unsafe { self.copy_by_engine(own, from, part, local) }?;
        }
        for (nth, range) in ranges.iter().enumerate() {
            let bytes = range.end - range.start;
            if let Some(before) = nth.checked_sub(SLOTS) {
                self.await_emptied(&peers, before)?;
            }
            for peer in &peers {
                let there = self.slot_from(rank, *peer) + slot(nth, room);
                // SAFETY: the range lies within the part that the caller promised. The peer's scratch is a window, in which
                // this slot is this rank's alone and has room for a piece; the peer has emptied it.
                unsafe { self.copy_by_engine(there, from + range.start, bytes, copies) }?;
            }
            self.signal_behind_copies(&peers, filled(nth))?;
            self.await_copied(&peers, filled(nth), local)?;
            for peer in &peers {
                let here = self.slot_from(*peer, rank) + slot(nth, room);
                let there = to + u64::from(*peer) * part + range.start;
                // SAFETY: the caller promised that the output has a part for each rank, and this is a range of the peer's. The
                // peer has filled the slot of this rank's scratch, and fills it again when it was told to.
                unsafe { self.copy_by_engine(there, here, bytes, local) }?;
            }
            if nth + SLOTS < ranges.len() {
                self.signal_copied(&peers, emptied(nth), local)?;
            }
        }
        self.end_pieces(call, stream, &others)
    }
}
