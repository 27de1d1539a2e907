//! A fused matmul of matrices, as ranks compare it.

use crate::DType;

/// Communication of a fused matmul.
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
/// A fused matmul of matrices, as ranks compare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatmulShape {
    /// Communication of the product.
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
