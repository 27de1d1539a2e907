//! Vectors of sixteen bytes: loads, stores, and the elements in them.
//!
//! Addresses are of global memory, this device's or a peer's, and multiples of 16. *Plain*
//! accesses are ordered only by barriers and signals around them; `symmpool/impl/ptx.cuh` has other accesses.

#pragma once

#include <symmpool/impl/types.cuh>

namespace symmpool {

__device__ __forceinline__ uint4 load_plain(const void* from) {
    return *static_cast<const uint4*>(from);
}

__device__ __forceinline__ void store_plain(void* to, uint4 value) {
    *static_cast<uint4*>(to) = value;
}

// Selects `a` or `b` word by word, so that the compiler keeps arrays of vectors in registers.
__device__ __forceinline__ uint4 select(bool first, uint4 a, uint4 b) {
    return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
}

// How many elements of a type are in a vector.
template <int D>
constexpr int LANES = 16 / static_cast<int>(sizeof(typename Type<D>::Item));

// The elements of a vector, widened to `Acc`.
template <int D, typename Acc>
__device__ __forceinline__ void unpack(uint4 vector, Acc (&out)[LANES<D>]) {
    const unsigned words[4] = {vector.x, vector.y, vector.z, vector.w};
    constexpr int PER_WORD = LANES<D> / 4;
    if constexpr (D == F16 || D == BF16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 pair = D == F16 ? f16x2_to_f32(words[i]) : bf16x2_to_f32(words[i]);
            out[2 * i] = pair.x;
            out[2 * i + 1] = pair.y;
        }
    } else if constexpr (D == F8E4M3 || D == F8E5M2) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            unsigned short bits = static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16));
            float2 pair = D == F8E4M3 ? e4m3x2_to_f32(bits) : e5m2x2_to_f32(bits);
            out[2 * i] = pair.x;
            out[2 * i + 1] = pair.y;
        }
    } else if constexpr (sizeof(typename Type<D>::Item) == 8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            long long bits =
                static_cast<long long>(static_cast<unsigned long long>(words[2 * i + 1]) << 32 |
                                       words[2 * i]);
            if constexpr (D == F64) {
                out[i] = __longlong_as_double(bits);
            } else {
                out[i] = widen<D, Acc>(bits);
            }
        }
    } else if constexpr (D == F32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[i] = __uint_as_float(words[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < LANES<D>; ++i) {
            unsigned bits = words[i / PER_WORD] >> (i % PER_WORD * (32 / PER_WORD));
            out[i] = widen<D, Acc>(static_cast<typename Type<D>::Item>(bits));
        }
    }
}

// The vector of these elements, which are narrowed.
template <int D, typename Acc>
__device__ __forceinline__ uint4 pack(const Acc (&in)[LANES<D>]) {
    unsigned words[4];
    constexpr int PER_WORD = LANES<D> / 4;
    if constexpr (D == F16 || D == BF16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = D == F16 ? f32_to_f16x2(in[2 * i], in[2 * i + 1])
                                    : f32_to_bf16x2(in[2 * i], in[2 * i + 1]);
        }
    } else if constexpr (D == F8E4M3 || D == F8E5M2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Acc* four = in + 4 * i;
            unsigned low = D == F8E4M3 ? f32_to_e4m3x2(four[0], four[1])
                                            : f32_to_e5m2x2(four[0], four[1]);
            unsigned high = D == F8E4M3 ? f32_to_e4m3x2(four[2], four[3])
                                             : f32_to_e5m2x2(four[2], four[3]);
            words[i] = low | high << 16;
        }
    } else if constexpr (sizeof(typename Type<D>::Item) == 8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            long long bits;
            if constexpr (D == F64) {
                bits = __double_as_longlong(in[i]);
            } else {
                bits = narrow<D, Acc>(in[i]);
            }
            words[2 * i] = static_cast<unsigned>(bits);
            words[2 * i + 1] = static_cast<unsigned>(bits >> 32);
        }
    } else if constexpr (D == F32) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = __float_as_uint(in[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[i] = 0;
#pragma unroll
            for (int j = 0; j < PER_WORD; ++j) {
                unsigned bits = static_cast<unsigned>(narrow<D, Acc>(in[PER_WORD * i + j]));
                // A negative byte has ones in the bits above its own.
                unsigned own = PER_WORD == 1 ? bits : bits & 0xffu;
                words[i] |= own << (j * (32 / PER_WORD) % 32);
            }
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace symmpool
