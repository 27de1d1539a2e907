//! Products whose parts are added up over all ranks.

use symmpool_allocator::{Error, Result};

use super::{
    BATCH_ROWS, CLUSTER, CONTROL_BYTES, MAX_CHUNKS, MAX_PROBLEMS, MatrixView, SCRATCH_BYTES, TILE,
    are_aligned, are_batches, are_sizes, are_types, taken, tile_columns, tile_rows,
};
use crate::DType;

/// Bytes of a tile on its way to another rank.
pub(crate) const TILE_BYTES: usize = 2 * TILE.0 * TILE.1;
/// About how many bytes a chunk has: copies of fewer take longer for each byte, and what follows the last one waits for all of
/// it. About what 132 SMs finish at once.
const CHUNK_BYTES: usize = 8 << 20;

/// A product of [`MatmulScatter`]: of a left matrix, of `world` times [`MatmulScatter::rows`] rows and `inner` columns, and
/// a right one of `inner` rows and [`MatmulScatter::columns`] columns.
#[derive(Clone, Copy, Debug)]
pub struct MatmulTerm {
    /// The left matrix: a row in memory is a row of it.
    pub left: MatrixView,
    /// Bytes from one of several [`MatmulScatter::batches`] of the left matrix to the next, a multiple of 16.
    pub batch_pitch: u64,
    /// The right matrix.
    pub right: MatrixView,
    /// Columns of the left matrix.
    pub inner: usize,
}

/// The operands of [`Communicator::matmul_reduce_scatter_at`](crate::Communicator::matmul_reduce_scatter_at): a product of
/// matrices, or a sum of products, whose rows are parts for the ranks.
#[derive(Clone, Copy, Debug)]
pub struct MatmulScatter<'a> {
    /// The type of all matrices that are multiplied: [`DType::F16`], [`DType::Bf16`] or [`DType::F8E4m3`].
    pub dtype: DType,
    /// The type of the result, and of partial sums on their way: that of the matrices, or one of the first two for 8-bit
    /// floats.
    pub out_dtype: DType,
    /// The products that are added up, in `f32`; at most [`Self::MAX_TERMS`]. Ranks may have different ones.
    pub terms: &'a [MatmulTerm],
    /// Whether rows in memory are rows of the right matrices; else they are columns, as those of 8-bit floats must be.
    pub right_by_rows: bool,
    /// The result: `rows` rows.
    pub out: MatrixView,
    /// Factors of the sum of the products, `f32` on the device; 0 where there is none. For 8-bit floats only.
    pub scales: (u64, u64),
    /// Rows of the result on each rank.
    pub rows: usize,
    /// A left matrix has so many batches of rows, each with rows of all ranks, one rank's after the other's: 1, where the rows
    /// of a rank's part lie together. A tensor of shape (batches, rows, columns) that is scattered along its rows has more;
    /// of a part each of them then has a multiple of [`Self::BATCH_ROWS`] rows.
    pub batches: usize,
    /// Columns of the result.
    pub columns: usize,
    /// Whether the sum is divided by the number of ranks.
    pub mean: bool,
    /// Memory at the same place of the pool on all ranks, through which partial sums travel:
    /// [`Self::parts_bytes`] bytes.
    pub parts: u64,
    /// Memory of [`Self::CONTROL_BYTES`] bytes for the calls' own use: zeros before a communicator's first call that
    /// is given it, and of no other communicator from then on.
    pub control: u64,
    /// Memory of the device, any of it, and its bytes, for sums of tiles that blocks make together where there are too few
    /// tiles for all blocks: [`Self::SCRATCH_BYTES`] are enough, and with less, or none, tiles are not divided.
    pub scratch: (u64, usize),
}

impl MatmulScatter<'_> {
    /// Bytes of [`Self::control`].
    pub const CONTROL_BYTES: usize = CONTROL_BYTES;
    /// Bytes of [`Self::scratch`] that are enough on every device.
    pub const SCRATCH_BYTES: usize = SCRATCH_BYTES;
    /// Products of a call at most.
    pub const MAX_TERMS: usize = MAX_PROBLEMS;
    /// Rows of a tile: in each of several batches, the number of a part's rows is a multiple of it.
    pub const BATCH_ROWS: usize = BATCH_ROWS;

    /// Bytes of [`Self::parts`], for `world` ranks.
    #[must_use]
    pub fn parts_bytes(rows: usize, columns: usize, world: u32) -> usize {
        2 * (world as usize).saturating_sub(1) * part_bytes(rows, columns)
    }

    /// Rows and columns of a part's tiles.
    pub(crate) fn tiles(&self) -> (usize, usize) {
        (tile_rows(self.rows), tile_columns(self.columns))
    }

    /// Bytes of one rank's part on its way.
    pub(crate) fn part_bytes(&self) -> usize {
        part_bytes(self.rows, self.columns)
    }

    /// Tiles of a chunk, an even number.
    pub(crate) fn chunk_tiles(&self, world: u32) -> usize {
        let all = self.part_bytes() / TILE_BYTES;
        // With several peers links are busy nearly all the time, and every copy leaves them idle for some microseconds.
        let bytes = if world > 2 { 2 * CHUNK_BYTES } else { CHUNK_BYTES };
        let wanted = (self.part_bytes() + bytes / 2) / bytes;
        all.div_ceil(wanted.clamp(1, MAX_CHUNKS)).next_multiple_of(CLUSTER)
    }

    /// Chunks of a part.
    pub(crate) fn chunks(&self, world: u32) -> usize {
        (self.part_bytes() / TILE_BYTES).div_ceil(self.chunk_tiles(world))
    }

    /// Refuses what tensor cores cannot be given. A product that passes here can be made on any device of compute
    /// capability 9.0.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument`, with what is wrong.
    pub fn check(&self) -> Result<()> {
        let Self { dtype, rows, batches, columns, .. } = *self;
        let are_terms = self.terms.iter().all(|&MatmulTerm { left, batch_pitch, right, inner }| {
            are_sizes(&[inner])
                && left.fits(inner * dtype.size())
                && (batches == 1 || MatrixView { pitch: batch_pitch, ..left }.fits(0))
                && are_aligned(dtype, (right, self.right_by_rows), self.out, (inner, columns))
        });
        if (1..=Self::MAX_TERMS).contains(&self.terms.len())
            && are_types(dtype, self.out_dtype, self.right_by_rows, self.scales != (0, 0))
            && are_sizes(&[rows, columns])
            && are_batches(rows, batches)
            && are_terms
        {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "a product of tensor cores: {self:?}; {}, 1 to {} products, and of a part a multiple of {} rows in each of \
             several batches",
            taken(),
            Self::MAX_TERMS,
            Self::BATCH_ROWS
        )))
    }
}

fn part_bytes(rows: usize, columns: usize) -> usize {
    tile_rows(rows) * tile_columns(columns) * TILE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERM: MatmulTerm = MatmulTerm {
        left: MatrixView { begin: 0x1000, pitch: 512 },
        batch_pitch: 48,
        right: MatrixView { begin: 0x2000, pitch: 512 },
        inner: 200,
    };

    fn gemm(terms: &[MatmulTerm]) -> MatmulScatter<'_> {
        MatmulScatter {
            dtype: DType::Bf16,
            out_dtype: DType::Bf16,
            terms,
            right_by_rows: true,
            out: MatrixView { begin: 0x3000, pitch: 512 },
            scales: (0, 0),
            rows: 100,
            batches: 1,
            columns: 250,
            mean: false,
            parts: 0,
            control: 0,
            scratch: (0, 0),
        }
    }

    #[test]
    fn what_tensor_cores_cannot_be_given_is_refused() {
        let four = [TERM, MatmulTerm { inner: 8, ..TERM }, TERM, TERM];
        let right = gemm(&four);
        right.check().expect("it fits");
        gemm(&four[..1]).check().expect("one fits");
        let fp8 = MatmulScatter { dtype: DType::F8E4m3, right_by_rows: false, ..right };
        fp8.check().expect("it fits");
        MatmulScatter { scales: (16, 0), out_dtype: DType::F16, ..fp8 }.check().expect("it fits");
        MatmulScatter { rows: 768, batches: 3, ..right }.check().expect("it fits");
        for wrong in [
            MatmulScatter { dtype: DType::F32, out_dtype: DType::F32, ..right },
            MatmulScatter { out_dtype: DType::F16, ..right },
            MatmulScatter { scales: (16, 0), ..right },
            MatmulScatter { right_by_rows: true, ..fp8 },
            MatmulScatter { terms: &[], ..right },
            MatmulScatter { terms: &[TERM; 5], ..right },
            MatmulScatter {
                terms: &[TERM, MatmulTerm { left: MatrixView { begin: 8, pitch: 512 }, ..TERM }],
                ..right
            },
            MatmulScatter {
                terms: &[MatmulTerm { right: MatrixView { begin: 16, pitch: 500 }, ..TERM }],
                ..right
            },
            MatmulScatter { terms: &[TERM, MatmulTerm { inner: 257, ..TERM }], ..right },
            MatmulScatter { terms: &[MatmulTerm { inner: 0, ..TERM }], ..right },
            MatmulScatter { out: MatrixView { begin: 16, pitch: 496 }, ..right },
            MatmulScatter { rows: 0, ..right },
            MatmulScatter { rows: 1 << 28, ..right },
            MatmulScatter { batches: 0, ..right },
            MatmulScatter { batches: 2, ..right },
            MatmulScatter { rows: 768, batches: 4, ..right },
            MatmulScatter { batches: usize::MAX, ..right },
            MatmulScatter {
                rows: 768,
                batches: 3,
                terms: &[MatmulTerm { batch_pitch: 8, ..TERM }],
                ..right
            },
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
            let gemm = MatmulScatter { rows, columns, ..gemm(&[TERM]) };
            let all = gemm.part_bytes() / TILE_BYTES;
            let each = gemm.chunk_tiles(2);
            assert!(each.is_multiple_of(CLUSTER) && all.is_multiple_of(CLUSTER));
            assert!(
                (1..=MAX_CHUNKS).contains(&all.div_ceil(each)),
                "{rows} x {columns}: {each} of {all}"
            );
            assert_eq!(MatmulScatter::parts_bytes(rows, columns, 4), 6 * gemm.part_bytes());
        }
        assert_eq!(MatmulScatter::parts_bytes(128, 256, 1), 0);
    }
}
