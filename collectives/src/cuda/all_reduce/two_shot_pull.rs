//! The all-reduce in two shots between windows, by loads from inputs.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use super::constraints::always;
use super::row::{AllReduce, AllReduceCall, Cases};
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::mode::{KernelMode, TwoShotCollective};
use crate::cuda::kernel::spec::{KernelSpec, THREADS};
use crate::jit::kernel_beside;
use crate::jit::sources::{
    F32, KernelSource, OTHERS, REDUCTIONS, SOME_DTYPES, SUM, WIDE, WORLDS_OF_2_AND_8,
};
use crate::{AllReduceAlgorithm as Name, DType, ReduceOp};

/// All-reduce in two shots, and reduce-scatter, by loads from peers.
pub(in crate::cuda) const KERNEL: KernelSource<'static> = kernel_beside!(
    "all_reduce" / "two_shot_pull",
    [WORLDS_OF_2_AND_8, SOME_DTYPES, SUM, REDUCTIONS, WIDE],
    [OTHERS, F32, SUM, REDUCTIONS, WIDE],
);

pub(super) const ROW: AllReduce = AllReduce {
    name: Name::TwoShotPull,
    one_of: None,
    fits: |shape, _| shape.input_window && shape.output_window,
    pays_off: always,
    most_bytes: |_, _| u64::MAX,
    kernel: |_, of, _| KernelSpec::two_shot_pull(of, TwoShotCollective::AllReduce),
    launch,
    cases: Cases { count: 100_000, ..Cases::USUAL },
};

/// # Safety
///
/// You must keep the promises of [`AllReduceCall`].
unsafe fn launch(engine: &mut dyn KernelLauncher, call: &AllReduceCall) -> Result<()> {
    let loaded = call.kernel(engine)?;
    let share = call.work.bytes.div_ceil(16).div_ceil(u64::from(engine.world()));
    let config = LaunchConfig::new(&loaded.alone(), share, THREADS, 256);
    // SAFETY: the caller promised that the input and output of the call are there until the stream has done it.
    unsafe { engine.launch_peer_blocks(loaded, config, call.work) }
}

impl KernelSpec {
    /// A collective of two shots, or of the first one, by loads from peers.
    pub(in crate::cuda) fn two_shot_pull(
        reduction: (DType, ReduceOp),
        collective: TwoShotCollective,
    ) -> Self {
        let mode = KernelMode::Collective(collective);
        Self { mode, ..Self::reduces(&KERNEL, reduction) }
    }
}
