//! Element types that collectives understand.

use half::{bf16, f16};

use crate::{F8E4m3, F8E5m2};

/// The type of one element, as it is named in calls, digests and messages.
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
    /// 8-bit float of the finite kind, [`F8E4m3`]; reduced in `f32`, rounded once at the end, where
    /// what is too large becomes the largest number.
    F8E4m3 = 9,
    /// 8-bit float, [`F8E5m2`]; reduced in `f32`, rounded once at the end, where what is too large
    /// becomes infinity.
    F8E5m2 = 10,
}

impl DType {
    /// All element types.
    pub const ALL: [Self; 10] = [
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

    /// Bytes of one element.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::F8E4m3 | Self::F8E5m2 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
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
        }
    }

    /// The type behind a number read from a call descriptor.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| *dtype as u8 == code)
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is an element type of collectives. Sealed: the set is [`DType`]'s.
///
/// Every implementor is plain data: any bit pattern is a value.
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
        let names: Vec<_> = DType::ALL.iter().map(|dtype| (*dtype as u8, dtype.name())).collect();
        assert_eq!(names[8..], [(9, "f8e4m3"), (10, "f8e5m2")]);
        assert_eq!(DType::from_code(0), None);
        assert_eq!(DType::from_code(99), None);
    }
}
