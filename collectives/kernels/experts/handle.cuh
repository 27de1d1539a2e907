//! The check of a handle that an earlier dispatch has written.
//! Defines: as each kernel that includes it.

#pragma once

#include <experts/work.cuh>

namespace symmpool {

// By which number a handle says how the rows of its dispatch lie: `HandleParts::layout_word` in `experts/layout.rs`.
constexpr int LAYOUT_WORD = 0x5e1dab00 + BY_EXPERT;
constexpr int OTHER_LAYOUT_WORD = 0x5e1dab00 + !BY_EXPERT;

// Which part of a handle is wrong: `PARTS_OF_HANDLES` in `cuda/fault.rs` has their names.
constexpr u32 WRONG_LAYOUT = 1;
constexpr u32 WRONG_TOKENS = 2;
constexpr u32 WRONG_RECEIVED = 3;
constexpr u32 WRONG_OFFSET = 4;
constexpr u32 WRONG_POSITION = 5;
constexpr u32 WRONG_PLACE = 6;

// That part in the upper half, and what it has; 0 where nothing is wrong.
__shared__ u64 wrong_in_handle;

__device__ __forceinline__ void found_wrong(u32 part, int found) {
    wrong_in_handle = static_cast<u64>(part) << 32 | static_cast<u32>(found);
}

// Looks at all indices in a handle, and tells the host of one that is out of bounds. `rows` is how many rows there are, by
// expert if they lie so. Called by all threads of the leader block.
__device__ __noinline__ void check_handle(const Session& session, const ExpertsWork& work, u64 rows) {
    if (threadIdx.x == 0) {
        wrong_in_handle = 0;
    }
    __syncthreads();
    const int received = work.head[0];
    for (u32 at = threadIdx.x; at < work.tokens * WORLD; at += THREADS) {
        const int found = work.positions[at];
        if (found != -1 && !is_index(found, work.tokens)) {
            found_wrong(WRONG_POSITION, found);
        }
    }
#if BY_EXPERT
    const u64 items = is_index(received, work.capacity + 1) ? static_cast<u64>(received) * work.top_k : 0;
#pragma unroll 4
    for (u64 at = threadIdx.x; at < items; at += THREADS) {
        const int found = work.places[at];
        if (found != -1 && !is_index(found, rows)) {
            found_wrong(WRONG_PLACE, found);
        }
    }
#endif
    if (threadIdx.x < WORLD) {
        const u32 at = threadIdx.x;
        const int begin = work.source_offsets[at], end = work.source_offsets[at + 1], base = work.bases[at];
        const bool starts = at == 0 ? begin == 0 : begin >= 0, ends = at == WORLD - 1 ? end == received : end <= received;
        const bool many = static_cast<u32>(end) - static_cast<u32>(begin) > work.max_tokens;
        if (!starts || !ends || end < begin || many) {
            found_wrong(WRONG_OFFSET, end);
        }
        if (!is_index(base, work.capacity + 1) || (at == session.comm.rank && base != begin)) {
            found_wrong(WRONG_OFFSET, base);
        }
    }
    __syncthreads();
    if (threadIdx.x != 0) {
        return;
    }
    const u64 most = BY_EXPERT || rows > work.capacity ? work.capacity : rows;
    if (!is_index(received, most + 1)) {
        found_wrong(WRONG_RECEIVED, received);
    }
    if (work.head[1] != static_cast<int>(work.tokens)) {
        found_wrong(WRONG_TOKENS, work.head[1]);
    }
    const int layout = work.head[3];
    if (layout != LAYOUT_WORD && !(work.any_layout != 0 && layout == OTHER_LAYOUT_WORD)) {
        found_wrong(WRONG_LAYOUT, layout == OTHER_LAYOUT_WORD);
    }
    if (wrong_in_handle != 0) {
        write_notice(session, WRONG_HANDLE, session.comm.rank, wrong_in_handle >> 32, wrong_in_handle & 0xffffffffu);
    }
}

}  // namespace symmpool
