//! A kernel that is loaded on a device, with what its communicator may occupy. It may be loaded in two forms: one asks for a grant
//! of SMs (`symmpool/impl/sm_grant.cuh`), and the other one, for small grids, does not.

use super::sm_budget::SmBudget;
use crate::cuda::driver::api::CudaHandle;

/// The numbers of threads that blocks may have.
pub(in crate::cuda) const SIZES: [u32; 7] = [32, 64, 128, 256, 512, 768, 896];

/// A loaded kernel.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct LoadedKernel {
    pub(in crate::cuda) function: CudaHandle,
    /// The form without a grant: the function for grids that are no larger than the narrow one of the budget. It may be the
    /// same function.
    pub(in crate::cuda) small: CudaHandle,
    /// How many blocks of each of `SIZES` the device runs at once, for sizes that the kernel is compiled for.
    resident: [u32; SIZES.len()],
    /// Blocks that the device runs at once of `small`, and most threads of these.
    small_resident: [u32; SIZES.len()],
    small_threads: u32,
    /// Most threads of a block.
    pub(in crate::cuda) threads: u32,
    /// SMs of the device.
    pub(in crate::cuda) sm_count: u32,
    /// Bytes of shared memory of a block, besides those that the kernel has by itself.
    pub(in crate::cuda) shared_bytes: u32,
    /// Budget of its communicator in the call.
    pub(in crate::cuda) budget: SmBudget,
}

impl LoadedKernel {
    pub(in crate::cuda) fn new(
        function: CudaHandle,
        resident: [u32; SIZES.len()],
        threads: u32,
        sm_count: u32,
    ) -> Self {
        let budget = SmBudget::ALL;
        let (small, small_resident) = (function, resident);
        Self {
            function,
            small,
            resident,
            small_resident,
            small_threads: threads,
            threads,
            sm_count,
            shared_bytes: 0,
            budget,
        }
    }

    /// The kernel in both forms: `self` asks for a grant of SMs, and `small` does not.
    pub(super) fn sharing(self, small: Self) -> Self {
        let Self { function, resident, threads, .. } = small;
        Self { small: function, small_resident: resident, small_threads: threads, ..self }
    }

    fn is_small(&self, blocks: u32) -> bool {
        self.budget.narrow_blocks.is_some_and(|narrow| blocks <= narrow)
    }

    /// The function for a grid of `blocks` blocks.
    pub(super) fn function_for(&self, blocks: u32) -> CudaHandle {
        if self.is_small(blocks) { self.small } else { self.function }
    }

    /// Most threads of a block in a grid of `blocks` blocks.
    pub(super) fn threads_for(&self, blocks: u32) -> u32 {
        if self.is_small(blocks) { self.small_threads } else { self.threads }
    }

    /// The kernel with the budget of a call.
    pub(super) fn with_budget(self, budget: SmBudget) -> Self {
        Self { budget, ..self }
    }

    /// How many blocks of `threads` threads the device runs at once, as the driver says: it takes registers, shared
    /// memory, threads and the device's limit of 16 to 32 blocks an SM into account.
    pub(in crate::cuda) fn resident(&self, threads: u32) -> u32 {
        let at = SIZES.iter().position(|size| *size >= threads).unwrap_or(SIZES.len() - 1);
        self.resident[at].max(1)
    }

    /// The kernel as its communicator has it when it is alone on the device: the form without a grant. Ranks may differ in that, so numbers that they
    /// compare follow from this form.
    pub(in crate::cuda) fn alone(self) -> Self {
        let Self { small: function, small_resident: resident, small_threads: threads, .. } = self;
        Self { budget: SmBudget::ALL, function, resident, threads, ..self }
    }

    /// The kernel with no more blocks than that, if the call runs beside compute.
    pub(in crate::cuda) fn beside_compute(self, most: u32) -> Self {
        let most_blocks = self.budget.most_blocks;
        let most_blocks =
            if self.budget.beside_compute { most_blocks.min(most) } else { most_blocks };
        Self { budget: SmBudget { most_blocks, ..self.budget }, ..self }
    }

    /// The kernel as it may be launched if it waits for no other rank: it gives SMs back soon, and sooner
    /// the more it has, so it need not leave any to compute.
    pub(in crate::cuda) fn without_waits(self) -> Self {
        if self.budget.beside_compute { self.alone() } else { self }
    }

    /// The kernel as it takes all SMs, whatever its budget is. Beside other communicators it must not take them before its turn.
    pub(in crate::cuda) fn on_all_sms(self) -> Self {
        if self.budget.early { self } else { self.in_turn() }
    }

    /// The kernel as it is launched where it must not start before all that comes before it has ended.
    fn in_turn(self) -> Self {
        Self { budget: self.budget.in_turn(), ..self }
    }

    /// The kernel as it must be launched behind copies: its blocks cannot wait for the end of a copy by
    /// themselves, so it must not start early.
    pub(in crate::cuda) fn after_copies(self) -> Self {
        self.in_turn()
    }
}
