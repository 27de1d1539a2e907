//! All-reduces in one shot through inboxes: every rank reduces everything.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use super::constraints::{always, fits_lamport};
use super::row::{AllReduce, AllReduceCall, Cases};
use crate::AllReduceAlgorithm as Name;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::spec::KernelSpec;
use crate::jit::kernel_beside;
use crate::jit::sources::{
    BOTH, F32, KernelSource, LAMPORT, LAMPORT_DTYPES, LL, ONE, OTHERS, SOME_DTYPES, SUM, WIDE,
    WORLDS_OF_2_AND_8,
};

/// All-reduce in one shot through inboxes.
pub(in crate::cuda) const KERNEL: KernelSource<'static> = kernel_beside!(
    "all_reduce" / "one_shot",
    [WORLDS_OF_2_AND_8, SOME_DTYPES, SUM, WIDE, ONE, LL],
    [WORLDS_OF_2_AND_8, LAMPORT_DTYPES, SUM, WIDE, ONE, LAMPORT],
    [OTHERS, F32, SUM, WIDE, ONE, BOTH],
    // An average of integers divides.
    [("WORLD", &["4"]), ("DTYPE", &["6"]), ("OP", &["5"]), WIDE, ONE, LL],
);

/// Row of the Lamport protocol.
pub(super) const LAMPORT_ROW: AllReduce = AllReduce {
    name: Name::OneShotLamport,
    one_of: Some(Name::OneShot),
    fits: |shape, control| {
        fits_lamport(shape.dtype) && shape.one_shot_vectors() <= control.lamport_vectors()
    },
    pays_off: always,
    most_bytes: |_, _| u64::MAX,
    kernel: |_, of, _| KernelSpec { lamport: true, ..KernelSpec::reduces(&KERNEL, of) },
    launch,
    cases: Cases::USUAL,
};

/// Row of the LL protocol.
pub(super) const LL_ROW: AllReduce = AllReduce {
    name: Name::OneShotLl,
    one_of: Some(Name::OneShot),
    fits: |shape, control| shape.one_shot_vectors() <= control.ll_vectors(),
    pays_off: always,
    most_bytes: |_, _| u64::MAX,
    kernel: |_, of, _| KernelSpec::reduces(&KERNEL, of),
    launch,
    cases: Cases::USUAL,
};

/// # Safety
///
/// You must keep the promises of [`AllReduceCall`].
unsafe fn launch(engine: &mut dyn KernelLauncher, call: &AllReduceCall) -> Result<()> {
    // Small blocks start and end sooner.
    // SAFETY: the caller promised that the input and output of the call are there until the stream has done it.
    unsafe { call.in_threads(engine, call.work.bytes.div_ceil(16), 32) }
}
