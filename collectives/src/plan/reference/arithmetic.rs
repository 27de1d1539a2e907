//! The arithmetic of reductions, one element at a time.

use half::{bf16, f16};

use crate::{DType, F8E4m3, F8E5m2, ReduceOp};

/// Reduces chunks of equal length in their order, and rounds once; averages are divided by `divisor` before. The reduction
/// of one chunk is that chunk, unless it is divided.
pub(super) fn reduce(chunks: Vec<Vec<u8>>, dtype: DType, op: ReduceOp, divisor: usize) -> Vec<u8> {
    let op = if op == ReduceOp::Avg && divisor <= 1 { ReduceOp::Sum } else { op };
    if chunks.len() == 1 && op != ReduceOp::Avg {
        return chunks.into_iter().next().unwrap_or_default();
    }
    let all = (chunks.as_slice(), op, divisor);
    match dtype {
        DType::F32 => floats(all, f32::from_le_bytes, f32::to_le_bytes),
        DType::F64 => doubles(all),
        DType::F16 => {
            let widen = |item| f16::from_le_bytes(item).to_f32();
            floats(all, widen, |sum| f16::from_f32(sum).to_le_bytes())
        }
        DType::Bf16 => {
            let widen = |item| bf16::from_le_bytes(item).to_f32();
            floats(all, widen, |sum| bf16::from_f32(sum).to_le_bytes())
        }
        DType::F8E4m3 => {
            let widen = |[bits]: [u8; 1]| F8E4m3::from_bits(bits).to_f32();
            floats(all, widen, |sum| [F8E4m3::from_f32(sum).to_bits()])
        }
        DType::F8E5m2 => {
            let widen = |[bits]: [u8; 1]| F8E5m2::from_bits(bits).to_f32();
            floats(all, widen, |sum| [F8E5m2::from_f32(sum).to_bits()])
        }
        DType::I32 => {
            integers(all, |item| i32::from_le_bytes(item).into(), |sum| (sum as i32).to_le_bytes())
        }
        DType::I64 => {
            integers(all, |item| i64::from_le_bytes(item).into(), |sum| (sum as i64).to_le_bytes())
        }
        DType::U8 => integers(all, |[item]| item.into(), |sum| [sum as u8]),
        DType::I8 => integers(all, |[item]| (item as i8).into(), |sum| [sum as u8]),
        // Such elements are not reduced; calls are refused before.
        _ => chunks.into_iter().next().unwrap_or_default(),
    }
}

type All<'a> = (&'a [Vec<u8>], ReduceOp, usize);

/// Element `at` of each chunk through `total`, one after the other.
fn each<const SIZE: usize>(
    chunks: &[Vec<u8>],
    total: impl Fn(&[[u8; SIZE]]) -> [u8; SIZE],
) -> Vec<u8> {
    let length = chunks.iter().map(Vec::len).min().unwrap_or(0);
    let mut items = Vec::with_capacity(chunks.len());
    let mut result = Vec::with_capacity(length);
    for at in (0..length).step_by(SIZE) {
        items.clear();
        for chunk in chunks {
            let mut item = [0; SIZE];
            item.copy_from_slice(&chunk[at..at + SIZE]);
            items.push(item);
        }
        result.extend(total(&items));
    }
    result
}

macro_rules! float {
    ($name:ident, $wide:ty) => {
        fn $name<const SIZE: usize>(
            (chunks, op, divisor): All<'_>,
            widen: impl Fn([u8; SIZE]) -> $wide,
            narrow: impl Fn($wide) -> [u8; SIZE],
        ) -> Vec<u8> {
            each(chunks, |items| {
                let mut total = widen(items[0]);
                for item in &items[1..] {
                    let next = widen(*item);
                    total = match op {
                        ReduceOp::Sum | ReduceOp::Avg => total + next,
                        ReduceOp::Prod => total * next,
                        // A NaN stays, and of equals, such as zeros of both signs, the later one counts.
                        ReduceOp::Min if total < next || total.is_nan() => total,
                        ReduceOp::Max if total > next || total.is_nan() => total,
                        ReduceOp::Min | ReduceOp::Max => next,
                    };
                }
                narrow(if op == ReduceOp::Avg { total / divisor as $wide } else { total })
            })
        }
    };
}
float!(floats, f32);
float!(wide_floats, f64);

fn doubles(all: All<'_>) -> Vec<u8> {
    wide_floats(all, f64::from_le_bytes, f64::to_le_bytes)
}

/// Integers wrap, but sums of averages, which are divided before.
fn integers<const SIZE: usize>(
    (chunks, op, divisor): All<'_>,
    widen: impl Fn([u8; SIZE]) -> i128,
    narrow: impl Fn(i128) -> [u8; SIZE],
) -> Vec<u8> {
    each(chunks, |items| {
        let mut total = widen(items[0]);
        for item in &items[1..] {
            let next = widen(*item);
            total = match op {
                ReduceOp::Sum | ReduceOp::Avg => total.wrapping_add(next),
                ReduceOp::Prod => total.wrapping_mul(next),
                ReduceOp::Min => total.min(next),
                ReduceOp::Max => total.max(next),
            };
        }
        narrow(if op == ReduceOp::Avg { total / divisor as i128 } else { total })
    })
}
