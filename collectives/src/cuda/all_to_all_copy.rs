//! All-to-alls of equal parts, and all-gathers, that copy engines carry: `copy`.
//!
//! An H200's copy engine reaches 388 GB/s on its links, where stores of kernels end at 366, but each
//! copy begins with some microseconds of nothing, and only one is to be under way at a time. So a
//! rank's parts leave one after the other, in an order in which no two ranks copy to one. The host has
//! to know where parts go: so counts are equal, and outputs are windows at one offset on all ranks,
//! which the call compares.
//!
//! Beside the copies a kernel sends the beginning of every part, until the engine is under way, and
//! copies the rank's own. It is on its device before all have entered, and is told: launched behind the
//! entry, as the copies are, it would delay them by 5 us, as two streams then wait for one kernel.

#![allow(unsafe_code)] // copies by address, and passes on the caller's promises

use symmpool_allocator::{PeerRow, Result, Stream};

use super::engine::CudaEngine;
use super::kernel_spec::Specialty;
use super::params::CallParams;
use super::reductions::THREADS;
use super::strided_copy::Slices;
use crate::host::call::{Call, Operation};
use crate::jit::sources::COPY_COMPANION;
use crate::{AllToAllAlgorithm, DType, Place};

/// From so many bytes on that leave a rank, and of each part, it takes less time than kernels' stores.
const COPY_BYTES: u64 = 48 << 20;
const COPY_PART: u64 = 16 << 20;
/// What goes as stores until the copy engine has begun, of all parts together: 2 MiB of 32 take 4 us
/// more on two H200s, 8 MiB of 128 nearly 1 us.
const HEAD_BYTES: u64 = 4 << 20;
/// Blocks beside copies: enough for that.
const BLOCKS: u32 = 32;

/// Equal parts that go by copy engines, as addresses and bytes: of the input they begin so far `apart`,
/// which is nothing where all peers get the same.
#[derive(Clone, Copy)]
pub(super) struct Copied {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) part: u64,
    pub(super) apart: u64,
}

impl CudaEngine {
    /// Whether equal parts of so many bytes go by copy engines: the same on every rank if outputs are
    /// windows on all or on none.
    pub(super) fn copies_parts(&self, output: Place, part: u64) -> bool {
        let leaves = part.saturating_mul(u64::from(self.world()) - 1);
        let wanted = match self.all_to_all {
            AllToAllAlgorithm::Auto => leaves >= COPY_BYTES && part >= COPY_PART,
            AllToAllAlgorithm::Copy => leaves > 0,
            AllToAllAlgorithm::Ll | AllToAllAlgorithm::Direct | AllToAllAlgorithm::Ring => false,
        };
        wanted && output.is_window()
    }

    /// Part `r` of `input` to rank `r`, `count` elements each.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::all_to_all_v`].
    pub(super) unsafe fn all_to_all_copied(
        &mut self,
        (input, output): (Place, Place),
        count: usize,
        dtype: DType,
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        let part = self.bytes("all_to_all", count, dtype, stream)?;
        let whole = self.parts("all_to_all", part, stream)?;
        let call = Call::new(Operation::AllToAll).elements(dtype, count).output(output);
        let call = call.algorithm(AllToAllAlgorithm::Copy as u8);
        let (from, to) = (self.address(input), self.address(output));
        self.apart("all_to_all", (from, whole), (to, whole), stream)?;
        // SAFETY: the caller's promises, which are passed on.
        unsafe { self.copy_parts(call, Copied { from, to, part, apart: part }, stream) }
    }

    /// A part to every peer, at this rank's place there.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::all_to_all_v`], for these parts; the output is a window, at one offset on all ranks.
    pub(super) unsafe fn copy_parts(
        &mut self,
        call: Call,
        copied: Copied,
        stream: Stream,
    ) -> Result<()> {
        let Copied { from, to, part, apart } = copied;
        let whole = part * u64::from(self.world());
        let head = self.head_of(part);
        let kernel = self.kernel(Specialty::new(&COPY_COMPANION, THREADS))?.after_copies();
        let row = if self.world() > 2 { self.peers_in_a_row(to, whole) } else { None };
        let (in_a_row, asked) = (row.is_some(), self.all_to_all.name());
        tracing::debug!(part, head, in_a_row, algorithm = "copy", asked, %call);
        let (copies, beside) = (self.aside, self.beside);
        self.turn_to(stream)?;
        self.fork(stream, beside)?;
        // Peers' streams are past what they did with their outputs when they have entered.
        self.enter_and_tell(call, stream)?;
        let params = CallParams {
            input: from,
            output: to + u64::from(self.rank()) * part,
            bytes: head,
            stride: part,
            root: u32::from(apart == 0),
            ..CallParams::of(&call)
        };
        // They wait for the entry, which must find a place beside them.
        let beside_entry = kernel.resident(THREADS).saturating_sub(1).max(1);
        let grid = (BLOCKS.min(kernel.share.most_blocks).min(beside_entry), THREADS);
        // SAFETY: parts of what the caller promised, and what no copy writes.
        unsafe { self.launch_apart(kernel, grid, &self.comm, &params, None, beside) }
            .map_err(|error| self.decline(error, stream))?;
        self.fork(stream, copies)?;
        self.copy_behind(head, copied, row, copies)?;
        self.fork(copies, stream)?;
        self.fork(beside, stream)?;
        // What a rank copied to its peers has arrived when they have entered this one.
        self.enter_after_copies(call, stream)
    }

    /// Puts what is behind the heads of all parts but this rank's own on a stream: those to ranks above
    /// it in one copy and those to ranks below in one, where it can be so, else each by itself.
    fn copy_behind(
        &mut self,
        head: u64,
        Copied { from, to, part, apart }: Copied,
        row: Option<PeerRow>,
        stream: Stream,
    ) -> Result<()> {
        let (rank, world) = (self.rank(), self.world());
        // What this rank sends to anyone, in all outputs.
        let place = u64::from(rank) * part + head;
        for peers in [rank + 1..world, 0..rank] {
            let count = u64::from(peers.end - peers.start);
            let first = peers.start;
            let in_one = row.filter(|_| count > 1).is_some_and(|row| {
                let nth = if first < rank { first } else { first - 1 };
                let slices = Slices {
                    from: from + u64::from(first) * apart + head,
                    from_distance: apart,
                    to: row.first + u64::from(nth) * row.distance + place,
                    to_distance: row.distance,
                    bytes: part - head,
                    count,
                };
                // SAFETY: as of copies one by one, to the same memory; rows have no gaps.
                unsafe { self.copy_slices(&slices, stream) }
            });
            if in_one {
                continue;
            }
            for peer in peers {
                let to = self.at_peer(to, peer) + place;
                self.copy_by_engine(
                    to,
                    from + u64::from(peer) * apart + head,
                    part - head,
                    stream,
                )?;
            }
        }
        Ok(())
    }

    /// How much of a part goes as stores, before the copy engine begins.
    fn head_of(&self, part: u64) -> u64 {
        let head = HEAD_BYTES / u64::from(self.world().max(2) - 1) / 4096 * 4096;
        if part >= 4 * head { head } else { 0 }
    }
}
