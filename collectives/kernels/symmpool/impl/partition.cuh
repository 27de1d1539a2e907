//! How data is divided: a buffer among ranks, and the data of a rank among blocks.

#pragma once

#include <symmpool/impl/handshake.cuh>
#include <symmpool/span.cuh>

namespace symmpool {

// Each rank's chunk of a buffer. With ONE_BUFFER, the chunks are one buffer of `call.bytes` bytes, cut into chunks of
// whole vectors of which the last ones may be shorter or empty. Otherwise every chunk has `call.bytes` bytes, and
// chunks begin `call.stride` bytes apart.
template <bool ONE_BUFFER>
struct RankChunks {
    u64 bytes;
    u64 stride;

    __device__ __forceinline__ explicit RankChunks(const CallParams& call)
        : bytes(call.bytes),
          stride(ONE_BUFFER ? ((call.bytes + 15) / 16 + WORLD - 1) / WORLD * 16 : call.stride) {}

    // Vectors of the longest chunk.
    __device__ __forceinline__ u64 vectors() const { return ((ONE_BUFFER ? stride : bytes) + 15) / 16; }

    template <typename Byte>
    __device__ __forceinline__ Span<Byte> of(Byte* begin, u32 rank) const {
        u64 from = rank * stride, length = bytes;
        if (ONE_BUFFER) {
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

// `count` items, usually vectors, divided evenly into pieces for blocks. Pieces begin at multiples of `grain` items,
// which by default are a line of 128 bytes, and differ by at most one grain.
struct EvenSplit {
    u64 count;
    u64 grains;  // length of the shorter pieces
    u32 longer;  // how many pieces, the first ones, have one grain more
    u32 grain;

    __device__ __forceinline__ EvenSplit(u64 all, u32 pieces, u32 items = 8) : count(all), grain(items) {
        const u64 whole = (all + items - 1) / items;
        // A division of 64 bits takes ten times as long.
        grains = whole >> 32 == 0 ? static_cast<u32>(whole) / pieces : whole / pieces;
        longer = static_cast<u32>(whole - grains * pieces);
    }

    // Where a piece begins, and the one before it ends.
    __device__ __forceinline__ u64 begin(u32 piece) const {
        const u64 first = (piece * grains + (piece < longer ? piece : longer)) * grain;
        return first < count ? first : count;
    }

    __device__ __forceinline__ u64 longest() const { return (grains + (longer > 0 ? 1 : 0)) * grain; }

    __device__ __forceinline__ Range operator[](u32 piece) const { return {begin(piece), begin(piece + 1)}; }
};

}  // namespace symmpool
