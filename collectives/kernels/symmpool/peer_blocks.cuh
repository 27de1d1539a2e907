//! Flags between teams of equal number on all ranks, for data that cannot show by itself that it has
//! arrived. A flag is the call's epoch and a count within the call; it only grows.

#pragma once

#include <symmpool/handshake.cuh>

namespace symmpool {

constexpr u32 ARRIVED = 0;   // what the sender put into scratch
constexpr u32 FINISHED = 1;  // results, or that the sender needs this rank's memory no more
constexpr u32 STEP = 2;      // where the sender is; nothing depends on it
constexpr u64 FLAG_KINDS = 4;     // of which three are there: parts of whole vectors

// In order of teams, so that those a call uses lie at the beginning.
__device__ __forceinline__ u64* flag_of(const Session& session, u32 owner, u32 kind, u32 from,
                                        u32 block) {
    const Comm& comm = session.comm;
    char* flags = comm.of(owner) + comm.flags + session.parity() * (comm.flags_bytes / 2);
    return reinterpret_cast<u64*>(flags) + (block * FLAG_KINDS + kind) * WORLD + from;
}

// Whom a block stands for: data is divided among teams, as many on all ranks, and those of one number wait
// for each other alone. A block stands for one of them or, where the communicator has a part of its device,
// for several in a row. Ranks may have different parts: every step of a call is done for all of a block's
// teams before the next, so of any blocks that wait for each other one is in the earliest step, and goes on.
struct PeerBlocks {
    u32 first;
    u32 end;

    // Of this block, of so many.
    __device__ __forceinline__ explicit PeerBlocks(u32 count) : first(worker_block()), end(first + 1) {
        if (count != worker_blocks()) {
            first = count * worker_block() / worker_blocks();
            end = count * (worker_block() + 1) / worker_blocks();
        }
    }

    __device__ __forceinline__ u32 pairs() const { return WORLD * (end - first); }
};

__device__ __forceinline__ UsedBytes used_flags(u32 peer_blocks) {
    UsedBytes used;
    used.flags = peer_blocks * (8 * FLAG_KINDS * WORLD);
    return used;
}

// After the block's stores so far, tells its teams on every peer (rule S3). By all threads.
__device__ __forceinline__ void raise_flags(const Session& session, PeerBlocks peer_blocks, u32 kind, u32 count) {
    __syncthreads();
#pragma unroll 1
    for (u32 pair = threadIdx.x; pair < peer_blocks.pairs(); pair += blockDim.x) {
        const u32 peer = pair % WORLD;
        if (peer != session.comm.rank) {
            fence();
            store_release(
                flag_of(session, peer, kind, session.comm.rank, peer_blocks.first + pair / WORLD),
                static_cast<u64>(session.epoch) << 32 | count);
        }
    }
}

// Until a team of a peer has raised its flag to `count`. By one thread; false if that takes too long.
__device__ __forceinline__ bool thread_await_flag(const Session& session, u32 kind, u32 peer, u32 block,
                                             u32 count, u32 phase) {
    const u64* own = flag_of(session, session.comm.rank, kind, peer, block);
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

// Until every peer's teams have raised their flags to `count`. By all threads; false on all of them
// if one takes too long. With PRESENT no peer has given up on the call: their outputs may be written.
template <bool PRESENT = false>
__device__ __forceinline__ bool await_flags(const Session& session, PeerBlocks peer_blocks, u32 kind,
                                            u32 count, u32 phase) {
    bool bad = false;
#pragma unroll 1
    for (u32 pair = threadIdx.x; pair < peer_blocks.pairs() && !bad; pair += blockDim.x) {
        const u32 peer = pair % WORLD, block = peer_blocks.first + pair / WORLD;
        if (peer != session.comm.rank) {
            const bool left = PRESENT && withdrawn(handshake_word(session, peer, 0), session.epoch);
            bad = !thread_await_flag(session, kind, peer, block, count, phase) || left;
        }
    }
    return !__syncthreads_or(bad);
}

// The same of one peer's one team.
__device__ __forceinline__ bool block_await_flag(const Session& session, u32 kind, u32 peer, u32 block,
                                           u32 count, u32 phase) {
    bool bad = threadIdx.x == 0 && !thread_await_flag(session, kind, peer, block, count, phase);
    return !__syncthreads_or(bad);
}

// Tells peers' teams that these are about to take a step, as far ahead as it takes a word to travel: links
// idle meanwhile else.
__device__ __forceinline__ void announce_step(const Session& session, PeerBlocks peer_blocks, u32 step) {
#pragma unroll 1
    for (u32 pair = threadIdx.x; pair < peer_blocks.pairs(); pair += blockDim.x) {
        const u32 peer = pair % WORLD, block = peer_blocks.first + pair / WORLD, rank = session.comm.rank;
        if (peer != rank) {
            *static_cast<volatile u64*>(flag_of(session, peer, STEP, rank, block)) =
                static_cast<u64>(session.epoch) << 32 | step;
        }
    }
}

// So that teams of one number turn to the next peer together, all of which have announced it. Only the links
// gain by it: no data depends on it, nothing is ordered by it, and who is far behind is not waited for. By
// all threads.
__device__ __forceinline__ void keep_step(const Session& session, PeerBlocks peer_blocks, u32 step) {
    constexpr u32 PATIENCE = 64;  // looks of about 0.7 us
#pragma unroll 1
    for (u32 pair = threadIdx.x; pair < peer_blocks.pairs(); pair += blockDim.x) {
        const u32 peer = pair % WORLD, block = peer_blocks.first + pair / WORLD, rank = session.comm.rank;
        const volatile u64* there = flag_of(session, rank, STEP, peer, block);
        for (u32 look = 0; peer != rank && look < PATIENCE; ++look) {
            const u64 value = *there;
            if (static_cast<u32>(value >> 32) == session.epoch &&
                static_cast<u32>(value) >= step) {
                break;
            }
        }
    }
    __syncthreads();
}

}  // namespace symmpool
