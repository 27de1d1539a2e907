//! The reduce-scatter by stores, in stages through scratch: the first half of the all-reduce `two_shot_pipeline`.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use super::row::{ReduceScatter, ScatterCases};
use crate::algorithm::PIPELINE;
use crate::cuda::all_reduce::two_shot_pipeline::{Results, by_pipeline};
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::mode::TwoShotCollective;
use crate::cuda::kernel::reduction_call::ReductionCall;
use crate::cuda::kernel::spec::KernelSpec;

pub(super) const ROW: ReduceScatter = ReduceScatter {
    id: PIPELINE,
    fits: |_, _| true,
    needs: "",
    pays_off: |_| true,
    kernel: |_, of| KernelSpec::two_shot_pipeline(of, TwoShotCollective::ReduceScatter),
    launch,
    cases: ScatterCases::ANY,
};

/// # Safety
///
/// You must keep the promises of [`ReductionCall`].
unsafe fn launch(engine: &mut dyn KernelLauncher, work: &ReductionCall) -> Result<()> {
    // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
    unsafe { by_pipeline(engine, work, TwoShotCollective::ReduceScatter, Results::Direct) }
}
