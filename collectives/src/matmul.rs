//! What ranks compare before a fused product of matrices.

use symmpool_allocator::{Error, Result};

use crate::DType;
use crate::host::call::{Call, Operation};

/// What a fused product of matrices communicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum MatmulKind {
    /// The rows of the left matrix are gathered from all ranks, and multiplied.
    AllGatherMatmul = 1,
    /// The rows of the product are added up over all ranks, each on the rank that gets it.
    MatmulReduceScatter = 2,
    /// The product is added up over all ranks.
    MatmulAllReduce = 3,
    /// A tensor is gathered by copy engines, without a product.
    AllGather = 4,
    /// A tensor is exchanged by copy engines and added up, without a product.
    ReduceScatter = 5,
}

impl MatmulKind {
    const ALL: [Self; 5] = [
        Self::AllGatherMatmul,
        Self::MatmulReduceScatter,
        Self::MatmulAllReduce,
        Self::AllGather,
        Self::ReduceScatter,
    ];

    /// The operator's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllGatherMatmul => "fused_all_gather_matmul",
            Self::MatmulReduceScatter => "fused_matmul_reduce_scatter",
            Self::MatmulAllReduce => "matmul_all_reduce",
            Self::AllGather => "_low_contention_all_gather",
            Self::ReduceScatter => "_low_contention_reduce_scatter",
        }
    }

    /// The kind of an operator's name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }
}

/// A fused product of matrices, as ranks compare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatmulShape {
    /// What is communicated.
    pub kind: MatmulKind,
    /// The type of the left matrix.
    pub dtype: DType,
    /// Rows of what this rank contributes; below 2^48.
    pub rows: u64,
    /// Columns of a shard that is gathered; 0 where sums are scattered, as ranks may have different ones.
    pub inner: u32,
    /// Columns of a product that is added up; 0 where shards are gathered, as ranks may have different ones.
    pub columns: u32,
    /// A hash of what else must be equal on all ranks.
    pub rest: u64,
}

impl MatmulShape {
    pub(crate) fn describe(&self) -> Call {
        Call::new(Operation::FusedMatmul).matmul(self)
    }
}

/// Rows and columns of a tile of a product that is made by tensor cores: `TILE_ROWS` and its neighbours in
/// `fused/matmul.cuh`.
const TILE: (usize, usize) = (128, 256);
/// Bytes of a tile on its way to another rank.
pub(crate) const TILE_BYTES: usize = 2 * TILE.0 * TILE.1;
/// Chunks of a part at most.
pub(crate) const MOST_CHUNKS: usize = 8;
/// About how many bytes a chunk has: copies of fewer take longer for each byte, and what follows the last one waits for all of
/// it. About what 132 SMs finish at once.
const CHUNK_BYTES: usize = 8 << 20;
/// Bytes of the inner dimension that are multiplied at once: the matrices are addressed by as many.
const ALIGNMENT: usize = 16;

/// A matrix in memory: rows of elements that lie one after the other, at a distance in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The address of the first element, a multiple of 16.
    pub begin: u64,
    /// Bytes from one row to the next, a multiple of 16.
    pub pitch: u64,
}

/// The operands of [`Communicator::matmul_reduce_scatter_at`](crate::Communicator::matmul_reduce_scatter_at): the product
/// of a left matrix, of `world` times `rows` rows and `inner` columns, and a right one of `inner` rows and `columns` columns.
#[derive(Clone, Copy, Debug)]
pub struct MatmulScatter {
    /// The type of both matrices: [`DType::F16`], [`DType::Bf16`] or [`DType::F8E4m3`].
    pub dtype: DType,
    /// The type of the result, and of partial sums on their way: that of the matrices, or one of the first two for 8-bit
    /// floats.
    pub out_dtype: DType,
    /// The left matrix: a row in memory is one of it.
    pub left: Rows,
    /// The right matrix.
    pub right: Rows,
    /// Whether a row of the right matrix in memory is one of it, which 8-bit floats cannot be; else it is a column.
    pub right_by_rows: bool,
    /// The result: `rows` rows.
    pub out: Rows,
    /// Factors of the products, `f32` on the device; 0 where there is none. For 8-bit floats only.
    pub scales: (u64, u64),
    /// Rows of the result on each rank.
    pub rows: usize,
    /// Columns of the left matrix. Ranks may have different ones.
    pub inner: usize,
    /// Columns of the result.
    pub columns: usize,
    /// Whether the sum is divided by the number of ranks.
    pub mean: bool,
    /// Memory at the same place of the pool on all ranks, through which partial sums travel:
    /// [`Self::parts_bytes`] bytes.
    pub parts: u64,
    /// And [`Self::CONTROL_BYTES`] bytes for the calls' own use: zeros before a communicator's first call that is given
    /// them, and of no other communicator from then on.
    pub control: u64,
}

impl MatmulScatter {
    /// Bytes of [`Self::control`].
    pub const CONTROL_BYTES: usize = 4096;

    /// Bytes of [`Self::parts`], for `world` ranks.
    #[must_use]
    pub fn parts_bytes(rows: usize, columns: usize, world: u32) -> usize {
        2 * (world as usize).saturating_sub(1) * part_bytes(rows, columns)
    }

    pub(crate) fn tiles(&self) -> (usize, usize) {
        tiles(self.rows, self.columns)
    }

    /// Bytes of one rank's part on its way.
    pub(crate) fn part_bytes(&self) -> usize {
        part_bytes(self.rows, self.columns)
    }

    /// Tiles of a chunk, an even number.
    pub(crate) fn chunk_tiles(&self) -> usize {
        let all = self.part_bytes() / TILE_BYTES;
        let wanted = (self.part_bytes() + CHUNK_BYTES / 2) / CHUNK_BYTES;
        all.div_ceil(wanted.clamp(1, MOST_CHUNKS)).next_multiple_of(CLUSTER)
    }

    /// Refuses what tensor cores cannot be given. A product that passes here can be made on any device of compute
    /// capability 9.0.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument`, with what is wrong.
    pub fn check(&self) -> Result<()> {
        let wide = [DType::F16, DType::Bf16];
        let types = match self.dtype {
            DType::F8E4m3 => wide.contains(&self.out_dtype) && !self.right_by_rows,
            dtype => wide.contains(&dtype) && self.out_dtype == dtype && self.scales == (0, 0),
        };
        let size = self.dtype.size();
        let matrices = [self.left, self.right, self.out];
        let aligned = matrices.iter().all(|rows| {
            (rows.begin | rows.pitch).is_multiple_of(ALIGNMENT as u64) && rows.pitch < 1 << 40
        });
        let (right_columns, right_size) =
            if self.right_by_rows { (self.columns, 2) } else { (self.inner, size) };
        let long = self.left.pitch >= (self.inner * size) as u64
            && self.right.pitch >= (right_columns * right_size) as u64
            && self.out.pitch >= (2 * self.columns) as u64;
        // The driver counts rows and columns, and the kernel tiles, in 32 bits.
        let most = 1 << 28;
        let sizes =
            [self.rows, self.inner, self.columns].iter().all(|size| (1..most).contains(size));
        if types && aligned && long && sizes {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "a product of tensor cores: {self:?}; it takes f16, bf16, or f8e4m3 with the right matrix by columns, matrices \
             whose addresses and pitches are multiples of {ALIGNMENT}, and sizes from 1 to {}",
            most - 1
        )))
    }
}

/// Blocks that make tiles together.
pub(crate) const CLUSTER: usize = 2;

/// Rows and columns of a part's tiles.
fn tiles(rows: usize, columns: usize) -> (usize, usize) {
    (rows.div_ceil(TILE.0).next_multiple_of(CLUSTER), columns.div_ceil(TILE.1))
}

fn part_bytes(rows: usize, columns: usize) -> usize {
    let (tile_rows, tile_columns) = tiles(rows, columns);
    tile_rows * tile_columns * TILE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product() -> MatmulScatter {
        let rows = |begin: u64| Rows { begin: 0x1000 * begin, pitch: 512 };
        MatmulScatter {
            dtype: DType::Bf16,
            out_dtype: DType::Bf16,
            left: rows(1),
            right: rows(2),
            right_by_rows: true,
            out: rows(3),
            scales: (0, 0),
            rows: 100,
            inner: 200,
            columns: 250,
            mean: false,
            parts: 0,
            control: 0,
        }
    }

    #[test]
    fn what_tensor_cores_cannot_be_given_is_refused() {
        product().check().expect("it fits");
        let fp8 = MatmulScatter { dtype: DType::F8E4m3, right_by_rows: false, ..product() };
        fp8.check().expect("it fits");
        MatmulScatter { scales: (16, 0), out_dtype: DType::F16, ..fp8 }.check().expect("it fits");
        for wrong in [
            MatmulScatter { dtype: DType::F32, out_dtype: DType::F32, ..product() },
            MatmulScatter { out_dtype: DType::F16, ..product() },
            MatmulScatter { scales: (16, 0), ..product() },
            MatmulScatter { right_by_rows: true, ..fp8 },
            MatmulScatter { left: Rows { begin: 8, pitch: 512 }, ..product() },
            MatmulScatter { right: Rows { begin: 16, pitch: 500 }, ..product() },
            MatmulScatter { out: Rows { begin: 16, pitch: 496 }, ..product() },
            MatmulScatter { inner: 257, ..product() },
            MatmulScatter { rows: 0, ..product() },
            MatmulScatter { rows: 1 << 28, ..product() },
        ] {
            let error = wrong.check().expect_err("it does not fit");
            assert!(error.is_invalid_argument(), "{error}");
        }
    }

    #[test]
    fn chunks_have_whole_pairs_of_tiles_and_are_few() {
        for (rows, columns) in
            [(1, 1), (128, 256), (512, 4096), (1024, 4096), (8192, 8192), (70_000, 300)]
        {
            let product = MatmulScatter { rows, columns, ..product() };
            let all = product.part_bytes() / TILE_BYTES;
            let each = product.chunk_tiles();
            assert!(each.is_multiple_of(CLUSTER) && all.is_multiple_of(CLUSTER));
            assert!(
                (1..=MOST_CHUNKS).contains(&all.div_ceil(each)),
                "{rows} x {columns}: {each} of {all}"
            );
            assert_eq!(MatmulScatter::parts_bytes(rows, columns, 4), 6 * product.part_bytes());
        }
        assert_eq!(MatmulScatter::parts_bytes(128, 256, 1), 0);
    }
}
