//! A row of the table of reduce-scatters.

use symmpool_allocator::Result;

use super::scatter_shape::ScatterShape;
use crate::algorithm::AlgorithmId;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::reduction_call::ReductionCall;
use crate::cuda::kernel::spec::KernelSpec;
use crate::{DType, ReduceOp};

/// A reduce-scatter algorithm.
pub(in crate::cuda) struct ReduceScatter {
    pub(in crate::cuda) id: AlgorithmId,
    /// Whether it can serve calls of a type, from a window or not.
    pub(super) fits: fn(DType, bool) -> bool,
    /// Text for errors where it does not fit: what it needs.
    pub(super) needs: &'static str,
    /// Whether it is the fastest for a call that those before it in the order of choice are not for.
    pub(super) pays_off: fn(&ScatterShape) -> bool,
    /// The kernel of calls that name no algorithm and choose this one, by the number of ranks.
    pub(in crate::cuda) kernel: fn(u32, (DType, ReduceOp)) -> KernelSpec,
    /// Launches it. You must keep the promises of [`ReductionCall`].
    pub(in crate::cuda) launch: unsafe fn(&mut dyn KernelLauncher, &ReductionCall) -> Result<()>,
    /// Facts that its checks need to know.
    pub(super) cases: ScatterCases,
}

/// Calls that check a reduce-scatter on devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScatterCases {
    /// Whether it serves the floats that the Lamport protocol carries alone.
    pub lamport_types: bool,
    /// Whether it serves inputs in windows alone.
    pub input_windows: bool,
    /// Whether copy engines carry it: then calls from windows to outputs elsewhere are checked by themselves.
    pub by_copies: bool,
}

impl ScatterCases {
    /// Calls of all types from any memory.
    pub(super) const ANY: Self =
        Self { lamport_types: false, input_windows: false, by_copies: false };
}
