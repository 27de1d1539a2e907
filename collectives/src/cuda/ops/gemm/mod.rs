//! Products of tensor cores with parts for or of different ranks: kernels of `fused/`, and the copies that run meanwhile.
//!
//! | file | what is in it |
//! | --- | --- |
//! | `scatter` | products that are added up over all ranks: `fused/matmul_scatter.cu` |
//! | `gather` | products of the rows of all ranks: `fused/matmul_gather.cu` |
//! | `small_m` | products of few rows, added up over all ranks: `fused/matmul_small_m.cu` |
//! | `stream_k` | how tiles that fill no whole wave are divided among the blocks |
//!
//! One kernel makes the whole product, if the communicator has the device to itself; it waits at its end for what other
//! ranks send, on all SMs. Where kernels of other communicators may need SMs meanwhile, two launches make the product: the
//! second one has the parts that wait, behind a kernel of one block that waits for them. Both give the same bits, and ranks
//! may differ in it.
//!
//! A stream of the engine's sends, by copy engines: one copy at a time, as several share the links, and the first one would
//! arrive with the last.

#![allow(unsafe_code)] // driver calls on raw addresses

mod gather;
mod scatter;
pub(in crate::cuda) mod small_m;
mod stream_k;

use std::ffi::c_uint;

use cudarc::driver::sys;
use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Error, Result, Stream};

use crate::call::CallDescription;
use crate::call::matmul::{CLUSTER, MAX_CHUNKS, MAX_PARTIAL_TILES, SUMS_BYTES};
use crate::cuda::driver::api::cuda;
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::mode::{KernelMode, MatmulMode};
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::params::{CallParams, MatmulWork, StreamK, TensorMap};
use crate::jit::sources::MATMUL_WAIT;
use crate::jit::{Arch, KernelSource};
use crate::{DType, MatrixView, ReduceOp};

/// Threads of a block.
const THREADS: u32 = 384;
/// Threads of the block that waits.
const WAIT_THREADS: u32 = 32;
/// Bytes of a row of a tile in shared memory.
const BLOCK_BYTES: usize = 128;

/// Where words lie in the control memory: `MatmulControl` in `fused/matmul_work.cuh`.
struct MatmulControl {
    begin: u64,
    world: u64,
}

impl MatmulControl {
    fn sent(&self, rank: u32, chunk: usize) -> u64 {
        let arrived = 8 * self.world * MAX_CHUNKS as u64;
        self.begin + 8 + arrived + 8 * Self::of(rank, chunk)
    }

    fn finished(&self, rank: u32, chunk: usize) -> u64 {
        let partial = 8 * 2 * MAX_PARTIAL_TILES as u64;
        self.sent(self.world as u32, 0) + partial + 4 * Self::of(rank, chunk)
    }

    fn entered(&self) -> u64 {
        self.finished(self.world as u32, 0)
    }

    fn of(rank: u32, chunk: usize) -> u64 {
        u64::from(rank) * MAX_CHUNKS as u64 + chunk as u64
    }
}

/// Facts that decide which kernel makes a product, and how it is launched.
struct GemmLaunch<'a> {
    kernel: &'static KernelSource<'static>,
    dtype: DType,
    mode: MatmulMode,
    call: &'a CallDescription,
    /// Parts that wait for nobody, which a launch can make by itself.
    first_parts: u32,
    /// Memory for the sums of helpers.
    scratch: (u64, usize),
}

impl GemmLaunch<'_> {
    /// How `tiles` tiles are divided among `blocks` blocks, if there is the memory for it.
    fn split(&self, work: &MatmulWork, tiles: u32, blocks: u32) -> StreamK {
        let tiles = tiles / CLUSTER as u32;
        let split = StreamK::of(tiles, blocks / CLUSTER as u32, work.inner_blocks);
        let partial = split.partial_tiles() as usize * CLUSTER;
        if partial > MAX_PARTIAL_TILES || partial * SUMS_BYTES > self.scratch.1 {
            return StreamK::none(tiles);
        }
        split
    }
}

impl CudaEngine {
    /// Whether the device multiplies by the instructions that the kernels have.
    pub(crate) fn has_tensor_kernels(&self) -> bool {
        Arch::new(9, 0).is_ok_and(|hopper| self.arch() == hopper)
    }

    fn check_tensor_kernels(&self) -> Result<()> {
        if self.has_tensor_kernels() {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "a product of tensor cores on rank {}: its kernel is for devices of compute capability 9.0, and this one is of {}",
            self.rank(),
            self.arch()
        )))
    }

    /// Begins a call, and returns what its kernel is given. What this rank cannot make is an error on all ranks.
    fn begin_gemm<T>(
        &mut self,
        checked: Result<()>,
        work: impl FnOnce(&Self) -> Result<T>,
        stream: Stream,
    ) -> Result<T> {
        self.begin(stream)?;
        let found = checked.and_then(|()| self.check_tensor_kernels()).and_then(|()| work(self));
        found.map_err(|why| self.decline(why, stream))
    }

    /// Makes all parts of a product on `stream`, and sends meanwhile by what `send` puts on the stream for that.
    ///
    /// # Safety
    ///
    /// `work` is what the kernel takes, with all of its memory valid until the stream has done the call.
    unsafe fn multiply(
        &mut self,
        gemm: &GemmLaunch<'_>,
        work: MatmulWork,
        stream: Stream,
        send: impl FnOnce(&mut Self, Stream) -> Result<()>,
    ) -> Result<()> {
        let world = self.world();
        let kernel = self
            .kernel(KernelSpec {
                mode: KernelMode::Matmul(gemm.mode),
                threads: THREADS,
                ..KernelSpec::reduces(gemm.kernel, (gemm.dtype, ReduceOp::Sum))
            })?
            .on_all_sms();
        let in_two = world > 1 && !kernel.budget.early;
        tracing::debug!(kernel = gemm.kernel.name, in_two, "a product by tensor cores");
        // Loaded before anything is on streams: loading may wait for what runs.
        let wait = KernelSpec::new(&MATMUL_WAIT, WAIT_THREADS);
        let wait = if in_two { Some(self.kernel(wait)?) } else { None };
        let params = CallParams::of(gemm.call);
        let most = (kernel.sm_count / CLUSTER as u32).max(1) * CLUSTER as u32;
        let tiles = work.tile_rows * work.tile_columns;
        // All blocks, also of a launch that has fewer tiles: what each of them helps with must not depend on it.
        let grid = ((world * tiles).min(most), THREADS);
        let first_parts = if in_two { gemm.first_parts } else { world };
        let split = gemm.split(&work, world * tiles, grid.0);
        let work = MatmulWork { partials: gemm.scratch.0, split, ..work };
        let copies = self.copy_stream;
        if world > 1 {
            // Reads and writes of peers in an earlier call are over when this one begins, also for the copies.
            self.fork(stream, copies)?;
            // The kernel waits for the copies.
            self.switch_to(stream)?;
            self.mark_earlier_calls(stream)?;
        }
        let first = MatmulWork { first_part: 0, end_part: first_parts, ..work };
        let rest = MatmulWork { first_part: first_parts, end_part: world, ..work };
        // SAFETY: the caller promised that `work` is what the kernel takes, and that its memory is valid until the
        // stream has done the call; `first` has the same memory, and some of the parts.
        unsafe { self.launch_with_work(kernel, grid, &params, &first, stream) }?;
        if world == 1 {
            return Ok(());
        }
        send(self, copies)?;
        if let Some(wait) = wait {
            let one = (1, WAIT_THREADS);
            // SAFETY: the caller promised that the memory of `work` is valid until the stream has done the call; `rest`
            // has the same memory, and the kernel that waits takes such work, too.
            unsafe { self.launch_rest(wait, one, &params, &rest, stream) }?;
            // SAFETY: the caller promised that `work` is what the kernel takes, and that its memory is valid until the
            // stream has done the call; `rest` has the same memory, and the other parts.
            unsafe { self.launch_rest(kernel, grid, &params, &rest, stream) }?;
        }
        self.fork(copies, stream)?;
        // Copies to peers may end after the kernel does, and read what the next call's kernel writes.
        self.extend_order(stream)
    }

    /// Describes a right matrix.
    fn right_map(
        &self,
        dtype: DType,
        (right, by_rows): (MatrixView, bool),
        (inner, columns): (usize, usize),
    ) -> Result<TensorMap> {
        let size = dtype.size();
        let across = BLOCK_BYTES / size;
        // There is one part.
        let right = (right, right.pitch);
        if by_rows {
            self.tensor_map(right, (1, inner, columns), (64, across, size))
        } else {
            self.tensor_map(right, (1, columns, inner), (128, across, size))
        }
    }

    /// Describes a left matrix. `sizes` are the number of parts, the rows of each, and the columns. The parts lie one after the
    /// other, or `part_pitch` bytes apart.
    fn left_map(
        &self,
        dtype: DType,
        (left, part_pitch): (MatrixView, Option<u64>),
        sizes: (usize, usize, usize),
    ) -> Result<TensorMap> {
        let size = dtype.size();
        let part_pitch = part_pitch.unwrap_or(sizes.1 as u64 * left.pitch);
        self.tensor_map((left, part_pitch), sizes, (128, BLOCK_BYTES / size, size))
    }

    /// Describes a result. `sizes` are the number of parts, the rows of each, and the columns.
    fn out_map(&self, out: MatrixView, sizes: (usize, usize, usize)) -> Result<TensorMap> {
        self.tensor_map((out, sizes.1 as u64 * out.pitch), sizes, (64, 64, 2))
    }

    /// Describes a matrix of `parts` times `rows` rows, and `columns` columns, which is copied in boxes of `box_rows` rows and
    /// `box_columns` columns of elements of `size` bytes. Parts begin at a distance of `part_pitch` bytes, and no box has rows
    /// of two of them.
    fn tensor_map(
        &self,
        (matrix, part_pitch): (MatrixView, u64),
        (parts, rows, columns): (usize, usize, usize),
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
        let sizes = [columns as u64, rows as u64, parts as u64];
        let pitches = [matrix.pitch, part_pitch];
        let (boxes, steps) = ([box_columns as u32, box_rows as u32, 1], [1_u32; 3]);
        let swizzle = sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B as c_uint;
        let promotion = sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B as c_uint;
        let api = self.api;
        cuda(self.pool.driver())?.with_context(|| {
            // SAFETY: the map is 128 bytes at a multiple of 64, and the arrays have three members each, of which the pitches
            // need two; the matrix's address is only noted.
            let code = unsafe {
                (api.tensor_map)(
                    (&raw mut map).cast(),
                    kind as c_uint,
                    3,
                    matrix.begin,
                    sizes.as_ptr(),
                    pitches.as_ptr(),
                    boxes.as_ptr(),
                    steps.as_ptr(),
                    0,
                    swizzle,
                    promotion,
                    0,
                )
            };
            CudaDriver::check(code, || {
                format!("describing {matrix:?} of {parts} x {rows} x {columns} elements")
            })
        })?;
        Ok(map)
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::MatmulControl;
    use crate::cuda::layout::headers::compile_assertions;

    #[test]
    fn kernels_have_the_words_of_control_memory_where_the_host_has_them() {
        for world in [2, 8] {
            let control = MatmulControl { begin: 0, world };
            let mut text = "#include <fused/matmul_work.cuh>\n".to_owned();
            for (word, at) in [
                ("sent", control.sent(0, 0)),
                ("sent[1][2]", control.sent(1, 2)),
                ("finished", control.finished(0, 0)),
                ("finished[1][2]", control.finished(1, 2)),
                ("entered", control.entered()),
            ] {
                let offset = format!("offsetof(symmpool::MatmulControl, {word})");
                let _ = writeln!(text, "static_assert({offset} == {at}, \"{word}\");");
            }
            let world = world.to_string();
            let defines = [("WORLD", world.as_str()), ("THREADS", "384"), ("DTYPE", "4")];
            compile_assertions(&text, &defines).unwrap_or_else(|error| panic!("{error}"));
        }
    }
}
