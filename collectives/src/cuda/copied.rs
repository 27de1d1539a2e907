//! All-reduces of which the copy engines carry the most: `two_shot_copy`.
//!
//! Copy engines reach 390 GB/s on the links of an H200, where stores of kernels end at 361, but only
//! with one copy under way at a time, and each begins anew with some microseconds of nothing. So a
//! share goes to its owner in one copy, ranks copy to peers in rotated order, and between the copies
//! of inputs and those of results there is one kernel. While it reduces what was copied, the links
//! would rest: it pushes the remaining part of every share meanwhile.

#![allow(unsafe_code)] // copies by address, and passes on the caller's promises

use symmpool_allocator::{Error, Result, Stream};

use super::algorithms::{GATHER, Grid, SCATTER, THREADS, Work};
use super::engine::CudaEngine;
use crate::jit::sources::PUSH;

/// A bit of `SHOTS` in `push.cu`.
const COPIED: u8 = 8;

/// How an all-reduce of `bytes` is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    /// Of every rank but perhaps the last, whole vectors.
    share: u64,
    /// From the beginning of every share: what copy engines carry.
    copied: u64,
}

impl Division {
    fn new(bytes: u64, ranks: u64) -> Self {
        let share = bytes.div_ceil(16).div_ceil(ranks) * 16;
        // Half of an H200's processors reduce 3.1 TB/s of what they read and write, the others push
        // 355 GB/s: both are to take as long.
        let (reduced, pushed) = (2 * (ranks + 1), 35 * (ranks - 1));
        let copied = share / (reduced + pushed) * pushed;
        let last = bytes.saturating_sub(share * (ranks - 1));
        Self { share, copied: copied.min(last) / 128 * 128 }
    }
}

impl CudaEngine {
    /// In as many pieces as the scratch asks for, each a call of the protocol, and one more at the end:
    /// what a rank copied to its peers has arrived when it has entered the next.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`].
    pub(super) unsafe fn copied(&mut self, work: &Work) -> Result<()> {
        let loaded = self.loaded(&PUSH, work, SCATTER | GATHER | COPIED, false, THREADS)?;
        let loaded = loaded.after_copies();
        let grid = Grid::new(&loaded, u64::MAX, THREADS, 256);
        if grid.data_blocks() < 2 {
            let why = Error::unsupported("two_shot_copy on a device that runs one block at a time");
            return Err(self.decline(why, work.stream));
        }
        self.turn_to(work.stream)?;
        let ranks = u64::from(self.world());
        let most = self.control.scratch_vectors(self.world()) * 16 * ranks;
        for mut piece in work.pieces(most, 128 * ranks) {
            let division = Division::new(piece.bytes, ranks);
            piece.stride = division.copied;
            self.copy_inputs(&piece, division)?;
            // SAFETY: a stretch of what the caller promised.
            unsafe { self.put(loaded, grid, &piece) }?;
            self.copy_results(&piece, division)?;
        }
        self.enter_after_copies(work.call, work.stream)
    }

    /// Puts this rank's part of every peer's share into that peer's scratch, which nobody has read
    /// since the call before ended on all ranks.
    fn copy_inputs(&mut self, work: &Work, division: Division) -> Result<()> {
        let room = self.control.scratch_vectors(self.world()) * 16;
        let rank = self.rank();
        for peer in self.others() {
            let from = work.input + u64::from(peer) * division.share;
            let slot = if rank < peer { rank } else { rank - 1 };
            let to = self.scratch_of(peer) + u64::from(slot) * room;
            self.copy_by_engine(to, from, division.copied, work.stream)?;
        }
        Ok(())
    }

    /// Puts this rank's results into every peer's output, whose old contents the peer needs no more:
    /// it had sent them before the kernel reduced.
    fn copy_results(&mut self, work: &Work, division: Division) -> Result<()> {
        let from = work.output + u64::from(self.rank()) * division.share;
        for peer in self.others() {
            let to = self.at_peer(from, peer);
            self.copy_by_engine(to, from, division.copied, work.stream)?;
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
    fn every_share_has_what_is_copied() {
        for ranks in 2..=8 {
            for bytes in [1 << 20, (1 << 20) + 2, 3_000_001, 256 << 20, 5 << 30] {
                let Division { share, copied } = Division::new(bytes, ranks);
                assert!(share % 16 == 0 && share * ranks >= bytes);
                let last = bytes - share * (ranks - 1);
                assert!(copied <= last && copied.is_multiple_of(128), "{bytes} {ranks}");
                // Most of it.
                assert!(copied * 20 > share * 16, "{copied} of {share}");
                assert!(share - copied > share / 40, "{copied} of {share}");
            }
        }
    }
}
