//! The check of a handle that an earlier dispatch has written.
//! Defines: as each kernel that includes it.

#pragma once

#include <experts/inbox.cuh>

namespace symmpool {

// Number by which a handle says how the rows of its dispatch lie: `HandleParts::layout_word` in
// `call/experts/layout.rs`.
constexpr int LAYOUT_WORD = 0x5e1dab00 + BY_EXPERT;
constexpr int OTHER_LAYOUT_WORD = 0x5e1dab00 + !BY_EXPERT;

// Which part of a handle is wrong: `PARTS_OF_HANDLES` in `cuda/layout/fault.rs` has their names.
constexpr u32 WRONG_LAYOUT = 1;
constexpr u32 WRONG_TOKENS = 2;
constexpr u32 WRONG_RECEIVED = 3;
constexpr u32 WRONG_OFFSET = 4;
constexpr u32 WRONG_POSITION = 5;
constexpr u32 WRONG_PLACE = 6;

constexpr u32 WRONG_ROWS = 7;

// That part in the upper half, and what it has; 0 where nothing is wrong.
__shared__ u64 wrong_in_handle;
// How many rows of this rank's tokens each rank has, as the handle says, where they travel through inboxes.
__shared__ u32 low_latency_rows_of[WORLD];
// How many rows each rank sends to this one's inbox, as it says itself.
__shared__ u32 sent_here[WORLD];

__device__ __forceinline__ void found_wrong(u32 part, int found) {
    wrong_in_handle = static_cast<u64>(part) << 32 | static_cast<u32>(found);
}

__device__ __forceinline__ void notify_of_handle(const Session& session, u32 part, u32 found) {
    write_async_error(session, WRONG_HANDLE, session.comm.rank, part, found);
}

// Looks at all indices in a handle, and tells the host of one that is out of bounds. `rows` is how many rows there are, by
// expert if they lie so. Called by all threads of the leader block.
__device__ __noinline__ void check_handle(const Session& session, const ExpertsWork& work, u64 rows) {
    if (threadIdx.x == 0) {
        wrong_in_handle = 0;
    }
    if (threadIdx.x < WORLD) {
        low_latency_rows_of[threadIdx.x] = 0;
    }
    __syncthreads();
    const bool low_latency = is_low_latency(work, work.tokens);
    const int received = work.head[0];
    for (u32 at = threadIdx.x; at < work.tokens * WORLD; at += THREADS) {
        const int found = work.positions[at];
        if (is_index(found, work.tokens)) {
            if (low_latency) {
                atomicAdd(&low_latency_rows_of[at % WORLD], 1u);
            }
        } else if (found != -1) {
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
        notify_of_handle(session, wrong_in_handle >> 32, wrong_in_handle & 0xffffffffu);
    }
}

// --- rows that a handle does not know of
//
// A call by a handle sends and receives as many rows as the handles of its ranks say, of which a program may have written to
// any. A row that its receiver does not expect must leave the inbox all the same: a later call would take it for its own.
// So ranks say how many rows they send to each inbox, in the LL protocol.

// Where ranks say that: a vector of the LL inbox for each, `stride` vectors apart.
struct SentRows {
    u32 stride;

    __device__ __forceinline__ char* slot(const Session& session, u32 owner, u32 from) const {
        const Comm& comm = session.comm;
        return comm.of(owner) + comm.ll + session.parity() * (comm.ll_bytes / 2) + 32ull * stride * from;
    }

    // Called by all threads of the leader block: `count(rank)` rows go to the inbox of a rank.
    template <typename Count> __device__ __forceinline__ void send(const Session& session, Count count) const {
        const u32 to = threadIdx.x;
        if (to < WORLD && to != session.comm.rank) {
            ll_store_vector(slot(session, to, session.comm.rank), make_uint4(count(to), 0, 0, 0), session.epoch);
        }
    }

    // Waits for the counts of all ranks. Called by all threads of the leader block, which get the same answer: false if one
    // does not arrive.
    __device__ __forceinline__ bool receive(const Session& session, u32 most) const {
        const u32 from = threadIdx.x;
        bool bad = false;
        if (from < WORLD) {
            uint4 vector = make_uint4(0, 0, 0, 0);
            bad = from != session.comm.rank && !await_vector(session, from, slot(session, session.comm.rank, from), vector);
            sent_here[from] = vector.x < most ? vector.x : most;
        }
        return !__syncthreads_or(bad);
    }
};

// Takes rows of a rank from number `first` on out of the inbox, but for those that `expects(row)`. Called by all threads of
// the leader block.
template <typename Expects>
__device__ __forceinline__ void discard_rows(const Session& session, const InboxRows& rows, u32 from, u32 first,
                                             Expects expects) {
    const EscapedSlot inbox(session, session.comm.rank, from);
#pragma unroll 1
    for (u32 row = first + threadIdx.x / 32; row < sent_here[from]; row += WARPS) {
        if (expects(row)) {
            continue;
        }
#pragma unroll 1
        for (u32 begin = 0; begin < rows.vectors; begin += ITEM) {
            const u32 nth = begin + threadIdx.x % 32;
            const u32 at[] = {row * rows.stride + nth};
            const bool live[] = {nth < rows.vectors};
            uint4 found[1];
            if (!inbox.receive(session, from, at, live, found)) {
                return;
            }
        }
    }
}

}  // namespace symmpool
