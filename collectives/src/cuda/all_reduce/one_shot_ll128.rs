//! The all-reduce in one shot in the LL128 protocol.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use super::constraints::always;
use super::row::{AllReduce, AllReduceCall, Cases};
use crate::AllReduceAlgorithm as Name;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::params::LL128_PAYLOAD;
use crate::jit::kernel_beside;
use crate::jit::sources::{F32, KernelSource, OTHERS, SOME_DTYPES, SUM, WIDE, WORLDS_OF_2_AND_8};

/// All-reduce in one shot in the LL128 protocol.
pub(in crate::cuda) const KERNEL: KernelSource<'static> = kernel_beside!(
    "all_reduce" / "one_shot_ll128",
    [WORLDS_OF_2_AND_8, SOME_DTYPES, SUM, WIDE],
    [OTHERS, F32, SUM, WIDE],
);

pub(super) const ROW: AllReduce = AllReduce {
    name: Name::OneShotLl128,
    one_of: Some(Name::OneShot),
    // A line of 128 bytes has one flag, so it must arrive whole; buses other than NVLink may tear it.
    fits: |shape, control| {
        let lines = u64::from(shape.world) * shape.bytes.div_ceil(LL128_PAYLOAD);
        shape.nvlinked && lines <= control.ll128_lines()
    },
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
    // Eight threads handle a line.
    let threads = call.work.bytes.div_ceil(LL128_PAYLOAD) * 8;
    // SAFETY: the caller promised that the input and output of the call are there until the stream has done it.
    unsafe { call.in_threads(engine, threads, 64) }
}
