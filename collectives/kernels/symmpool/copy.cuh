//! Copies of bytes from anywhere to anywhere, in vectors that are aligned where they are written.

#pragma once

#include <symmpool/partition.cuh>

namespace symmpool {

// Sixteen bytes from `shift` bytes on of two vectors, less than 16.
__device__ __forceinline__ uint4 from_pair(uint4 low, uint4 high, u32 shift) {
    const u32 words = shift / 4, bits = shift % 4 * 8;
    auto pick = [&](u32 a, u32 b, u32 c, u32 d) {
        return words == 0 ? a : words == 1 ? b : words == 2 ? c : d;
    };
    const u32 w0 = pick(low.x, low.y, low.z, low.w);
    const u32 w1 = pick(low.y, low.z, low.w, high.x);
    const u32 w2 = pick(low.z, low.w, high.x, high.y);
    const u32 w3 = pick(low.w, high.x, high.y, high.z);
    const u32 w4 = pick(high.x, high.y, high.z, high.w);
    return make_uint4(__funnelshift_r(w0, w1, bits), __funnelshift_r(w1, w2, bits),
                      __funnelshift_r(w2, w3, bits), __funnelshift_r(w3, w4, bits));
}

// Sixteen bytes from `shift` bytes behind `aligned` on, a multiple of 16. Only vectors of which a
// byte is wanted are read, so none lies outside the memory's pages.
__device__ __forceinline__ uint4 load_shifted(const char* aligned, u32 shift) {
    const uint4 low = load_plain(aligned);
    return shift == 0 ? low : from_pair(low, load_plain(aligned + 16), shift);
}

// A copy of so many bytes.
struct Transfer {
    const char* from;
    char* to;
    u64 bytes;
};

// A copy in units that blocks share out among them: vectors, in lines of 128 bytes where they are
// written, and behind them one for the bytes at both ends that fill no line and no vector.
struct Copy {
    static constexpr int UNROLL = 4;

    const char* from;
    char* to;
    u64 bytes;
    u32 head;
    u64 vectors;

    __device__ __forceinline__ explicit Copy(const Transfer& route)
        : from(route.from), to(route.to), bytes(route.bytes) {
        // Stores that straddle lines take the links for longer.
        const u32 before = (128 - static_cast<u32>(reinterpret_cast<u64>(to)) % 128) % 128;
        head = before < bytes ? before : static_cast<u32>(bytes);
        vectors = (bytes - head) / 16;
    }

    __device__ __forceinline__ u64 units() const { return bytes == 0 ? 0 : vectors + 1; }

    // Units `[first, last)`, by one block.
    __device__ __forceinline__ void run(u64 first, u64 last) const;

    __device__ __forceinline__ void run_inline(u64 first, u64 last) const {
        const u32 shift = static_cast<u32>(reinterpret_cast<u64>(from + head) % 16);
        const u64 end = last < vectors ? last : vectors;
        shift == 0 ? move<false>(first, end, 0) : move<true>(first, end, shift);
        if (last > vectors) {
            const u64 behind = head + 16 * vectors;
            const u32 ends = head + static_cast<u32>(bytes - behind);
            for (u32 i = threadIdx.x; i < ends; i += blockDim.x) {
                const u64 at = i < head ? i : behind + (i - head);
                to[at] = from[at];
            }
        }
    }

    // Vectors `[begin, end)`.
    template <bool SHIFTED>
    __device__ __forceinline__ void move(u64 begin, u64 end, u32 shift) const {
        const char* source = from + head - shift;
        char* target = to + head;
        for (u64 at = begin + threadIdx.x; at < end; at += blockDim.x * UNROLL) {
            uint4 all[UNROLL];
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                if (at + i * blockDim.x < end) {
                    const char* vector = source + 16 * (at + i * blockDim.x);
                    all[i] = SHIFTED ? load_shifted(vector, shift) : load_plain(vector);
                }
            }
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                if (at + i * blockDim.x < end) {
                    store_plain(target + 16 * (at + i * blockDim.x), all[i]);
                }
            }
        }
    }
};

// One place in the image serves all peers and ways: what is longer than the instruction cache begins
// slowly. All it needs is passed in registers.
__device__ __noinline__ void copy_units(const char* from, char* to, u64 bytes, u64 first, u64 last) {
    Copy(Transfer{from, to, bytes}).run_inline(first, last);
}

__device__ __forceinline__ void Copy::run(u64 first, u64 last) const {
    if (first < last) {
        copy_units(from, to, bytes, first, last);
    }
}

// Shares of a copy that is cut into so many, from the `first` one to before the `last`.
__device__ __forceinline__ void shares(const Transfer& route, u32 first, u32 last, u32 all) {
    const Copy copy(route);
    const u64 units = copy.units();
    auto bound = [&](u32 nth) {
        const u64 unit = (part(units, nth, all) + 7) / 8 * 8;
        return unit < units ? unit : units;
    };
    copy.run(bound(first), bound(last));
}

// A block's share of a copy that so many blocks make, the `nth` of them.
__device__ __forceinline__ void share(const Transfer& route, u32 nth, u32 blocks) {
    shares(route, nth, nth + 1, blocks);
}

}  // namespace symmpool
