//! Fused matmuls: what ranks compare before one, and the operands of those that tensor cores make.

mod gather;
mod scatter;
pub(crate) mod shape;
mod small_m;

pub use self::gather::{MatmulGather, RightMatrix};
pub(crate) use self::scatter::TILE_BYTES;
pub use self::scatter::{MatmulScatter, MatmulTerm};
pub use self::small_m::MatmulAllReduce;
use crate::MatmulShape;

use super::{CallDescription, OpType};
use crate::DType;

impl MatmulShape {
    pub(crate) fn describe(&self) -> CallDescription {
        CallDescription::new(OpType::FusedMatmul).matmul(self)
    }
}

/// Rows and columns of a tile of a product that is made by tensor cores: `TILE_ROWS` and its neighbours in
/// `fused/matmul_tiles.cuh`.
const TILE: (usize, usize) = (128, 256);
/// A batch of a part's rows begins with a tile.
const BATCH_ROWS: usize = TILE.0;
/// Blocks that make tiles together.
pub(crate) const CLUSTER: usize = 2;
/// Chunks of a part at most: `MAX_CHUNKS` in `fused/matmul_work.cuh`.
pub(crate) const MAX_CHUNKS: usize = 8;
/// Products of a call at most: `MAX_PROBLEMS` in `fused/matmul_work.cuh`.
pub(crate) const MAX_PROBLEMS: usize = 4;
/// Bytes of the memory that calls keep their flags in.
const CONTROL_BYTES: usize = 4096;
/// Bytes of the sums of a tile.
pub(crate) const SUMS_BYTES: usize = 4 * TILE.0 * TILE.1;
/// Tiles whose sums blocks may leave in memory for others, `MAX_PARTIAL_TILES` in `fused/matmul_work.cuh`: one for each SM of a
/// device of compute capability 9.0, which has 132 of them, with some to spare.
pub(crate) const MAX_PARTIAL_TILES: usize = 144;
const SCRATCH_BYTES: usize = MAX_PARTIAL_TILES * SUMS_BYTES;
/// Matrices, and their rows, begin at multiples of this many bytes.
const ALIGNMENT: usize = 16;
/// The driver counts rows and columns in 32 bits, and the kernel tiles.
const MAX_ELEMENTS: usize = 1 << 28;

/// A matrix in memory: rows of elements that lie one after the other, at a distance in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixView {
    /// The address of the first element, a multiple of 16.
    pub begin: u64,
    /// Bytes from one row to the next, a multiple of 16.
    pub pitch: u64,
}

impl MatrixView {
    /// Whether the matrix is where it can be addressed, with `bytes` bytes in a row.
    fn fits(self, bytes: usize) -> bool {
        (self.begin | self.pitch).is_multiple_of(ALIGNMENT as u64)
            && self.pitch < 1 << 40
            && self.pitch >= bytes as u64
    }
}

/// Whether tensor cores multiply matrices of these types.
fn are_types(dtype: DType, out_dtype: DType, right_by_rows: bool, scaled: bool) -> bool {
    let wide = [DType::F16, DType::Bf16];
    match dtype {
        DType::F8E4m3 => wide.contains(&out_dtype) && !right_by_rows,
        dtype => wide.contains(&dtype) && out_dtype == dtype && !scaled,
    }
}

/// Whether a right matrix of `inner` rows and `columns` columns, and its product, are where they can be addressed.
fn are_aligned(
    dtype: DType,
    (right, by_rows): (MatrixView, bool),
    out: MatrixView,
    (inner, columns): (usize, usize),
) -> bool {
    let across = if by_rows { columns } else { inner };
    right.fits(across * dtype.size()) && out.fits(2 * columns)
}

fn are_sizes(sizes: &[usize]) -> bool {
    sizes.iter().all(|size| (1..MAX_ELEMENTS).contains(size))
}

/// Whether `rows` rows of a part can lie in `batches` batches.
fn are_batches(rows: usize, batches: usize) -> bool {
    batches == 1 || (batches != 0 && rows.is_multiple_of(batches.saturating_mul(BATCH_ROWS)))
}

/// Description of the matrices that tensor cores take, for errors.
fn taken() -> String {
    format!(
        "it takes f16, bf16, or f8e4m3 with right matrices by columns, matrices whose addresses and pitches are multiples of \
         {ALIGNMENT}, and sizes from 1 to {}",
        MAX_ELEMENTS - 1
    )
}

/// Rows of a part's tiles.
fn tile_rows(rows: usize) -> usize {
    rows.div_ceil(TILE.0).next_multiple_of(CLUSTER)
}

/// Columns of a product's tiles.
fn tile_columns(columns: usize) -> usize {
    columns.div_ceil(TILE.1)
}
