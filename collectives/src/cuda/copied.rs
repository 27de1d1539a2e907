//! All-reduces of which the copy engines carry the most: `two_shot_copy`.
//!
//! A copy engine reaches 394 GB/s on the links of an H200, where stores of kernels end at 366, but only
//! with one copy under way at a time, and each begins anew with some microseconds of nothing. A few
//! blocks that store beside it fill these, and take nothing from the sum of both. So every share is
//! divided: its beginning goes to its owner in one copy, is reduced there by a kernel on the same
//! stream, and goes to the others in a copy each, while a kernel on the caller's stream, which is the
//! call itself, pushes the rest through both shots. Ranks copy to peers in rotated order.

#![allow(unsafe_code)] // copies by address, and passes on the caller's promises

use symmpool_allocator::{Error, Result, Stream};

use super::algorithms::{GATHER, Grid, SCATTER, THREADS, Work};
use super::engine::CudaEngine;
use crate::jit::sources::{PUSH, REDUCE_COPIED};

/// A bit of `SHOTS` in `push.cu`.
const COPIED: u8 = 8;

/// Blocks that push beside the copies.
const PUSHING: u32 = 64;

// What `cuda_collectives bench` on two H200s fits best, in GB/s: these blocks' stores beside copies, and
// alone while the others reduce; copies beside them; what is read and written by those that reduce.
const BESIDE: u64 = 144;
const ALONE: u64 = 350;
const COPIES: u64 = 242;
const REDUCES: u64 = 2500;
/// What those blocks store while copies and kernels begin, and ranks wait for each other, in bytes. On
/// four H200s the same figures hold for all else.
const fn beginnings(ranks: u64) -> u64 {
    if ranks == 2 { 4 << 20 } else { 44 << 20 }
}

/// How an all-reduce of `bytes` is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    /// Of every rank but perhaps the last, whole vectors.
    share: u64,
    /// From the beginning of every share: what copy engines carry.
    copied: u64,
}

impl Division {
    /// So that both ways take as long: what blocks push of a share goes over the links `2 * (ranks - 1)`
    /// times, as what is copied does, which is `ranks + 1` times read or written to be reduced.
    fn new(bytes: u64, ranks: u64) -> Self {
        let share = bytes.div_ceil(16).div_ceil(ranks) * 16;
        let times = 2 * (ranks - 1);
        let pushed = 1000 * times * BESIDE / COPIES + 1000 * (ranks + 1) * ALONE / REDUCES;
        let links = (times * share).saturating_sub(beginnings(ranks));
        let copied = links / (1000 * times + pushed) * 1000;
        let last = bytes.saturating_sub(share * (ranks - 1));
        Self { share, copied: copied.min(last) / 128 * 128 }
    }
}

impl CudaEngine {
    /// In as many pieces as the scratch asks for, each a call of the protocol and one without data at
    /// its end: what a rank copied to its peers has arrived when it has entered that, and what they
    /// copied to it has been reduced.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`].
    pub(super) unsafe fn copied(&mut self, work: &Work) -> Result<()> {
        let push = self.loaded(&PUSH, work, SCATTER | GATHER | COPIED, false, THREADS)?;
        let reduce = self.loaded(&REDUCE_COPIED, work, 0, false, THREADS)?.after_copies();
        let places = Grid::new(&reduce, u64::MAX, THREADS, u32::MAX).blocks;
        let pushing = Grid::new(&push, u64::MAX, THREADS, PUSHING.min(places / 2));
        // The other places, so that both kernels find room at once.
        let Some(reducing) = places.checked_sub(pushing.blocks).filter(|blocks| *blocks > 0) else {
            let why =
                Error::unsupported("two_shot_copy on a device that runs two blocks at a time");
            return Err(self.decline(why, work.stream));
        };
        let ranks = u64::from(self.world());
        let most = self.control.scratch_vectors(self.world()) * 16 * ranks;
        let aside = self.aside;
        for mut piece in work.pieces(most, 128 * ranks) {
            let division = Division::new(piece.bytes, ranks);
            piece.stride = division.copied;
            self.turn_to(piece.stream)?;
            self.fork(piece.stream, aside)?;
            // SAFETY: a stretch of what the caller promised.
            unsafe { self.put(push, pushing, &piece) }?;
            self.copy_inputs(&piece, division, aside)?;
            let (grid, comm) = ((reducing, THREADS), self.comm);
            // SAFETY: likewise; the kernels work on different parts of it.
            unsafe { self.launch_apart(reduce, grid, &comm, &piece.params(), None, aside) }?;
            self.copy_results(&piece, division, aside)?;
            self.fork(aside, piece.stream)?;
            self.enter_after_copies(piece.call, piece.stream)?;
        }
        Ok(())
    }

    /// Puts this rank's part of every peer's share into that peer's scratch, which nobody has read
    /// since the call before ended on all ranks.
    fn copy_inputs(&mut self, work: &Work, division: Division, stream: Stream) -> Result<()> {
        let room = self.control.scratch_vectors(self.world()) * 16;
        let rank = self.rank();
        for peer in self.others() {
            let from = work.input + u64::from(peer) * division.share;
            let slot = if rank < peer { rank } else { rank - 1 };
            let to = self.scratch_of(peer) + u64::from(slot) * room;
            self.copy_by_engine(to, from, division.copied, stream)?;
        }
        Ok(())
    }

    /// Puts this rank's results into every peer's output, whose old contents the peer needs no more:
    /// it had sent them before the kernel reduced.
    fn copy_results(&mut self, work: &Work, division: Division, stream: Stream) -> Result<()> {
        let from = work.output + u64::from(self.rank()) * division.share;
        for peer in self.others() {
            let to = self.at_peer(from, peer);
            self.copy_by_engine(to, from, division.copied, stream)?;
        }
        Ok(())
    }

    /// The others in an order that differs from rank to rank, so that no two copy to one.
    pub(super) fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, world) = (self.rank(), self.world());
        (1..world).map(move |distance| (rank + distance) % world)
    }

    /// One copy, by a copy engine. The other ranks are told where that is refused.
    pub(super) fn copy_by_engine(
        &mut self,
        to: u64,
        from: u64,
        bytes: u64,
        stream: Stream,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: callers copy from this rank's buffers, which their caller promised, to peers'
        // scratch or outputs, which are windows at the same place.
        unsafe { self.copy_apart(to, from, bytes, stream) }
            .map_err(|error| self.decline(error, stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_divided_for_both_ways() {
        for ranks in 2..=8 {
            for bytes in [1 << 20, (1 << 20) + 2, 3_000_001, 256 << 20, 5 << 30] {
                let Division { share, copied } = Division::new(bytes, ranks);
                assert!(share % 16 == 0 && share * ranks >= bytes);
                let last = bytes - share * (ranks - 1);
                assert!(copied <= last && copied.is_multiple_of(128), "{bytes} {ranks}");
                // What copies begin with is longer than little takes.
                let percent = copied * 100 / share;
                assert!(percent < 61 && (bytes < 256 << 20 || percent > 49), "{copied} of {share}");
            }
        }
        // The best of those that were measured: 45 and 46 hundredths pushed.
        for bytes in [256 << 20, 512 << 20] {
            let Division { share, copied } = Division::new(bytes, 2);
            assert!((54..56).contains(&(copied * 100 / share)), "{copied} of {share}");
        }
        // And of four H200s.
        for (bytes, best) in [(256 << 20, 52), (512 << 20, 55), (1 << 30, 57)] {
            let Division { share, copied } = Division::new(bytes, 4);
            assert!((copied * 100 / share).abs_diff(best) <= 1, "{copied} of {share}");
        }
    }
}
