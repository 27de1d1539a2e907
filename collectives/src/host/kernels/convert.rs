//! Conversions of 16-bit floats to and from `f32`. They have no branches, so that loops over them vectorise, and round
//! to nearest, ties to even, in the default floating-point environment (see `float_environment`).

/// bfloat16 bits to `f32`: exact.
#[inline(always)]
pub(super) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// `f32` to bfloat16 bits. NaNs stay NaN (made quiet).
#[inline(always)]
pub(super) fn f32_to_bf16(value: f32) -> u16 {
    let x = value.to_bits();
    let rounded = x.wrapping_add(0x7fff + ((x >> 16) & 1)) >> 16;
    let quiet = (x >> 16) | 0x40;
    (if x & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded }) as u16
}

/// IEEE half bits to `f32`: exact; NaNs are made quiet.
#[inline(always)]
pub(super) fn f16_to_f32(bits: u16) -> f32 {
    // A half's 5-bit exponent with bias 15 becomes 8 bits with bias 127.
    const REBIAS: u32 = (127 - 15) << 23;
    // 2^-14, the value of a half's exponent 1 and of its subnormals' unit bit.
    const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
    let magnitude = u32::from(bits & 0x7fff);
    let sign = u32::from(bits & 0x8000) << 16;
    let shifted = magnitude << 13;
    // With the exponent of 2^-14 put on, a subnormal is 2^-14 too large: subtract it, exactly.
    let subnormal =
        (f32::from_bits(SMALLEST_NORMAL | shifted) - f32::from_bits(SMALLEST_NORMAL)).to_bits();
    let normal = shifted.wrapping_add(REBIAS);
    let special = 0x7f80_0000 | shifted | (u32::from(magnitude > 0x7c00) << 22);
    let finite = if magnitude < 0x0400 { subnormal } else { normal };
    f32::from_bits(sign | if magnitude >= 0x7c00 { special } else { finite })
}

/// `f32` to IEEE half bits. Numbers that are too large become infinity; NaNs stay NaN (made quiet).
#[inline(always)]
pub(super) fn f32_to_f16(value: f32) -> u16 {
    const REBIAS: u32 = (127 - 15) << 23;
    // Adding 2^-1 leaves a subnormal half's ten bits at the bottom, rounded by the addition.
    const ALIGN: u32 = (127 - 15 + 23 - 10 + 1) << 23;
    let x = value.to_bits();
    let sign = (x >> 16) & 0x8000;
    let magnitude = x & 0x7fff_ffff;
    let subnormal =
        (f32::from_bits(magnitude) + f32::from_bits(ALIGN)).to_bits().wrapping_sub(ALIGN);
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(REBIAS).wrapping_add(0xfff + odd) >> 13;
    let quiet = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    let finite = if magnitude < 0x3880_0000 { subnormal } else { normal };
    let bounded = if magnitude >= 0x4780_0000 { 0x7c00 } else { finite };
    (sign | if magnitude > 0x7f80_0000 { quiet } else { bounded }) as u16
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    #[test]
    fn every_16_bit_value_widens_exactly_and_comes_back() {
        for bits in 0..=u16::MAX {
            let (h, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            if h.is_nan() {
                assert!(f16_to_f32(bits).is_nan());
                assert!(f16::from_bits(f32_to_f16(f16_to_f32(bits))).is_nan());
            } else {
                assert_eq!(f16_to_f32(bits).to_bits(), h.to_f32_const().to_bits(), "{bits:#x}");
                assert_eq!(f32_to_f16(f16_to_f32(bits)), bits);
            }
            if b.is_nan() {
                assert!(bf16::from_bits(f32_to_bf16(bf16_to_f32(bits))).is_nan());
            } else {
                assert_eq!(bf16_to_f32(bits).to_bits(), b.to_f32_const().to_bits(), "{bits:#x}");
                assert_eq!(f32_to_bf16(bf16_to_f32(bits)), bits);
            }
        }
    }

    #[test]
    fn narrowing_rounds_as_the_reference_does() {
        // A stride coprime to 2^32 visits every exponent and sign with many mantissas; the
        // neighbours of each visited value include ties.
        let mut bits = 0u32;
        for _ in 0..2_000_000 {
            bits = bits.wrapping_add(0x0001_0a2b);
            for x in [bits, bits & 0xffff_e000, bits & 0xffff_f000 | 0x1000, bits & 0xffff_8000] {
                let value = f32::from_bits(x);
                if value.is_nan() {
                    continue;
                }
                assert_eq!(f32_to_f16(value), f16::from_f32_const(value).to_bits(), "{x:#x}");
                assert_eq!(f32_to_bf16(value), bf16::from_f32_const(value).to_bits(), "{x:#x}");
            }
        }
    }
}
