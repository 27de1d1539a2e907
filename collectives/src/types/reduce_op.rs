//! Reduction operations and what they mean for each element type.

/// How the elements of all ranks are reduced to one.
///
/// The bits are the same on every rank and in every run (rule S7). Every built-in algorithm on one host reduces in rank order,
/// from 0 to world - 1. Over several hosts elements are reduced within each host first, rounded to their type, and then in the
/// order of hosts. A plan reduces in its own order, and rounds after each step. `f16`, `bf16` and the 8-bit floats accumulate in
/// `f32` and are rounded once a step; other types accumulate in their own type, where integers wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ReduceOp {
    /// Sum.
    Sum = 1,
    /// Product.
    Prod = 2,
    /// Smallest; a NaN on any rank gives NaN.
    Min = 3,
    /// Largest; a NaN on any rank gives NaN.
    Max = 4,
    /// Sum divided by the number of ranks. Integers are summed in a wider type, without wrapping, and the quotient is
    /// truncated toward zero.
    Avg = 5,
}

impl ReduceOp {
    /// All operations.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Prod, Self::Min, Self::Max, Self::Avg];

    /// The name used in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
        }
    }

    /// The operation of a number in a call description.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|op| *op as u8 == code)
    }
}
