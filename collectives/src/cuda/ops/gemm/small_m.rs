//! Products of few rows that are added up over all ranks.

#![allow(unsafe_code)] // passes on addresses, about which callers promise

use symmpool_allocator::{Error, Result, Stream};

use super::{BLOCK_BYTES, THREADS};
use crate::call::CallDescription;
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::mode::{KernelMode, SmallMMode};
use crate::cuda::kernel::spec::{KernelSpec, THREADS as REDUCE_THREADS};
use crate::cuda::layout::params::{CallParams, MatmulSmallMWork};
use crate::jit::sources::{MATMUL_SMALL_M, MATMUL_SMALL_M_RECEIVED};
use crate::{MatmulAllReduce, ReduceOp};

/// Columns of a tile.
const TILE_COLUMNS: usize = 128;
/// Blocks of a cluster at most, which a device of compute capability 9.0 is sure to have room for.
const MAX_OF_CLUSTER: u32 = 8;
/// Blocks of the inner dimension that a block of a cluster has at least: as many as it can load at once.
const MIN_OF_INNER: u32 = 8;

/// Rows of a product, filled up to what kernels are compiled for.
fn tokens(rows: usize) -> u32 {
    rows.next_power_of_two().max(8) as u32
}

/// Blocks of a cluster, for a product of `tiles` tiles whose inner dimension has `inner_blocks` blocks: two, or as many as
/// should run at once.
/// A cluster lies within a part of the device, and not all parts have a multiple of eight SMs: of 128 blocks in clusters of four,
/// some wait for others to end (measured on an H200 with 132 SMs), and of 96 none. Elsewhere some may wait: that takes time, and
/// nothing more. What kernels of other calls may use does not count, so a product has the same bits whatever runs at the same
/// time.
fn cluster_of(tiles: u32, inner_blocks: u32, sm_count: u32) -> u32 {
    let fits = |cluster: u32| {
        u64::from(tiles) * u64::from(cluster) <= u64::from(sm_count) * 3 / 4
            && inner_blocks >= MIN_OF_INNER * cluster
    };
    [MAX_OF_CLUSTER, 4].into_iter().find(|cluster| fits(*cluster)).unwrap_or(2)
}

impl CudaEngine {
    /// Whether the largest inbox that there is has room for a product of `rows` rows and `columns` columns of 16-bit numbers.
    pub(crate) fn has_room_for_matmul(&self, rows: usize, columns: usize) -> bool {
        self.gemms_fit(rows, columns, self.largest_lamport_vectors())
    }

    fn gemms_fit(&self, rows: usize, columns: usize, inbox_vectors: u64) -> bool {
        let vectors = (rows as u64).saturating_mul(columns as u64) / 8;
        let ranks = u64::from(self.world());
        ranks == 1 || vectors.saturating_mul(ranks) <= inbox_vectors
    }

    /// Makes a product, and adds it up over all ranks.
    ///
    /// # Safety
    ///
    /// The matrices are readable or writable on the device until the stream has done the call, and nothing else touches them
    /// meanwhile.
    pub(crate) unsafe fn matmul_all_reduce(
        &mut self,
        call: CallDescription,
        gemm: &MatmulAllReduce,
        stream: Stream,
    ) -> Result<()> {
        let work = self.begin_gemm(gemm.check(), |engine| engine.small_m_work(gemm), stream)?;
        let sm_count = self.sm_count();
        let cluster = cluster_of(work.tiles, work.inner_blocks, sm_count);
        let mode =
            SmallMMode { right_by_rows: gemm.right_by_rows, cluster, tokens: tokens(gemm.rows) };
        let reduction = (gemm.dtype, if gemm.mean { ReduceOp::Avg } else { ReduceOp::Sum });
        let kernel = self
            .kernel(KernelSpec {
                mode: KernelMode::SmallM(mode),
                threads: THREADS,
                lamport: true,
                ..KernelSpec::reduces(&MATMUL_SMALL_M, reduction)
            })?
            .on_all_sms();
        let in_two = self.world() > 1 && !kernel.budget.early;
        tracing::debug!(rows = gemm.rows, cluster, in_two, %call, "a product of few rows");
        // Loaded before anything is on the stream: loading may wait for what runs.
        let received = KernelSpec::reduces(&MATMUL_SMALL_M_RECEIVED, reduction);
        let received = KernelSpec { lamport: true, ..received };
        let received = if in_two { Some(self.kernel(received)?) } else { None };
        let bytes = (gemm.rows * gemm.columns * gemm.dtype.size()) as u64;
        let params = CallParams { output: gemm.out, bytes, ..CallParams::of(&call) };
        let grid = work.tiles.min((sm_count / cluster).max(1)) * cluster;
        let work = MatmulSmallMWork { receives: u32::from(!in_two), ..work };
        // SAFETY: the caller promised that the matrices are there until the stream has done the call, and that nothing
        // else touches them; the maps have the sizes that the product was checked for.
        unsafe { self.launch_with_work(kernel, (grid, THREADS), &params, &work, stream) }?;
        let Some(kernel) = received else { return Ok(()) };
        let most = kernel.resident(REDUCE_THREADS).min(kernel.budget.most_blocks);
        let grid = ((bytes / 16) as u32).div_ceil(REDUCE_THREADS).clamp(1, most);
        let grid = (grid, REDUCE_THREADS);
        // SAFETY: the caller promised that the result is writable until the stream has done the call; the kernel writes
        // as many bytes of it as the product was checked for. It has no third parameter, and the driver reads none.
        unsafe { self.launch_rest(kernel, grid, &params, &(), stream) }
    }

    fn small_m_work(&self, gemm: &MatmulAllReduce) -> Result<MatmulSmallMWork> {
        let MatmulAllReduce { dtype, rows, inner, columns, right_by_rows, .. } = *gemm;
        if !self.gemms_fit(rows, columns, self.control.lamport_vectors()) {
            return Err(Error::unsupported(format!(
                "a gemm of {rows} rows and {columns} columns on rank {}: the inbox has no room for those of all ranks; give \
                 the communicator more device memory, or multiply and all-reduce separately",
                self.rank()
            )));
        }
        let size = dtype.size();
        let box_of_left = (tokens(rows) as usize, BLOCK_BYTES / size, size);
        let left_pitch = rows as u64 * gemm.left.pitch;
        Ok(MatmulSmallMWork {
            left: self.tensor_map((gemm.left, left_pitch), (1, rows, inner), box_of_left)?,
            right: self.right_map(dtype, (gemm.right, right_by_rows), (inner, columns))?,
            rows: rows as u32,
            columns: columns as u32,
            inner_blocks: (inner * size).div_ceil(BLOCK_BYTES) as u32,
            tiles: columns.div_ceil(TILE_COLUMNS) as u32,
            receives: 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_have_as_many_blocks_as_run_at_once() {
        for (columns, cluster) in
            [(8, 8), (1024, 8), (1536, 8), (1544, 4), (3072, 4), (3080, 2), (8192, 2)]
        {
            let tiles = (columns as usize).div_ceil(TILE_COLUMNS) as u32;
            assert_eq!(cluster_of(tiles, 64, 132), cluster, "{columns} columns");
        }
        // A short inner dimension is not divided among so many.
        assert_eq!([16, 31, 32, 63, 64].map(|blocks| cluster_of(1, blocks, 132)), [2, 2, 4, 4, 8]);
        assert_eq!(cluster_of(u32::MAX, 64, 132), 2);
    }
}
