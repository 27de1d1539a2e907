//! Products whose parts are added up over all ranks.
//!
//! A stream waits, by memory operations, for chunks of the product that are for other ranks, and copies them.

#![allow(unsafe_code)] // passes on addresses, about which callers promise

use symmpool_allocator::{Result, Stream};

use super::{BLOCK_BYTES, GemmLaunch, MatmulControl};
use crate::MatmulScatter;
use crate::call::CallDescription;
use crate::call::matmul::{MAX_PROBLEMS, TILE_BYTES};
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::mode::MatmulMode;
use crate::cuda::layout::params::{GemmProblem, MatmulWork, StreamK, TensorMap};
use crate::jit::sources::MATMUL_SCATTER;

impl CudaEngine {
    /// Makes a product, and adds up each rank's part of it over all ranks.
    ///
    /// # Safety
    ///
    /// The matrices are readable or writable on the device until the stream has done the call, and nothing else touches them
    /// meanwhile; `parts` and `control` are windows, at the same place on all ranks.
    pub(crate) unsafe fn matmul_scatter(
        &mut self,
        call: CallDescription,
        scatter: &MatmulScatter<'_>,
        stream: Stream,
    ) -> Result<()> {
        let work =
            self.begin_gemm(scatter.check(), |engine| engine.scatter_work(scatter), stream)?;
        let gemm = GemmLaunch {
            kernel: &MATMUL_SCATTER,
            dtype: scatter.dtype,
            mode: MatmulMode::new(scatter.right_by_rows, scatter.out_dtype),
            call: &call,
            first_parts: self.world() - 1,
            scratch: scatter.scratch,
        };
        let send = |engine: &mut Self, copies| {
            // SAFETY: the caller promised that parts and control words are windows, until the call is done.
            unsafe { engine.send_parts(scatter, copies) }
        };
        // SAFETY: the caller promised that the matrices are there until the stream has done the call, that nothing else
        // touches them, and that `parts` and `control` are windows at one place; maps and parts have the sizes that the
        // product was checked for.
        unsafe { self.multiply(&gemm, work, stream, send) }
    }

    fn scatter_work(&self, scatter: &MatmulScatter<'_>) -> Result<MatmulWork> {
        let MatmulScatter { dtype, rows, columns, batches, .. } = *scatter;
        let (world, part) = (self.world(), scatter.part_bytes() as u64);
        let (tile_rows, tile_columns) = scatter.tiles();
        let mut problems = [GemmProblem::NONE; MAX_PROBLEMS];
        let mut inner_blocks = 0;
        for (problem, term) in problems.iter_mut().zip(scatter.terms) {
            let inner = term.inner;
            inner_blocks += (inner * dtype.size()).div_ceil(BLOCK_BYTES) as u32;
            let left = (term.left, (batches > 1).then_some(term.batch_pitch));
            let right = (term.right, scatter.right_by_rows);
            let batch_rows = world as usize * rows / batches;
            *problem = GemmProblem {
                left: self.left_map(dtype, left, (batches, batch_rows, inner))?,
                right: self.right_map(dtype, right, (inner, columns))?,
                end_block: inner_blocks,
                ..GemmProblem::NONE
            };
        }
        problems[0].out = self.out_map(scatter.out, (batches, rows / batches, columns))?;
        problems[0].right_scale = scatter.scales.1;
        Ok(MatmulWork {
            own: TensorMap::NONE,
            problems,
            left_scale: scatter.scales.0,
            outgoing: scatter.parts,
            incoming: scatter.parts + u64::from(world - 1) * part,
            part_bytes: part,
            gathered: 0,
            control: scatter.control,
            partials: 0,
            rows: rows as u32,
            batch_rows: (rows / batches) as u32,
            inner_blocks,
            tile_rows: tile_rows as u32,
            tile_columns: tile_columns as u32,
            chunk_tiles: scatter.chunk_tiles(world) as u32,
            chunks: scatter.chunks(world) as u32,
            factor: if scatter.mean { 1.0 / world as f32 } else { 1.0 },
            first_part: 0,
            end_part: world,
            split: StreamK::none(0),
        })
    }

    /// Copies each chunk to its rank when the kernel has made it.
    ///
    /// # Safety
    ///
    /// You must promise that the parts and the control words are windows of the same offset on all ranks, until the call is
    /// done.
    unsafe fn send_parts(&mut self, scatter: &MatmulScatter<'_>, copies: Stream) -> Result<()> {
        let (rank, world) = (self.rank(), self.world());
        let control = MatmulControl { begin: scatter.control, world: world.into() };
        let (part, each) = (scatter.part_bytes(), scatter.chunk_tiles(world));
        let all = part / TILE_BYTES;
        let entered = Some((control.entered(), 1));
        // SAFETY: the caller promised control words of this call in a window, which stays until the call is done.
        unsafe { self.memory_operations.write_and_await_own(None, entered, copies) }?;
        let mut sent = None;
        for distance in 1..world {
            let peer = (rank + distance) % world;
            for chunk in 0..scatter.chunks(world) {
                let tiles = each.min(all - chunk * each);
                // Both halves of every tile.
                let halves = 2 * tiles as u32;
                let finished = (control.finished(peer, chunk), halves);
                // SAFETY: the caller promised control words of this call in a window, which stays until the call is done.
                unsafe {
                    self.memory_operations.write_and_await_own(sent, Some(finished), copies)
                }?;
                let within = (chunk * each * TILE_BYTES) as u64;
                let from = scatter.parts + u64::from(distance - 1) * part as u64 + within;
                // The peer counts from itself on too.
                let theirs = u64::from(world - 1) + u64::from(world - distance - 1);
                let to = scatter.parts + theirs * part as u64 + within;
                let bytes = (tiles * TILE_BYTES) as u64;
                // SAFETY: the caller promised that the parts are windows. The chunk lies within the part for the peer, and within
                // the one that the peer has for this rank's, which nobody else writes.
                unsafe { self.copy_by_engine(self.at_peer(to, peer), from, bytes, copies) }?;
                sent = Some(control.sent(peer, chunk));
            }
        }
        // SAFETY: the caller promised control words of this call in a window, which stays until the call is done.
        unsafe { self.memory_operations.write_and_await_own(sent, None, copies) }
    }
}
