//! Inputs that look random, and what collectives must make of them, computed one element at a time.

use half::{bf16, f16};
use symmpool_allocator::testing::SplitMix64;
use symmpool_collectives::{Element, F8E4m3, F8E5m2, ReduceOp};

/// A pseudo-random number, which is the same on every rank.
pub(crate) fn noise(seed: u64, index: u64) -> u64 {
    SplitMix64::at(seed << 32, index)
}

/// The expected results of reductions, computed one element at a time, in rank order.
pub(crate) trait Oracle: Element {
    fn from_noise(noise: u64) -> Self;
    fn reduce(op: ReduceOp, values: &[Self]) -> Self;
}

macro_rules! float_oracle {
    ($($ty:ty, $acc:ty, $to:expr, $from:expr;)+) => {$(
        impl Oracle for $ty {
            fn from_noise(noise: u64) -> Self {
                $from((noise % 4001) as $acc / 1000.0 - 2.0)
            }
            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                let values = values.iter().map(|x| $to(*x));
                let count = values.len() as $acc;
                let total = values.reduce(|a, b| match op {
                    ReduceOp::Sum | ReduceOp::Avg => a + b,
                    ReduceOp::Prod => a * b,
                    ReduceOp::Min => if a < b { a } else { b },
                    ReduceOp::Max => if a > b { a } else { b },
                });
                $from(if op == ReduceOp::Avg { total.unwrap() / count } else { total.unwrap() })
            }
        }
    )+};
}
float_oracle! {
    f32, f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x;
    f16, f32, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::to_f32, bf16::from_f32;
    F8E4m3, f32, F8E4m3::to_f32, F8E4m3::from_f32;
    F8E5m2, f32, F8E5m2::to_f32, F8E5m2::from_f32;
}

macro_rules! integer_oracle {
    ($($ty:ty),+) => {$(
        impl Oracle for $ty {
            fn from_noise(noise: u64) -> Self {
                noise as $ty
            }
            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                let wide = || values.iter().map(|x| i128::from(*x));
                let total = match op {
                    ReduceOp::Sum => wide().sum(),
                    ReduceOp::Avg => wide().sum::<i128>() / values.len() as i128,
                    ReduceOp::Prod => wide().fold(1, i128::wrapping_mul),
                    ReduceOp::Min => wide().min().unwrap(),
                    ReduceOp::Max => wide().max().unwrap(),
                };
                total as $ty
            }
        }
    )+};
}
integer_oracle!(i32, i64, u8, i8);

/// The input of `rank`: `count` elements.
pub(crate) fn input<T: Oracle>(seed: u64, rank: u32, count: usize) -> Vec<T> {
    (0..count as u64).map(|i| T::from_noise(noise(seed * 64 + u64::from(rank), i))).collect()
}

/// The reduction of all ranks' inputs.
pub(crate) fn reduced<T: Oracle>(seed: u64, world: u32, count: usize, op: ReduceOp) -> Vec<T> {
    let inputs: Vec<Vec<T>> = (0..world).map(|rank| input(seed, rank, count)).collect();
    let mut values = Vec::new();
    (0..count)
        .map(|i| {
            values.clear();
            values.extend(inputs.iter().map(|input| input[i]));
            T::reduce(op, &values)
        })
        .collect()
}

/// The bits of elements, for comparisons in which -0.0 differs from 0.0.
pub(crate) fn bits<T: Element>(data: &[T]) -> &[u8] {
    bytemuck::cast_slice(data)
}
