//! The all-reduce in two shots by copy engines, with kernels that reduce between copies (`ops/copy_engine`).

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use super::constraints::{MIN_COPY_BYTES, at_once};
use super::row::{AllReduce, AllReduceCall, Cases};
use crate::AllReduceAlgorithm as Name;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::spec::KernelSpec;
use crate::jit::kernel_beside;
use crate::jit::sources::{F32, KernelSource, OTHERS, SOME_DTYPES, SUM, WIDE, WORLDS_OF_2_AND_8};

/// Bytes of a longer call, of all ranks' shares together, that scratch must hold at once for copy engines to
/// be worth their start-up time in every round. From `cuda_collectives bench` on 4 H200s.
const COPY_ROUND_BYTES: u64 = 256 << 20;

/// Reduces what copy engines carry of an all-reduce.
pub(in crate::cuda) const KERNEL: KernelSource<'static> = kernel_beside!(
    "all_reduce" / "two_shot_copy",
    [WORLDS_OF_2_AND_8, SOME_DTYPES, SUM, WIDE],
    [OTHERS, F32, SUM, WIDE],
);

pub(super) const ROW: AllReduce = AllReduce {
    // In pieces, as into ordinary memory, it pays off for calls during compute only.
    name: Name::TwoShotCopy,
    one_of: None,
    fits: |shape, _| {
        let served = shape.output_window || shape.streams_may_wait;
        shape.world > 1 && shape.bytes >= MIN_COPY_BYTES && served
    },
    pays_off: |shape, control| {
        shape.output_window && at_once(shape, control) >= shape.bytes.min(COPY_ROUND_BYTES)
    },
    most_bytes: |_, _| u64::MAX,
    kernel: |_, of, _| KernelSpec::reduces(&KERNEL, of),
    launch,
    // There is no room for more pieces than these.
    cases: Cases { count: 1_000_000, min_count: 600_000, by_copies: true, ..Cases::USUAL },
};

/// # Safety
///
/// You must keep the promises of [`AllReduceCall`].
unsafe fn launch(engine: &mut dyn KernelLauncher, call: &AllReduceCall) -> Result<()> {
    // SAFETY: the caller promised that the input and output of the call are there until the stream has done it.
    unsafe { engine.copy_all_reduce(call.work, call.output_window) }
}
