//! Products of tensor cores whose parts are added up over all ranks: `fused/matmul_scatter.cu`, and the copies behind it.
//!
//! One kernel makes the whole product, if the communicator has the device to itself; it waits at its end for what other
//! ranks have made, on all SMs. Where kernels of other communicators may need SMs meanwhile, two launches make the product:
//! the second one has this rank's own part, behind a kernel of one block that waits. Both give the same bits, and ranks may
//! differ in it.
//!
//! Two streams of the engine's wait in turn, by memory operations, for chunks of it that
//! are for other ranks, and copy them by copy engines; so one copy starts while the other one ends.

#![allow(unsafe_code)] // driver calls on raw addresses

use std::ffi::c_uint;

use cudarc::driver::sys;
use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Error, Result, Stream};

use super::engine::CudaEngine;
use super::kernel_mode::{KernelMode, MatmulMode};
use super::kernel_spec::KernelSpec;
use super::modules::cuda;
use super::params::{CallParams, MatmulWork, TensorMap};
use crate::host::call::Call;
use crate::jit::Arch;
use crate::jit::sources::{MATMUL_SCATTER, MATMUL_WAIT};
use crate::matmul::{CLUSTER, MOST_CHUNKS, TILE_BYTES};
use crate::{DType, MatmulScatter, ReduceOp, Rows};

/// Bytes of shared memory of a block, and 1024 more for their alignment: `SHARED_BYTES` in `fused/matmul.cuh`.
pub(super) const SHARED_BYTES: u32 = 3 * (128 + 256) * 128 + 65_536 + 30 * 16 + 1024;
/// Threads of a block.
const THREADS: u32 = 384;
/// And of the one that waits.
const WAIT_THREADS: u32 = 32;
/// Bytes of a row of a tile in shared memory.
const BLOCK_BYTES: usize = 128;
/// Streams that send in turn.
const SENDING_STREAMS: usize = 2;

/// Where words lie in the control memory: `MatmulControl` in `fused/matmul.cuh`.
struct Control {
    begin: u64,
    world: u64,
}

impl Control {
    fn finished(&self, rank: u32, chunk: usize) -> u64 {
        self.begin + 4 * (u64::from(rank) * MOST_CHUNKS as u64 + chunk as u64)
    }

    fn entered(&self, stream: usize) -> u64 {
        self.begin + 4 * self.world * MOST_CHUNKS as u64 + 4 * stream as u64
    }

    fn epoch(&self) -> u64 {
        self.entered(SENDING_STREAMS)
    }

    fn arrived(&self, rank: u32, chunk: usize) -> u64 {
        self.epoch() + 8 + 8 * (u64::from(rank) * MOST_CHUNKS as u64 + chunk as u64)
    }
}

impl CudaEngine {
    /// Whether the device multiplies by the instructions that the kernel has.
    pub(crate) fn has_tensor_kernels(&self) -> bool {
        Arch::new(9, 0).is_ok_and(|hopper| self.arch() == hopper)
    }

    /// Makes a product, and adds up each rank's part of it over all ranks.
    ///
    /// # Safety
    ///
    /// The matrices are readable or writable on the device until the stream has done the call, and nothing else touches them
    /// meanwhile; `parts` and `control` are windows, at the same place on all ranks.
    pub(crate) unsafe fn matmul_scatter(
        &mut self,
        call: Call,
        product: &MatmulScatter,
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        let (rank, world) = (self.rank(), self.world());
        let checked = product.check().and_then(|()| {
            if self.has_tensor_kernels() {
                return Ok(());
            }
            Err(Error::unsupported(format!(
                "a product of tensor cores on rank {rank}: its kernel is for devices of compute capability 9.0, and this \
                 one is of {}",
                self.arch()
            )))
        });
        let maps = checked.and_then(|()| self.tensor_maps(product));
        let (left, right, out) = match maps {
            Ok(maps) => maps,
            Err(why) => return Err(self.decline(why, stream)),
        };
        let kernel = self.kernel(spec(product, self.has_clusters()?))?;
        let apart = world > 1 && !kernel.budget.early;
        let MatmulScatter { rows, inner, columns, .. } = *product;
        tracing::debug!(rows, inner, columns, apart, "matmul_reduce_scatter by tensor cores");
        // Loaded before anything is on streams: loading may wait for what runs.
        let wait = if apart { Some(self.kernel(wait_spec())?) } else { None };
        let control = Control { begin: product.control, world: world.into() };
        let part = product.part_bytes() as u64;
        let all_sent = u64::from(world - 1) * part;
        let (tile_rows, tile_columns) = product.tiles();
        let size = product.dtype.size();
        let work = MatmulWork {
            left,
            right,
            out,
            left_scale: product.scales.0,
            right_scale: product.scales.1,
            outgoing: product.parts,
            incoming: product.parts + all_sent,
            part_bytes: part,
            control: product.control,
            rows: product.rows as u32,
            inner_blocks: (product.inner * size).div_ceil(BLOCK_BYTES) as u32,
            tile_rows: tile_rows as u32,
            tile_columns: tile_columns as u32,
            chunk_tiles: product.chunk_tiles() as u32,
            factor: if product.mean { 1.0 / world as f32 } else { 1.0 },
            first_part: 0,
            end_part: if apart { world - 1 } else { world },
        };
        let params = CallParams::of(&call);
        let most = kernel.processors as usize / CLUSTER * CLUSTER;
        let grid =
            |parts: u32| ((parts as usize * tile_rows * tile_columns).min(most) as u32, THREADS);
        let sending = [self.copy_stream, self.result_stream];
        if world > 1 {
            // What peers wrote or read in an earlier call is over when this one begins, also for the copies.
            sending.iter().try_for_each(|&copies| self.fork(stream, copies))?;
        }
        // SAFETY: the caller's promise; maps and parts have the sizes that the product was checked for.
        unsafe { self.launch_with_work(kernel, grid(work.end_part), &params, &work, stream) }?;
        if world == 1 {
            return Ok(());
        }
        // The other ranks wait for what was not sent, and this one for what it has not made.
        let sent = self.send_chunks(product, &control, sending).and_then(|()| {
            if let Some(wait) = wait {
                let own = MatmulWork { first_part: world - 1, end_part: world, ..work };
                let one = (1, WAIT_THREADS);
                // SAFETY: as above.
                unsafe { self.launch_with_work(wait, one, &params, &own, stream) }?;
                // SAFETY: as above.
                unsafe { self.launch_with_work(kernel, grid(1), &params, &own, stream) }?;
            }
            sending.iter().try_for_each(|&copies| self.fork(copies, stream))
        });
        self.or_close(sent)
    }

    /// Copies each chunk to its rank when the kernel has made it, and then the call's epoch.
    fn send_chunks(
        &mut self,
        product: &MatmulScatter,
        control: &Control,
        sending: [Stream; SENDING_STREAMS],
    ) -> Result<()> {
        let (rank, world) = (self.rank(), self.world());
        let (part, each) = (product.part_bytes(), product.chunk_tiles());
        let all = part / TILE_BYTES;
        for (nth, copies) in sending.into_iter().enumerate() {
            self.memory_operations.await_own(control.entered(nth), 1, copies)?;
        }
        let mut streams = sending.into_iter().cycle();
        for distance in 1..world {
            let peer = (rank + distance) % world;
            for chunk in 0..all.div_ceil(each) {
                let Some(copies) = streams.next() else { break };
                let tiles = each.min(all - chunk * each);
                // Both halves of every tile.
                let halves = 2 * tiles as u32;
                self.memory_operations.await_own(control.finished(peer, chunk), halves, copies)?;
                let within = (chunk * each * TILE_BYTES) as u64;
                let from = product.parts + u64::from(distance - 1) * part as u64 + within;
                // The peer counts from itself on too.
                let theirs = u64::from(world - 1) + u64::from(world - distance - 1);
                let to = self.at_peer(product.parts + theirs * part as u64 + within, peer);
                let bytes = (tiles * TILE_BYTES) as u64;
                // SAFETY: both are within the parts, which the caller promised are windows.
                unsafe { self.copy_outside_calls(to, from, bytes, copies) }?;
                let arrived = self.at_peer(control.arrived(rank, chunk), peer);
                // SAFETY: both are words of the control memory, which the caller promised is a window.
                unsafe { self.copy_outside_calls(arrived, control.epoch(), 8, copies) }?;
            }
        }
        Ok(())
    }

    /// How the driver describes the three matrices.
    fn tensor_maps(&self, product: &MatmulScatter) -> Result<(TensorMap, TensorMap, TensorMap)> {
        let MatmulScatter { rows, inner, columns, .. } = *product;
        let size = product.dtype.size();
        let across = BLOCK_BYTES / size;
        let left = self.tensor_map(
            product.left,
            (rows * self.world() as usize, inner),
            (128, across, size),
        )?;
        let right = if product.right_by_rows {
            self.tensor_map(product.right, (inner, columns), (64, across, size))?
        } else {
            self.tensor_map(product.right, (columns, inner), (128, across, size))?
        };
        Ok((left, right, self.tensor_map(product.out, (rows, columns), (64, 64, 2))?))
    }

    /// Describes a matrix of so many rows and columns, which is copied in boxes of `box_rows` rows and `box_columns` columns
    /// of elements of `size` bytes.
    fn tensor_map(
        &self,
        matrix: Rows,
        (rows, columns): (usize, usize),
        (box_rows, box_columns, size): (usize, usize, usize),
    ) -> Result<TensorMap> {
        use sys::CUtensorMapDataType as Type;
        let mut map = TensorMap([0; 16]);
        // The type decides only what is added where copies reduce, which none does here.
        let kind = if size == 1 {
            Type::CU_TENSOR_MAP_DATA_TYPE_UINT8
        } else {
            Type::CU_TENSOR_MAP_DATA_TYPE_UINT16
        };
        let (sizes, pitch) = ([columns as u64, rows as u64], matrix.pitch);
        let (boxes, steps) = ([box_columns as u32, box_rows as u32], [1_u32, 1]);
        let swizzle = sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B as c_uint;
        let promotion = sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B as c_uint;
        let api = self.api;
        cuda(self.pool.driver())?.with_context(|| {
            // SAFETY: the map is 128 bytes at a multiple of 64, and the arrays have two members each, of which the pitches need
            // one; the matrix's address is only noted.
            let code = unsafe {
                (api.tensor_map)(
                    (&raw mut map).cast(),
                    kind as c_uint,
                    2,
                    matrix.begin,
                    sizes.as_ptr(),
                    &raw const pitch,
                    boxes.as_ptr(),
                    steps.as_ptr(),
                    0,
                    swizzle,
                    promotion,
                    0,
                )
            };
            CudaDriver::check(code, || {
                format!("describing {matrix:?} of {rows} x {columns} elements")
            })
        })?;
        Ok(map)
    }
}

fn wait_spec() -> KernelSpec {
    KernelSpec::new(&MATMUL_WAIT, WAIT_THREADS)
}

fn spec(product: &MatmulScatter, clusters: bool) -> KernelSpec {
    let mode = MatmulMode {
        right_by_rows: product.right_by_rows,
        output_f16: product.out_dtype == DType::F16,
        clusters,
    };
    KernelSpec {
        mode: KernelMode::Matmul(mode),
        threads: THREADS,
        ..KernelSpec::reduces(&MATMUL_SCATTER, (product.dtype, ReduceOp::Sum))
    }
}
