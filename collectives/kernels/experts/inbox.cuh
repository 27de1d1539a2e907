//! Inboxes for the rows of ranks that have few tokens: a row travels to a place that its sender knows without any
//! count, and shows by itself that it has arrived. So nobody waits before it sends, and there are no flags.
//!
//! Rows go through the escaped Lamport inbox. What belongs to a row goes through the LL inbox, behind the counts.

#pragma once

#include <experts/params.cuh>
#include <symmpool/impl/lamport_escaped.cuh>

namespace symmpool {

static_assert(ITEM == 32, "a piece is made of items");

// Whether the rows that a rank with `tokens` tokens sends in a dispatch, or gets back in a combine, go through inboxes.
// With ONLY_LOW_LATENCY no rank can have more, so that a kernel has nothing for other tokens: its instructions are loaded in
// less time, which is what small calls wait for.
__device__ __forceinline__ bool is_low_latency(const ExpertsWork& work, u32 tokens) {
    return ONLY_LOW_LATENCY || tokens <= work.inbox_tokens;
}

// Whether any rank, this one included, has many tokens: `path.skips_inboxes(rank)` says it of one.
template <typename Path> __device__ __forceinline__ bool any_skips_inboxes(const Path& path) {
    bool any = false;
#pragma unroll
    for (u32 rank = 0; rank < WORLD; ++rank) {
        any = any || path.skips_inboxes(rank);
    }
    return any;
}

// Which flags between peer blocks a call uses: none if no rank has many tokens.
template <typename Path> __device__ __forceinline__ UsedBytes used_flags_of(const Path& path) {
    return used_flags(any_skips_inboxes(path) ? path.work.peer_blocks : 0);
}

// Sends the handshake of a call, as `send_handshake` does. Where no rank can have many tokens no peer writes to this
// rank's memory for rows, so none needs to see what its stream did.
__device__ __forceinline__ void send_handshake_of(const Session& session, const CallParams& call, const ExpertsWork& work,
                                                  u32 threads) {
    if (is_low_latency(work, work.max_tokens)) {
        send_handshake<false>(session, call, threadIdx.x, threads);
    } else {
        send_handshake<true>(session, call, threadIdx.x, threads);
    }
}

// Where rows lie in a sender's slot of the inbox.
struct InboxRows {
    u32 vectors;  // length of a row
    u32 stride;   // vectors from row to row: lines with an escape mark belong to one row, and marks expire in pairs

    __device__ __forceinline__ explicit InboxRows(u64 row_bytes)
        : vectors(static_cast<u32>(row_bytes / 16)),
          stride((vectors + 2 * MARK_VECTORS - 1) / (2 * MARK_VECTORS) * (2 * MARK_VECTORS)) {}

    // Expires escape marks of old calls behind those of the first `used` rows of rank `from`. Called by all threads of
    // the leader block.
    __device__ __forceinline__ void expire(const Session& session, u32 from, u32 used) const {
        if (from != session.comm.rank) {
            const EscapedSlot inbox(session, session.comm.rank, from);
            const u64 marks = static_cast<u64>(used) * stride / MARK_VECTORS;
            const u64 most = EscapedSlot::length(session.comm) / MARK_VECTORS;
            expire_bytes(session, reinterpret_cast<char*>(inbox.escape_marks + marks), 8 * (most - marks));
        }
    }
};

// Details that travel with each row, in vectors of the LL inbox.
struct InboxDetails {
    u64 begin;  // bytes of the inbox before those of the first row
    u32 each;   // vectors of a row
    u32 rows;   // rows of each source

    __device__ __forceinline__ u64 bytes() const { return 32ull * WORLD * rows * each; }

    __device__ __forceinline__ char* slot(const Session& session, u32 owner, u32 from, u32 row, u32 nth) const {
        const Comm& comm = session.comm;
        const u64 at = (static_cast<u64>(from) * rows + row) * each + nth;
        return comm.of(owner) + comm.ll + session.parity() * (comm.ll_bytes / 2) + begin + 32 * at;
    }

    __device__ __forceinline__ void send(const Session& session, u32 owner, u32 row, u32 nth, uint4 vector) const {
        ll_store_vector(slot(session, owner, session.comm.rank, row, nth), vector, session.epoch);
    }

    // Waits for a vector; false if it does not arrive in time.
    __device__ __forceinline__ bool receive(const Session& session, u32 from, u32 row, u32 nth, uint4& vector) const {
        return await_vector(session, from, slot(session, session.comm.rank, from, row, nth), vector);
    }

    // Expires flags of old calls behind those of the first `used` rows of rank `from`. Called by all threads of the leader
    // block.
    __device__ __forceinline__ void expire(const Session& session, u32 from, u32 used) const {
        expire_bytes(session, slot(session, session.comm.rank, from, used, 0), 32ull * (rows - used) * each);
    }
};

// The rows of a list that a block works on: several, or a part of one if there are fewer rows than blocks.
struct BlockRows {
    u32 from = 0;
    u32 to = 0;
    u32 part = 0;
    u32 parts = 1;

    // Shares `rows` rows of `pieces` pieces each, of which a warp copies one. Block `first` begins with the first row.
    __device__ __forceinline__ BlockRows(u32 rows, u32 pieces, u32 first) {
        const u32 blocks = worker_blocks();
        const u32 block = worker_block() < first ? worker_block() + blocks - first : worker_block() - first;
        if (rows == 0) {
            return;
        }
        if (rows >= blocks) {
            from = rows * block / blocks;
            to = rows * (block + 1) / blocks;
            return;
        }
        const u32 worth = (pieces + WARPS - 1) / WARPS;
        parts = worth * rows <= blocks ? worth : blocks / rows;
        from = block / parts < rows ? block / parts : rows;
        to = from < rows ? from + 1 : rows;
        part = block % parts;
    }

    __device__ __forceinline__ bool is_empty() const { return from == to; }

    // Whether this block does what is done once for each row.
    __device__ __forceinline__ bool is_first() const { return part == 0; }
};

// Calls `visit(piece)` for the pieces of `count` rows of a block. Called by all threads of a block; whole warps get
// the same piece.
template <u32 COUNT, typename Visit>
__device__ __forceinline__ void for_pieces(const BlockRows& own_rows, u32 count, u32 vectors, Visit visit) {
    for_pieces<COUNT>(count, vectors, own_rows.part, own_rows.parts, visit);
}

// A list of the rows that come from, or go back to, ranks with few tokens.
struct InboxList {
    u32 begin[WORLD + 1];  // where the rows of each rank begin in the list, and its end

    // Called by one thread: `count(rank)` is how many rows of the rank there are.
    template <typename Count> __device__ __forceinline__ void fill(Count count) {
        begin[0] = 0;
        for (u32 rank = 0; rank < WORLD; ++rank) {
            begin[rank + 1] = begin[rank] + count(rank);
        }
    }

    __device__ __forceinline__ u32 rows() const { return begin[WORLD]; }

    // Whose a row of the list is; `row` becomes its number among those of that rank.
    __device__ __forceinline__ u32 rank_of(u32& row) const {
        u32 rank = 0;
#pragma unroll
        for (u32 next = 1; next < WORLD; ++next) {
            rank = row >= begin[next] ? next : rank;
        }
        row -= begin[rank];
        return rank;
    }
};

}  // namespace symmpool
