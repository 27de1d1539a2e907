//! The LL128 protocol: eight threads store a line of 128 bytes at once, of which the last eight are flags. Any
//! bits can travel, and take little more than their space.
//!
//! A line that a warp stores with one instruction arrives whole over NVLink, and one that it loads with one
//! instruction is seen whole. NCCL's protocol of this name relies on the same.

#pragma once

#include <symmpool/span.cuh>

namespace symmpool {

constexpr u32 LINE_BYTES = 128;
constexpr u32 LINE_PAYLOAD = 120;
constexpr u32 LINE_THREADS = 8;

// The number of this thread among those that have a line together.
__device__ __forceinline__ u32 line_thread() { return threadIdx.x % LINE_THREADS; }

__device__ __forceinline__ u64 lines_of(u64 bytes) { return (bytes + LINE_PAYLOAD - 1) / LINE_PAYLOAD; }

// How many of the `bytes` bytes of the data a thread has in a line: sixteen, or eight in the last of its threads;
// fewer at the end of the data. `thread` is the thread's number in the line.
__device__ __forceinline__ u32 piece_bytes(u64 bytes, u64 line, u32 thread) {
    const u64 from = line * LINE_PAYLOAD + thread * 16;
    const u64 left = from < bytes ? bytes - from : 0;
    const u32 most = thread == LINE_THREADS - 1 ? 8 : 16;
    return static_cast<u32>(left < most ? left : most);
}

// Loads up to sixteen bytes in halves of eight: the payload of lines is no better aligned than that.
__device__ __forceinline__ uint4 load_piece(const char* at, u32 count) {
    if (reinterpret_cast<u64>(at) % 8 != 0 || count % 8 != 0) {
        return load_partial(at, count);
    }
    const uint2* halves = reinterpret_cast<const uint2*>(at);
    uint2 low = make_uint2(0, 0), high = make_uint2(0, 0);
    if (count >= 8) {
        low = halves[0];
    }
    if (count == 16) {
        high = halves[1];
    }
    return make_uint4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ void store_piece(char* at, u32 count, uint4 vector) {
    if (reinterpret_cast<u64>(at) % 8 != 0 || count % 8 != 0) {
        store_partial(at, count, vector);
        return;
    }
    uint2* halves = reinterpret_cast<uint2*>(at);
    if (count >= 8) {
        halves[0] = make_uint2(vector.x, vector.y);
    }
    if (count == 16) {
        halves[1] = make_uint2(vector.z, vector.w);
    }
}

// The vector that a thread stores into a line: its data, and the flags in the last thread's.
__device__ __forceinline__ uint4 with_flags(uint4 piece, u32 thread, u32 epoch) {
    if (thread == LINE_THREADS - 1) {
        piece.z = epoch, piece.w = epoch;
    }
    return piece;
}

// Whether a line has arrived, as far as this thread sees: its last thread has the flags.
__device__ __forceinline__ bool has_flags(uint4 piece, u32 thread, u32 epoch) {
    return thread != LINE_THREADS - 1 || (piece.z == epoch && piece.w == epoch);
}

}  // namespace symmpool
