//! Fused all-reduces on a device: which kernel runs, and what it is given.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::{Error, Result, Stream};

use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use crate::cuda::kernel::mode::{KernelMode, NormMode};
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::params::{CallParams, NormWork};
use crate::jit::KernelSource;
use crate::jit::sources::{NORM_ONE_SHOT, NORM_TWO_SHOT};
use crate::{FusedAlgorithm, NormBuffers, NormOutput, NormShape, ReduceOp};

impl CudaEngine {
    /// Adds up every rank's rows, and a bias and the residual to them, and norms the rows.
    ///
    /// # Safety
    ///
    /// The buffers are readable or writable on the device for the shape, until the stream has done the call; nothing else
    /// touches them meanwhile.
    pub(crate) unsafe fn all_reduce_norm(
        &mut self,
        shape: &NormShape,
        buffers: &NormBuffers,
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        let (rank, world) = (self.rank(), self.world());
        let checked = shape.check(buffers, rank).and_then(|()| self.rows_of_launch(shape));
        let (algorithm, most) = match checked {
            Ok(found) => found,
            Err(why) => return Err(self.decline(why, stream)),
        };
        let call = shape.describe(buffers, algorithm);
        if shape.tokens == 0 {
            return self.handshake_only(call, stream);
        }
        let file =
            if algorithm == FusedAlgorithm::TwoShot { &NORM_TWO_SHOT } else { &NORM_ONE_SHOT };
        let kernel = self.kernel(spec(file, shape, world))?;
        let (bytes, output, max_sms) = (shape.bytes(), shape.output.name(), self.max_sms());
        tracing::debug!(bytes, output, algorithm = algorithm.name(), max_sms, "all_reduce_norm");
        let mut from = 0;
        while from < shape.tokens {
            let tokens = most.min(shape.tokens - from);
            let params = CallParams {
                input: buffers.input as u64 + (from * shape.row_bytes()) as u64,
                output: behind(buffers.output, from * shape.output_row_bytes()),
                bytes: (tokens * shape.row_bytes()) as u64,
                ..CallParams::of(&call)
            };
            let work = work(shape, buffers, from, tokens);
            let rows = match algorithm {
                FusedAlgorithm::TwoShot => tokens.div_ceil(world as usize),
                _ => tokens,
            };
            let grid = grid(&kernel, shape.threads() as u32, rows);
            // SAFETY: the caller promised that the buffers are there for the rows of `shape` until the stream has done
            // the call; the range lies within them, and the kernel takes such work.
            unsafe { self.launch_with_work(kernel, grid, &params, &work, stream) }?;
            from += tokens;
        }
        Ok(())
    }

    /// The algorithm of a call, and how many rows one launch of it takes through the inboxes.
    fn rows_of_launch(&self, shape: &NormShape) -> Result<(FusedAlgorithm, usize)> {
        let world = u64::from(self.world());
        if world == 1 {
            return Ok((FusedAlgorithm::OneShot, shape.tokens));
        }
        let vectors = (shape.row_bytes() / 16) as u64;
        let inbox = self.control.inbox_vectors(true);
        let one_shot = inbox / world / vectors;
        let two_shot = inbox / 2 / world / vectors * world;
        let algorithm = match shape.algorithm {
            FusedAlgorithm::Auto => chosen(shape.tokens as u64, world, (one_shot, two_shot)),
            requested => requested,
        };
        let most = if algorithm == FusedAlgorithm::TwoShot { two_shot } else { one_shot };
        if most == 0 {
            return Err(Error::unsupported(format!(
                "all_reduce_norm of rows of {} bytes on rank {} by {}: {world} ranks' inboxes of {} bytes have no room \
                 for a row of each; make the communicator with more memory",
                shape.row_bytes(),
                self.rank(),
                algorithm.name(),
                16 * inbox
            )));
        }
        // Launches of about equal length.
        let tokens = shape.tokens as u64;
        let launches = tokens.div_ceil(most).max(1);
        Ok((algorithm, (tokens.div_ceil(launches)).max(1) as usize))
    }
}

/// Chooses an algorithm for `auto` and `rows` rows. `one_shot` and `two_shot` are the rows that one launch has room for by each:
/// rows may be so long that only one shot has room for any.
fn chosen(rows: u64, world: u64, (one_shot, two_shot): (u64, u64)) -> FusedAlgorithm {
    let fits = rows <= one_shot && one_shot_is_faster(rows, world);
    if fits || two_shot == 0 { FusedAlgorithm::OneShot } else { FusedAlgorithm::TwoShot }
}

/// Whether rows come sooner in one shot. Between two ranks it moves no more than two shots do. More ranks send and norm each
/// row more often in it, which takes longer from some number of rows on, whatever their length is: four H200s need the
/// same time for 64 rows of 8192 elements, and with 4096 elements one shot is faster with 64 rows and slower with 128.
fn one_shot_is_faster(rows: u64, world: u64) -> bool {
    world == 2 || rows * (world - 1) <= 3 * 64
}

fn spec(file: &'static KernelSource<'static>, shape: &NormShape, world: u32) -> KernelSpec {
    let (units, held) = shape.units(world);
    let mode = NormMode { output: shape.output, units: units as u8, held };
    KernelSpec {
        mode: KernelMode::Norm(mode),
        lamport: true,
        threads: shape.threads() as u32,
        ..KernelSpec::reduces(file, (shape.dtype, ReduceOp::Sum))
    }
}

/// A block for each row, and the leader block, as far as all of them run at once and within the SM budget.
fn grid(kernel: &LoadedKernel, threads: u32, rows: usize) -> (u32, u32) {
    let most = kernel.resident(threads).min(kernel.budget.most_blocks).max(2) - 1;
    (rows.min(most as usize) as u32 + 1, threads)
}

/// The address `bytes` bytes behind another, or 0 where that is null.
fn behind(at: *const u8, bytes: usize) -> u64 {
    if at.is_null() { 0 } else { at as u64 + bytes as u64 }
}

/// The arguments for a range of the rows.
fn work(shape: &NormShape, buffers: &NormBuffers, from: usize, tokens: usize) -> NormWork {
    let rows = from * shape.row_bytes();
    let scales = match shape.output {
        NormOutput::Fp8Static => buffers.scales as u64,
        _ => behind(buffers.scales.cast(), 4 * from * buffers.token_stride),
    };
    NormWork {
        residual: behind(buffers.residual, rows),
        weight: buffers.weight as u64,
        bias: buffers.bias as u64,
        residual_out: behind(buffers.residual_out, rows),
        norm_out: behind(buffers.norm_out, rows),
        scales,
        scale_row: buffers.token_stride as u64,
        scale_group: buffers.group_stride as u64,
        tokens: tokens as u32,
        hidden: shape.hidden as u32,
        epsilon: shape.epsilon,
        weight_bias: shape.weight_bias,
        powers_of_two: shape.powers_of_two.into(),
        unused: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::{FusedAlgorithm, chosen, one_shot_is_faster};

    #[test]
    fn rows_for_which_two_shots_have_no_room_go_in_one() {
        let (one, two) = (FusedAlgorithm::OneShot, FusedAlgorithm::TwoShot);
        for (rows, world, room, wanted) in [
            (1, 2, (1, 0), one),
            // Several launches take these rows.
            (5, 2, (1, 0), one),
            (1000, 8, (3, 0), one),
            (1000, 8, (10, 8), two),
            (20, 8, (10, 8), two),
            (20, 8, (20, 16), one),
        ] {
            assert_eq!(chosen(rows, world, room), wanted, "{rows} rows of {world}, {room:?}");
        }
    }

    #[test]
    fn few_rows_go_in_one_shot_and_fewer_of_more_ranks() {
        assert!(one_shot_is_faster(1 << 20, 2), "two ranks gain nothing by two shots");
        for (world, most) in [(3, 96), (4, 64), (8, 27)] {
            assert!(one_shot_is_faster(most, world) && !one_shot_is_faster(most + 1, world));
        }
    }
}
