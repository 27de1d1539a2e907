//! The operations behind the sum in a fused all-reduce, for one row: the same in the same order as in
//! `collectives/kernels/fused/norm.cuh`, so that bits are equal (rule S7).

use super::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use super::float_environment::DefaultEnvironment;
use crate::call::norm::{GROUP, LANES};
use crate::types::float8::f32_to_e4m3;
use crate::{DType, NormOutput, NormShape};

const LARGEST: f32 = 448.0;
const MIN_TOKEN_SCALE: f32 = 1.0 / (448.0 * 512.0);
const MIN_GROUP_MAXIMUM: f32 = 1e-10;

/// The rows that one row is made of.
pub(crate) struct RowIn<'a> {
    /// The sum of all ranks.
    pub(crate) sum: &'a [f32],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) residual: Option<&'a [f32]>,
    /// Empty where there is no norm.
    pub(crate) weight: &'a [f32],
    /// Scale for [`NormOutput::Fp8Static`].
    pub(crate) scale: f32,
}

/// Outputs of one row.
#[derive(Default)]
pub(crate) struct RowOut {
    pub(crate) sum: Vec<f32>,
    pub(crate) norm: Vec<f32>,
    pub(crate) quantized: Vec<u8>,
    pub(crate) scales: Vec<f32>,
}

/// The value that an element of the type holds after `value` was stored in it.
fn rounded(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F16 => f16_to_f32(f32_to_f16(value)),
        DType::Bf16 => bf16_to_f32(f32_to_bf16(value)),
        _ => value,
    }
}

/// The elements of a row in memory, widened.
pub(crate) fn widen_row(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let pair = |at: &[u8]| u16::from_ne_bytes([at[0], at[1]]);
    match dtype {
        DType::F16 => bytes.chunks_exact(2).map(|at| f16_to_f32(pair(at))).collect(),
        DType::Bf16 => bytes.chunks_exact(2).map(|at| bf16_to_f32(pair(at))).collect(),
        _ => bytes
            .chunks_exact(4)
            .map(|at| f32::from_ne_bytes([at[0], at[1], at[2], at[3]]))
            .collect(),
    }
}

/// A row as it lies in memory. Its values are those of elements of the type.
pub(crate) fn narrow_row(dtype: DType, row: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F16 => row.iter().flat_map(|x| f32_to_f16(*x).to_ne_bytes()).collect(),
        DType::Bf16 => row.iter().flat_map(|x| f32_to_bf16(*x).to_ne_bytes()).collect(),
        _ => row.iter().flat_map(|x| x.to_ne_bytes()).collect(),
    }
}

/// Makes the outputs of a row.
pub(crate) fn norm_row(shape: &NormShape, row: &RowIn<'_>) -> RowOut {
    let _environment = DefaultEnvironment::enter();
    let (dtype, output) = (shape.dtype, shape.output);
    let mut sum = row.sum.to_vec();
    for more in [row.bias, row.residual].into_iter().flatten() {
        for (so_far, next) in sum.iter_mut().zip(more) {
            *so_far = rounded(dtype, *so_far + next);
        }
    }
    if output == NormOutput::Sum {
        return RowOut { sum, ..RowOut::default() };
    }
    let mean = sum_of_squares(&sum, shape.threads()) / shape.hidden as f32;
    let factor = 1.0 / (mean + shape.epsilon).sqrt();
    let weighted =
        |(x, weight): (&f32, &f32)| rounded(dtype, x * factor * (weight + shape.weight_bias));
    let norm: Vec<f32> = sum.iter().zip(row.weight).map(weighted).collect();
    let up = |scale| if shape.powers_of_two { up_to_power_of_two(scale) } else { scale };
    let (scales, quantized) = match output {
        NormOutput::Fp8Static => {
            let factor = 1.0 / row.scale;
            (Vec::new(), norm.iter().map(|x| f32_to_e4m3(x * factor)).collect())
        }
        NormOutput::Fp8PerToken => {
            let scale = up(greater(largest(&norm) / LARGEST, MIN_TOKEN_SCALE));
            (vec![scale], norm.iter().map(|x| f32_to_e4m3(x / scale)).collect())
        }
        NormOutput::Fp8PerGroup => {
            let of_group = |group| up(greater(largest(group), MIN_GROUP_MAXIMUM) / LARGEST);
            let scales: Vec<f32> = norm.chunks(GROUP).map(of_group).collect();
            let both = norm.chunks(GROUP).zip(&scales);
            let bytes =
                both.flat_map(|(group, scale)| group.iter().map(|x| f32_to_e4m3(x / *scale)));
            (scales.clone(), bytes.collect())
        }
        NormOutput::Sum | NormOutput::Norm => (Vec::new(), Vec::new()),
    };
    RowOut { sum, norm, quantized, scales }
}

/// The squares of a row, added up as `threads` threads of a kernel do it: each adds the squares of its units one after the other, and
/// then pairs of neighbours are added until one is left.
fn sum_of_squares(row: &[f32], threads: usize) -> f32 {
    let mut sums = vec![0.0_f32; threads];
    for (unit, lanes) in row.chunks(LANES).enumerate() {
        let sum = &mut sums[unit % threads];
        lanes.iter().for_each(|x| *sum += x * x);
    }
    while sums.len() > 1 {
        sums = sums.chunks(2).map(|pair| pair[0] + pair[1]).collect();
    }
    sums[0]
}

/// `b` if it is greater; so a NaN is never taken.
fn greater(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

fn largest(row: &[f32]) -> f32 {
    row.iter().fold(0.0, |most, x| greater(most, x.abs()))
}

/// Rounds a scale, which is a normal number above 0, up to a power of two.
fn up_to_power_of_two(scale: f32) -> f32 {
    f32::from_bits((scale.to_bits() + 0x7f_ffff) & 0xff80_0000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{F8E4m3, FusedAlgorithm};

    fn shape(hidden: usize, dtype: DType, output: NormOutput) -> NormShape {
        NormShape {
            tokens: 1,
            hidden,
            dtype,
            epsilon: 1e-5,
            weight_bias: 1.0,
            output,
            powers_of_two: false,
            algorithm: FusedAlgorithm::Auto,
        }
    }

    fn values(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 37 + seed * 101) % 251) as f32 / 64.0 - 1.9).collect()
    }

    /// Against the definition in `f64`.
    #[test]
    fn rows_are_normed_as_defined() {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for hidden in [8, 64, 1000, 4096, 20_000] {
                let round = |row: Vec<f32>| {
                    row.into_iter().map(|x| rounded(dtype, x)).collect::<Vec<f32>>()
                };
                let [sum, bias, residual, weight] =
                    [0, 1, 2, 3].map(|seed| round(values(hidden, seed)));
                let row = RowIn {
                    sum: &sum,
                    bias: Some(&bias),
                    residual: Some(&residual),
                    weight: &weight,
                    scale: 0.0,
                };
                let shape = shape(hidden, dtype, NormOutput::Norm);
                let made = norm_row(&shape, &row);
                let all: Vec<f64> = (0..hidden)
                    .map(|i| {
                        let first = rounded(dtype, sum[i] + bias[i]);
                        f64::from(rounded(dtype, first + residual[i]))
                    })
                    .collect();
                let mean = all.iter().map(|x| x * x).sum::<f64>() / hidden as f64;
                let factor = 1.0 / (mean + 1e-5).sqrt();
                let bound = if dtype == DType::Bf16 { 0.005 } else { 0.001 };
                for i in 0..hidden {
                    assert_eq!(f64::from(made.sum[i]), all[i]);
                    let wanted = all[i] * factor * (f64::from(weight[i]) + 1.0);
                    let off = (f64::from(made.norm[i]) - wanted).abs();
                    assert!(off <= bound * wanted.abs().max(0.01), "{dtype:?} {hidden} {i}: {off}");
                }
            }
        }
    }

    #[test]
    fn quantized_rows_come_back_within_a_step_of_their_scale() {
        let (hidden, dtype) = (512, DType::Bf16);
        let sum: Vec<f32> = values(hidden, 4).into_iter().map(|x| rounded(dtype, x)).collect();
        let weight = vec![0.0; hidden];
        let row = |scale| RowIn { sum: &sum, bias: None, residual: None, weight: &weight, scale };
        for output in [NormOutput::Fp8Static, NormOutput::Fp8PerToken, NormOutput::Fp8PerGroup] {
            for powers_of_two in [false, true] {
                let shape = NormShape { powers_of_two, ..shape(hidden, dtype, output) };
                let made = norm_row(&shape, &row(0.25));
                let scale = |i: usize| match output {
                    NormOutput::Fp8Static => 0.25,
                    NormOutput::Fp8PerToken => made.scales[0],
                    _ => made.scales[i / GROUP],
                };
                for i in 0..hidden {
                    let back = F8E4m3::from_bits(made.quantized[i]).to_f32() * scale(i);
                    // Three bits of mantissa, and the least subnormal.
                    let bound = (made.norm[i].abs() / 16.0).max(scale(i) / 512.0);
                    assert!((back - made.norm[i]).abs() <= bound, "{output:?} {i}: {back}");
                    assert!(
                        !powers_of_two
                            || output == NormOutput::Fp8Static
                            || scale(i).log2().fract() == 0.0
                    );
                }
                if output == NormOutput::Fp8PerGroup {
                    assert_eq!(made.scales.len(), hidden / GROUP);
                }
            }
        }
        // Rows of zeros have the least scale, and nothing is divided by zero.
        let zeros = vec![0.0; hidden];
        let made = norm_row(
            &shape(hidden, dtype, NormOutput::Fp8PerToken),
            &RowIn { sum: &zeros, ..row(0.0) },
        );
        assert_eq!((made.scales[0], made.quantized), (MIN_TOKEN_SCALE, vec![0; hidden]));
    }
}
