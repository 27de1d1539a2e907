//! The all-reduce in one shot by loads from every rank's scratch.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use super::constraints::always;
use super::row::{AllReduce, AllReduceCall, Cases};
use crate::AllReduceAlgorithm as Name;
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::params::MAX_PEER_BLOCKS;
use crate::jit::kernel_beside;
use crate::jit::sources::{F32, KernelSource, OTHERS, SOME_DTYPES, SUM, WIDE, WORLDS_OF_2_AND_8};

/// All-reduce in one shot by loads from peers.
pub(in crate::cuda) const KERNEL: KernelSource<'static> = kernel_beside!(
    "all_reduce" / "one_shot_pull",
    [WORLDS_OF_2_AND_8, SOME_DTYPES, SUM, WIDE],
    [OTHERS, F32, SUM, WIDE],
);

pub(super) const ROW: AllReduce = AllReduce {
    name: Name::OneShotPull,
    one_of: Some(Name::OneShot),
    fits: |shape, control| shape.bytes.next_multiple_of(16) <= control.scratch_bytes,
    pays_off: always,
    most_bytes: |_, _| u64::MAX,
    kernel: |_, of, _| KernelSpec::reduces(&KERNEL, of),
    launch,
    cases: Cases::USUAL,
};

/// # Safety
///
/// You must keep the promises of [`AllReduceCall`].
unsafe fn launch(engine: &mut dyn KernelLauncher, call: &AllReduceCall) -> Result<()> {
    let loaded = call.kernel(engine)?;
    let vectors = call.work.bytes.div_ceil(16);
    let config = LaunchConfig::new(&loaded.alone(), vectors, 256, MAX_PEER_BLOCKS);
    // SAFETY: the caller promised that the input and output of the call are there until the stream has done it.
    unsafe { engine.launch_peer_blocks(loaded, config, call.work) }
}
