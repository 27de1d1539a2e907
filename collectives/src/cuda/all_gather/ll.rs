//! All-gathers and broadcasts in one shot of the LL protocol, by the kernel of the all-reduce `two_shot_ll`.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use crate::algorithm::LL;
use crate::cuda::all_reduce::two_shot::one_of_two_shots;
use crate::cuda::all_to_all::row::{Exchange, Use};
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::mode::TwoShotCollective;
use crate::cuda::kernel::reduction_call::ReductionCall;
use crate::cuda::kernel::spec::KernelSpec;
use crate::{DType, ReduceOp};

/// Most bytes that a rank sends to all its peers together in the LL protocol, which sends twice as many as it
/// carries. On two H200s, an all-gather of 8 KiB parts takes 2.7 us in LL and 3.5 us in escaped Lamport; of
/// 512 KiB parts 6.3 us and 4.3 us.
pub(in crate::cuda) const LL_BYTES: u64 = 128 << 10;

pub(in crate::cuda) static ROW: Exchange =
    Exchange { id: LL, ll: Use::Always, ..Exchange::DIRECTLY };

/// Whether a call with parts of `bytes` bytes goes in the LL protocol, among `world` ranks.
pub(in crate::cuda) fn serves(by: &Exchange, bytes: u64, world: u32) -> bool {
    let sent = bytes.saturating_mul(u64::from(world) - 1);
    let wanted = match by.ll {
        Use::Never => false,
        Use::WhereFaster => sent <= LL_BYTES,
        Use::Always => true,
    };
    bytes == 0 || world > 1 && wanted
}

/// The kernel of all-gathers, or of broadcasts. Nothing is reduced, so one serves all element types.
pub(in crate::cuda) fn kernel(world: u32, collective: TwoShotCollective) -> KernelSpec {
    KernelSpec::two_shot(world, (DType::U8, ReduceOp::Sum), collective, false, 0)
}

/// Launches a call that has data.
///
/// # Safety
///
/// You must keep the promises of [`ReductionCall`].
pub(in crate::cuda) unsafe fn launch(
    engine: &mut dyn KernelLauncher,
    work: &ReductionCall,
    collective: TwoShotCollective,
) -> Result<()> {
    // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
    unsafe { one_of_two_shots(engine, work, collective, false) }
}
