//! The expected results of collectives, computed by the CPU from the data of every rank, element by element.

use half::{bf16, f16};
use symmpool_allocator::testing::SplitMix64;
use symmpool_collectives::{DType, F8E4m3, F8E5m2, ReduceOp};

/// A stateless generator: the same numbers on every rank.
pub(crate) fn random(seed: u64, index: u64) -> u64 {
    SplitMix64::at(seed, index)
}

/// Elements of a rank: integers of any value, floats of both signs near one, and sometimes
/// elements with all bits set, which is a NaN or minus one.
pub(crate) fn input(seed: u64, rank: u32, dtype: DType, count: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count * dtype.size());
    for index in 0..count as u64 {
        let bits = random(seed ^ (u64::from(rank) << 40), index);
        let float = (bits % 4001) as f64 / 1000.0 - 2.0;
        match dtype {
            _ if bits >> 54 == 0 && index > 3 => {
                bytes.extend(std::iter::repeat_n(0xff, dtype.size()));
            }
            DType::F32 => bytes.extend((float as f32).to_le_bytes()),
            DType::F64 => bytes.extend(float.to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f64(float).to_le_bytes()),
            DType::Bf16 => bytes.extend(bf16::from_f64(float).to_le_bytes()),
            _ => bytes.extend(&bits.to_le_bytes()[..dtype.size()]),
        }
    }
    bytes
}

/// As [`input`], without NaNs, for which several results are right.
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

macro_rules! floats {
    ($name:ident, $item:ty, $wide:ty, $widen:expr, $narrow:expr) => {
        fn $name(inputs: &[&[u8]], op: ReduceOp, out: &mut Vec<u8>) {
            const SIZE: usize = size_of::<$item>();
            for at in (0..inputs[0].len()).step_by(SIZE) {
                let item = |rank: &[u8]| {
                    $widen(<$item>::from_le_bytes(rank[at..at + SIZE].try_into().expect("whole")))
                };
                let mut total: $wide = item(inputs[0]);
                for rank in &inputs[1..] {
                    let next: $wide = item(rank);
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
                out.extend($narrow(total).to_le_bytes());
            }
        }
    };
}
floats!(f32s, f32, f32, |x| x, |x: f32| x);
floats!(f64s, f64, f64, |x| x, |x: f64| x);
floats!(f16s, f16, f32, |x: f16| x.to_f32(), f16::from_f32);
floats!(bf16s, bf16, f32, |x: bf16| x.to_f32(), bf16::from_f32);

macro_rules! small_floats {
    ($name:ident, $item:ty) => {
        fn $name(inputs: &[&[u8]], op: ReduceOp, out: &mut Vec<u8>) {
            let wide: Vec<Vec<u8>> = inputs
                .iter()
                .map(|rank| {
                    let items = rank.iter().map(|bits| <$item>::from_bits(*bits).to_f32());
                    items.flat_map(f32::to_le_bytes).collect()
                })
                .collect();
            let wide: Vec<&[u8]> = wide.iter().map(Vec::as_slice).collect();
            let mut total = Vec::new();
            f32s(&wide, op, &mut total);
            out.extend(
                total
                    .as_chunks::<4>()
                    .0
                    .iter()
                    .map(|bytes| <$item>::from_f32(f32::from_le_bytes(*bytes)).to_bits()),
            );
        }
    };
}
small_floats!(f8e4m3s, F8E4m3);
small_floats!(f8e5m2s, F8E5m2);

macro_rules! integers {
    ($name:ident, $item:ty) => {
        fn $name(inputs: &[&[u8]], op: ReduceOp, out: &mut Vec<u8>) {
            const SIZE: usize = size_of::<$item>();
            for at in (0..inputs[0].len()).step_by(SIZE) {
                let items = inputs.iter().map(|rank| {
                    <$item>::from_le_bytes(rank[at..at + SIZE].try_into().expect("whole"))
                });
                let result = match op {
                    ReduceOp::Sum => items.fold(0, |a: $item, b| a.wrapping_add(b)),
                    ReduceOp::Prod => items.fold(1, |a: $item, b| a.wrapping_mul(b)),
                    ReduceOp::Min => items.min().expect("ranks"),
                    ReduceOp::Max => items.max().expect("ranks"),
                    ReduceOp::Avg => {
                        let sum: i128 = items.map(|item| i128::from(item)).sum();
                        (sum / inputs.len() as i128) as $item
                    }
                };
                out.extend(result.to_le_bytes());
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
    let mut out = Vec::with_capacity(inputs[0].len());
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
    if got == wanted {
        return None;
    }
    got.chunks(size).zip(wanted.chunks(size)).position(|(a, b)| a != b && !(nan(a) && nan(b)))
}
