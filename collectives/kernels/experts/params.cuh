//! Arguments of dispatches to experts and of combines, and how both cut tokens into chunks.
//!
//! The tokens of each rank are cut into chunks, an equal number for every peer block. In a dispatch the block of an index
//! sends the tokens of its chunks, and the blocks of the same index on other ranks receive them. In a combine, warps that
//! sum up wait for a step of an index only, whose chunks are sent by warps that wait for no sums.
//! Defines: THREADS, which each kernel that includes it has.

#pragma once

#include <experts/params_layout.cuh>
#include <symmpool/impl/peer_blocks.cuh>
#include <symmpool/impl/vector.cuh>

namespace symmpool {

// Bound of chunks; `call/experts/layout.rs` has it too, and makes room for as many.
constexpr u32 MAX_CHUNKS = 2048;
// Most chunks of a peer block, which signals once for each in a call.
constexpr u32 MAX_STEPS = 8;
// Fewer tokens than these are not worth a signal.
constexpr u32 CHUNK_TOKENS = 4;
// Bounds that `call/experts/mod.rs` has too.
constexpr u32 MAX_EXPERTS = 1024;
constexpr u32 MAX_TOP_K = 32;

constexpr u32 NOWHERE = ~0u;
// Tokens whose places a block keeps in shared memory at once.
constexpr u32 TILE = 128;
// How many vectors of a row a thread has under way at once where it copies them.
constexpr u32 COPY_VECTORS = 4;

// How the tokens of a rank are cut.
struct Chunks {
    u32 tokens;
    u32 steps;  // chunks of a peer block
    u32 count;

    __device__ __forceinline__ Chunks(u32 all, u32 peer_blocks) : tokens(all) {
        const u32 worth = all / (peer_blocks * CHUNK_TOKENS);
        const u32 fitting = MAX_CHUNKS / peer_blocks;
        const u32 most = fitting < MAX_STEPS ? fitting : MAX_STEPS;
        steps = worth < most ? worth : most;
        steps = steps == 0 ? 1 : steps;
        count = peer_blocks * steps;
    }

    // The first token of a chunk: tokens times chunks fit 32 bits.
    __device__ __forceinline__ u32 begin(u32 chunk) const { return tokens * chunk / count; }
};

constexpr u32 WARPS = THREADS / 32;

// A piece of a row: COUNT vectors of 16 bytes for each thread of a warp.
template <u32 COUNT> struct Piece {
    u32 row;
    u32 at[COUNT];  // which vector of the row
    bool live[COUNT];

    // Piece `nth` of rows of `vectors` vectors, each of which has `each` pieces.
    __device__ __forceinline__ Piece(u32 nth, u32 each, u32 vectors) : row(nth / each) {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            at[i] = ((nth - row * each) * COUNT + i) * 32 + threadIdx.x % 32;
            live[i] = at[i] < vectors;
        }
    }

    static __device__ __forceinline__ u32 count(u32 vectors) { return (vectors + 32 * COUNT - 1) / (32 * COUNT); }

    // Loads the piece from a row that begins at an address.
    __device__ __forceinline__ void load(const char* from, uint4 (&vectors)[COUNT]) const {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            if (live[i]) {
                vectors[i] = load_plain(from + 16ull * at[i]);
            }
        }
    }

    // Stores the piece in a row that begins at an address.
    __device__ __forceinline__ void store(char* to, const uint4 (&vectors)[COUNT]) const {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            if (live[i]) {
                store_plain(to + 16ull * at[i], vectors[i]);
            }
        }
    }
};

// Calls `visit(piece)` for the pieces of `rows` rows of `vectors` vectors. Of `parts` blocks that share them, this one
// has part `part`. Called by all threads of a block; whole warps get the same piece.
template <u32 COUNT, typename Visit>
__device__ __forceinline__ void for_pieces(u32 rows, u32 vectors, u32 part, u32 parts, Visit visit) {
    const u32 each = Piece<COUNT>::count(vectors);
#pragma unroll 1
    for (u32 i = part * WARPS + threadIdx.x / 32; i < rows * each; i += parts * WARPS) {
        visit(Piece<COUNT>(i, each, vectors));
    }
}

// Calls `visit(piece)` for the pieces of `rows` rows, which some warps of a block divide. Called by all threads of these.
template <u32 COUNT, typename Visit>
__device__ __forceinline__ void for_pieces(u32 rows, u32 vectors, Warps warps, Visit visit) {
    const u32 each = Piece<COUNT>::count(vectors);
#pragma unroll 1
    for (u32 i = warps.warp(); i < rows * each; i += warps.count) {
        visit(Piece<COUNT>(i, each, vectors));
    }
}

// Waits for a vector of a rank in the LL protocol; false if it does not arrive in time.
__device__ __forceinline__ bool await_vector(const Session& session, u32 from, const char* slot, uint4& vector) {
    Watch watch;
    while (!ll_load_vector(slot, session.epoch, vector)) {
        if (watch.expired(session, from, DATA)) {
            return false;
        }
    }
    return true;
}

// The words in which a dispatch tells the host sizes.
constexpr u32 SIZES_NUMBER = 0;     // the call's; it is written last
constexpr u32 SIZES_ROWS = 1;       // rows received
constexpr u32 SIZES_BY_EXPERT = 2;  // rows by expert, padding included
constexpr u32 SIZES_COUNTS = 4;     // rows of each expert

// Kinds of asynchronous errors, behind those of `all_to_all/traffic.cuh`.
constexpr u32 NO_EXPERT = 3;        // an id is no expert
constexpr u32 ROWS_OVERFLOW = 4;    // a rank has no room for all its rows
constexpr u32 EXPERTS_OVERFLOW = 5; // an output has no room for all rows by expert
constexpr u32 EXPERT_OVERFLOW = 6;  // nor has the part of an expert for all rows of that one
constexpr u32 WRONG_HANDLE = 7;     // a handle is of another layout, or was written to: which part, and what it has

// A handle is the caller's memory, which a program may write to, and calls take indices from it. So each is compared with
// its bound where it is used, by the instruction that finds out whether there is one: what is out of bounds counts as
// none. The leader block looks at all of them, while it would wait for handshakes, and tells the host.

// Whether an index that a handle has is one.
__device__ __forceinline__ bool is_index(int found, u64 bound) { return static_cast<u32>(found) < bound; }

// An index that a handle has, or -1.
__device__ __forceinline__ int index_or_none(int found, u64 bound) { return is_index(found, bound) ? found : -1; }

}  // namespace symmpool
