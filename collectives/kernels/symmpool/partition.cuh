//! How data is divided among ranks, and a part among blocks or teams.

#pragma once

#include <symmpool/handshake.cuh>
#include <symmpool/span.cuh>

namespace symmpool {

// `nth` of `parts` equal parts of a number ends where the one after begins.
__device__ __forceinline__ u64 part(u64 whole, u32 nth, u32 parts) {
    if (whole == parts) {
        return nth;
    }
    // Division of 64 bits takes ten times as long.
    const u64 product = whole * nth;
    return product >> 32 == 0 ? static_cast<u32>(product) / parts : product / parts;
}

// Rank `r`'s part of a buffer. With SHARES it is one buffer, cut into shares of whole vectors;
// else parts are as the call says.
template <bool SHARES>
struct Parts {
    u64 bytes;
    u64 stride;

    __device__ __forceinline__ explicit Parts(const Call& call)
        : bytes(call.bytes),
          stride(SHARES ? ((call.bytes + 15) / 16 + WORLD - 1) / WORLD * 16 : call.stride) {}

    // Of the longest.
    __device__ __forceinline__ u64 vectors() const { return ((SHARES ? stride : bytes) + 15) / 16; }

    template <typename Byte>
    __device__ __forceinline__ Span<Byte> of(Byte* begin, u32 rank) const {
        u64 from = rank * stride, length = bytes;
        if (SHARES) {
            u64 left = from < bytes ? bytes - from : 0;
            length = left < stride ? left : stride;
        }
        return Span<Byte>(begin + from, length);
    }
};

struct Range {
    u64 from;
    u64 to;
};

// Vectors that so many blocks or teams divide among them, in whole lines of 128 bytes.
struct Division {
    u64 count;
    u64 each;

    __device__ __forceinline__ Division(u64 vectors, u32 among)
        : count(vectors), each(((vectors + among - 1) / among + 7) / 8 * 8) {}

    __device__ __forceinline__ Range operator[](u32 nth) const {
        const u64 first = nth * each;
        return {first < count ? first : count, first + each < count ? first + each : count};
    }
};

}  // namespace symmpool
