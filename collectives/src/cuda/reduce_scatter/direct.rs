//! The reduce-scatter by loads: every rank reduces its part, which it loads from all ranks' inputs.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use std::ops::RangeInclusive;

use symmpool_allocator::Result;

use super::row::{ReduceScatter, ScatterCases};
use crate::algorithm::DIRECT;
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::mode::TwoShotCollective;
use crate::cuda::kernel::reduction_call::ReductionCall;
use crate::cuda::kernel::spec::{KernelSpec, THREADS};
use crate::cuda::layout::params::MAX_PEER_BLOCKS;

/// Reduce-scatters of parts of as many bytes as this range has go by loads from inputs that are windows. On two H200s 16 MiB take 59 us so and
/// 61 through inboxes, 32 MiB 109 and 121, 64 MiB 209 and by copy engines 214, and 128 MiB 409 and 392. Four H200s gain
/// nothing from either way: parts of 16 MiB take 170 and 184 us, and 167 through inboxes.
const LOADED_BYTES: RangeInclusive<u64> = 16 << 20..=96 << 20;

pub(super) const ROW: ReduceScatter = ReduceScatter {
    id: DIRECT,
    fits: |_, window| window,
    needs: "ranks read each other's inputs, which must be windows",
    pays_off: |shape| {
        let pair_alone = shape.world == 2 && !shape.beside_compute;
        pair_alone && shape.input_window && shape.nvlinked && LOADED_BYTES.contains(&shape.part)
    },
    kernel: |_, of| KernelSpec::two_shot_pull(of, TwoShotCollective::ReduceScatter),
    launch,
    cases: ScatterCases { input_windows: true, ..ScatterCases::ANY },
};

/// # Safety
///
/// You must keep the promises of [`ReductionCall`].
unsafe fn launch(engine: &mut dyn KernelLauncher, work: &ReductionCall) -> Result<()> {
    let loaded = engine.kernel((ROW.kernel)(engine.world(), (work.dtype, work.op)))?;
    let vectors = work.bytes.div_ceil(16);
    let config = LaunchConfig::new(&loaded.alone(), vectors, THREADS, MAX_PEER_BLOCKS);
    // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
    unsafe { engine.launch_peer_blocks(loaded, config, work) }
}
