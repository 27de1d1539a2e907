//! Products of the rows of all ranks.
//!
//! A stream copies this rank's rows to the others when all ranks have begun the call.

#![allow(unsafe_code)] // passes on addresses, about which callers promise

use symmpool_allocator::{Result, Stream};

use super::{BLOCK_BYTES, GemmLaunch, MatmulControl};
use crate::call::CallDescription;
use crate::call::matmul::MAX_PROBLEMS;
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::mode::MatmulMode;
use crate::cuda::layout::params::{GemmProblem, MatmulWork, StreamK};
use crate::jit::sources::MATMUL_GATHER;
use crate::{MatmulGather, MatrixView};

impl CudaEngine {
    /// Gathers the rows of all ranks, and multiplies them.
    ///
    /// # Safety
    ///
    /// The matrices are readable or writable on the device until the stream has done the call, and nothing else touches them
    /// meanwhile; `slots` and `control` are windows, at the same place on all ranks.
    pub(crate) unsafe fn matmul_gather(
        &mut self,
        call: CallDescription,
        gather: &MatmulGather<'_>,
        stream: Stream,
    ) -> Result<()> {
        let work = self.begin_gemm(gather.check(), |engine| engine.gather_work(gather), stream)?;
        let gemm = GemmLaunch {
            kernel: &MATMUL_GATHER,
            dtype: gather.dtype,
            mode: MatmulMode::new(gather.right_by_rows, gather.out_dtype),
            call: &call,
            first_parts: 1,
            scratch: gather.scratch,
        };
        let send = |engine: &mut Self, copies| {
            // SAFETY: the caller promised that the rows are readable and that slots and control words are windows, until the call is
            // done.
            unsafe { engine.send_rows(gather, copies) }
        };
        // SAFETY: the caller promised that the matrices are there until the stream has done the call, that nothing else
        // touches them, and that `slots` and `control` are windows at one place; maps and slots have the sizes that the
        // products were checked for.
        unsafe { self.multiply(&gemm, work, stream, send) }
    }

    fn gather_work(&self, gather: &MatmulGather<'_>) -> Result<MatmulWork> {
        let MatmulGather { dtype, rows, batches, inner, .. } = *gather;
        let world = self.world();
        let slots = MatrixView { begin: gather.slots, pitch: gather.left.pitch };
        let own = self.left_map(dtype, (gather.left, None), (1, rows, inner))?;
        // A single rank has no slots, and nothing is loaded from them.
        let left = if world == 1 {
            own
        } else {
            self.left_map(dtype, (slots, None), (world as usize, rows, inner))?
        };
        let inner_blocks = (inner * dtype.size()).div_ceil(BLOCK_BYTES) as u32;
        let mut problems = [GemmProblem::NONE; MAX_PROBLEMS];
        for (nth, (problem, each)) in problems.iter_mut().zip(gather.rights).enumerate() {
            let right = (each.right, gather.right_by_rows);
            *problem = GemmProblem {
                left,
                right: self.right_map(dtype, right, (inner, each.columns))?,
                out: self
                    .out_map(each.out, (world as usize * batches, rows / batches, each.columns))?,
                right_scale: each.scale,
                end_column: MatmulGather::tile_columns(&gather.rights[..=nth]) as u32,
                end_block: inner_blocks,
            };
        }
        Ok(MatmulWork {
            own,
            problems,
            left_scale: gather.left_scale,
            outgoing: gather.left.begin,
            incoming: gather.slots,
            part_bytes: gather.part_bytes() as u64,
            gathered: gather.gathered,
            control: gather.control,
            partials: 0,
            rows: rows as u32,
            batch_rows: (rows / batches) as u32,
            inner_blocks,
            tile_rows: gather.tile_rows() as u32,
            tile_columns: MatmulGather::tile_columns(gather.rights) as u32,
            chunk_tiles: gather.chunk_tiles() as u32,
            chunks: gather.chunks() as u32,
            factor: 1.0,
            first_part: 0,
            end_part: world,
            split: StreamK::none(0),
        })
    }

    /// Copies this rank's rows to all others, the next one first.
    ///
    /// # Safety
    ///
    /// You must promise that the rows are readable, and that the slots and the control words are windows of the same offset on
    /// all ranks, until the call is done.
    unsafe fn send_rows(&mut self, gather: &MatmulGather<'_>, copies: Stream) -> Result<()> {
        let (rank, world) = (self.rank(), self.world());
        let control = MatmulControl { begin: gather.control, world: world.into() };
        let part = gather.part_bytes() as u64;
        let slot = |of: u32| gather.slots + u64::from(of) * part;
        let entered = Some((control.entered(), 1));
        // SAFETY: the caller promised control words of this call in a window, which stays until the call is done.
        unsafe { self.memory_operations.write_and_await_own(None, entered, copies) }?;
        for distance in 1..world {
            let peer = (rank + distance) % world;
            for chunk in 0..gather.chunks() {
                let (begin, end) = gather.chunk(chunk);
                let (from, to) =
                    (gather.left.begin + begin, self.at_peer(slot(rank) + begin, peer));
                // SAFETY: the caller promised that the rows are readable and that the slots are windows. A chunk lies within both,
                // and this rank alone writes its slots.
                unsafe { self.copy_by_engine(to, from, end - begin, copies) }?;
                let sent = control.sent(peer, chunk);
                // SAFETY: the caller promised control words of this call in a window, which stays until the call is done.
                unsafe { self.memory_operations.write_and_await_own(Some(sent), None, copies) }?;
            }
        }
        Ok(())
    }
}
