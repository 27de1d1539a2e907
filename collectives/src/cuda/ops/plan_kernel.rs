//! The kernel of a rank's program of a plan: its key, its source, and compiling it ahead of calls.

use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::generated_kernel::{GeneratedKernel, GeneratedSource};
use crate::cuda::kernel::spec::THREADS;
use crate::plan::{CheckedPlan, cuda};
use crate::{DType, ReduceOp};

/// Returns the key of the kernel of a rank of the plan, which may share SMs. Plans that only move data have one for all types.
pub(in crate::cuda) fn key(
    checked: &CheckedPlan,
    world: u32,
    of_plan: u32,
    (dtype, op): (DType, ReduceOp),
    shares_sms: bool,
) -> GeneratedKernel {
    let reduces = checked.plan().collective.reduces();
    let (dtype, op) = if reduces { (dtype, op) } else { (DType::U8, ReduceOp::Sum) };
    let (dtype, op, hash) = (dtype as u8, op as u8, checked.hash());
    GeneratedKernel { world, hash, rank: of_plan, dtype, op, threads: THREADS, shares_sms }
}

/// The source of that kernel.
pub(in crate::cuda) fn source(checked: &CheckedPlan, of_plan: u32) -> GeneratedSource {
    GeneratedSource {
        name: checked.plan().name.clone(),
        path: "plan.cu".to_owned(),
        entry: cuda::ENTRY.to_owned(),
        source: cuda::source(checked, checked.schedule(), of_plan),
    }
}

impl CudaEngine {
    /// Compiles this rank's kernels of plans, for calls with these roots, several at a time. An error occurs again in the
    /// call that needs the kernel.
    pub(crate) fn compile_plans(
        &self,
        plans: &[(&CheckedPlan, DType, ReduceOp, u32)],
        threads: usize,
    ) {
        let (rank, world) = (self.rank(), self.world());
        let kernel = |shares_sms| {
            move |(checked, dtype, op, root): &(&CheckedPlan, DType, ReduceOp, u32)| {
                let of_plan = (rank + world - root % world) % world;
                (key(checked, world, of_plan, (*dtype, *op), shares_sms), source(checked, of_plan))
            }
        };
        let mut kernels: Vec<_> = plans.iter().map(kernel(false)).collect();
        if self.kernels().has_company() {
            kernels.extend(plans.iter().map(kernel(true)));
        }
        self.compile_generated(&kernels, threads);
    }
}
