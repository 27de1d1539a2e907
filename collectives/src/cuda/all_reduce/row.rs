//! A row of the table of all-reduces, and what its launch is given: the call, and launches of the engine.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use super::constraints::AllReduceShape;
use super::reduction_call::Work;
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::params::Control;
use crate::{AllReduceAlgorithm, DType, ReduceOp};

/// A reduction's element type and operation.
type Reduction = (DType, ReduceOp);

/// An all-reduce algorithm.
pub(in crate::cuda) struct AllReduce {
    pub(in crate::cuda) name: AllReduceAlgorithm,
    /// The name that stands for the first of several algorithms that fits, if this is one of those.
    pub(in crate::cuda) one_of: Option<AllReduceAlgorithm>,
    /// Whether it can serve a call.
    pub(in crate::cuda) fits: fn(&AllReduceShape, &Control) -> bool,
    /// Whether it is about as fast with the memory there is as it was when it was measured: it is if the call goes in
    /// one round or launch, or in long ones.
    pub(in crate::cuda) pays_off: fn(&AllReduceShape, &Control) -> bool,
    /// Most bytes of a launch.
    pub(in crate::cuda) most_bytes: fn(&AllReduceShape, &Control) -> u64,
    /// Its kernel on so many ranks, for launches of at most so many bytes.
    pub(in crate::cuda) kernel: fn(u32, Reduction, u64) -> KernelSpec,
    /// Launches it. You must keep the promises of [`AllReduceCall`].
    pub(in crate::cuda) launch: unsafe fn(&mut dyn KernelLauncher, &AllReduceCall) -> Result<()>,
    /// Calls that check it.
    pub(in crate::cuda) cases: Cases,
}

/// Calls that check an all-reduce on devices, with inboxes of 2 MiB and scratch of 1 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cases {
    /// Elements of a call that it serves there.
    pub count: usize,
    /// Whether that goes in several launches. Shorter calls go in one.
    pub in_pieces: bool,
    /// Elements of 2 bytes of a short call.
    pub min_count: usize,
}

/// An all-reduce algorithm of devices, as checks see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckedAllReduce {
    /// The file of its kernel below `collectives/kernels`.
    pub kernel: &'static str,
    /// Whether blocks of the kernel share memory, in which tools look for races.
    pub shares_memory: bool,
    /// Calls that check it.
    pub cases: Cases,
}

/// Launches of an engine, on one rank.
pub(in crate::cuda) trait KernelLauncher {
    /// The number of ranks.
    fn world(&self) -> u32;

    /// The layout of the memory that ranks share.
    fn control(&self) -> &Control;

    /// Loads a kernel, which is compiled if that is not done yet.
    fn kernel(&mut self, spec: KernelSpec) -> Result<LoadedKernel>;

    /// Launches a kernel whose blocks need no blocks of peers.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`AllReduceCall`], for the input and output of `work`.
    unsafe fn launch_blocks(
        &mut self,
        kernel: LoadedKernel,
        config: LaunchConfig,
        work: &Work,
    ) -> Result<()>;

    /// Launches a kernel whose blocks of equal index work together on all ranks, as peer blocks. Ranks compare
    /// how many peer blocks there are, so that is as many as the worker blocks of a communicator that has the
    /// device for itself. Where communicators share a device, fewer blocks run, and each does the work of
    /// several peer blocks.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`AllReduceCall`], for the input and output of `work`.
    unsafe fn launch_peer_blocks(
        &mut self,
        kernel: LoadedKernel,
        whole: LaunchConfig,
        work: &Work,
    ) -> Result<()>;

    /// Has copy engines carry an all-reduce, with kernels that reduce between copies.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`AllReduceCall`], for the input and output of `work`.
    unsafe fn launch_copies(&mut self, work: &Work, output_window: bool) -> Result<()>;
}

/// A call that an algorithm launches. You must promise that its input is readable and its output writable on the device
/// until the stream has done the call, and that nothing else touches them meanwhile, in any rank's slot if they are windows.
pub(in crate::cuda) struct AllReduceCall<'a> {
    pub(in crate::cuda) entry: &'a AllReduce,
    pub(in crate::cuda) work: &'a Work,
    /// Whether the output is a window.
    pub(in crate::cuda) output_window: bool,
}

impl AllReduceCall<'_> {
    /// The algorithm's kernel for this call.
    pub(super) fn kernel(&self, engine: &mut dyn KernelLauncher) -> Result<LoadedKernel> {
        let work = self.work;
        engine.kernel((self.entry.kernel)(engine.world(), (work.dtype, work.op), work.bytes))
    }

    /// Launches a kernel whose blocks need no blocks of peers: so many threads in blocks of `size`.
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
