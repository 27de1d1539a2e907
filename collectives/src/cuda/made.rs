//! Kernels whose sources are no files of ours: those of plans, and those that programs bring along.

use super::kernel_spec::KernelSpec;
use crate::jit::sources::BARRIER;

/// What such a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct MadeKernel {
    pub(super) world: u32,
    /// A hash of what its source is made from.
    pub(super) hash: u64,
    /// Whose program of a plan it runs; 0 for kernels that all ranks run.
    pub(super) rank: u32,
    pub(super) dtype: u8,
    pub(super) op: u8,
    pub(super) threads: u32,
}

impl MadeKernel {
    pub(super) fn spec(&self) -> KernelSpec {
        // Of the kernel that is named here nothing is used.
        KernelSpec { dtype: self.dtype, op: self.op, ..KernelSpec::new(&BARRIER, self.threads) }
    }
}

/// The source of such a kernel.
pub(super) struct MadeSource {
    /// Its name in messages, and that of its file.
    pub(super) name: String,
    pub(super) path: String,
    pub(super) entry: String,
    pub(super) source: String,
}
