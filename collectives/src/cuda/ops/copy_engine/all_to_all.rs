//! All-to-alls of equal parts, and all-gathers, carried by copy engines: the algorithm `copy`.
//!
//! An H200's copy engine reaches 388 GB/s on its links, where stores of kernels reach 366, but each copy takes some
//! microseconds to start, and only one should be under way at a time. So a rank's parts leave one after the other,
//! in an order in which no two ranks copy to the same one. The host must know where parts go, so counts are
//! equal, and outputs are windows at one offset on all ranks, which the handshake compares.
//!
//! While the copy engine starts, a companion kernel on another stream sends the beginning of every part; it also
//! copies the rank's own part. It is resident before the handshake is over, and is notified then. If it were
//! launched behind the handshake, as the copies are, it would delay them by 5 us, as two streams would wait for one
//! kernel.

#![allow(unsafe_code)] // copies by address, and passes on the caller's promises

use symmpool_allocator::{Result, Stream};

use crate::Place;
use crate::algorithm::COPY;
use crate::call::{Arguments, CallDescription, StandardCall};
use crate::cuda::all_to_all::copies::COMPANION;
use crate::cuda::all_to_all::row::{Exchange, Use};
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::spec::{KernelSpec, THREADS};
use crate::cuda::layout::params::CallParams;

/// Bytes that a rank must send to its only peer for copy engines to be faster than kernels' stores.
const MIN_SENT_BYTES: u64 = 48 << 20;
/// Bytes that each further peer adds to that, as links are idle between two copies: on four H200s, where copies take
/// 153.3 us for 48 MiB, and stores 150.6, they are even at about 61 MiB.
const MIN_SENT_BYTES_MORE: u64 = 7 << 20;
/// Bytes that each part must have besides.
const MIN_PART_BYTES: u64 = 16 << 20;
/// Bytes of all parts together that the companion kernel sends while the copy engine starts. With 2 MiB, 32 MiB
/// take 4 us more on two H200s; with 8 MiB, 128 MiB take nearly 1 us more.
const HEAD_BYTES: u64 = 4 << 20;
/// Blocks of the companion kernel: enough for [`HEAD_BYTES`].
const BLOCKS: u32 = 32;

/// Equal parts that copy engines carry.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct EqualParts {
    /// The address of the input.
    pub(in crate::cuda) from: u64,
    /// The address of the output.
    pub(in crate::cuda) to: u64,
    /// Bytes of a part.
    pub(in crate::cuda) part: u64,
    /// Bytes from part to part of the input; 0 where all peers get the same part.
    pub(in crate::cuda) input_stride: u64,
}

impl CudaEngine {
    /// Whether copy engines carry equal parts of `part` bytes. The same on every rank if outputs are
    /// windows on all ranks or on none.
    pub(in crate::cuda) fn copies_parts(&self, by: &Exchange, output: Place, part: u64) -> bool {
        let sent = part.saturating_mul(u64::from(self.world()) - 1);
        let least =
            MIN_SENT_BYTES + u64::from(self.world().saturating_sub(2)) * MIN_SENT_BYTES_MORE;
        let wanted = match by.copies {
            Use::WhereFaster => sent >= least && part >= MIN_PART_BYTES,
            Use::Always => sent > 0,
            Use::Never => false,
        };
        wanted && output.is_window()
    }

    /// Sends part `r` of `input` to rank `r`; parts have `count` elements each.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_to_all_v`], for `count` elements to and from each rank. `output`
    /// is a window.
    pub(in crate::cuda) unsafe fn all_to_all_copy(
        &mut self,
        call: &StandardCall,
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        let Arguments { input, output, count, dtype, .. } = call.arguments;
        let part = self.byte_count("all_to_all", count, dtype, stream)?;
        let whole = self.bytes_of_parts("all_to_all", part, stream)?;
        let call = call.describe().output(output).algorithm(COPY);
        let (from, to) = (self.address(input), self.address(output));
        self.check_disjoint("all_to_all", (from, whole), (to, whole), stream)?;
        // SAFETY: the caller promised that `input` is readable and the window `output` writable for a part for each
        // rank, until the stream has done the call. Ranks compare the window's offset, which `call` has.
        unsafe { self.copy_parts(call, EqualParts { from, to, part, input_stride: part }, stream) }
    }

    /// Sends a part to every peer, to this rank's place in its output.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_to_all_v`], for these parts. The output is a window, at one
    /// offset on all ranks.
    pub(in crate::cuda) unsafe fn copy_parts(
        &mut self,
        call: CallDescription,
        parts: EqualParts,
        stream: Stream,
    ) -> Result<()> {
        let EqualParts { from, to, part, input_stride } = parts;
        self.note_algorithm("copy", None);
        // Loaded before anything is on the stream, as the handshakes are.
        let kernel = self.kernel(KernelSpec::new(&COMPANION, THREADS))?.after_copies();
        for companion in [false, true] {
            self.kernel(KernelSpec::barrier(companion))?;
        }
        let in_place =
            from + u64::from(self.rank()) * input_stride == to + u64::from(self.rank()) * part;
        // Where SMs are wanted for something else none is taken, unless the own part must be copied.
        let companion_runs = !(in_place && kernel.budget.is_limited());
        let head = if companion_runs { self.head_of(part) } else { 0 };
        tracing::debug!(part, head, companion_runs, algorithm = "copy", %call);
        let (copies, companion) = (self.copy_stream, self.companion_stream);
        self.switch_to(stream)?;
        // When peers have made the call, their streams are past whatever used their outputs before.
        if companion_runs {
            // Beside other communicators it takes no SMs while its call waits for peers.
            let begins_early = !kernel.budget.concurrent;
            if begins_early {
                self.fork(stream, companion)?;
            }
            self.handshake_with_companion(call, stream)?;
            if !begins_early {
                self.fork(stream, companion)?;
            }
            let params = CallParams {
                input: from,
                output: to + u64::from(self.rank()) * part,
                bytes: head,
                stride: part,
                root: u32::from(input_stride == 0),
                ..CallParams::of(&call)
            };
            // These blocks wait for the handshake, whose block must be resident at the same time.
            let most = kernel.resident(THREADS).saturating_sub(1).max(1);
            // The budget holds for both kernels together.
            let most = most.min(kernel.budget.most_blocks.saturating_sub(1).max(1));
            let grid = (BLOCKS.min(most), THREADS);
            // SAFETY: the heads of the parts and the own part, which lie in the caller's buffers, and which no copy writes. The
            // call's stream waits for `companion` below, so they are there until it has run. The kernel has two parameters.
            unsafe { self.launch_unordered(kernel, grid, &self.comm, &params, None, companion) }?;
        } else {
            self.handshake_before_copies(call, stream)?;
        }
        self.fork(stream, copies)?;
        // SAFETY: the caller promised that the input has these parts, and that the output is a window at one offset of all
        // ranks, with a part for each. `head` is less than a part.
        unsafe { self.copy_behind_heads(head, parts, copies) }?;
        self.fork(copies, stream)?;
        if companion_runs {
            self.fork(companion, stream)?;
        }
        // Copies of this rank to its peers have arrived when it takes part in this handshake.
        self.handshake_after_copies(call, stream)
    }

    /// Copies what follows the heads of all parts but this rank's own, one after the other. (One copy of several boxes,
    /// to peers' windows mapped at equal distances, moves 91 GB/s on four H200s, and separate ones 389.)
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::copy_parts`], for parts of at least `head` bytes.
    unsafe fn copy_behind_heads(
        &mut self,
        head: u64,
        EqualParts { from, to, part, input_stride }: EqualParts,
        stream: Stream,
    ) -> Result<()> {
        let (rank, world) = (self.rank(), self.world());
        // Where this rank's data lies in every output.
        let place = u64::from(rank) * part + head;
        for peer in (rank + 1..world).chain(0..rank) {
            let there = self.at_peer(to, peer) + place;
            let here = from + u64::from(peer) * input_stride + head;
            // SAFETY: the caller promised that the input has a part for each peer, and that the output is a window of the same
            // offset on all ranks, with a part for each. Peers have made the call, so their outputs may be written.
            unsafe { self.copy_by_engine(there, here, part - head, stream) }?;
        }
        Ok(())
    }

    /// Bytes at the beginning of a part that the companion kernel sends.
    fn head_of(&self, part: u64) -> u64 {
        let head = HEAD_BYTES / u64::from(self.world().max(2) - 1) / 4096 * 4096;
        if part >= 4 * head { head } else { 0 }
    }
}
