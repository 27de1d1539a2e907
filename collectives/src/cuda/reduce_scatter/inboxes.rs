//! Reduce-scatters through inboxes, in one hop.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use super::row::{ReduceScatter, ScatterCases};
use super::scatter_shape::ScatterShape;
use crate::algorithm::{LAMPORT, LL};
use crate::cuda::all_reduce::constraints::fits_lamport;
use crate::cuda::all_reduce::two_shot::one_of_two_shots;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::mode::TwoShotCollective;
use crate::cuda::kernel::reduction_call::ReductionCall;
use crate::cuda::kernel::spec::{KernelSpec, MANY_BYTES};

/// Reduce-scatters of parts of no more bytes go through inboxes if they take few launches. On four H200s parts of 8 MiB take 84
/// us so and 92 in stages, and parts of 16 MiB 167 and 174.
const SCATTER_BYTES: u64 = 16 << 20;
const MAX_SCATTER_LAUNCHES: u64 = 4;
/// LL sends twice the bytes that it carries; Lamport does not.
const MAX_LL_BYTES: u64 = 64 << 10;

/// Row of the Lamport protocol.
pub(super) const LAMPORT_ROW: ReduceScatter = ReduceScatter {
    id: LAMPORT,
    fits: |dtype, _| fits_lamport(dtype),
    needs: "it carries floats of up to 32 bits",
    pays_off: |shape| shape.lamport && takes_few_launches(shape, most_bytes(shape.world)),
    kernel: |world, of| KernelSpec::two_shot(world, of, TwoShotCollective::ReduceScatter, true, 0),
    launch: launch_lamport,
    cases: ScatterCases { lamport_types: true, ..ScatterCases::ANY },
};

/// Row of the LL protocol.
pub(super) const LL_ROW: ReduceScatter = ReduceScatter {
    id: LL,
    fits: |_, _| true,
    needs: "",
    pays_off: |shape| !shape.lamport && takes_few_launches(shape, MAX_LL_BYTES),
    kernel: |world, of| KernelSpec::two_shot(world, of, TwoShotCollective::ReduceScatter, false, 0),
    launch: launch_ll,
    cases: ScatterCases::ANY,
};

fn takes_few_launches(shape: &ScatterShape, most: u64) -> bool {
    shape.part <= most.min(MAX_SCATTER_LAUNCHES * shape.launch)
}

/// Most bytes of a part of a reduce-scatter through Lamport inboxes. More than four ranks were not measured.
fn most_bytes(world: u32) -> u64 {
    let peers = u64::from(world) - 1;
    if world <= 4 { SCATTER_BYTES } else { MANY_BYTES.max(SCATTER_BYTES / peers) }
}

/// # Safety
///
/// You must keep the promises of [`ReductionCall`].
unsafe fn launch_lamport(engine: &mut dyn KernelLauncher, work: &ReductionCall) -> Result<()> {
    // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
    unsafe { one_of_two_shots(engine, work, TwoShotCollective::ReduceScatter, true) }
}

/// # Safety
///
/// You must keep the promises of [`ReductionCall`].
unsafe fn launch_ll(engine: &mut dyn KernelLauncher, work: &ReductionCall) -> Result<()> {
    // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
    unsafe { one_of_two_shots(engine, work, TwoShotCollective::ReduceScatter, false) }
}
