//! Specifications of kernels: all that they are compiled for.

use super::mode::{KernelMode, OneSidedMode};
use crate::call::p2p::Direction;
use crate::cuda::kernel::mode::P2pMode;
use crate::jit::KernelSource;
use crate::jit::sources::P2P;
use crate::jit::sources::{BARRIER, MEASURED_BARRIER, ONE_SIDED};
use crate::{DType, ReduceOp};

/// Threads of a block of most kernels.
pub(in crate::cuda) const THREADS: u32 = 512;

/// Threads of a block of the kernel that runs a handshake alone.
pub(in crate::cuda) const BARRIER_THREADS: u32 = 128;
/// Threads of a block of the kernel that measures its waits: a warp for each rank.
const MEASURED_BARRIER_THREADS: u32 = 256;
/// Threads of a block of the kernels of point-to-point messages. Each handles four vectors at once, which is enough to keep
/// the link busy with sixteen blocks.
pub(in crate::cuda) const P2P_THREADS: u32 = 512;
/// Threads of a block of kernels that only signal or wait.
pub(in crate::cuda) const WARP_THREADS: u32 = 32;

/// Two-shot calls of more bytes get twice as many resident blocks, where registers suffice.
pub(in crate::cuda) const MANY_BYTES: u64 = 4 << 20;

/// Specification of a kernel: all that it is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) struct KernelSpec {
    pub(in crate::cuda) kernel: &'static KernelSource<'static>,
    pub(in crate::cuda) dtype: u8,
    pub(in crate::cuda) op: u8,
    pub(in crate::cuda) mode: KernelMode,
    /// Whether inboxes are used in the Lamport protocol, and not in LL.
    pub(in crate::cuda) lamport: bool,
    pub(in crate::cuda) threads: u32,
    /// Blocks that an SM must have registers for at the same time.
    pub(in crate::cuda) min_blocks_per_sm: u32,
    /// Whether blocks ask for a grant, as other communicators of the process may have the SMs.
    pub(in crate::cuda) shares_sms: bool,
    /// Threads of a block that asks for a grant, where it has others than `threads`, as it may have an SM of its own.
    pub(in crate::cuda) sharing_threads: Option<u32>,
}

impl KernelSpec {
    /// Specifies a kernel that moves bytes, or no data at all.
    pub(in crate::cuda) fn new(kernel: &'static KernelSource<'static>, threads: u32) -> Self {
        let (dtype, op) = (DType::U8 as u8, ReduceOp::Sum as u8);
        Self {
            kernel,
            dtype,
            op,
            mode: KernelMode::Only,
            lamport: false,
            threads,
            min_blocks_per_sm: 1,
            shares_sms: false,
            sharing_threads: None,
        }
    }

    /// The kernel as it shares SMs with other communicators, if it can.
    pub(in crate::cuda) fn sharing(self, shares_sms: bool) -> Self {
        if !shares_sms || !self.kernel.asks_for_blocks {
            return self;
        }
        // Where data lies in inboxes follows from `min_blocks_per_sm`, so that is equal in both forms.
        Self { shares_sms: true, threads: self.sharing_threads.unwrap_or(self.threads), ..self }
    }

    /// A handshake alone. `notify_companion` says whether it notifies a companion kernel.
    pub(in crate::cuda) fn barrier(notify_companion: bool) -> Self {
        let mode = KernelMode::Barrier { notify_companion };
        Self { mode, ..Self::new(&BARRIER, BARRIER_THREADS) }
    }

    /// A handshake alone, which measures its waits: with a warp for each rank.
    pub(in crate::cuda) fn measured_barrier() -> Self {
        Self::new(&MEASURED_BARRIER, MEASURED_BARRIER_THREADS)
    }

    /// A copy, a signal, a wait, or a copy and then a signal, between two ranks.
    pub(in crate::cuda) fn one_sided(mode: OneSidedMode) -> Self {
        let threads = match mode {
            OneSidedMode::Copy | OneSidedMode::CopyAndSignal => THREADS,
            OneSidedMode::Signal | OneSidedMode::Wait => WARP_THREADS,
        };
        Self { mode: KernelMode::OneSided(mode), ..Self::new(&ONE_SIDED, threads) }
    }

    /// A kernel that reduces.
    pub(in crate::cuda) fn reduces(
        kernel: &'static KernelSource<'static>,
        (dtype, op): (DType, ReduceOp),
    ) -> Self {
        Self { dtype: dtype as u8, op: op as u8, ..Self::new(kernel, THREADS) }
    }

    /// The kernel of point-to-point messages in a direction.
    pub(in crate::cuda) fn p2p(direction: Direction) -> Self {
        let mode = match direction {
            Direction::Send => P2pMode::Send,
            Direction::Receive => P2pMode::Receive,
        };
        Self { mode: KernelMode::PointToPoint(mode), ..Self::new(&P2P, P2P_THREADS) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernel::mode::TwoShotCollective;
    use crate::jit::sources::DISPATCH;

    /// A kernel is launched with the threads that it is compiled for, in whichever form.
    #[test]
    fn forms_that_share_sms_have_the_threads_of_the_others_unless_they_say_so() {
        let few = KernelSpec { threads: 256, ..KernelSpec::new(&DISPATCH, THREADS) };
        assert_eq!(few.sharing(true).threads, 256);
        let sum = (DType::Bf16, ReduceOp::Sum);
        for (world, threads) in [(2, 896), (4, 768)] {
            let large = KernelSpec::two_shot(
                world,
                sum,
                TwoShotCollective::AllReduce,
                true,
                2 * MANY_BYTES,
            );
            assert_eq!((large.threads, large.sharing(true).threads), (THREADS, threads));
        }
    }
}
