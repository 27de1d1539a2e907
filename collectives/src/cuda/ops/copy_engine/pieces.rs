//! Pieces of data that copy engines carry through scratch, while the SMs belong to other kernels.
//!
//! Every share of the data is cut into pieces, which use a few slots of the scratch in turn. Copies to peers follow each other
//! on one stream, as copies at the same time would slow each other down. Behind the copies of a piece a signal goes to each
//! peer by another stream, so that links do not idle until it has arrived. Ranks wait for signals by memory operations, which
//! take no SM: a kernel that waited on a few SMs would delay every other kernel that needs all of them for as long.
//!
//! A channel holds one signal, and each slot has two channels. On the first, a rank signals that the slot was filled; on
//! the second, what lets the peer fill it again. Each collective says in its own file why no signal comes before the last
//! one on its channel was taken, and why ranks do not wait for each other in a circle: every operation waits for such as
//! all ranks have given their streams before, in this order.

use std::ops::Range;

use symmpool_allocator::{Result, Stream};

use super::reduce_arrived::Copied;
use super::reduce_arrived::PromisedReduction;
use crate::call::CallDescription;
use crate::cuda::all_reduce::two_shot_copy;
use crate::cuda::engine::CudaEngine;
use crate::cuda::engine::memory_operations::MemoryOperations;
use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::memory_channels::{PIECE_CHANNELS, SLOTS};
use crate::cuda::layout::piece_slots::{SHORTEST, pays_off, room};

/// Pieces of a share, if they are neither shorter nor longer than they should be: shorter ones are sent in less time than a copy
/// takes to start.
const PIECES: u64 = 4;

/// Where the slot of a piece begins, in slots of `room` bytes.
pub(in crate::cuda) fn slot(nth: usize, room: u64) -> u64 {
    (nth % SLOTS) as u64 * room
}

/// The pieces of shares of `share` bytes: of about equal length, at most `room` and `longest` bytes, and multiples of a
/// cache line but for the last one.
pub(in crate::cuda) fn pieces(share: u64, room: u64, longest: u64) -> Vec<Range<u64>> {
    equal_pieces(share, share.div_ceil(PIECES).clamp(SHORTEST, longest).min(room))
}

/// Divides a share into as few pieces of about equal length as have no more than `most` bytes each.
pub(in crate::cuda) fn equal_pieces(share: u64, most: u64) -> Vec<Range<u64>> {
    let each = share.div_ceil(share.div_ceil(most)).next_multiple_of(128);
    (0..share.div_ceil(each)).map(|nth| nth * each..share.min((nth + 1) * each)).collect()
}

/// The channel on which ranks signal that the slot of a piece was filled.
pub(in crate::cuda) fn filled(nth: usize) -> u32 {
    PIECE_CHANNELS + (nth % SLOTS) as u32
}

/// The channel on which they signal what lets peers fill that slot again.
pub(in crate::cuda) fn emptied(nth: usize) -> u32 {
    filled(nth) + SLOTS as u32
}

/// A reduction that goes in pieces.
pub(in crate::cuda) struct PiecewiseReduction {
    kernel: LoadedKernel,
    pub(in crate::cuda) work: PromisedReduction,
    /// The pieces of every share.
    pub(in crate::cuda) ranges: Vec<Range<u64>>,
    /// Bytes of a slot.
    pub(in crate::cuda) room: u64,
    pub(in crate::cuda) peers: Vec<u32>,
}

impl CudaEngine {
    /// Signals each of these peers, behind the copies so far.
    pub(in crate::cuda) fn signal_behind_copies(
        &mut self,
        peers: &[u32],
        channel: u32,
    ) -> Result<()> {
        self.fork(self.copy_stream, self.signal_stream)?;
        self.signal_copied(peers, channel, self.signal_stream)
    }

    /// Makes copies wait until these peers have said that a piece's slot may be filled again. Another stream waits for them
    /// and the copies for its event: that event is long there as a rule, and a wait by a memory operation among copies
    /// would leave links idle for some 30 us.
    pub(in crate::cuda) fn await_emptied(&mut self, peers: &[u32], nth: usize) -> Result<()> {
        self.await_copied(peers, emptied(nth), self.result_stream)?;
        self.record(nth % SLOTS, self.result_stream)?;
        self.wait_for(nth % SLOTS, self.copy_stream)
    }

    /// Signals each of these peers, behind what is on a stream.
    pub(in crate::cuda) fn signal_copied(
        &mut self,
        peers: &[u32],
        channel: u32,
        stream: Stream,
    ) -> Result<()> {
        self.each_peer(peers, |operations, peer, timeout| {
            operations.signal((peer, channel), timeout, false, stream)
        })
    }

    /// Makes a stream wait for a signal of each of these peers.
    pub(in crate::cuda) fn await_copied(
        &mut self,
        peers: &[u32],
        channel: u32,
        stream: Stream,
    ) -> Result<()> {
        self.each_peer(peers, |operations, peer, timeout| {
            operations.wait((peer, channel), timeout, false, stream)
        })
    }

    /// Puts a memory operation on a stream for each of these peers.
    fn each_peer(
        &mut self,
        peers: &[u32],
        put: impl Fn(&mut MemoryOperations, u32, u64) -> Result<()>,
    ) -> Result<()> {
        if self.is_rehearsing() {
            return Ok(());
        }
        let timeout = self.comm.timeout;
        peers.iter().try_for_each(|peer| put(&mut self.memory_operations, *peer, timeout))
    }

    /// Whether calls go in pieces by themselves, if they are long enough.
    pub(in crate::cuda) fn pieces_pay_off(&self) -> bool {
        self.goes_in_pieces() && pays_off(&self.control, self.world(), SLOTS)
    }

    /// Begins a call in pieces on the caller's stream. Copies to peers may begin at once, as scratch is empty between calls;
    /// the other streams that the call uses come behind the handshake, which names a rank that does not come.
    pub(in crate::cuda) fn begin_pieces(
        &mut self,
        call: CallDescription,
        stream: Stream,
        others: &[Stream],
    ) -> Result<()> {
        self.switch_to(stream)?;
        self.fork(stream, self.copy_stream)?;
        self.handshake_before_copies(call, stream)?;
        others.iter().try_for_each(|other| self.fork(stream, *other))
    }

    /// Ends a call in pieces: the caller's stream goes on behind all others, of all ranks.
    pub(in crate::cuda) fn end_pieces(
        &mut self,
        call: CallDescription,
        stream: Stream,
        others: &[Stream],
    ) -> Result<()> {
        self.fork(self.signal_stream, stream)?;
        others.iter().try_for_each(|other| self.fork(*other, stream))?;
        self.handshake_after_copies(call, stream)
    }

    /// The stream on which copies of `pieces` pieces wait for slots, if there are more pieces than slots.
    pub(in crate::cuda) fn stream_of_waits(&self, pieces: usize) -> Option<Stream> {
        (pieces > SLOTS).then_some(self.result_stream)
    }

    /// Returns what a reduction in pieces needs, with `slots` slots for each peer.
    pub(in crate::cuda) fn plan_reduction(
        &mut self,
        work: &PromisedReduction,
        slots: usize,
        longest: u64,
    ) -> Result<PiecewiseReduction> {
        let spec = KernelSpec::reduces(&two_shot_copy::KERNEL, (work.dtype, work.op));
        let kernel = self.kernel(spec)?.without_waits().after_copies();
        let room = room(&self.control, self.world(), slots);
        let ranges = pieces(work.share(0, self.world()).1, room, longest);
        // Ranks on which the same algorithm is not in pieces differ in this.
        let call = work.call.peer_blocks(ranges.len() as u32);
        let peers = self.peers_in_rotated_order().collect();
        let work = work.described(call);
        Ok(PiecewiseReduction { kernel, work, ranges, room, peers })
    }

    /// Sends a piece of this rank's input to all peers, and reduces theirs when they have arrived.
    pub(in crate::cuda) fn reduce_piece(
        &mut self,
        of: &PiecewiseReduction,
        nth: usize,
    ) -> Result<()> {
        let PiecewiseReduction { kernel, work, ranges, room, peers } = of;
        let (range, slot) = (&ranges[nth], slot(nth, *room));
        for peer in peers {
            self.copy_input(work, *peer, range.clone(), slot)?;
        }
        self.signal_behind_copies(peers, filled(nth))?;
        self.await_copied(peers, filled(nth), work.stream)?;
        self.reduce_copied(*kernel, work, range.clone(), Copied::InScratch(slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::layout::memory_channels::CHANNELS_OF_PIECES;

    const LONGEST: u64 = 16 << 20;

    #[test]
    fn pieces_leave_nothing_out_and_fit() {
        for share in [16, 128, 1 << 20, (12 << 20) + 16, 64 << 20, (5 << 30) - 48] {
            for room in [1 << 16, 1 << 20, (22 << 20) / 7 / 128 * 128, 1 << 30] {
                let found = pieces(share, room, LONGEST);
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
        assert_eq!(pieces(40 << 20, 1 << 30, LONGEST).len(), PIECES as usize);
    }

    #[test]
    fn slots_have_channels_of_their_own() {
        let channels: std::collections::BTreeSet<u32> =
            (0..3 * SLOTS).flat_map(|nth| [filled(nth), emptied(nth)]).collect();
        assert_eq!(channels.len(), CHANNELS_OF_PIECES as usize);
        assert!(channels.iter().all(|channel| channel - PIECE_CHANNELS < CHANNELS_OF_PIECES));
    }
}
