//! Products of few rows that are added up over all ranks.

use symmpool_allocator::{Error, Result};

use super::{MatrixView, are_aligned, are_sizes, are_types, taken};
use crate::DType;

/// The operands of [`Communicator::matmul_all_reduce_at`](crate::Communicator::matmul_all_reduce_at): a matrix product, of
/// which the left one has few rows.
#[derive(Clone, Copy, Debug)]
pub struct MatmulAllReduce {
    /// The type of all matrices: [`DType::F16`] or [`DType::Bf16`].
    pub dtype: DType,
    /// The left matrix: a row in memory is a row of it.
    pub left: MatrixView,
    /// The right matrix: as many rows as the left one has columns.
    pub right: MatrixView,
    /// Whether rows of the right matrix in memory are its rows; else they are its columns.
    pub right_by_rows: bool,
    /// The address of the sum of all ranks' products, whose rows lie one after the other. A multiple of 16.
    pub out: u64,
    /// Rows of the left matrix, from 1 to [`Self::MAX_ROWS`].
    pub rows: usize,
    /// Columns of the left matrix. Ranks may have different ones.
    pub inner: usize,
    /// Columns of the product, a multiple of 8.
    pub columns: usize,
    /// Whether the sum is divided by the number of ranks.
    pub mean: bool,
}

impl MatmulAllReduce {
    /// Rows of a product at most.
    pub const MAX_ROWS: usize = 64;

    /// Refuses what tensor cores cannot be given. A product that passes here can be made on any device of compute
    /// capability 9.0 whose communicator has room for it
    /// ([`has_room_for_matmul`](crate::Communicator::has_room_for_matmul)).
    ///
    /// # Errors
    ///
    /// `is_invalid_argument`, with what is wrong.
    pub fn check(&self) -> Result<()> {
        let Self { dtype, rows, inner, columns, right_by_rows, .. } = *self;
        let out = MatrixView { begin: self.out, pitch: 2 * columns as u64 };
        if dtype.size() == 2
            && are_types(dtype, dtype, right_by_rows, false)
            && are_sizes(&[rows, inner, columns])
            && rows <= Self::MAX_ROWS
            && columns.is_multiple_of(8)
            && self.left.fits(inner * dtype.size())
            && are_aligned(dtype, (self.right, right_by_rows), out, (inner, columns))
        {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "a product of few rows: {self:?}; {}, here of f16 or bf16, at most {} rows, and a multiple of 8 columns",
            taken(),
            Self::MAX_ROWS
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_tensor_cores_cannot_be_given_is_refused() {
        let right = MatmulAllReduce {
            dtype: DType::Bf16,
            left: MatrixView { begin: 0x1000, pitch: 400 },
            right: MatrixView { begin: 0x2000, pitch: 512 },
            right_by_rows: true,
            out: 0x3000,
            rows: 64,
            inner: 200,
            columns: 256,
            mean: false,
        };
        right.check().expect("it fits");
        let by_columns = MatrixView { pitch: 400, ..right.right };
        MatmulAllReduce { right_by_rows: false, right: by_columns, ..right }
            .check()
            .expect("it fits");
        for wrong in [
            MatmulAllReduce { rows: 0, ..right },
            MatmulAllReduce { rows: 65, ..right },
            MatmulAllReduce { columns: 250, ..right },
            MatmulAllReduce { columns: 264, ..right },
            MatmulAllReduce { inner: 0, ..right },
            MatmulAllReduce { inner: 201, ..right },
            MatmulAllReduce { out: 0x3008, ..right },
            MatmulAllReduce { dtype: DType::F32, ..right },
            MatmulAllReduce { dtype: DType::F8E4m3, right_by_rows: false, ..right },
            MatmulAllReduce { left: MatrixView { begin: 0x1008, ..right.left }, ..right },
            MatmulAllReduce {
                right_by_rows: false,
                right: MatrixView { pitch: 384, ..right.right },
                ..right
            },
        ] {
            let error = wrong.check().expect_err("it does not fit");
            assert!(error.is_invalid_argument(), "{error}");
        }
    }
}
