//! Products of the rows of all ranks.

use symmpool_allocator::{Error, Result};

use super::{
    BATCH_ROWS, CLUSTER, CONTROL_BYTES, MAX_CHUNKS, MAX_PROBLEMS, MatrixView, SCRATCH_BYTES, TILE,
    are_aligned, are_batches, are_sizes, are_types, taken, tile_columns, tile_rows,
};
use crate::DType;

/// About how many bytes a chunk has: copies of fewer take longer for each byte, and tiles wait for all of one.
const CHUNK_BYTES: usize = 16 << 20;

/// A right matrix of [`MatmulGather`], and its product.
#[derive(Clone, Copy, Debug)]
pub struct RightMatrix {
    /// The matrix: as many rows as the left one has columns.
    pub right: MatrixView,
    /// Its columns.
    pub columns: usize,
    /// The product: `world` times [`MatmulGather::rows`] rows.
    pub out: MatrixView,
    /// A factor of the product, `f32` on the device, or 0. For 8-bit floats only.
    pub scale: u64,
}

/// The operands of [`Communicator::all_gather_matmul_at`](crate::Communicator::all_gather_matmul_at): the products of a left
/// matrix, of which each rank has `rows` rows, with right ones.
#[derive(Clone, Copy, Debug)]
pub struct MatmulGather<'a> {
    /// The type of all matrices that are multiplied: [`DType::F16`], [`DType::Bf16`] or [`DType::F8E4m3`].
    pub dtype: DType,
    /// The type of the products: that of the matrices, or one of the first two for 8-bit floats.
    pub out_dtype: DType,
    /// This rank's rows of the left matrix, which lie one after the other: the pitch is the bytes of a row, rounded up to a
    /// multiple of 16.
    pub left: MatrixView,
    /// A factor of all products, as [`RightMatrix::scale`].
    pub left_scale: u64,
    /// The right matrices, at most [`Self::MAX_PROBLEMS`]. Ranks may have different ones.
    pub rights: &'a [RightMatrix],
    /// Whether rows in memory are rows of the right matrices; else they are columns, as those of 8-bit floats must be.
    pub right_by_rows: bool,
    /// Rows of each rank.
    pub rows: usize,
    /// The products, and the gathered rows, have so many batches of rows, each with as many rows of every rank, one rank's
    /// after the other's: 1, where all rows of a rank lie together. A tensor of shape (batches, rows, columns) that is
    /// gathered along its rows has more; each then has a multiple of [`Self::BATCH_ROWS`] rows of every rank.
    pub batches: usize,
    /// Columns of the left matrix.
    pub inner: usize,
    /// Where all ranks' rows are copied to, with the left matrix's pitch; 0 where nobody wants them.
    pub gathered: u64,
    /// Memory at the same place of the pool on all ranks, through which rows travel: [`Self::slots_bytes`] bytes.
    pub slots: u64,
    /// Memory of the calls' own, like [`MatmulScatter::control`](crate::MatmulScatter::control), and the same memory
    /// may serve both.
    pub control: u64,
    /// Memory of the device, any of it, and its bytes, for sums of tiles that blocks make together where there are too few
    /// tiles for all blocks: [`Self::SCRATCH_BYTES`] are enough, and with less, or none, tiles are not divided.
    pub scratch: (u64, usize),
}

impl MatmulGather<'_> {
    /// Bytes of [`Self::control`].
    pub const CONTROL_BYTES: usize = CONTROL_BYTES;
    /// Bytes of [`Self::scratch`] that are enough on every device.
    pub const SCRATCH_BYTES: usize = SCRATCH_BYTES;
    /// Right matrices of a call at most.
    pub const MAX_PROBLEMS: usize = MAX_PROBLEMS;
    /// Rows of a tile: in each of several batches, the number of a rank's rows is a multiple of it.
    pub const BATCH_ROWS: usize = BATCH_ROWS;

    /// Bytes of a row of the left matrix, with those up to the next row.
    #[must_use]
    pub fn pitch(dtype: DType, inner: usize) -> usize {
        (inner * dtype.size()).next_multiple_of(super::ALIGNMENT)
    }

    /// Bytes of [`Self::slots`], for `world` ranks.
    #[must_use]
    pub fn slots_bytes(dtype: DType, rows: usize, inner: usize, world: u32) -> usize {
        world as usize * rows * Self::pitch(dtype, inner)
    }

    /// Bytes of one rank's rows.
    pub(crate) fn part_bytes(&self) -> usize {
        self.rows * Self::pitch(self.dtype, self.inner)
    }

    pub(crate) fn tile_rows(&self) -> usize {
        tile_rows(self.rows)
    }

    /// How many columns the tiles of these right matrices have.
    pub(crate) fn tile_columns(rights: &[RightMatrix]) -> usize {
        rights.iter().map(|each| tile_columns(each.columns)).sum()
    }

    /// Rows of tiles of a chunk, an even number.
    pub(crate) fn chunk_tiles(&self) -> usize {
        let wanted = (self.part_bytes() + CHUNK_BYTES / 2) / CHUNK_BYTES;
        self.tile_rows().div_ceil(wanted.clamp(1, MAX_CHUNKS)).next_multiple_of(CLUSTER)
    }

    /// Chunks of a rank's rows.
    pub(crate) fn chunks(&self) -> usize {
        self.tile_rows().div_ceil(self.chunk_tiles())
    }

    /// Where the bytes of a chunk begin and end among those of a rank's rows.
    pub(crate) fn chunk(&self, nth: usize) -> (u64, u64) {
        let pitch = Self::pitch(self.dtype, self.inner);
        let row = |tiles: usize| (tiles * TILE.0).min(self.rows) * pitch;
        let each = self.chunk_tiles();
        (row(nth * each) as u64, row((nth + 1) * each) as u64)
    }

    /// Refuses what tensor cores cannot be given. Products that pass here can be made on any device of compute capability
    /// 9.0.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument`, with what is wrong.
    pub fn check(&self) -> Result<()> {
        let Self { dtype, inner, right_by_rows, .. } = *self;
        let scaled = self.left_scale != 0 || self.rights.iter().any(|each| each.scale != 0);
        let pitch = Self::pitch(dtype, inner) as u64;
        let are_rights = self.rights.iter().all(|each| {
            let right = (each.right, right_by_rows);
            are_sizes(&[each.columns]) && are_aligned(dtype, right, each.out, (inner, each.columns))
        });
        if (1..=Self::MAX_PROBLEMS).contains(&self.rights.len())
            && are_types(dtype, self.out_dtype, right_by_rows, scaled)
            && are_sizes(&[self.rows, inner])
            && are_batches(self.rows, self.batches)
            && self.left.fits(inner * dtype.size())
            && self.left.pitch == pitch
            && are_rights
        {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "products of tensor cores: {self:?}; {}, a left matrix of {pitch} bytes from row to row, 1 to {} right ones, and \
             a multiple of {} rows in each of several batches",
            taken(),
            Self::MAX_PROBLEMS,
            Self::BATCH_ROWS
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RIGHT: RightMatrix = RightMatrix {
        right: MatrixView { begin: 0x2000, pitch: 512 },
        columns: 250,
        out: MatrixView { begin: 0x3000, pitch: 512 },
        scale: 0,
    };

    fn gemm(rights: &[RightMatrix]) -> MatmulGather<'_> {
        MatmulGather {
            dtype: DType::Bf16,
            out_dtype: DType::Bf16,
            left: MatrixView { begin: 0x1000, pitch: 400 },
            left_scale: 0,
            rights,
            right_by_rows: true,
            rows: 100,
            batches: 1,
            inner: 200,
            gathered: 0,
            slots: 0,
            control: 0,
            scratch: (0, 0),
        }
    }

    #[test]
    fn what_tensor_cores_cannot_be_given_is_refused() {
        let fine = [RIGHT; 4];
        let right = gemm(&fine);
        right.check().expect("it fits");
        gemm(&fine[..1]).check().expect("one fits");
        MatmulGather { rows: 768, batches: 3, ..right }.check().expect("it fits");
        let fp8 = MatmulGather {
            dtype: DType::F8E4m3,
            right_by_rows: false,
            left: MatrixView { begin: 16, pitch: 208 },
            left_scale: 32,
            ..right
        };
        fp8.check().expect("it fits");
        for wrong in [
            MatmulGather { rights: &[], ..right },
            MatmulGather { rights: &[RIGHT; 5], ..right },
            MatmulGather { rights: &[RIGHT, RightMatrix { columns: 257, ..RIGHT }], ..right },
            MatmulGather { rights: &[RightMatrix { columns: 0, ..RIGHT }], ..right },
            MatmulGather { rights: &[RightMatrix { scale: 16, ..RIGHT }], ..right },
            MatmulGather { dtype: DType::F64, out_dtype: DType::F64, ..right },
            MatmulGather { out_dtype: DType::F16, ..right },
            MatmulGather { left: MatrixView { begin: 0x1000, pitch: 416 }, ..right },
            MatmulGather { left: MatrixView { begin: 0x1008, pitch: 400 }, ..right },
            MatmulGather { rows: 0, ..right },
            MatmulGather { batches: 0, ..right },
            MatmulGather { batches: 2, ..right },
            MatmulGather { rows: 768, batches: 4, ..right },
            MatmulGather { right_by_rows: true, ..fp8 },
        ] {
            let error = wrong.check().expect_err("it does not fit");
            assert!(error.is_invalid_argument(), "{error}");
        }
    }

    #[test]
    fn chunks_are_all_rows_in_order_and_few() {
        let rights = [RIGHT];
        for (rows, inner) in [(1, 8), (300, 40), (1024, 4096), (8192, 8192), (70_000, 100)] {
            let gemm = MatmulGather { rows, inner, ..gemm(&rights) };
            assert!((1..=MAX_CHUNKS).contains(&gemm.chunks()), "{rows} x {inner}");
            let mut end = 0;
            for nth in 0..gemm.chunks() {
                let (from, to) = gemm.chunk(nth);
                assert!(from == end && to > from, "{rows} x {inner}: {from} to {to}");
                end = to;
            }
            assert_eq!(end as usize, gemm.part_bytes());
        }
    }
}
