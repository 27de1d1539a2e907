//! The all-reduce in two shots by stores, in stages through scratch.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use super::constraints::always;
use super::row::{AllReduce, AllReduceCall, Cases};
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::mode::{KernelMode, TwoShotCollective};
use crate::cuda::kernel::reduction_call::ReductionCall;
use crate::cuda::kernel::spec::{KernelSpec, THREADS};
use crate::jit::kernel_beside;
use crate::jit::sources::{
    F32, KernelSource, OTHERS, REDUCTIONS, SOME_DTYPES, SUM, WIDE, WORLDS_OF_2_AND_8,
};
use crate::{AllReduceAlgorithm as Name, DType, ReduceOp};

/// Most SMs of an all-reduce in stages beside compute. Beside matrix products of two H100s, 128 MiB take 697 us with 32 SMs
/// and 511 with 48, and cost the products 118 and 191 us; NCCL's take 716 and cost them 186. Reduce-scatters cost them
/// about the same with either number, and programs wait for those sooner.
const ALL_REDUCE_BESIDE_COMPUTE: u32 = 32;

/// How the results of an all-reduce in stages reach peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Results {
    /// Into outputs, which are windows.
    Direct,
    ThroughScratch,
}

/// All-reduce in two shots, and reduce-scatter, in stages through scratch.
pub(in crate::cuda) const KERNEL: KernelSource<'static> = kernel_beside!(
    "all_reduce" / "two_shot_pipeline",
    [WORLDS_OF_2_AND_8, SOME_DTYPES, SUM, REDUCTIONS, WIDE],
    [OTHERS, F32, SUM, REDUCTIONS, WIDE],
);

pub(super) const ROW: AllReduce = AllReduce {
    name: Name::TwoShotPipeline,
    one_of: None,
    fits: |shape, _| shape.world > 1,
    pays_off: always,
    most_bytes: |_, _| u64::MAX,
    kernel: |_, of, _| KernelSpec::two_shot_pipeline(of, TwoShotCollective::AllReduce),
    launch,
    cases: Cases { count: 100_000, ..Cases::USUAL },
};

/// # Safety
///
/// You must keep the promises of [`AllReduceCall`].
unsafe fn launch(engine: &mut dyn KernelLauncher, call: &AllReduceCall) -> Result<()> {
    let results = if call.output_window { Results::Direct } else { Results::ThroughScratch };
    // SAFETY: the caller promised that the input and output of the call are there until the stream has done it.
    unsafe { by_pipeline(engine, call.work, TwoShotCollective::AllReduce, results) }
}

/// Sends inputs through scratch in stages, and results of an all-reduce into outputs that are windows or through
/// scratch too, in one launch. Reduce-scatters are the first half of it.
///
/// # Safety
///
/// You must keep the promises of [`AllReduceCall`].
pub(in crate::cuda) unsafe fn by_pipeline(
    engine: &mut dyn KernelLauncher,
    work: &ReductionCall,
    collective: TwoShotCollective,
    results: Results,
) -> Result<()> {
    let reduction = (work.dtype, work.op);
    let loaded = engine.kernel(KernelSpec::two_shot_pipeline(reduction, collective))?;
    // Peer blocks divide a share of an all-reduce, and a part of a reduce-scatter.
    let both = collective == TwoShotCollective::AllReduce;
    let loaded = if both { loaded.beside_compute(ALL_REDUCE_BESIDE_COMPUTE) } else { loaded };
    let shares = if both { u64::from(engine.world()) } else { 1 };
    let wanted = work.bytes.div_ceil(16).div_ceil(shares);
    let through_scratch = results == Results::ThroughScratch;
    let most = engine.control().stage_blocks(engine.world(), through_scratch);
    let config = LaunchConfig::new(&loaded.alone(), wanted, THREADS, most);
    let work = ReductionCall { root: through_scratch.into(), ..*work };
    // SAFETY: the caller promised that the input and output of the call are there until the stream has done it; they
    // are the same in this copy.
    unsafe { engine.launch_peer_blocks(loaded, config, &work) }
}

impl KernelSpec {
    /// A collective of two shots, or of the first one, in stages through scratch.
    pub(in crate::cuda) fn two_shot_pipeline(
        reduction: (DType, ReduceOp),
        collective: TwoShotCollective,
    ) -> Self {
        let mode = KernelMode::Collective(collective);
        Self { mode, ..Self::reduces(&KERNEL, reduction) }
    }
}
