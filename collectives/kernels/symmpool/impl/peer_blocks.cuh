//! Flags between peer blocks: blocks of equal index on all ranks, which wait for each other and for no
//! other block. They are for data that cannot show by itself that it has arrived. A flag is the epoch of the
//! call and a count within it; it only grows.

#pragma once

#include <symmpool/impl/handshake.cuh>
#include <symmpool/impl/warps.cuh>

namespace symmpool {

// Kinds of flags.
constexpr u32 ARRIVED = 0;   // the sender's data is in this rank's scratch
constexpr u32 FINISHED = 1;  // results are in this rank's memory, or the sender needs it no more
constexpr u32 STEP = 2;      // which step the sender is about to take; only a hint
constexpr u64 FLAG_KINDS = 4;  // a power of two: the flags of one index fill whole vectors

// Flags lie in the order of indices, so that those that a call uses are at the beginning of the region.
__device__ __forceinline__ u64* flag_of(const Session& session, u32 owner, u32 kind, u32 from, u32 index) {
    const Comm& comm = session.comm;
    char* flags = comm.of(owner) + comm.flags + session.parity() * (comm.flags_bytes / 2);
    return reinterpret_cast<u64*>(flags) + (index * FLAG_KINDS + kind) * WORLD + from;
}

// The indices for which a block works. All ranks divide a call's data among the same number of peer blocks. A
// worker block does the work of one index or, where its communicator may use only some of the SMs, of several in a
// row. Ranks may launch different numbers of blocks: a block takes every step of a call for all of its indices
// before the next step, so among any blocks that wait for each other one is in the earliest step and goes on.
struct PeerBlocks {
    u32 first;
    u32 end;

    PeerBlocks() = default;

    // Those of `count` indices that are this block's.
    __device__ __forceinline__ explicit PeerBlocks(u32 count) : PeerBlocks(count, worker_block(), worker_blocks()) {}

    // Those of `count` indices that are block `block`'s, where `blocks` of the worker blocks divide them.
    __device__ __forceinline__ PeerBlocks(u32 count, u32 block, u32 blocks) : first(block), end(first + 1) {
        if (count != blocks) {
            first = count * block / blocks;
            end = count * (block + 1) / blocks;
        }
    }

    // Pairs of a rank and an index.
    __device__ __forceinline__ u32 pairs() const { return WORLD * (end - first); }
};

__device__ __forceinline__ UsedBytes used_flags(u32 peer_blocks) {
    UsedBytes used;
    used.flags = peer_blocks * (8 * FLAG_KINDS * WORLD);
    return used;
}

// Raises this block's flags on every peer, behind a barrier of these threads (rule S3). Called by all of them.
template <typename Threads = WholeBlock>
__device__ __forceinline__ void raise_flags_behind_barrier(const Session& session, PeerBlocks peer_blocks, u32 kind,
                                                           u32 count, Threads threads = {}) {
#pragma unroll 1
    for (u32 pair = threads.thread(); pair < peer_blocks.pairs(); pair += threads.threads()) {
        const u32 peer = pair % WORLD;
        if (peer != session.comm.rank) {
            store_release(
                flag_of(session, peer, kind, session.comm.rank, peer_blocks.first + pair / WORLD),
                static_cast<u64>(session.epoch) << 32 | count);
        }
    }
}

// Raises this block's flags on every peer, after all that these threads have stored so far. Called by all of them.
template <typename Threads = WholeBlock>
__device__ __forceinline__ void raise_flags(const Session& session, PeerBlocks peer_blocks, u32 kind, u32 count,
                                            Threads threads = {}) {
    threads.sync();
    raise_flags_behind_barrier(session, peer_blocks, kind, count, threads);
}

// Raises flags on all peers. Called by one thread, which must have made a fence behind its stores: one fence for all flags.
__device__ __forceinline__ void raise_flags_after_fence(const Session& session, PeerBlocks peer_blocks, u32 kind,
                                                        u32 count) {
#pragma unroll 1
    for (u32 distance = 1; distance < WORLD; ++distance) {
        const u32 peer = session.comm.after(distance);
        for (u32 index = peer_blocks.first; index < peer_blocks.end; ++index) {
            *static_cast<volatile u64*>(flag_of(session, peer, kind, session.comm.rank, index)) =
                static_cast<u64>(session.epoch) << 32 | count;
        }
    }
}

// Waits until a peer has raised the flag of an index to `count`; false if that takes too long. Called by one thread.
__device__ __forceinline__ bool thread_await_flag(const Session& session, u32 kind, u32 peer, u32 index,
                                                  u32 count, u32 phase) {
    const u64* own = flag_of(session, session.comm.rank, kind, peer, index);
    Watch watch;
    for (u64 value = load_acquire(own);
         static_cast<u32>(value >> 32) != session.epoch || static_cast<u32>(value) < count;
         value = load_acquire(own)) {
        if (watch.expired(session, peer, phase)) {
            return false;
        }
    }
    return true;
}

// Waits for a flag as `thread_await_flag`. Called by all threads of a block, which get the same answer.
__device__ __forceinline__ bool block_await_flag(const Session& session, u32 kind, u32 peer, u32 index,
                                                 u32 count, u32 phase) {
    bool bad = threadIdx.x == 0 && !thread_await_flag(session, kind, peer, index, count, phase);
    return !__syncthreads_or(bad);
}

// A choice of peers: all of them.
struct EveryPeer {
    __device__ __forceinline__ bool operator()(u32) const { return true; }
};

// Waits until every peer for which `which(peer)` is true has raised the flags of all of this block's indices to `count`.
// Called by all of these threads, which get the same answer: false if one takes too long. With PRESENT it is false as
// well if one of these peers has failed in the call, after which its output must not be written.
template <bool PRESENT = false, typename Which = EveryPeer, typename Threads = WholeBlock>
__device__ __forceinline__ bool await_flags(const Session& session, PeerBlocks peer_blocks, u32 kind,
                                            u32 count, u32 phase, Which which = {}, Threads threads = {}) {
    bool bad = false;
#pragma unroll 1
    for (u32 pair = threads.thread(); pair < peer_blocks.pairs() && !bad; pair += threads.threads()) {
        const u32 peer = pair % WORLD, index = peer_blocks.first + pair / WORLD;
        if (peer != session.comm.rank && which(peer)) {
            const bool left = PRESENT && has_failed_handshake(handshake_word(session, peer, 0), session.epoch);
            bad = !thread_await_flag(session, kind, peer, index, count, phase) || left;
        }
    }
    return !threads.sync_or(bad);
}

// --- keeping step
//
// Links are faster while no two ranks send to one peer. So peer blocks turn to the next peer together. Only speed
// depends on it: no data is ordered by it, and a block does not wait long for a peer that is far behind.

// Announces to the peers that this block is about to take a step. It is called before the block has
// finished the step before, as early as a word needs to travel: links would be idle meanwhile otherwise.
__device__ __forceinline__ void announce_step(const Session& session, PeerBlocks peer_blocks, u32 step) {
#pragma unroll 1
    for (u32 pair = threadIdx.x; pair < peer_blocks.pairs(); pair += blockDim.x) {
        const u32 peer = pair % WORLD, index = peer_blocks.first + pair / WORLD, rank = session.comm.rank;
        if (peer != rank) {
            *static_cast<volatile u64*>(flag_of(session, peer, STEP, rank, index)) =
                static_cast<u64>(session.epoch) << 32 | step;
        }
    }
}

// Waits, for a while, until all peers have announced a step. Called by all threads of the block.
__device__ __forceinline__ void keep_step(const Session& session, PeerBlocks peer_blocks, u32 step) {
    constexpr u32 MAX_LOOKS = 64;  // each takes about 0.7 us
#pragma unroll 1
    for (u32 pair = threadIdx.x; pair < peer_blocks.pairs(); pair += blockDim.x) {
        const u32 peer = pair % WORLD, index = peer_blocks.first + pair / WORLD, rank = session.comm.rank;
        const volatile u64* announced = flag_of(session, rank, STEP, peer, index);
        for (u32 look = 0; peer != rank && look < MAX_LOOKS; ++look) {
            const u64 value = *announced;
            if (static_cast<u32>(value >> 32) == session.epoch &&
                static_cast<u32>(value) >= step) {
                break;
            }
        }
    }
    __syncthreads();
}

}  // namespace symmpool
