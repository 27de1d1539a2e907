//! Reduces any number of sources to any number of destinations, element by element, in the order of the sources.
//!
//! One generic body serves all element types and operations. It is compiled for several instruction sets, one of
//! which is selected at run time. Fused multiply-add is not enabled anywhere, and the default floating-point
//! environment is set, so the bits depend on neither the processor nor the caller's settings (rule S7). The body
//! loads a block of every source before it stores, so a destination may be one of the sources.

use half::{bf16, f16};

use super::elementwise::{Avg, ElementReduction, Max, Min, Prod, Scalar, Sum};
use super::float_environment::DefaultEnvironment;
use crate::{DType, F8E4m3, F8E5m2, ReduceOp};

/// The number of elements that are loaded, reduced and stored together: two 64-byte vectors of `f32`.
pub(super) const BLOCK: usize = 32;

/// Reduces `count` elements of all sources, in order, and stores the result to each destination. The last argument is
/// what averages are divided by: the number of ranks.
///
/// # Safety
///
/// Every source is readable and every destination writable for `count` elements (no alignment is needed), and nobody
/// else writes the sources or accesses the destinations meanwhile. A destination is either exactly one of the sources
/// or overlaps none, and destinations do not overlap each other. The instruction set that the function was selected
/// for is available.
pub(crate) type ReduceFn = unsafe fn(&[*const u8], &[*mut u8], usize, usize);

/// Does nothing. It stands for a reduction in calls that only move data.
pub(crate) unsafe fn moves_only(_: &[*const u8], _: &[*mut u8], _: usize, _: usize) {}

/// The instruction sets that the loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The best of these instruction sets that this processor has.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("f16c")
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("f16c") && is_x86_feature_detected!("avx2") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }
}

/// The loop for this combination, or `None` for an element type that has no reductions.
pub(crate) fn select(isa: Isa, dtype: DType, op: ReduceOp) -> Option<ReduceFn> {
    Some(match dtype {
        DType::F32 => by_op::<f32>(isa, op),
        DType::F64 => by_op::<f64>(isa, op),
        DType::F16 => by_op::<f16>(isa, op),
        DType::Bf16 => by_op::<bf16>(isa, op),
        DType::I32 => by_op::<i32>(isa, op),
        DType::I64 => by_op::<i64>(isa, op),
        DType::U8 => by_op::<u8>(isa, op),
        DType::I8 => by_op::<i8>(isa, op),
        DType::F8E4m3 => by_op::<F8E4m3>(isa, op),
        DType::F8E5m2 => by_op::<F8E5m2>(isa, op),
        _ => return None,
    })
}

fn by_op<S: Scalar>(isa: Isa, op: ReduceOp) -> ReduceFn {
    match op {
        ReduceOp::Sum => by_isa::<Sum<S>>(isa),
        ReduceOp::Prod => by_isa::<Prod<S>>(isa),
        ReduceOp::Min => by_isa::<Min<S>>(isa),
        ReduceOp::Max => by_isa::<Max<S>>(isa),
        ReduceOp::Avg => by_isa::<Avg<S>>(isa),
    }
}

fn by_isa<F: ElementReduction>(isa: Isa) -> ReduceFn {
    match isa {
        Isa::Portable => portable::<F>,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::<F>,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => avx512::<F>,
    }
}

/// # Safety
///
/// You must keep the promises of [`ReduceFn`].
unsafe fn portable<F: ElementReduction>(
    sources: &[*const u8],
    outputs: &[*mut u8],
    count: usize,
    world: usize,
) {
    let _environment = DefaultEnvironment::enter();
    // SAFETY: the caller promised what `ReduceFn` asks; without `F16C` no instruction set is needed.
    unsafe { body::<F, false>(sources, outputs, count, world) }
}

/// # Safety
///
/// You must keep the promises of [`ReduceFn`], and the processor has AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn avx2<F: ElementReduction>(
    sources: &[*const u8],
    outputs: &[*mut u8],
    count: usize,
    world: usize,
) {
    let _environment = DefaultEnvironment::enter();
    // SAFETY: the caller promised what `ReduceFn` asks; this function enables the instructions of `F16C`.
    unsafe { body::<F, true>(sources, outputs, count, world) }
}

/// # Safety
///
/// You must keep the promises of [`ReduceFn`], and the processor has these AVX-512 sets and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
unsafe fn avx512<F: ElementReduction>(
    sources: &[*const u8],
    outputs: &[*mut u8],
    count: usize,
    world: usize,
) {
    let _environment = DefaultEnvironment::enter();
    // SAFETY: the caller promised what `ReduceFn` asks; this function enables the instructions of `F16C`.
    unsafe { body::<F, true>(sources, outputs, count, world) }
}

/// # Safety
///
/// You must keep the promises of [`ReduceFn`]; `F16C` only in functions that enable those instructions.
#[inline(always)]
unsafe fn body<F: ElementReduction, const F16C: bool>(
    sources: &[*const u8],
    outputs: &[*mut u8],
    count: usize,
    world: usize,
) {
    let Some((first, rest)) = sources.split_first() else { return };
    let size = size_of::<F::Item>();
    let mut done = 0;
    while done + BLOCK <= count {
        let at = done * size;
        let mut total = widen::<F, F16C>(
            // SAFETY: elements `done..done + BLOCK` lie within `count`, readable by contract.
            unsafe { load_block::<F::Item>(first.wrapping_add(at)) },
        );
        for source in rest {
            // SAFETY: elements `done..done + BLOCK` of this source lie within `count`, for which the caller promised
            // that it is readable.
            let block = unsafe { load_block::<F::Item>(source.wrapping_add(at)) };
            combine_block::<F, F16C>(&mut total, &block);
        }
        let block = finish_block::<F, F16C>(&total, world);
        for output in outputs {
            // SAFETY: elements `done..done + BLOCK` of this destination lie within `count`, for which the caller
            // promised that it is writable.
            unsafe { store_block::<F::Item>(output.wrapping_add(at), &block) };
        }
        done += BLOCK;
    }
    let left = count - done;
    if left == 0 {
        return;
    }
    // The tail goes through the same block code, padded, so that an element's bits do not depend
    // on its position.
    let at = done * size;
    let mut padded = [F::Item::default(); BLOCK];
    // SAFETY: elements `done..count` of the first source are readable; `left < BLOCK`.
    unsafe { load_part(first.wrapping_add(at), &mut padded, left) };
    let mut total = widen::<F, F16C>(padded);
    for source in rest {
        // SAFETY: elements `done..count` of this source are readable; `left < BLOCK`.
        unsafe { load_part(source.wrapping_add(at), &mut padded, left) };
        combine_block::<F, F16C>(&mut total, &padded);
    }
    let block = finish_block::<F, F16C>(&total, world);
    for output in outputs {
        let to = output.wrapping_add(at).cast::<F::Item>();
        // SAFETY: elements `done..count` of a destination are writable; `block` is a local array of more than `left`
        // elements. The copy is by bytes, so no alignment is needed.
        unsafe {
            std::ptr::copy_nonoverlapping(block.as_ptr().cast::<u8>(), to.cast(), left * size);
        };
    }
}

#[inline(always)]
pub(super) fn widen<F: ElementReduction, const F16C: bool>(
    block: [F::Item; BLOCK],
) -> [F::Acc; BLOCK] {
    #[cfg(target_arch = "x86_64")]
    if F16C && F::HALF {
        // SAFETY: `F16C` says that the enclosing function enables these instructions.
        return bytemuck::cast(unsafe { f16c::widen(bytemuck::cast(block)) });
    }
    block.map(
        #[inline(always)]
        |item| F::widen(item),
    )
}

#[inline(always)]
fn combine_block<F: ElementReduction, const F16C: bool>(
    total: &mut [F::Acc; BLOCK],
    block: &[F::Item; BLOCK],
) {
    let block = widen::<F, F16C>(*block);
    for (so_far, item) in total.iter_mut().zip(block) {
        *so_far = F::combine(*so_far, item);
    }
}

#[inline(always)]
pub(super) fn finish_block<F: ElementReduction, const F16C: bool>(
    total: &[F::Acc; BLOCK],
    world: usize,
) -> [F::Item; BLOCK] {
    let finished = total.map(
        #[inline(always)]
        |total| F::finish(total, world),
    );
    #[cfg(target_arch = "x86_64")]
    if F16C && F::HALF {
        // SAFETY: `F16C` says that the enclosing function enables these instructions.
        return bytemuck::cast(unsafe { f16c::narrow(bytemuck::cast(finished)) });
    }
    finished.map(
        #[inline(always)]
        |finished| F::narrow(finished),
    )
}

/// Converts halves to `f32` and back with the F16C instructions, which give the same bits as `convert`.
#[cfg(target_arch = "x86_64")]
mod f16c {
    use std::arch::x86_64::{
        __m128i, __m256, _MM_FROUND_TO_NEAREST_INT, _mm256_cvtph_ps, _mm256_cvtps_ph,
    };

    use super::BLOCK;

    #[inline]
    #[target_feature(enable = "avx,f16c")]
    pub(super) fn widen(halves: [u16; BLOCK]) -> [f32; BLOCK] {
        let [a, b, c, d]: [__m128i; 4] = bytemuck::cast(halves);
        let wide: [__m256; 4] =
            [_mm256_cvtph_ps(a), _mm256_cvtph_ps(b), _mm256_cvtph_ps(c), _mm256_cvtph_ps(d)];
        bytemuck::cast(wide)
    }

    #[inline]
    #[target_feature(enable = "avx,f16c")]
    pub(super) fn narrow(floats: [f32; BLOCK]) -> [u16; BLOCK] {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        let [a, b, c, d]: [__m256; 4] = bytemuck::cast(floats);
        let halves: [__m128i; 4] = [
            _mm256_cvtps_ph::<NEAREST>(a),
            _mm256_cvtps_ph::<NEAREST>(b),
            _mm256_cvtps_ph::<NEAREST>(c),
            _mm256_cvtps_ph::<NEAREST>(d),
        ];
        bytemuck::cast(halves)
    }
}

/// # Safety
///
/// `from` is readable for a block of `T`.
#[inline(always)]
pub(super) unsafe fn load_block<T: Copy>(from: *const u8) -> [T; BLOCK] {
    // SAFETY: readable by contract; an unaligned read needs no alignment.
    unsafe { from.cast::<[T; BLOCK]>().read_unaligned() }
}

/// # Safety
///
/// `to` is writable for a block of `T`.
#[inline(always)]
pub(super) unsafe fn store_block<T: Copy>(to: *mut u8, block: &[T; BLOCK]) {
    // SAFETY: writable by contract; an unaligned write needs no alignment.
    unsafe { to.cast::<[T; BLOCK]>().write_unaligned(*block) }
}

/// # Safety
///
/// `from` is readable for `count` elements of `T`, and `count <= BLOCK`.
#[inline(always)]
pub(super) unsafe fn load_part<T: Copy>(from: *const u8, block: &mut [T; BLOCK], count: usize) {
    // SAFETY: `count` elements are readable by contract and fit the local block. The copy is by bytes, so no alignment
    // is needed.
    unsafe {
        std::ptr::copy_nonoverlapping(
            from,
            block.as_mut_ptr().cast::<u8>(),
            count * size_of::<T>(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T: bytemuck::Pod + Default>(
        isa: Isa,
        dtype: DType,
        op: ReduceOp,
        sources: &[Vec<T>],
    ) -> Vec<T> {
        let count = sources[0].len();
        let mut out = vec![T::default(); count];
        let from: Vec<*const u8> = sources.iter().map(|s| s.as_ptr().cast()).collect();
        let reduce = select(isa, dtype, op).expect("a type that is reduced");
        // SAFETY: every source and the output are vectors of `count` elements, and the set was
        // detected by the caller.
        unsafe { reduce(&from, &[out.as_mut_ptr().cast()], count, from.len()) };
        out
    }

    /// Rule S7.
    #[test]
    fn instruction_sets_agree_to_the_bit() {
        // The bits depend neither on the processor nor on the position of an element.
        let sources: Vec<Vec<f32>> = (0..3)
            .map(|r| (0..101).map(|i| ((i * 37 + r * 11) % 97) as f32 * 0.37 - 9.1).collect())
            .collect();
        let halves: Vec<Vec<u16>> = sources
            .iter()
            .map(|s| s.iter().map(|x| f16::from_f32(*x).to_bits()).collect())
            .collect();
        // Every encoding is reduced with others, including NaNs and infinities.
        let bytes: Vec<Vec<u8>> =
            (0..3).map(|r| (0..=u8::MAX).map(|i| i.wrapping_mul(2 * r + 1)).collect()).collect();
        for op in ReduceOp::ALL {
            let best = run(Isa::detect(), DType::F32, op, &sources);
            let plain = run(Isa::Portable, DType::F32, op, &sources);
            assert_eq!(
                bytemuck::cast_slice::<f32, u32>(&best),
                bytemuck::cast_slice::<f32, u32>(&plain)
            );
            for dtype in [DType::F16, DType::Bf16] {
                let best = run(Isa::detect(), dtype, op, &halves);
                assert_eq!(best, run(Isa::Portable, dtype, op, &halves));
            }
            for dtype in [DType::F8E4m3, DType::F8E5m2] {
                let best = run(Isa::detect(), dtype, op, &bytes);
                assert_eq!(best, run(Isa::Portable, dtype, op, &bytes));
            }
        }
    }

    #[test]
    fn nan_wins_min_and_max_from_either_side() {
        let sources = [vec![f32::NAN, 1.0, 2.0], vec![0.0, f32::NAN, 3.0]];
        for op in [ReduceOp::Min, ReduceOp::Max] {
            let out = run(Isa::detect(), DType::F32, op, &sources);
            assert!(out[0].is_nan() && out[1].is_nan());
            assert_eq!(out[2], if op == ReduceOp::Min { 2.0 } else { 3.0 });
        }
    }

    #[test]
    fn small_floats_are_rounded_once_at_the_end() {
        // 16 + 0.75 + 0.75 + 0.75 is 18.25, which is rounded to 18; rounded after each step, it would be 16.
        let bits = |value| F8E4m3::from_f32(value).to_bits();
        let sources = [16.0, 0.75, 0.75, 0.75].map(|value| vec![bits(value)]);
        let out = run(Isa::detect(), DType::F8E4m3, ReduceOp::Sum, &sources);
        assert_eq!(F8E4m3::from_bits(out[0]).to_f32(), 18.0);
        let sources = [400.0, 400.0].map(|value| vec![bits(value)]);
        let out = run(Isa::detect(), DType::F8E4m3, ReduceOp::Sum, &sources);
        assert_eq!(F8E4m3::from_bits(out[0]).to_f32(), 448.0, "the largest number");
        // The sum is too large, but its average is not.
        let out = run(Isa::detect(), DType::F8E4m3, ReduceOp::Avg, &sources);
        assert_eq!(F8E4m3::from_bits(out[0]).to_f32(), F8E4m3::from_f32(400.0).to_f32());
        let sources = [50000.0, 50000.0].map(|value| vec![F8E5m2::from_f32(value).to_bits()]);
        let out = run(Isa::detect(), DType::F8E5m2, ReduceOp::Sum, &sources);
        assert_eq!(F8E5m2::from_bits(out[0]).to_f32(), f32::INFINITY);
    }

    #[test]
    fn integer_averages_do_not_wrap_and_truncate() {
        let out = run(Isa::detect(), DType::I8, ReduceOp::Avg, &[vec![127i8, -3], vec![127, -4]]);
        assert_eq!(out, [127, -3]);
        let out = run(Isa::detect(), DType::I64, ReduceOp::Avg, &[vec![i64::MAX], vec![i64::MAX]]);
        assert_eq!(out, [i64::MAX]);
    }
}
