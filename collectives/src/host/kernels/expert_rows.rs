//! The loops over rows of tokens: sums of them, and 8-bit floats made of them.

use super::convert::{bf16_to_f32, f16_to_f32};
use super::float_environment::DefaultEnvironment;
use super::reduce::Isa;
use super::row_sums::{self, RowSumFn, SummedRow};
use crate::call::experts::SCALE_GROUP;
use crate::types::float8::f32_to_e4m3;
use crate::{DType, ExpertQuantization};

/// Smaller magnitudes give the scale of this one, so that no scale is 0.
const MIN_MAGNITUDE: f32 = 1e-4;
/// The largest number of `f8e4m3`.
const LARGEST_F8: f32 = 448.0;

/// Rows of floats, which are summed up in `f32`, or quantised. While the value lives, the thread has the default
/// floating-point environment.
pub(crate) struct ExpertRows {
    dtype: DType,
    hidden: usize,
    sum: RowSumFn,
    /// The rows of the next sum.
    rows: Vec<SummedRow>,
    _environment: DefaultEnvironment,
}

impl ExpertRows {
    /// `dtype` is `f32`, `f16` or `bf16`.
    pub(crate) fn new(dtype: DType, hidden: usize) -> Self {
        let sum = row_sums::select(Isa::detect(), dtype);
        Self { dtype, hidden, sum, rows: Vec::new(), _environment: DefaultEnvironment::enter() }
    }

    /// Reads the elements of a row.
    ///
    /// # Safety
    ///
    /// It is readable for the bytes of a row, and aligned for its elements.
    unsafe fn load(&self, from: *const u8, row: &mut Vec<f32>) {
        row.resize(self.hidden, 0.0);
        let (halves, floats) = (from.cast::<u16>(), from.cast::<f32>());
        // SAFETY: the caller promised that the row is readable and aligned, and `at` is below its length.
        let half = |at: usize| unsafe { halves.wrapping_add(at).read() };
        match self.dtype {
            DType::Bf16 => each(row, |at| bf16_to_f32(half(at))),
            DType::F16 => each(row, |at| f16_to_f32(half(at))),
            // SAFETY: the caller promised that the row is readable and aligned, and `at` is below its length.
            _ => each(row, |at| unsafe { floats.wrapping_add(at).read() }),
        }
    }

    /// Adds a row to the partial sum, multiplied by `weight` if there is one. It is read by [`store`](Self::store).
    pub(crate) fn add(&mut self, from: *const u8, weight: Option<f32>) {
        self.rows.push(SummedRow { from, weight: weight.unwrap_or(1.0), ends: false });
    }

    /// Ends a partial sum. It is added to those before it, unrounded.
    pub(crate) fn end_part(&mut self) {
        if let Some(last) = self.rows.last_mut() {
            last.ends = true;
        }
    }

    /// Writes the sum of the rows that were added, rounded once, or zeros if there were none; and begins another sum. Sums
    /// begin with zero, as those of devices do, so a negative zero alone becomes a positive one.
    ///
    /// # Safety
    ///
    /// The rows that were added are readable, and `to` is writable and overlaps none of them. Nobody else touches them.
    pub(crate) unsafe fn store(&mut self, to: *mut u8) {
        self.end_part();
        // SAFETY: the caller promised that the rows are readable and that `to` is writable. The instruction set was detected.
        unsafe { (self.sum)(&self.rows, self.hidden, to) };
        self.rows.clear();
    }

    /// Makes 8-bit floats of a row. Devices compute the same: in `f32`, each operation rounded by itself.
    ///
    /// The scale of a group is `max(largest magnitude, 1e-4) / 448`, and an element becomes
    /// `element * (1 / scale)`, rounded to `f8e4m3`. A NaN does not count for the magnitude, and stays NaN.
    ///
    /// # Safety
    ///
    /// The row is readable, and aligned for its elements.
    pub(crate) unsafe fn quantize(
        &self,
        from: *const u8,
        how: ExpertQuantization,
        (row, bytes, scales): (&mut Vec<f32>, &mut Vec<u8>, &mut Vec<u8>),
    ) {
        // SAFETY: the caller promised that the row is readable and aligned for its elements.
        unsafe { self.load(from, row) };
        bytes.clear();
        scales.clear();
        for group in row.chunks(SCALE_GROUP) {
            let largest = group.iter().fold(0.0_f32, |largest, element| largest.max(element.abs()));
            let (scale, exponent) = scale_of(largest, how);
            match how {
                ExpertQuantization::Fp8Ue8m0 => scales.push(exponent),
                _ => scales.extend_from_slice(&scale.to_ne_bytes()),
            }
            let inverse = 1.0 / scale;
            bytes.extend(group.iter().map(|element| f32_to_e4m3(element * inverse)));
        }
    }
}

/// The scale of a group with this largest magnitude, and its exponent with a bias of 127.
fn scale_of(largest: f32, how: ExpertQuantization) -> (f32, u8) {
    let scale = largest.max(MIN_MAGNITUDE) / LARGEST_F8;
    match how {
        ExpertQuantization::None | ExpertQuantization::Fp8 => (scale, 0),
        ExpertQuantization::Fp8PowerOfTwo | ExpertQuantization::Fp8Ue8m0 => {
            // The next exponent, unless the mantissa is zero.
            let exponent = (scale.to_bits() + 0x7f_ffff) >> 23;
            (f32::from_bits(exponent << 23), exponent as u8)
        }
    }
}

#[inline(always)]
fn each(row: &mut [f32], value: impl Fn(usize) -> f32) {
    row.iter_mut().enumerate().for_each(|(at, element)| *element = value(at));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_rounded_up_to_powers_of_two() {
        let scale = |largest, how| scale_of(largest, how);
        assert_eq!(scale(448.0, ExpertQuantization::Fp8), (1.0, 0));
        assert_eq!(scale(896.0, ExpertQuantization::Fp8Ue8m0), (2.0, 128));
        assert_eq!(scale(897.0, ExpertQuantization::Fp8PowerOfTwo), (4.0, 129));
        assert_eq!(scale(0.0, ExpertQuantization::Fp8), (1e-4 / 448.0, 0));
        let (tiny, exponent) = scale(0.0, ExpertQuantization::Fp8Ue8m0);
        assert_eq!(tiny, f32::from_bits(u32::from(exponent) << 23));
        assert!((1e-4 / 448.0..2e-4 / 448.0).contains(&tiny));
    }
}
