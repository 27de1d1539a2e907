//! Generated kernels, whose sources are no files of this repository: those of plans, and those that programs bring along.

use super::spec::KernelSpec;
use crate::jit::sources::BARRIER;

/// Key of such a kernel: all that it is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) struct GeneratedKernel {
    pub(in crate::cuda) world: u32,
    /// A hash of what its source is made from.
    pub(in crate::cuda) hash: u64,
    /// Whose program of a plan it runs; 0 for kernels that all ranks run.
    pub(in crate::cuda) rank: u32,
    pub(in crate::cuda) dtype: u8,
    pub(in crate::cuda) op: u8,
    pub(in crate::cuda) threads: u32,
    /// Whether blocks ask for a grant, as in [`KernelSpec`].
    pub(in crate::cuda) shares_sms: bool,
}

impl GeneratedKernel {
    pub(in crate::cuda) fn spec(&self) -> KernelSpec {
        // Nothing of the kernel that is named here is used.
        let spec = KernelSpec::new(&BARRIER, self.threads);
        KernelSpec { dtype: self.dtype, op: self.op, shares_sms: self.shares_sms, ..spec }
    }
}

/// The source of such a kernel.
pub(in crate::cuda) struct GeneratedSource {
    /// Its name in messages, and that of its file.
    pub(in crate::cuda) name: String,
    pub(in crate::cuda) path: String,
    pub(in crate::cuda) entry: String,
    pub(in crate::cuda) source: String,
}
