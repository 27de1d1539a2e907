//! The arithmetic of reductions on one element: widen, combine in rank order, finish, narrow. Nothing here accesses
//! memory.

use std::marker::PhantomData;

use bytemuck::Pod;
use half::{bf16, f16};

use super::convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::types::float8::{e4m3_to_f32, e5m2_to_f32, f32_to_e4m3, f32_to_e5m2};
use crate::{F8E4m3, F8E5m2};

/// One reduction of one element type.
pub(super) trait ElementReduction {
    /// The type in memory.
    type Item: Pod + Default;
    /// The type of the accumulator.
    type Acc: Pod;
    /// Whether items are IEEE halves that accumulate in `f32`, for which there are conversion instructions.
    #[cfg(target_arch = "x86_64")]
    const HALF: bool;

    fn widen(item: Self::Item) -> Self::Acc;
    fn combine(so_far: Self::Acc, next: Self::Acc) -> Self::Acc;
    /// Computes the result from the total over `world` ranks, before it is narrowed.
    fn finish(total: Self::Acc, world: usize) -> Self::Acc;
    fn narrow(finished: Self::Acc) -> Self::Item;
}

/// The arithmetic of an accumulator. Floats follow IEEE 754, integers wrap.
pub(super) trait Arithmetic: Pod {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn minimum(self, other: Self) -> Self;
    fn maximum(self, other: Self) -> Self;
    fn divided(self, by: usize) -> Self;
}

macro_rules! float_arithmetic {
    ($($ty:ty),+) => {$(
        impl Arithmetic for $ty {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                // The first NaN is kept; a NaN in `other` makes the comparison false, so it is taken.
                if self < other || self.is_nan() { self } else { other }
            }
            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                if self > other || self.is_nan() { self } else { other }
            }
            #[inline(always)]
            fn divided(self, by: usize) -> Self {
                self / by as $ty
            }
        }
    )+};
}
float_arithmetic!(f32, f64);

macro_rules! integer_arithmetic {
    ($($ty:ty),+) => {$(
        impl Arithmetic for $ty {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                self.min(other)
            }
            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                self.max(other)
            }
            #[inline(always)]
            fn divided(self, by: usize) -> Self {
                // Only averages divide, in a type that can hold `world`, which is at least 1.
                self.checked_div(by as $ty).unwrap_or(self)
            }
        }
    )+};
}
integer_arithmetic!(u8, i8, i32, i64, i128);

/// An element type with the accumulator of its reductions and the wider one of its averages.
pub(super) trait Scalar {
    type Item: Pod + Default;
    type Acc: Arithmetic;
    type Wide: Arithmetic;
    #[cfg(target_arch = "x86_64")]
    const HALF: bool;

    fn to_acc(item: Self::Item) -> Self::Acc;
    fn from_acc(acc: Self::Acc) -> Self::Item;
    fn to_wide(item: Self::Item) -> Self::Wide;
    fn from_wide(wide: Self::Wide) -> Self::Item;
}

// `acc` and `wide` give a type, the conversion from an item to it, and the conversion back.
macro_rules! scalars {
    ($($name:ty {
        item: $item:ty,
        acc: $acc:ty = ($to_acc:expr, $from_acc:expr),
        wide: $wide:ty = ($to_wide:expr, $from_wide:expr),
        half: $half:literal
    })+) => {$(
        impl Scalar for $name {
            type Item = $item;
            type Acc = $acc;
            type Wide = $wide;
            #[cfg(target_arch = "x86_64")]
            const HALF: bool = $half;
            #[inline(always)]
            fn to_acc(item: $item) -> $acc {
                $to_acc(item)
            }
            #[inline(always)]
            fn from_acc(acc: $acc) -> $item {
                $from_acc(acc)
            }
            #[inline(always)]
            fn to_wide(item: $item) -> $wide {
                $to_wide(item)
            }
            #[inline(always)]
            fn from_wide(wide: $wide) -> $item {
                $from_wide(wide)
            }
        }
    )+};
}

scalars! {
    f32 { item: f32, acc: f32 = (|x| x, |x| x), wide: f32 = (|x| x, |x| x), half: false }
    f64 { item: f64, acc: f64 = (|x| x, |x| x), wide: f64 = (|x| x, |x| x), half: false }
    f16 {
        item: u16,
        acc: f32 = (f16_to_f32, f32_to_f16),
        wide: f32 = (f16_to_f32, f32_to_f16),
        half: true
    }
    bf16 {
        item: u16,
        acc: f32 = (bf16_to_f32, f32_to_bf16),
        wide: f32 = (bf16_to_f32, f32_to_bf16),
        half: false
    }
    F8E4m3 {
        item: u8,
        acc: f32 = (e4m3_to_f32, f32_to_e4m3),
        wide: f32 = (e4m3_to_f32, f32_to_e4m3),
        half: false
    }
    F8E5m2 {
        item: u8,
        acc: f32 = (e5m2_to_f32, f32_to_e5m2),
        wide: f32 = (e5m2_to_f32, f32_to_e5m2),
        half: false
    }
    i32 { item: i32, acc: i32 = (|x| x, |x| x), wide: i64 = (i64::from, |x| x as i32), half: false }
    i64 { item: i64, acc: i64 = (|x| x, |x| x), wide: i128 = (i128::from, |x| x as i64), half: false }
    u8 { item: u8, acc: u8 = (|x| x, |x| x), wide: i32 = (i32::from, |x| x as u8), half: false }
    i8 { item: i8, acc: i8 = (|x| x, |x| x), wide: i32 = (i32::from, |x| x as i8), half: false }
}

macro_rules! reductions {
    ($($name:ident: $method:ident;)+) => {$(
        pub(super) struct $name<S>(PhantomData<S>);
        impl<S: Scalar> ElementReduction for $name<S> {
            type Item = S::Item;
            type Acc = S::Acc;
            #[cfg(target_arch = "x86_64")]
            const HALF: bool = S::HALF;
            #[inline(always)]
            fn widen(item: S::Item) -> S::Acc {
                S::to_acc(item)
            }
            #[inline(always)]
            fn combine(so_far: S::Acc, next: S::Acc) -> S::Acc {
                so_far.$method(next)
            }
            #[inline(always)]
            fn finish(total: S::Acc, _world: usize) -> S::Acc {
                total
            }
            #[inline(always)]
            fn narrow(finished: S::Acc) -> S::Item {
                S::from_acc(finished)
            }
        }
    )+};
}

reductions! {
    Sum: add;
    Prod: mul;
    Min: minimum;
    Max: maximum;
}

pub(super) struct Avg<S>(PhantomData<S>);
impl<S: Scalar> ElementReduction for Avg<S> {
    type Item = S::Item;
    type Acc = S::Wide;
    #[cfg(target_arch = "x86_64")]
    const HALF: bool = S::HALF;
    #[inline(always)]
    fn widen(item: S::Item) -> S::Wide {
        S::to_wide(item)
    }
    #[inline(always)]
    fn combine(so_far: S::Wide, next: S::Wide) -> S::Wide {
        so_far.add(next)
    }
    #[inline(always)]
    fn finish(total: S::Wide, world: usize) -> S::Wide {
        total.divided(world)
    }
    #[inline(always)]
    fn narrow(finished: S::Wide) -> S::Item {
        S::from_wide(finished)
    }
}
