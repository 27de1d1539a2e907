//! Outputs of a fused all-reduce that are made of its sum.

/// Outputs of a fused all-reduce that are made of the sum with bias and residual.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum NormOutput {
    /// Nothing: the sum is the result.
    Sum = 0,
    /// The norm, in the type of the input.
    Norm = 1,
    /// The norm as E4M3, multiplied by the reciprocal of one scale, which is given.
    Fp8Static = 2,
    /// The norm as E4M3, divided by a scale for each token, its largest magnitude / 448, at least 1 / (448 * 512).
    Fp8PerToken = 3,
    /// The norm as E4M3, divided by a scale for each 128 elements of a token, their largest magnitude / 448, at least
    /// 1e-10 / 448.
    Fp8PerGroup = 4,
}
impl NormOutput {
    /// Whether the output has 8-bit floats.
    pub fn quantizes(self) -> bool {
        matches!(self, Self::Fp8Static | Self::Fp8PerToken | Self::Fp8PerGroup)
    }

    /// The name in messages, and in the kernels' macros.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sum => "SUM_ONLY",
            Self::Norm => "NORM",
            Self::Fp8Static => "FP8_STATIC",
            Self::Fp8PerToken => "FP8_TOKEN",
            Self::Fp8PerGroup => "FP8_GROUP",
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [Self::Sum, Self::Norm, Self::Fp8Static, Self::Fp8PerToken, Self::Fp8PerGroup]
            .into_iter()
            .find(|output| *output as u8 == code)
    }
}
