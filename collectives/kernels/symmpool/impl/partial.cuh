//! Vectors of the caller's data that are partial or not aligned.

#pragma once

#include <symmpool/impl/vector.cuh>

namespace symmpool {

// Loads a vector that is partial or not aligned, which is slow. Bytes that are not loaded are zero.
__device__ __noinline__ uint4 load_partial(const char* from, u32 bytes) {
    u32 words[4] = {0, 0, 0, 0};
    if (bytes == 16) {
        // Reads no word of which no byte is needed.
        const u32 shift = static_cast<u32>(reinterpret_cast<u64>(from) % 4);
        const u32* at = reinterpret_cast<const u32*>(from - shift);
        const u32 last = shift == 0 ? 0 : at[4], bits = 8 * shift;
        return make_uint4(__funnelshift_r(at[0], at[1], bits), __funnelshift_r(at[1], at[2], bits),
                          __funnelshift_r(at[2], at[3], bits), __funnelshift_r(at[3], last, bits));
    }
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
        if (i < bytes) {
            words[i / 4] |= static_cast<u32>(static_cast<unsigned char>(from[i])) << (i % 4 * 8);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Stores a vector that is partial or not aligned.
__device__ __noinline__ void store_partial(char* to, u32 bytes, uint4 vector) {
    const u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
    if (bytes == 16 && reinterpret_cast<u64>(to) % 4 == 0) {
        u32* at = reinterpret_cast<u32*>(to);
        at[0] = words[0], at[1] = words[1], at[2] = words[2], at[3] = words[3];
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
        if (i < bytes) {
            to[i] = static_cast<char>(words[i / 4] >> (i % 4 * 8));
        }
    }
}

}  // namespace symmpool
