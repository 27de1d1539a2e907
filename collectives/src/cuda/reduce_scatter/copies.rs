//! The reduce-scatter by copy engines, with kernels that reduce between copies (`ops/copy_engine`).

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::Result;

use super::row::{ReduceScatter, ScatterCases};
use crate::algorithm::COPY;
use crate::cuda::all_reduce::two_shot_copy;
use crate::cuda::kernel::launcher::KernelLauncher;
use crate::cuda::kernel::reduction_call::ReductionCall;
use crate::cuda::kernel::spec::KernelSpec;

/// Bytes of a part from which on copy engines carry it, if scratch has room for as many at once. On two H200s 32 MiB take 123 us
/// by copies and 125 in stages, 64 MiB 214 and 222, 128 MiB 392 and 441.
const MIN_COPIED_BYTES: u64 = 48 << 20;
/// Bytes of parts from which on copy engines carry them in pieces beside compute. A step of matrix products of two
/// H200s beside 32 MiB takes 0.97 of what it takes beside NCCL's, and 1.05 beside stages.
const MIN_PIECES_BYTES: u64 = 32 << 20;

pub(super) const ROW: ReduceScatter = ReduceScatter {
    id: COPY,
    fits: |_, _| true,
    needs: "",
    pays_off: |shape| match shape.beside_compute {
        false => shape.world == 2 && shape.part.min(shape.room) >= MIN_COPIED_BYTES,
        true => shape.in_pieces && shape.part >= MIN_PIECES_BYTES,
    },
    kernel: |_, of| KernelSpec::reduces(&two_shot_copy::KERNEL, of),
    launch,
    cases: ScatterCases { by_copies: true, ..ScatterCases::ANY },
};

/// # Safety
///
/// You must keep the promises of [`ReductionCall`].
unsafe fn launch(engine: &mut dyn KernelLauncher, work: &ReductionCall) -> Result<()> {
    // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
    unsafe { engine.copy_reduce_scatter(work) }
}
