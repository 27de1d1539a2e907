//! The part of an engine that the launch of an algorithm's row is given.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use super::launch_config::LaunchConfig;
use super::loaded_kernel::LoadedKernel;
use super::reduction_call::ReductionCall;
use super::spec::KernelSpec;
use crate::cuda::layout::params::ControlLayout;

/// Launches of an engine, on one rank.
pub(in crate::cuda) trait KernelLauncher {
    /// The number of ranks.
    fn world(&self) -> u32;

    /// The layout of the memory that ranks share.
    fn control(&self) -> &ControlLayout;

    /// Loads a kernel, which is compiled if that is not done yet.
    fn kernel(&mut self, spec: KernelSpec) -> Result<LoadedKernel>;

    /// Launches a kernel whose blocks wait for data of peers, but not for blocks of their own number there.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`ReductionCall`].
    unsafe fn launch_blocks(
        &mut self,
        kernel: LoadedKernel,
        config: LaunchConfig,
        work: &ReductionCall,
    ) -> Result<()>;

    /// Launches a kernel whose blocks of equal index work together on all ranks, as peer blocks. Ranks compare
    /// how many peer blocks there are, and may have different SM budgets. So the number depends on no budget: it is
    /// that of the worker blocks of a communicator that has the device for itself. Where communicators share a device, fewer blocks run, and each does the work of
    /// several peer blocks.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`ReductionCall`].
    unsafe fn launch_peer_blocks(
        &mut self,
        kernel: LoadedKernel,
        whole: LaunchConfig,
        work: &ReductionCall,
    ) -> Result<()>;

    /// Has copy engines carry an all-reduce, with kernels that reduce between copies.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`ReductionCall`].
    unsafe fn copy_all_reduce(&mut self, work: &ReductionCall, output_window: bool) -> Result<()>;

    /// Has copy engines carry a reduce-scatter, with kernels that reduce between copies.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`ReductionCall`].
    unsafe fn copy_reduce_scatter(&mut self, work: &ReductionCall) -> Result<()>;
}
