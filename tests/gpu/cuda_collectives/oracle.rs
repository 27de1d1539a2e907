//! The expected results of collectives, computed by the CPU from the data of every rank, element by element.
//!
//! Loops over elements are plain: checks are built with few optimisations, and iterators took most of their time.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};
use symmpool_allocator::testing::SplitMix64;
use symmpool_collectives::{DType, F8E4m3, F8E5m2, ReduceOp};

/// A stateless generator: the same numbers on every rank.
#[inline]
pub(crate) fn random(seed: u64, index: u64) -> u64 {
    SplitMix64::at(seed, index)
}

/// Elements of a rank: integers of any value, floats of both signs near one, and sometimes
/// elements with all bits set, which is a NaN or minus one.
///
/// They are a part of one long series, which begins where the seed and the rank say: making new ones for every call took a
/// fifth of the time of checks on emulated devices. The first four are made anew.
pub(crate) fn input(seed: u64, rank: u32, dtype: DType, count: usize) -> Vec<u8> {
    let seed = seed ^ (u64::from(rank) << 40);
    let size = dtype.size();
    let begin = random(seed, 0) as usize % BEGINS;
    let mut all = SERIES.lock().unwrap_or_else(PoisonError::into_inner);
    let series = all.entry(dtype.name()).or_default();
    let needed = begin + count;
    if series.len() < needed * size {
        *series = made(SERIES_SEED, dtype, needed.next_power_of_two().max(2 * BEGINS));
    }
    let mut elements = made(seed, dtype, count.min(PLAIN));
    elements.extend_from_slice(&series[(begin + elements.len() / size) * size..needed * size]);
    elements
}

/// The series of each type, as long as calls have needed yet.
static SERIES: Mutex<BTreeMap<&'static str, Vec<u8>>> = Mutex::new(BTreeMap::new());
const SERIES_SEED: u64 = 0x5e71e5;
/// At how many places of it calls' elements begin.
const BEGINS: usize = 1 << 16;
/// The first elements never have all bits set.
const PLAIN: usize = 4;

fn made(seed: u64, dtype: DType, count: usize) -> Vec<u8> {
    match (dtype, dtype.size()) {
        (DType::F32, _) => elements(seed, count, |bits| (float(bits) as f32).to_le_bytes()),
        (DType::F64, _) => elements(seed, count, |bits| float(bits).to_le_bytes()),
        (DType::F16, _) => elements(seed, count, |bits| f16::from_f64(float(bits)).to_le_bytes()),
        (DType::Bf16, _) => elements(seed, count, |bits| bf16::from_f64(float(bits)).to_le_bytes()),
        (_, 1) => elements(seed, count, |bits| (bits as u8).to_le_bytes()),
        (_, 2) => elements(seed, count, |bits| (bits as u16).to_le_bytes()),
        (_, 4) => elements(seed, count, |bits| (bits as u32).to_le_bytes()),
        (_, 8) => elements(seed, count, u64::to_le_bytes),
        (_, size) => unreachable!("{dtype:?} has {size} bytes"),
    }
}

/// A float of either sign near one.
#[inline]
fn float(bits: u64) -> f64 {
    (bits % 4001) as f64 / 1000.0 - 2.0
}

fn elements<const SIZE: usize>(
    seed: u64,
    count: usize,
    make: impl Fn(u64) -> [u8; SIZE],
) -> Vec<u8> {
    let mut bytes = vec![0; count * SIZE];
    let (places, _) = bytes.as_chunks_mut::<SIZE>();
    for (index, place) in places.iter_mut().enumerate() {
        let bits = random(seed, index as u64);
        *place = if bits >> 54 == 0 && index >= PLAIN { [0xff; SIZE] } else { make(bits) };
    }
    bytes
}

/// Makes data like [`input`], without NaNs, for which several results are right.
pub(crate) fn finite(seed: u64, rank: u32, dtype: DType, count: usize) -> Vec<u8> {
    let mut data = input(seed, rank, dtype, count);
    for element in data.chunks_mut(dtype.size()) {
        if element.iter().all(|byte| *byte == 0xff) {
            // The number is small in every type.
            element.fill(0x3c);
        }
    }
    data
}

/// Reduces floats of so many bytes, which become numbers of a wider type and are rounded at the end.
macro_rules! floats {
    ($name:ident, $size:literal, $wide:ty, $widen:expr, $narrow:expr) => {
        fn $name(inputs: &[&[u8]], op: ReduceOp, out: &mut [u8]) {
            let item = |rank: &[u8], at: usize| -> $wide {
                $widen(rank[at..at + $size].try_into().expect("whole"))
            };
            for at in (0..out.len()).step_by($size) {
                let mut total = item(inputs[0], at);
                for rank in &inputs[1..] {
                    let next = item(rank, at);
                    total = match op {
                        ReduceOp::Sum | ReduceOp::Avg => total + next,
                        ReduceOp::Prod => total * next,
                        ReduceOp::Min if total.is_nan() || total < next => total,
                        ReduceOp::Max if total.is_nan() || total > next => total,
                        _ => next,
                    };
                }
                if op == ReduceOp::Avg {
                    total /= inputs.len() as $wide;
                }
                let narrow: [u8; $size] = $narrow(total);
                out[at..at + $size].copy_from_slice(&narrow);
            }
        }
    };
}
floats!(f32s, 4, f32, f32::from_le_bytes, f32::to_le_bytes);
floats!(f64s, 8, f64, f64::from_le_bytes, f64::to_le_bytes);
floats!(f16s, 2, f32, |of| f16::from_le_bytes(of).to_f32(), |x| f16::from_f32(x).to_le_bytes());
floats!(bf16s, 2, f32, |of| bf16::from_le_bytes(of).to_f32(), |x| bf16::from_f32(x).to_le_bytes());
floats!(f8e4m3s, 1, f32, |[of]: [u8; 1]| F8E4m3::from_bits(of).to_f32(), |x| {
    [F8E4m3::from_f32(x).to_bits()]
});
floats!(f8e5m2s, 1, f32, |[of]: [u8; 1]| F8E5m2::from_bits(of).to_f32(), |x| {
    [F8E5m2::from_f32(x).to_bits()]
});

macro_rules! integers {
    ($name:ident, $item:ty) => {
        fn $name(inputs: &[&[u8]], op: ReduceOp, out: &mut [u8]) {
            const SIZE: usize = size_of::<$item>();
            let item = |rank: &[u8], at: usize| {
                <$item>::from_le_bytes(rank[at..at + SIZE].try_into().expect("whole"))
            };
            for at in (0..out.len()).step_by(SIZE) {
                let mut total = item(inputs[0], at);
                let mut sum = i128::from(total);
                for rank in &inputs[1..] {
                    let next = item(rank, at);
                    sum += i128::from(next);
                    total = match op {
                        ReduceOp::Sum | ReduceOp::Avg => total.wrapping_add(next),
                        ReduceOp::Prod => total.wrapping_mul(next),
                        ReduceOp::Min => total.min(next),
                        ReduceOp::Max => total.max(next),
                    };
                }
                if op == ReduceOp::Avg {
                    total = (sum / inputs.len() as i128) as $item;
                }
                out[at..at + SIZE].copy_from_slice(&total.to_le_bytes());
            }
        }
    };
}
integers!(i32s, i32);
integers!(i64s, i64);
integers!(u8s, u8);
integers!(i8s, i8);

/// The reduction of all ranks' elements, in rank order.
pub(crate) fn reduce(inputs: &[&[u8]], dtype: DType, op: ReduceOp) -> Vec<u8> {
    let mut out = vec![0; inputs[0].len()];
    match dtype {
        DType::F32 => f32s(inputs, op, &mut out),
        DType::F64 => f64s(inputs, op, &mut out),
        DType::F16 => f16s(inputs, op, &mut out),
        DType::Bf16 => bf16s(inputs, op, &mut out),
        DType::I32 => i32s(inputs, op, &mut out),
        DType::I64 => i64s(inputs, op, &mut out),
        DType::U8 => u8s(inputs, op, &mut out),
        DType::I8 => i8s(inputs, op, &mut out),
        DType::F8E4m3 => f8e4m3s(inputs, op, &mut out),
        DType::F8E5m2 => f8e5m2s(inputs, op, &mut out),
        moved => unreachable!("{moved:?} has no reduction"),
    }
    out
}

/// Where the bits differ; NaNs may differ in their payload.
pub(crate) fn differs(got: &[u8], wanted: &[u8], dtype: DType) -> Option<usize> {
    let size = dtype.size();
    let nan = |bytes: &[u8]| match dtype {
        DType::F32 => f32::from_le_bytes(bytes.try_into().expect("4")).is_nan(),
        DType::F64 => f64::from_le_bytes(bytes.try_into().expect("8")).is_nan(),
        DType::F16 => f16::from_le_bytes(bytes.try_into().expect("2")).is_nan(),
        DType::Bf16 => bf16::from_le_bytes(bytes.try_into().expect("2")).is_nan(),
        DType::F8E4m3 => F8E4m3::from_bits(bytes[0]).is_nan(),
        DType::F8E5m2 => F8E5m2::from_bits(bytes[0]).is_nan(),
        _ => false,
    };
    // Most of it is equal, and found to be so in parts of several elements; of longer ones most have some NaN.
    const PART: usize = 256;
    for (nth, (got, wanted)) in got.chunks(PART).zip(wanted.chunks(PART)).enumerate() {
        if got != wanted {
            let mut pairs = got.chunks(size).zip(wanted.chunks(size));
            if let Some(at) = pairs.position(|(a, b)| a != b && !(nan(a) && nan(b))) {
                return Some(nth * (PART / size) + at);
            }
        }
    }
    None
}
