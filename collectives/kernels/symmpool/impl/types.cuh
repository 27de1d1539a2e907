//! Element types: how they lie in memory, the types in which they are reduced, and conversions between these.
//!
//! No CUDA header is included, so that kernels compile wherever NVRTC is installed. Conversions round to nearest,
//! ties to even. Finite values and infinities convert to the same bits as in the host kernels; a NaN stays a
//! NaN, with whatever sign and payload the device gives it. Values that are too large become infinite, and in
//! E4M3, which has no infinity, the largest number, as in torch.
//!
//! A pair holds the element of the lower address in its lower half.

#pragma once

#include <symmpool/impl/ptx.cuh>

namespace symmpool {

using u32 = unsigned;
using u64 = unsigned long long;

// The codes of `DType` in types/dtype.rs.
constexpr int F32 = 1;
constexpr int F64 = 2;
constexpr int F16 = 3;
constexpr int BF16 = 4;
constexpr int I32 = 5;
constexpr int I64 = 6;
constexpr int U8 = 7;
constexpr int I8 = 8;
constexpr int F8E4M3 = 9;
constexpr int F8E5M2 = 10;

// Devices have instructions for 8-bit floats from compute capability 8.9 on. SYMMPOOL_PORTABLE_F8 does without
// them, so that tests on newer devices can compare the code of older ones.
#if __CUDA_ARCH__ >= 890 && !defined(SYMMPOOL_PORTABLE_F8)
constexpr bool F8_INSTRUCTIONS = true;
#else
constexpr bool F8_INSTRUCTIONS = false;
#endif

// --- bfloat16

__device__ __forceinline__ float bf16_to_f32(unsigned short bits) {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

__device__ __forceinline__ float2 bf16x2_to_f32(unsigned pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// --- IEEE half

__device__ __forceinline__ float2 f16x2_to_f32(unsigned pair) {
    return make_float2(f16_to_f32(static_cast<unsigned short>(pair)),
                       f16_to_f32(static_cast<unsigned short>(pair >> 16)));
}

// --- E4M3: 4 bits of exponent with bias 7, largest value 448, no infinities, 0x7f is NaN

__device__ __forceinline__ float2 e4m3x2_to_f32(unsigned short pair) {
    if constexpr (F8_INSTRUCTIONS) {
        return f16x2_to_f32(e4m3x2_to_f16x2(pair));
    } else {
        // Read as a half, whose exponent has the bias 15, a magnitude is too small by a factor of 2^8.
        auto one = [](unsigned byte) {
            unsigned sign = (byte & 0x80u) << 24;
            unsigned magnitude = byte & 0x7fu;
            float value = __fmul_rn(f16_to_f32(static_cast<unsigned short>(magnitude << 7)), 256.0f);
            unsigned bits = magnitude == 0x7fu ? 0x7fc00000u : __float_as_uint(value);
            return __uint_as_float(sign | bits);
        };
        return make_float2(one(pair), one(pair >> 8));
    }
}

__device__ __forceinline__ float e4m3_to_f32(unsigned char bits) {
    return e4m3x2_to_f32(bits).x;
}

__device__ __forceinline__ unsigned short f32_to_e4m3x2(float low, float high) {
    if constexpr (F8_INSTRUCTIONS) {
        return f32_to_e4m3x2_finite(low, high);
    } else {
        auto one = [](float value) {
            // 2^14: adding it leaves a subnormal's three bits at the bottom, rounded.
            constexpr unsigned ALIGN = (127 + 14) << 23;
            unsigned bits = __float_as_uint(value);
            unsigned sign = (bits >> 24) & 0x80u;
            unsigned magnitude = bits & 0x7fffffffu;
            float aligned = __fadd_rn(__uint_as_float(magnitude), __uint_as_float(ALIGN));
            unsigned subnormal = __float_as_uint(aligned) - ALIGN;
            unsigned odd = (magnitude >> 20) & 1u;
            unsigned normal = (magnitude - ((127u - 7u) << 23) + 0x7ffffu + odd) >> 20;
            unsigned finite = magnitude < ((127u - 6u) << 23) ? subnormal : normal;
            unsigned stopped = finite < 0x7eu ? finite : 0x7eu;
            return sign | (magnitude > 0x7f800000u ? 0x7fu : stopped);
        };
        return static_cast<unsigned short>(one(low) | one(high) << 8);
    }
}

__device__ __forceinline__ unsigned char f32_to_e4m3(float value) {
    return static_cast<unsigned char>(f32_to_e4m3x2(value, 0.0f));
}

// --- E5M2: the upper eight bits of a half

__device__ __forceinline__ float e5m2_to_f32(unsigned char bits) {
    return f16_to_f32(static_cast<unsigned short>(bits << 8));
}

__device__ __forceinline__ float2 e5m2x2_to_f32(unsigned short pair) {
    return make_float2(f16_to_f32(static_cast<unsigned short>(pair << 8)),
                       f16_to_f32(static_cast<unsigned short>(pair & 0xff00u)));
}

__device__ __forceinline__ unsigned short f32_to_e5m2x2(float low, float high) {
    if constexpr (F8_INSTRUCTIONS) {
        // Half way between 57344, the largest number, and 65536, from where on values round to infinity. The
        // instruction gives 57344 instead, whose bits are one below those of infinity.
        constexpr float INFINITE = 61440.0f;
        const unsigned short pair = f32_to_e5m2x2_finite(low, high);
        unsigned add_low = fabsf(low) >= INFINITE ? 0x0001u : 0u;
        unsigned add_high = fabsf(high) >= INFINITE ? 0x0100u : 0u;
        return static_cast<unsigned short>(pair + add_low + add_high);
    } else {
        auto one = [](float value) {
            // 2^7: adding it leaves a subnormal's two bits at the bottom, rounded.
            constexpr unsigned ALIGN = (127 + 7) << 23;
            unsigned bits = __float_as_uint(value);
            unsigned sign = (bits >> 24) & 0x80u;
            unsigned magnitude = bits & 0x7fffffffu;
            float aligned = __fadd_rn(__uint_as_float(magnitude), __uint_as_float(ALIGN));
            unsigned subnormal = __float_as_uint(aligned) - ALIGN;
            unsigned odd = (magnitude >> 21) & 1u;
            unsigned normal = (magnitude - ((127u - 15u) << 23) + 0xfffffu + odd) >> 21;
            unsigned finite = magnitude < ((127u - 14u) << 23) ? subnormal : normal;
            unsigned bounded = magnitude >= ((127u + 16u) << 23) ? 0x7cu : finite;
            return sign | (magnitude > 0x7f800000u ? 0x7fu : bounded);
        };
        return static_cast<unsigned short>(one(low) | one(high) << 8);
    }
}

__device__ __forceinline__ unsigned char f32_to_e5m2(float value) {
    return static_cast<unsigned char>(f32_to_e5m2x2(value, 0.0f));
}

// --- a description of each type

// A 128-bit integer, for averages of 64-bit integers.
struct Int128 {
    unsigned long long low;
    long long high;
};

// `Item` is the element in memory, `Acc` the type for sums, products, minima and maxima, and `Wide` the
// type for the sum of an average. Bytes are reduced in 32 bits, whose low eight are the wrapped result.
template <int D>
struct Type;

template <typename I, typename A, typename W>
struct Plain {
    using Item = I;
    using Acc = A;
    using Wide = W;
};

template <> struct Type<F32> : Plain<float, float, float> {};
template <> struct Type<F64> : Plain<double, double, double> {};
template <> struct Type<I32> : Plain<int, int, long long> {};
template <> struct Type<I64> : Plain<long long, long long, Int128> {};
template <> struct Type<U8> : Plain<unsigned char, int, int> {};
template <> struct Type<I8> : Plain<signed char, int, int> {};
template <> struct Type<F16> : Plain<unsigned short, float, float> {};
template <> struct Type<BF16> : Plain<unsigned short, float, float> {};
template <> struct Type<F8E4M3> : Plain<unsigned char, float, float> {};
template <> struct Type<F8E5M2> : Plain<unsigned char, float, float> {};

// Converts an item to `Acc`, which is its type's `Acc` or `Wide`, exactly.
template <int D, typename Acc>
__device__ __forceinline__ Acc widen(typename Type<D>::Item item) {
    if constexpr (D == F16) {
        return f16_to_f32(item);
    } else if constexpr (D == BF16) {
        return bf16_to_f32(item);
    } else if constexpr (D == F8E4M3) {
        return e4m3_to_f32(item);
    } else if constexpr (D == F8E5M2) {
        return e5m2_to_f32(item);
    } else if constexpr (sizeof(Acc) == sizeof(Int128)) {
        return Int128{static_cast<unsigned long long>(item), item >> 63};
    } else {
        return static_cast<Acc>(item);
    }
}

// Converts a result to an item: floats are rounded, integers keep their low bits.
template <int D, typename Acc>
__device__ __forceinline__ typename Type<D>::Item narrow(Acc value) {
    if constexpr (D == F16) {
        return f32_to_f16(value);
    } else if constexpr (D == BF16) {
        return f32_to_bf16(value);
    } else if constexpr (D == F8E4M3) {
        return f32_to_e4m3(value);
    } else if constexpr (D == F8E5M2) {
        return f32_to_e5m2(value);
    } else if constexpr (sizeof(Acc) == sizeof(Int128)) {
        return static_cast<long long>(value.low);
    } else {
        return static_cast<typename Type<D>::Item>(value);
    }
}

}  // namespace symmpool
