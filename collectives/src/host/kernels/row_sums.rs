//! Sums of rows of floats in `f32`, each element in the order of the rows, rounded once.
//!
//! One loop goes over the elements in blocks, and over the rows inside, so a row is read once and partial sums stay in
//! registers. It is compiled for the instruction sets of `reduce`, and has the same bits with each of them.

use half::{bf16, f16};

use super::elementwise::{ElementReduction, Sum};
use super::reduce::{BLOCK, Isa, finish_block, load_block, load_part, store_block, widen};
use crate::DType;

/// A row of a sum.
#[derive(Clone, Copy, Debug)]
pub(super) struct SummedRow {
    pub(super) from: *const u8,
    /// Factor of the row: 1 changes nothing.
    pub(super) weight: f32,
    /// Whether it is the last one of a partial sum. Partial sums are added in their order, unrounded.
    pub(super) ends: bool,
}

/// Adds up rows of `count` elements, and stores the sum. Sums and partial sums begin with zero, as those of devices do, so a
/// negative zero alone becomes a positive one. Rows behind the last end are part of no sum.
///
/// # Safety
///
/// Every row is readable and the destination writable for `count` elements (no alignment is needed), and nobody else writes
/// the rows or accesses the destination meanwhile. It overlaps no row. The instruction set that the function was selected for is
/// available.
pub(super) type RowSumFn = unsafe fn(&[SummedRow], usize, *mut u8);

/// The loop for rows of `f32`, `f16` or `bf16`.
pub(super) fn select(isa: Isa, dtype: DType) -> RowSumFn {
    macro_rules! by_dtype {
        ($function:ident) => {
            match dtype {
                DType::Bf16 => $function::<Sum<bf16>>,
                DType::F16 => $function::<Sum<f16>>,
                _ => $function::<Sum<f32>>,
            }
        };
    }
    match isa {
        Isa::Portable => by_dtype!(portable),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => by_dtype!(avx2),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => by_dtype!(avx512),
    }
}

/// # Safety
///
/// You must keep the promises of [`RowSumFn`].
unsafe fn portable<F: ElementReduction<Acc = f32>>(rows: &[SummedRow], count: usize, to: *mut u8) {
    // SAFETY: the caller promised what `RowSumFn` asks; without `F16C` no instruction set is needed.
    unsafe { body::<F, false>(rows, count, to) }
}

/// # Safety
///
/// You must keep the promises of [`RowSumFn`], and the processor has AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn avx2<F: ElementReduction<Acc = f32>>(rows: &[SummedRow], count: usize, to: *mut u8) {
    // SAFETY: the caller promised what `RowSumFn` asks; this function enables the instructions of `F16C`.
    unsafe { body::<F, true>(rows, count, to) }
}

/// # Safety
///
/// You must keep the promises of [`RowSumFn`], and the processor has these AVX-512 sets and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn avx512<F: ElementReduction<Acc = f32>>(rows: &[SummedRow], count: usize, to: *mut u8) {
    // SAFETY: the caller promised what `RowSumFn` asks; this function enables the instructions of `F16C`.
    unsafe { body::<F, true>(rows, count, to) }
}

/// # Safety
///
/// You must keep the promises of [`RowSumFn`]; `F16C` only in functions that enable those instructions.
#[inline(always)]
unsafe fn body<F: ElementReduction<Acc = f32>, const F16C: bool>(
    rows: &[SummedRow],
    count: usize,
    to: *mut u8,
) {
    let size = size_of::<F::Item>();
    let whole = count / BLOCK * BLOCK;
    for done in (0..whole).step_by(BLOCK) {
        // SAFETY: elements `done..done + BLOCK` of the rows lie within `count`, readable by contract.
        let block = unsafe { sum_block::<F, F16C>(rows, done * size, BLOCK) };
        // SAFETY: elements `done..done + BLOCK` of the destination lie within `count`, writable by contract.
        unsafe { store_block::<F::Item>(to.wrapping_add(done * size), &block) };
    }
    let left = count - whole;
    if left > 0 {
        // SAFETY: elements `whole..count` of the rows are readable by contract.
        let block = unsafe { sum_block::<F, F16C>(rows, whole * size, left) };
        let to = to.wrapping_add(whole * size);
        // SAFETY: elements `whole..count` of the destination are writable; `block` is a local array of more. The copy is by
        // bytes, so no alignment is needed.
        unsafe { std::ptr::copy_nonoverlapping(block.as_ptr().cast::<u8>(), to, left * size) };
    }
}

/// Sum of the `left` elements of all rows that begin `at` bytes behind their begin, and others behind it.
///
/// # Safety
///
/// These elements are readable, and `left <= BLOCK`. `F16C` only in functions that enable those instructions.
#[inline(always)]
unsafe fn sum_block<F: ElementReduction<Acc = f32>, const F16C: bool>(
    rows: &[SummedRow],
    at: usize,
    left: usize,
) -> [F::Item; BLOCK] {
    let (mut total, mut part) = ([0.0_f32; BLOCK], [0.0_f32; BLOCK]);
    for row in rows {
        // SAFETY: the caller promised that the next `left` elements of the row are readable.
        let block = unsafe { load_next::<F::Item>(row.from.wrapping_add(at), left) };
        let block = widen::<F, F16C>(block);
        for (sum, element) in part.iter_mut().zip(block) {
            *sum += element * row.weight;
        }
        if row.ends {
            for (sum, part) in total.iter_mut().zip(&mut part) {
                *sum += std::mem::take(part);
            }
        }
    }
    finish_block::<F, F16C>(&total, 1)
}

/// Loads a block of which the first `left` elements are there, one of them at least. The others are zeros.
///
/// # Safety
///
/// `left` elements from `from` on are readable, and `left <= BLOCK`.
#[inline(always)]
unsafe fn load_next<T: Copy + Default>(from: *const u8, left: usize) -> [T; BLOCK] {
    if left == BLOCK {
        // SAFETY: the caller promised that a whole block is readable.
        return unsafe { load_block(from) };
    }
    let mut padded = [T::default(); BLOCK];
    // SAFETY: the caller promised that `left` elements are readable, fewer than a block.
    unsafe { load_part(from, &mut padded, left) };
    padded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::kernels::float_environment::DefaultEnvironment;

    /// Rows of every kind of number, NaNs and subnormals among them.
    fn rows<T: bytemuck::Pod + Default>(of: impl Fn(u32) -> T) -> Vec<Vec<T>> {
        let bits = |row: u32, at: u32| at.wrapping_mul(655_360_007).wrapping_add(row * 77_777);
        (0..5).map(|row| (0..101).map(|at| of(bits(row, at))).collect()).collect()
    }

    fn sum<T: bytemuck::Pod + Default>(isa: Isa, dtype: DType, rows: &[Vec<T>]) -> Vec<u8> {
        let mut out = vec![T::default(); rows[0].len()];
        let row = |(nth, row): (usize, &Vec<T>)| SummedRow {
            from: row.as_ptr().cast(),
            weight: [1.0, 0.3, -2.0][nth % 3],
            ends: nth != 1,
        };
        let summed: Vec<SummedRow> = rows.iter().enumerate().map(row).collect();
        // SAFETY: the rows and the output are vectors of as many elements; the set was detected by the caller.
        unsafe { select(isa, dtype)(&summed, out.len(), out.as_mut_ptr().cast()) };
        bytemuck::cast_slice(&out).to_vec()
    }

    /// Rule S7.
    #[test]
    fn instruction_sets_agree_to_the_bit() {
        let wide = rows(f32::from_bits);
        let halves = rows(|bits| (bits >> 16) as u16);
        let finite =
            |row: &Vec<f32>| row.iter().map(|x| if x.is_nan() { 1.0 } else { *x }).collect();
        let wide: Vec<Vec<f32>> = wide.iter().map(finite).collect();
        let _environment = DefaultEnvironment::enter();
        let (best, plain) = (Isa::detect(), Isa::Portable);
        assert_eq!(sum(best, DType::F32, &wide), sum(plain, DType::F32, &wide));
        for dtype in [DType::F16, DType::Bf16] {
            assert_eq!(sum(best, dtype, &halves), sum(plain, dtype, &halves), "{dtype:?}");
        }
    }

    #[test]
    fn partial_sums_are_added_in_their_order_and_unrounded() {
        let rows = [vec![1.0_f32], vec![2.0], vec![4.0], vec![8.0], vec![-0.0]];
        let of = |x: f32| x.to_ne_bytes().to_vec();
        assert_eq!(sum(Isa::detect(), DType::F32, &rows), of(1.0 + (2.0 * 0.3 - 8.0) + 8.0));
        assert_eq!(sum(Isa::detect(), DType::F32, &[vec![-0.0_f32]]), of(0.0), "no negative zero");
        let mut out = [7_u16; 3];
        let ones = [1_u16; 3];
        let one = SummedRow { from: ones.as_ptr().cast(), weight: 1.0, ends: false };
        for rows in [&[][..], &[one]] {
            // SAFETY: the output has three elements; the row has as many.
            unsafe { select(Isa::detect(), DType::Bf16)(rows, 3, out.as_mut_ptr().cast()) };
            assert_eq!(out, [0; 3], "no sum has ended");
        }
    }
}
