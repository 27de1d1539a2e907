//! 8-bit floats, as in PyTorch.
//!
//! The conversions have no branches, so that loops over them vectorise. They round to nearest, ties to even, and give
//! the same bits as torch's `.to(torch.float8_e4m3fn)` and `.to(torch.float8_e5m2)`, NaNs included.

use std::fmt;

use bytemuck::{Pod, Zeroable};

/// A float with 4 bits of exponent, 3 bits of mantissa and no infinities: `torch.float8_e4m3fn`.
///
/// Numbers that are too large, and infinities, become the largest number, 448. NaN has the magnitude `0x7f`.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct F8E4m3(u8);

/// A float with 5 bits of exponent and 2 bits of mantissa: `torch.float8_e5m2`.
///
/// Numbers that are too large become infinity, as in IEEE 754; the largest number is 57344.
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct F8E5m2(u8);

macro_rules! float8 {
    ($($name:ident: $widen:ident, $narrow:ident;)+) => {$(
        impl $name {
            /// The float with these bits.
            #[inline]
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// The bits of this float.
            #[inline]
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// Rounds to the nearest number, ties to even.
            #[inline]
            pub const fn from_f32(value: f32) -> Self {
                Self($narrow(value))
            }

            /// Converts to `f32`, exactly.
            #[inline]
            pub const fn to_f32(self) -> f32 {
                $widen(self.0)
            }

            /// Whether this is NaN.
            #[inline]
            pub const fn is_nan(self) -> bool {
                self.to_f32().is_nan()
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl From<$name> for f32 {
            fn from(value: $name) -> Self {
                value.to_f32()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.to_f32().fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.to_f32().fmt(f)
            }
        }
    )+};
}

float8! {
    F8E4m3: e4m3_to_f32, f32_to_e4m3;
    F8E5m2: e5m2_to_f32, f32_to_e5m2;
}

/// E4M3 bits to `f32`: exact; NaNs keep their sign.
#[inline(always)]
pub(crate) const fn e4m3_to_f32(bits: u8) -> f32 {
    // A 4-bit exponent with bias 7 becomes 8 bits with bias 127.
    const REBIAS: u32 = (127 - 7) << 23;
    // 2^-6, the value of exponent 1 and of the subnormals' unit bit.
    const SMALLEST_NORMAL: u32 = (127 - 6) << 23;
    let magnitude = (bits & 0x7f) as u32;
    let sign = ((bits & 0x80) as u32) << 24;
    let shifted = magnitude << 20;
    // With the exponent of 2^-6 put on, a subnormal is 2^-6 too large: subtract it, exactly.
    let subnormal =
        (f32::from_bits(SMALLEST_NORMAL | shifted) - f32::from_bits(SMALLEST_NORMAL)).to_bits();
    let finite = if magnitude < 0x08 { subnormal } else { shifted + REBIAS };
    f32::from_bits(sign | if magnitude == 0x7f { 0x7fc0_0000 } else { finite })
}

/// `f32` to E4M3 bits. Numbers that are too large, and infinities, become the largest number. NaNs keep their sign.
#[inline(always)]
pub(crate) const fn f32_to_e4m3(value: f32) -> u8 {
    const REBIAS: u32 = (127 - 7) << 23;
    // Adding 2^14 leaves a subnormal's three bits at the bottom, rounded by the addition.
    const ALIGN: u32 = (127 - 7 + 23 - 3 + 1) << 23;
    const LARGEST: u32 = 0x7e;
    let x = value.to_bits();
    let sign = (x >> 24) & 0x80;
    let magnitude = x & 0x7fff_ffff;
    let subnormal =
        (f32::from_bits(magnitude) + f32::from_bits(ALIGN)).to_bits().wrapping_sub(ALIGN);
    let odd = (magnitude >> 20) & 1;
    let normal = magnitude.wrapping_sub(REBIAS).wrapping_add(0x7_ffff + odd) >> 20;
    let finite = if magnitude < 0x3c80_0000 { subnormal } else { normal };
    let bounded = if finite > LARGEST { LARGEST } else { finite };
    (sign | if magnitude > 0x7f80_0000 { 0x7f } else { bounded }) as u8
}

/// E5M2 bits to `f32`: exact; NaNs keep their sign and are made quiet.
#[inline(always)]
pub(crate) const fn e5m2_to_f32(bits: u8) -> f32 {
    const REBIAS: u32 = (127 - 15) << 23;
    // 2^-14, the value of exponent 1 and of the subnormals' unit bit.
    const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
    let magnitude = (bits & 0x7f) as u32;
    let sign = ((bits & 0x80) as u32) << 24;
    let shifted = magnitude << 21;
    let subnormal =
        (f32::from_bits(SMALLEST_NORMAL | shifted) - f32::from_bits(SMALLEST_NORMAL)).to_bits();
    let special = 0x7f80_0000 | shifted | ((magnitude > 0x7c) as u32) << 22;
    let finite = if magnitude < 0x04 { subnormal } else { shifted.wrapping_add(REBIAS) };
    f32::from_bits(sign | if magnitude >= 0x7c { special } else { finite })
}

/// `f32` to E5M2 bits. Numbers that are too large become infinity. NaNs keep their sign.
#[inline(always)]
pub(crate) const fn f32_to_e5m2(value: f32) -> u8 {
    const REBIAS: u32 = (127 - 15) << 23;
    // Adding 2^7 leaves a subnormal's two bits at the bottom, rounded by the addition.
    const ALIGN: u32 = (127 - 15 + 23 - 2 + 1) << 23;
    const INFINITE: u32 = 0x7c;
    let x = value.to_bits();
    let sign = (x >> 24) & 0x80;
    let magnitude = x & 0x7fff_ffff;
    let subnormal =
        (f32::from_bits(magnitude) + f32::from_bits(ALIGN)).to_bits().wrapping_sub(ALIGN);
    let odd = (magnitude >> 21) & 1;
    let normal = magnitude.wrapping_sub(REBIAS).wrapping_add(0xf_ffff + odd) >> 21;
    let finite = if magnitude < 0x3880_0000 { subnormal } else { normal };
    let bounded = if finite > INFINITE { INFINITE } else { finite };
    (sign | if magnitude > 0x7f80_0000 { 0x7f } else { bounded }) as u8
}

#[cfg(test)]
mod tests {
    use half::f16;
    use proptest::prelude::*;

    use super::*;

    /// A format as it is defined, for a simple reference implementation.
    #[derive(Clone, Copy)]
    struct Format {
        mantissa_bits: u32,
        bias: i32,
        /// The largest magnitude that is a number.
        largest: u8,
        /// Result of larger magnitudes.
        beyond: u8,
    }

    const E4M3: Format = Format { mantissa_bits: 3, bias: 7, largest: 0x7e, beyond: 0x7e };
    const E5M2: Format = Format { mantissa_bits: 2, bias: 15, largest: 0x7b, beyond: 0x7c };

    impl Format {
        /// The value of a finite magnitude, and of the one that would follow the largest.
        fn value(self, magnitude: u8) -> f64 {
            let one = 1 << self.mantissa_bits;
            let (exponent, mantissa) = (i32::from(magnitude) / one, i32::from(magnitude) % one);
            let (exponent, mantissa) =
                if exponent == 0 { (1, mantissa) } else { (exponent, mantissa + one) };
            f64::from(mantissa) / f64::from(one) * 2f64.powi(exponent - self.bias)
        }

        /// The nearest encoding, found by trying all of them; ties go to the even one.
        fn nearest(self, value: f32) -> u8 {
            let sign = if value.is_sign_negative() { 0x80 } else { 0 };
            if value.is_nan() {
                return sign | 0x7f;
            }
            let value = f64::from(value.abs());
            let distance = |code: &u8| (self.value(*code) - value).abs();
            let near =
                |a: &u8, b: &u8| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)));
            let nearest = if value >= self.value(self.largest + 1) {
                // Distances would be rounded here, so they are not compared.
                self.largest + 1
            } else {
                (0..=self.largest + 1).min_by(near).unwrap()
            };
            sign | if nearest > self.largest { self.beyond } else { nearest }
        }
    }

    #[test]
    fn every_encoding_has_its_value_and_comes_back() {
        for code in 0..=u8::MAX {
            let (magnitude, sign) = (code & 0x7f, if code < 0x80 { 1.0 } else { -1.0 });
            let (small, wide) = (F8E4m3::from_bits(code), F8E5m2::from_bits(code));
            for (format, value, back) in [
                (E4M3, small.to_f32(), F8E4m3::from_f32(small.to_f32()).to_bits()),
                (E5M2, wide.to_f32(), F8E5m2::from_f32(wide.to_f32()).to_bits()),
            ] {
                assert_eq!(value.is_sign_negative(), code >= 0x80, "{code:#x}");
                if magnitude <= format.largest {
                    assert_eq!(f64::from(value), sign * format.value(magnitude), "{code:#x}");
                    assert_eq!(back, code);
                } else if magnitude == 0x7c {
                    assert_eq!((value, back), (f32::INFINITY * sign as f32, code));
                } else {
                    assert!(value.is_nan() && back == code | 0x7f, "{code:#x}");
                }
            }
            assert_eq!(small.is_nan(), magnitude == 0x7f);
            assert_eq!(wide.is_nan(), magnitude > 0x7c);
        }
        assert_eq!(
            (F8E4m3::from_bits(0x7e).to_f32(), F8E5m2::from_bits(0x7b).to_f32()),
            (448.0, 57344.0)
        );
    }

    fn rounds_right(value: f32) {
        let bits = value.to_bits();
        assert_eq!(F8E4m3::from_f32(value).to_bits(), E4M3.nearest(value), "{bits:#x}");
        assert_eq!(F8E5m2::from_f32(value).to_bits(), E5M2.nearest(value), "{bits:#x}");
    }

    #[test]
    fn every_half_and_all_around_the_ties_round_to_the_nearest() {
        (0..=u16::MAX).for_each(|bits| rounds_right(f16::from_bits(bits).to_f32()));
        for format in [E4M3, E5M2] {
            for magnitude in 0..=format.largest {
                let middle = (format.value(magnitude) + format.value(magnitude + 1)) / 2.0;
                // Both are exact in f32.
                for value in [middle as f32, format.value(magnitude) as f32] {
                    [value, value.next_up(), value.next_down()].into_iter().for_each(rounds_right);
                }
            }
        }
        let edges = [f32::MAX, f32::MIN_POSITIVE, f32::INFINITY, f32::NAN, 0.0, 1e-45];
        edges.iter().flat_map(|value| [*value, -value]).for_each(rounds_right);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn any_float_rounds_to_the_nearest(bits: u32, exponent in 100_u32..150) {
            rounds_right(f32::from_bits(bits));
            // Most floats are far out of range, so here is one that is not.
            rounds_right(f32::from_bits(bits & 0x807f_ffff | exponent << 23));
        }
    }

    /// FNV-1a.
    fn digest(bytes: impl IntoIterator<Item = u8>) -> u64 {
        bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    #[test]
    fn the_bits_are_torchs() {
        // From torch 2.15.0: `x.to(dtype).view(torch.uint8)` of every float16, and of the 2^20
        // float32 with the bits i * 0x9e3779b1, NaNs of all kinds among them.
        let halves = || (0..=u16::MAX).map(|bits| f16::from_bits(bits).to_f32());
        let floats = || (0..1 << 20).map(|i: u32| f32::from_bits(i.wrapping_mul(0x9e37_79b1)));
        let e4m3 = |value| F8E4m3::from_f32(value).to_bits();
        let e5m2 = |value| F8E5m2::from_f32(value).to_bits();
        assert_eq!(digest(halves().map(e4m3)), 0x2d72_4a81_49ff_1225);
        assert_eq!(digest(floats().map(e4m3)), 0xeb36_f37f_69c5_4f6d);
        assert_eq!(digest(halves().map(e5m2)), 0x087c_cdde_80d9_3f25);
        assert_eq!(digest(floats().map(e5m2)), 0x9534_fe50_4958_8b53);
        // The way back: `torch.arange(256).to(torch.uint8).view(dtype).to(torch.float32)`, little endian, with "nan."
        // for each NaN.
        let widened = |widen: fn(u8) -> f32| {
            digest(
                (0..=u8::MAX)
                    .map(widen)
                    .flat_map(|value| if value.is_nan() { *b"nan." } else { value.to_le_bytes() }),
            )
        };
        assert_eq!(widened(e4m3_to_f32), 0xde1a_2ba0_66af_91fd);
        assert_eq!(widened(e5m2_to_f32), 0x7f69_97a5_38b2_2f1d);
    }

    #[test]
    fn they_compare_and_print_as_numbers() {
        let [one, two] = [1.0, 2.0].map(F8E4m3::from_f32);
        assert!(one < two && F8E4m3::from_f32(-0.0) == F8E4m3::default());
        assert_eq!(format!("{one} {two:?}"), "1 2.0");
        let nan = F8E5m2::from_f32(f32::NAN);
        assert!(nan != nan && f32::from(F8E5m2::from_f32(-3.0)) == -3.0);
    }
}
