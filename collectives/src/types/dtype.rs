//! Element types that collectives understand.

use half::{bf16, f16};
use symmpool_allocator::Error;

use crate::{F8E4m3, F8E5m2};

/// The type of an element.
///
/// [`REDUCED`](Self::REDUCED) types have reductions. Elements of the other types are only moved, bit by bit. They are
/// still different types: a call with different types on different ranks is an error on all of them (rule S6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DType {
    /// 32-bit IEEE float.
    F32 = 1,
    /// 64-bit IEEE float.
    F64 = 2,
    /// 16-bit IEEE float; reduced in `f32`, rounded once at the end.
    F16 = 3,
    /// bfloat16; reduced in `f32`, rounded once at the end.
    Bf16 = 4,
    /// 32-bit signed integer, wrapping.
    I32 = 5,
    /// 64-bit signed integer, wrapping.
    I64 = 6,
    /// 8-bit unsigned integer, wrapping.
    U8 = 7,
    /// 8-bit signed integer, wrapping.
    I8 = 8,
    /// 8-bit float without infinities, [`F8E4m3`]; reduced in `f32`, rounded once at the end, where numbers that are
    /// too large become the largest number.
    F8E4m3 = 9,
    /// 8-bit float, [`F8E5m2`]; reduced in `f32`, rounded once at the end, where numbers that are too large become
    /// infinity.
    F8E5m2 = 10,
    /// Boolean of one byte. This type and all that follow are only moved.
    Bool = 11,
    /// 16-bit signed integer.
    I16 = 12,
    /// 16-bit unsigned integer.
    U16 = 13,
    /// 32-bit unsigned integer.
    U32 = 14,
    /// 64-bit unsigned integer.
    U64 = 15,
    /// Complex number of two `f16`.
    Complex32 = 16,
    /// Complex number of two `f32`.
    Complex64 = 17,
    /// Complex number of two `f64`.
    Complex128 = 18,
    /// 8-bit float as E4M3, without a negative zero.
    F8E4m3Fnuz = 19,
    /// 8-bit float as E5M2, without a negative zero and infinities.
    F8E5m2Fnuz = 20,
    /// 8-bit power of two.
    F8E8m0 = 21,
    /// Two 4-bit floats in a byte.
    F4E2m1x2 = 22,
    /// Any other element of one byte.
    Bytes1 = 23,
    /// Any other element of 2 bytes.
    Bytes2 = 24,
    /// Any other element of 4 bytes.
    Bytes4 = 25,
    /// Any other element of 8 bytes.
    Bytes8 = 26,
    /// Any other element of 16 bytes.
    Bytes16 = 27,
}

impl DType {
    /// The element types that reductions take.
    pub const REDUCED: [Self; 10] = [
        Self::F32,
        Self::F64,
        Self::F16,
        Self::Bf16,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::I8,
        Self::F8E4m3,
        Self::F8E5m2,
    ];

    /// The element types that are only moved.
    pub const MOVED: [Self; 17] = [
        Self::Bool,
        Self::I16,
        Self::U16,
        Self::U32,
        Self::U64,
        Self::Complex32,
        Self::Complex64,
        Self::Complex128,
        Self::F8E4m3Fnuz,
        Self::F8E5m2Fnuz,
        Self::F8E8m0,
        Self::F4E2m1x2,
        Self::Bytes1,
        Self::Bytes2,
        Self::Bytes4,
        Self::Bytes8,
        Self::Bytes16,
    ];

    /// All element types.
    pub fn all() -> impl Iterator<Item = Self> {
        Self::REDUCED.into_iter().chain(Self::MOVED)
    }

    /// The type for elements of `size` bytes that have no type of their own here.
    pub const fn of_bytes(size: usize) -> Option<Self> {
        Some(match size {
            1 => Self::Bytes1,
            2 => Self::Bytes2,
            4 => Self::Bytes4,
            8 => Self::Bytes8,
            16 => Self::Bytes16,
            _ => return None,
        })
    }

    /// Whether reductions take this type.
    #[inline]
    pub const fn is_reduced(self) -> bool {
        self as u8 <= Self::F8E5m2 as u8
    }

    /// The error for a reduction of this type, which has none.
    #[cold]
    pub(crate) fn only_moved(self, what: &str, rank: u32) -> Error {
        Error::invalid_argument(format!(
            "{what} of {} on rank {rank}: such elements can be moved, not reduced; reductions take {}",
            self.name(),
            Self::REDUCED.map(Self::name).join(", ")
        ))
    }

    /// Bytes of one element.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::F8E4m3 | Self::F8E5m2 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
            Self::Bool | Self::F8E4m3Fnuz | Self::F8E5m2Fnuz | Self::F8E8m0 => 1,
            Self::F4E2m1x2 | Self::Bytes1 => 1,
            Self::I16 | Self::U16 | Self::Bytes2 => 2,
            Self::U32 | Self::Complex32 | Self::Bytes4 => 4,
            Self::U64 | Self::Complex64 | Self::Bytes8 => 8,
            Self::Complex128 | Self::Bytes16 => 16,
        }
    }

    /// The name used in messages: `f32`, `bf16`, ...
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::F8E4m3 => "f8e4m3",
            Self::F8E5m2 => "f8e5m2",
            Self::Bool => "bool",
            Self::I16 => "i16",
            Self::U16 => "u16",
            Self::U32 => "u32",
            Self::U64 => "u64",
            Self::Complex32 => "complex32",
            Self::Complex64 => "complex64",
            Self::Complex128 => "complex128",
            Self::F8E4m3Fnuz => "f8e4m3fnuz",
            Self::F8E5m2Fnuz => "f8e5m2fnuz",
            Self::F8E8m0 => "f8e8m0",
            Self::F4E2m1x2 => "f4e2m1x2",
            Self::Bytes1 => "bytes1",
            Self::Bytes2 => "bytes2",
            Self::Bytes4 => "bytes4",
            Self::Bytes8 => "bytes8",
            Self::Bytes16 => "bytes16",
        }
    }

    /// The type of a number in a call description.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::all().find(|dtype| *dtype as u8 == code)
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is an element type of collectives: those of [`DType::REDUCED`]. The trait is sealed.
///
/// All of them are plain data: any bit pattern is a valid value.
pub trait Element: sealed::Sealed + bytemuck::Pod + Send + Sync {
    /// The matching [`DType`].
    const DTYPE: DType;
}

macro_rules! element {
    ($($ty:ty => $dtype:ident),+ $(,)?) => {$(
        impl sealed::Sealed for $ty {}
        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
        }
    )+};
}

element! {
    f32 => F32,
    f64 => F64,
    f16 => F16,
    bf16 => Bf16,
    i32 => I32,
    i64 => I64,
    u8 => U8,
    i8 => I8,
    F8E4m3 => F8E4m3,
    F8E5m2 => F8E5m2,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agrees<T: Element>() {
        assert_eq!(T::DTYPE.size(), size_of::<T>());
        assert_eq!(DType::from_code(T::DTYPE as u8), Some(T::DTYPE));
    }

    #[test]
    fn sizes_and_codes_agree_with_the_rust_types() {
        agrees::<f32>();
        agrees::<f64>();
        agrees::<f16>();
        agrees::<bf16>();
        agrees::<i32>();
        agrees::<i64>();
        agrees::<u8>();
        agrees::<i8>();
        agrees::<F8E4m3>();
        agrees::<F8E5m2>();
        let names: Vec<_> = DType::all().map(|dtype| (dtype as u8, dtype.name())).collect();
        assert_eq!(names[8..11], [(9, "f8e4m3"), (10, "f8e5m2"), (11, "bool")]);
        assert!(names.iter().zip(1..).all(|((code, _), nth)| *code == nth), "{names:?}");
        assert_eq!(DType::from_code(0), None);
        assert_eq!(DType::from_code(99), None);
    }

    #[test]
    fn what_is_only_moved_says_what_is_reduced() {
        for dtype in DType::all() {
            assert_eq!(dtype.is_reduced(), DType::REDUCED.contains(&dtype));
            assert_eq!(DType::from_code(dtype as u8), Some(dtype));
            assert_eq!(DType::of_bytes(dtype.size()).map(DType::size), Some(dtype.size()));
        }
        let why = DType::Bool.only_moved("all_reduce", 2).to_string();
        assert!(why.contains("all_reduce of bool on rank 2"), "{why}");
        assert!(why.contains("f32, f64") && why.contains("f8e5m2"), "{why}");
        assert_eq!(DType::of_bytes(3), None);
    }
}
