//! A row of the table of all-reduces, and what its launch is given besides the engine.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use super::constraints::AllReduceShape;
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use crate::cuda::kernel::reduction_call::ReductionCall;
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::params::ControlLayout;
use crate::{AllReduceAlgorithm, DType, ReduceOp};

/// A reduction's element type and operation.
type ReducedType = (DType, ReduceOp);

/// A row of the table: an all-reduce algorithm.
pub(in crate::cuda) struct AllReduce {
    pub(in crate::cuda) name: AllReduceAlgorithm,
    /// The name that stands for the first of several algorithms that fits, if this is one of those.
    pub(in crate::cuda) one_of: Option<AllReduceAlgorithm>,
    /// Whether it can serve a call.
    pub(in crate::cuda) fits: fn(&AllReduceShape, &ControlLayout) -> bool,
    /// Whether it is about as fast with the memory there is as it was when it was measured: it is if the call goes in
    /// one round or launch, or in long ones.
    pub(in crate::cuda) pays_off: fn(&AllReduceShape, &ControlLayout) -> bool,
    /// Most bytes of a launch: `u64::MAX` if no call is divided. The launch itself divides longer calls, by
    /// [`ReductionCall::pieces`].
    pub(in crate::cuda) most_bytes: fn(&AllReduceShape, &ControlLayout) -> u64,
    /// Its kernel, by the number of ranks, the element type and operation, and the most bytes of a launch:
    /// [`KernelSpec::reduces`] if one kernel does for all.
    pub(in crate::cuda) kernel: fn(u32, ReducedType, u64) -> KernelSpec,
    /// Launches it. You must keep the promises of [`AllReduceCall`].
    pub(in crate::cuda) launch: unsafe fn(&mut dyn KernelLauncher, &AllReduceCall) -> Result<()>,
    /// Calls that check it.
    pub(in crate::cuda) cases: Cases,
}

/// Calls by which tests on devices try an all-reduce, with inboxes of 2 MiB and scratch of 1 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cases {
    /// Elements of a call of any type that it serves there.
    pub count: usize,
    /// Whether that goes in several launches. Shorter calls go in one.
    pub in_pieces: bool,
    /// Elements of 2 bytes of a short call.
    pub min_count: usize,
    /// Whether copy engines carry it. Then it is checked with several sizes of scratch, which it may divide calls by.
    pub by_copies: bool,
    /// Whether data lies otherwise in inboxes in calls of more than 4 MiB. Then it is checked with ranks that are alone on
    /// their devices, and with ranks that are not.
    pub has_two_layouts: bool,
}

impl Cases {
    /// Short calls, in one launch.
    pub(super) const USUAL: Self = Self {
        count: 10_000,
        in_pieces: false,
        min_count: 10_000,
        by_copies: false,
        has_two_layouts: false,
    };
}

/// An all-reduce algorithm of devices, as tests see it. (A [`CheckedPlan`](crate::plan::CheckedPlan) was proved.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckedAllReduce {
    /// The file of its kernel, below `collectives/kernels` or `collectives/src/cuda`.
    pub kernel: &'static str,
    /// Whether blocks of the kernel share memory, in which tools look for races.
    pub shares_memory: bool,
    /// Calls that check it.
    pub cases: Cases,
}

/// A call that an algorithm launches. You must promise that its input is readable and its output writable on the device
/// until the stream has done the call, and that nothing else touches them meanwhile, in any rank's slot if they are windows.
pub(in crate::cuda) struct AllReduceCall<'a> {
    pub(in crate::cuda) entry: &'a AllReduce,
    pub(in crate::cuda) work: &'a ReductionCall,
    /// Whether the output is a window.
    pub(in crate::cuda) output_window: bool,
}

impl AllReduceCall<'_> {
    /// The algorithm's kernel for this call.
    pub(super) fn kernel(&self, engine: &mut dyn KernelLauncher) -> Result<LoadedKernel> {
        let work = self.work;
        engine.kernel((self.entry.kernel)(engine.world(), (work.dtype, work.op), work.bytes))
    }

    /// Launches a kernel whose blocks need no blocks of peers: `threads` threads in all, in blocks of `size`.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`AllReduceCall`].
    pub(super) unsafe fn in_threads(
        &self,
        engine: &mut dyn KernelLauncher,
        threads: u64,
        size: u32,
    ) -> Result<()> {
        let loaded = self.kernel(engine)?;
        let config = LaunchConfig::new(&loaded, threads, size, u32::MAX);
        // SAFETY: the caller promised that the input and output of the call are there until the stream has done it.
        unsafe { engine.launch_blocks(loaded, config, self.work) }
    }
}
