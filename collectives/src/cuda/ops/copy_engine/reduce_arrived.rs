//! Data of peers that copy engines have carried for a reduction, and the kernel that reduces it.

#![allow(unsafe_code)] // launches with addresses, about which callers promise

use std::ops::{Deref, Range};

use symmpool_allocator::Result;

use crate::call::CallDescription;
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use crate::cuda::kernel::reduction_call::ReductionCall;
use crate::cuda::kernel::spec::THREADS;
use crate::cuda::layout::params::CallParams;

/// Where the data of peers is that a kernel reduces, and what it waits for: `Copied` in `all_reduce/two_shot_copy.cu`.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) enum Copied {
    /// In scratch, this many bytes after the beginning of each peer's part, when all ranks have come to the kernel's barrier.
    AwaitsBarrier(u64),
    /// In scratch, this many bytes after the beginning of each peer's part, and the stream has waited for it.
    InScratch(u64),
    /// In the output, to which this rank has copied the data of its only peer.
    InOutput,
}

/// A range of bytes of every share. Shares may end before or inside it.
pub(in crate::cuda) type ByteRange = Range<u64>;

/// Where a range of a share begins, and its length, for a share that begins at `begin` and has `length` bytes.
pub(in crate::cuda) fn within((begin, length): (u64, u64), range: ByteRange) -> (u64, u64) {
    let (from, end) = (range.start.min(length), range.end.min(length));
    (begin + from, end - from)
}

/// A call whose promises are kept, so that what puts its copies and kernels on streams can be safe.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct PromisedReduction(ReductionCall);

impl PromisedReduction {
    /// # Safety
    ///
    /// You must keep the promises of [`ReductionCall`].
    pub(in crate::cuda) unsafe fn new(work: &ReductionCall) -> Self {
        Self(*work)
    }

    /// The call of the same data with another description.
    pub(in crate::cuda) fn described(&self, call: CallDescription) -> Self {
        Self(ReductionCall { call, ..self.0 })
    }
}

impl Deref for PromisedReduction {
    type Target = ReductionCall;

    fn deref(&self) -> &ReductionCall {
        &self.0
    }
}

impl CudaEngine {
    /// Copies a range of a peer's share of this rank's input into that peer's scratch, `offset` bytes into
    /// this rank's slot there.
    pub(in crate::cuda) fn copy_input(
        &mut self,
        work: &PromisedReduction,
        peer: u32,
        range: ByteRange,
        offset: u64,
    ) -> Result<()> {
        let to = self.slot_from(self.rank(), peer) + offset;
        let (from, bytes) = within(work.share(peer, self.world()), range);
        assert!(offset + bytes <= self.control.scratch_room(self.world()), "scratch has no room");
        // SAFETY: the range lies within the input of `work`, whose promises are kept. The peer's scratch is a window, in
        // which the slot is this rank's alone and has the room, and no kernel reads the slot until it was told of the copy.
        unsafe { self.copy_by_engine(to, work.input + from, bytes, self.copy_stream) }
    }

    /// Where what one rank sends to another one lies in that one's scratch.
    pub(in crate::cuda) fn slot_from(&self, sender: u32, owner: u32) -> u64 {
        let slot = if sender < owner { sender } else { sender - 1 };
        self.scratch_of(owner) + u64::from(slot) * self.control.scratch_room(self.world())
    }

    /// Reduces a range of this rank's share on the call's stream.
    pub(in crate::cuda) fn reduce_copied(
        &self,
        kernel: LoadedKernel,
        work: &PromisedReduction,
        range: ByteRange,
        copied: Copied,
    ) -> Result<()> {
        let (from, bytes) = within(work.share(self.rank(), self.world()), range.clone());
        // A reduce-scatter has an output for this share alone.
        let to = if work.stride > 0 { range.start } else { from };
        let (input, output) = (work.input + from, work.output + to);
        let (root, stride) = match copied {
            Copied::AwaitsBarrier(offset) => (0, offset),
            Copied::InScratch(offset) => (1, offset),
            Copied::InOutput => (2, 0),
        };
        let params = CallParams { input, output, bytes, stride, root, ..work.params() };
        let grid = (kernel.resident(THREADS).min(kernel.budget.most_blocks), THREADS);
        // SAFETY: the promises of `work` are kept: its input and output are there until the stream has done the call. The range
        // lies within them, and nothing is copied from it until the kernel has run.
        unsafe { self.launch_unordered(kernel, grid, &self.comm, &params, None, work.stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_end_where_shares_do() {
        let share = (1000, 100);
        assert_eq!(within(share, 0..128), (1000, 100));
        assert_eq!(within(share, 64..128), (1064, 36));
        assert_eq!(within(share, 128..256), (1100, 0));
        assert_eq!(within((1000, 0), 0..128), (1000, 0));
    }
}
