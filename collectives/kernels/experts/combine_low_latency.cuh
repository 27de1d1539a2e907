//! Combine for ranks with few tokens, through inboxes: rows go back at once, and a rank sums up those of its tokens as
//! they arrive.
//! Defines: as `experts/combine.cu`, which includes it.

#pragma once

#include <experts/handle.cuh>
#include <experts/inbox.cuh>
#include <experts/combine_recv.cuh>

namespace symmpool {

constexpr u32 COMBINE_VECTORS = WORLD <= 4 ? 2 : 1;

__shared__ InboxList returning;  // rows that go back to ranks with few tokens
#if BY_EXPERT
__shared__ float low_latency_weights[TILE * MAX_TOP_K];  // for a tile's rows
#endif

// The rows that each rank sent here, by the handle; in shared memory.
struct CombineSources {
    u32 begin[WORLD + 1];  // where they begin, and the end of all
    u32 tokens[WORLD];     // that the rank has

    // The word that this thread keeps, for many threads of a block none.
    static __device__ __forceinline__ u32 load(const ExpertsWork& work) {
        const u32 begin = threadIdx.x, of = threadIdx.x - 32;
        const int* from = begin <= WORLD ? work.source_offsets + begin : of < WORLD ? work.source_tokens + of : nullptr;
        return from == nullptr ? 0 : static_cast<u32>(*from);
    }

    // Called by all threads of a block, which wait for a barrier then. Rows are those that the handle has room for, and if
    // they lie by rank those that there are.
    __device__ __forceinline__ void keep(const ExpertsWork& work, u32 word) {
        const u32 at = threadIdx.x, of = threadIdx.x - 32;
        if (at <= WORLD) {
            const u64 rows = BY_EXPERT || work.capacity < work.input_rows ? work.capacity : work.input_rows;
            begin[at] = word < rows ? word : static_cast<u32>(rows);
        } else if (of < WORLD) {
            tokens[of] = word;
        }
    }

    // How many rows a rank sent here: no more than it may have tokens.
    __device__ __forceinline__ u32 rows(u32 source, u32 most) const {
        const u32 from = begin[source], to = begin[source + 1];
        const u32 found = from < to ? to - from : 0;
        return found < most ? found : most;
    }
};

__shared__ CombineSources sources;

struct LowLatencyCombine {
    const Session& session;
    const ExpertsWork& work;
    InboxRows rows;
    SentRows sent;
    InboxDetails weights;  // that a combine is given, four in a vector

    __device__ __forceinline__ LowLatencyCombine(const Session& s, const ExpertsWork& w)
        : session(s), work(w), rows(w.row_bytes), sent{1}, weights{32 * WORLD, (w.top_k + 3) / 4, w.inbox_tokens} {}

    __device__ __forceinline__ u32 pieces() const { return Piece<COMBINE_VECTORS>::count(rows.vectors); }

    __device__ __forceinline__ bool skips_inboxes(u32 source) const { return !is_low_latency(work, sources.tokens[source]); }

    // How many rows this rank returns through the inbox of a rank.
    __device__ __forceinline__ u32 returns(u32 source) const {
        return source != session.comm.rank && !skips_inboxes(source) ? sources.rows(source, work.inbox_tokens) : 0;
    }
};

#if BY_EXPERT
// Sends the weights of a share's tokens to the ranks that have rows of them.
__device__ __forceinline__ void send_low_latency_weights(const LowLatencyCombine& low_latency, const BlockRows& own_rows) {
    const ExpertsWork& work = low_latency.work;
    const u32 each = low_latency.weights.each;
    for (u32 i = threadIdx.x; i < (own_rows.to - own_rows.from) * each && own_rows.is_first(); i += THREADS) {
        const u32 token = own_rows.from + i / each, nth = i % each;
        const float* of = work.weights + static_cast<u64>(token) * work.top_k;
        auto weight = [&](u32 k) { return k < work.top_k ? __float_as_uint(of[k]) : 0; };
        const uint4 vector = make_uint4(weight(4 * nth), weight(4 * nth + 1), weight(4 * nth + 2), weight(4 * nth + 3));
        for (u32 rank = 0; rank < WORLD; ++rank) {
            const int row = work.positions[static_cast<u64>(token) * WORLD + rank];
            if (rank != low_latency.session.comm.rank && is_index(row, work.tokens)) {
                low_latency.weights.send(low_latency.session, rank, static_cast<u32>(row), nth, vector);
            }
        }
    }
}

// Waits for the weights of a tile of the list. Called by all threads of a block, which get the same answer: false if
// something does not arrive.
__device__ __forceinline__ bool receive_low_latency_weights(const LowLatencyCombine& low_latency, u32 tile, u32 count) {
    const u32 each = low_latency.weights.each, top_k = low_latency.work.top_k;
    bool bad = false;
    for (u32 i = threadIdx.x; i < count * each && !bad; i += THREADS) {
        const u32 within = i / each, nth = i - within * each;
        u32 row = tile + within;
        const u32 source = returning.rank_of(row);
        uint4 vector;
        bad = !low_latency.weights.receive(low_latency.session, source, row, nth, vector);
        const u32 found[4] = {vector.x, vector.y, vector.z, vector.w};
        for (u32 k = 0; k < 4 && 4 * nth + k < top_k; ++k) {
            low_latency_weights[within * top_k + 4 * nth + k] = __uint_as_float(found[k]);
        }
    }
    return !__syncthreads_or(bad);
}
#endif

// Sends rows back to ranks with few tokens. Called by all threads of a block, which get the same answer: false if weights
// do not arrive.
__device__ __forceinline__ bool return_low_latency(const LowLatencyCombine& low_latency) {
    const Session& session = low_latency.session;
    if (threadIdx.x == 0) {
        returning.fill([&](u32 source) { return low_latency.returns(source); });
    }
    __syncthreads();
    const BlockRows own_rows(returning.rows(), low_latency.pieces(), worker_blocks() / 2);
#pragma unroll 1
    for (u32 tile = own_rows.from; tile < own_rows.to; tile += TILE) {
        const u32 left = own_rows.to - tile, count = left < TILE ? left : TILE;
#if BY_EXPERT
        if (low_latency.work.sends_weights && !receive_low_latency_weights(low_latency, tile, count)) {
            return false;
        }
#endif
        for_pieces<COMBINE_VECTORS>(own_rows, count, low_latency.rows.vectors, [&](const Piece<COMBINE_VECTORS>& piece) {
            u32 row = tile + piece.row;
            const u32 source = returning.rank_of(row), received = sources.begin[source] + row;
            const float* weights = nullptr;
#if BY_EXPERT
            const ExpertsWork& work = low_latency.work;
            weights = work.sends_weights ? low_latency_weights + piece.row * work.top_k : kept_weights(work, received);
#endif
            uint4 vectors[COMBINE_VECTORS];
            load_returned(low_latency.work, received, weights, piece, vectors);
            const EscapedSlot slot(session, source, session.comm.rank);
#pragma unroll
            for (u32 i = 0; i < COMBINE_VECTORS; ++i) {
                slot.send(session.epoch, row * low_latency.rows.stride + piece.at[i], vectors[i], piece.live[i]);
            }
        });
        __syncthreads();
    }
    return true;
}

// Sums up the rows of a share of this rank's tokens; false, in some threads, if something does not arrive.
__device__ __forceinline__ bool sum_low_latency(const LowLatencyCombine& low_latency, const BlockRows& own_rows) {
    const ExpertsWork& work = low_latency.work;
    const Session& session = low_latency.session;
    const u32 rank = session.comm.rank, begin = sources.begin[rank], rows = sources.rows(rank, work.tokens);
    bool bad = false;
    const u32 count = own_rows.to - own_rows.from;
    for_pieces<COMBINE_VECTORS>(own_rows, count, low_latency.rows.vectors, [&](const Piece<COMBINE_VECTORS>& piece) {
        const u64 token = own_rows.from + piece.row;
        const int* positions = work.positions + token * WORLD;
        const int own = index_or_none(positions[rank], rows);
        const u32 received = begin + static_cast<u32>(own);
        const float* weights = nullptr;
#if BY_EXPERT
        weights = own_weights(work, token, received);
#endif
        uint4 mine[COMBINE_VECTORS] = {};
        if (own >= 0) {
            load_returned(work, received, weights, piece, mine);
        }
        float sums[COMBINE_VECTORS][VALUES] = {};
#pragma unroll 1
        for (u32 other = 0; other < WORLD && !bad; ++other) {
            const int position = positions[other];
            if (!is_index(position, other == rank ? rows : work.tokens)) {
                continue;
            }
            uint4 found[COMBINE_VECTORS];
            if (other == rank) {
#pragma unroll
                for (u32 i = 0; i < COMBINE_VECTORS; ++i) {
                    found[i] = mine[i];
                }
            } else {
                u32 at[COMBINE_VECTORS];
#pragma unroll
                for (u32 i = 0; i < COMBINE_VECTORS; ++i) {
                    at[i] = static_cast<u32>(position) * low_latency.rows.stride + piece.at[i];
                }
                bad = !EscapedSlot(session, rank, other).receive(session, other, at, piece.live, found);
            }
            add_to(sums, found);
        }
        if (!bad) {
            store_sums(work, token, piece, sums);
        }
    });
    return !bad;
}

// Takes rows out of the inbox that ranks return and that this rank's handle does not know of. Called by all threads of the
// leader block.
__device__ __forceinline__ void discard_unexpected(const Session& session, const ExpertsWork& work) {
    const LowLatencyCombine low_latency(session, work);
    if (!low_latency.sent.receive(session, work.inbox_tokens)) {
        return;
    }
    for (u32 other = 0; other < WORLD; ++other) {
        const u32 expected = low_latency_rows_of[other];
        if (sent_here[other] <= expected && wrong_in_handle == 0) {
            continue;
        }
        if (threadIdx.x == 0 && wrong_in_handle == 0) {
            notify_of_handle(session, WRONG_ROWS, sent_here[other]);
        }
        discard_rows(session, low_latency.rows, other, 0, [&](u32 row) {
            bool found = false;
            for (u32 token = threadIdx.x % 32; token < work.tokens && expected != 0; token += 32) {
                found = found || static_cast<u32>(work.positions[static_cast<u64>(token) * WORLD + other]) == row;
            }
            return __any_sync(~0u, found) != 0;
        });
    }
}

// Expires flags of old calls that this one does not overwrite. Called by all threads of the leader block.
__device__ __noinline__ void expire_unused(const Session& session, const ExpertsWork& work) {
    const LowLatencyCombine low_latency(session, work);
    UsedBytes used = used_flags_of(low_latency);
    used.ll = low_latency.weights.begin + low_latency.weights.bytes();
    expire_old_flags(session, used);
    const bool sums = is_low_latency(work, work.tokens);
    for (u32 other = 0; other < WORLD; ++other) {
        low_latency.weights.expire(session, other, work.sends_weights ? low_latency.returns(other) : 0);
        // Rows of a rank are numbered in the order of tokens, so the last one says how many there are.
        u32 rows = 0;
        for (u32 token = work.tokens; sums && token != 0 && rows == 0; --token) {
            const int found = work.positions[static_cast<u64>(token - 1) * WORLD + other];
            rows = static_cast<u32>(index_or_none(found, work.tokens) + 1);
        }
        low_latency.rows.expire(session, other, rows);
    }
}

}  // namespace symmpool
