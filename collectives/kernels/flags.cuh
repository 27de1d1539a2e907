//! Flags between the blocks of equal number on all ranks, for data that cannot show by itself
//! that it has arrived. A flag is the call's epoch and a count within the call; it only grows.

#pragma once

#include "entry.cuh"

namespace symmpool {

constexpr u32 ARRIVED = 0;   // what the sender put into scratch
constexpr u32 FINISHED = 1;  // results, or that the sender needs this rank's memory no more
constexpr u32 STEP = 2;      // where the sender is; nothing depends on it
constexpr u64 KINDS = 4;     // of which three are there: parts of whole vectors

// In order of blocks, so that those a call uses lie at the beginning.
__device__ __forceinline__ u64* flag_of(const Session& session, u32 owner, u32 kind, u32 from,
                                        u32 block) {
    const Comm& comm = session.comm;
    char* flags = comm.of(owner) + comm.flags + session.parity() * (comm.flags_bytes / 2);
    return reinterpret_cast<u64*>(flags) + (block * KINDS + kind) * WORLD + from;
}

__device__ __forceinline__ u64* flag(const Session& session, u32 owner, u32 kind, u32 from) {
    return flag_of(session, owner, kind, from, data_block());
}

__device__ __forceinline__ Used used_flags() {
    Used used;
    used.flags = data_blocks() * (8 * KINDS * WORLD);
    return used;
}

// After the block's stores so far, tells every peer's block (rule S3). By all threads.
__device__ __forceinline__ void raise(const Session& session, u32 kind, u32 count) {
    __syncthreads();
    if (threadIdx.x < WORLD && threadIdx.x != session.comm.rank) {
        fence();
        store_release(flag(session, threadIdx.x, kind, session.comm.rank),
                      static_cast<u64>(session.epoch) << 32 | count);
    }
}

// Until a block of a peer has raised its flag to `count`. By one thread; false if that takes too long.
__device__ __forceinline__ bool await_raised(const Session& session, u32 kind, u32 peer, u32 block,
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

// Until every peer's block has raised its flag to `count`. By all threads; false on all of them
// if one takes too long. With PRESENT no peer has given up on the call: their outputs may be written.
template <bool PRESENT = false>
__device__ __forceinline__ bool await_flags(const Session& session, u32 kind, u32 count,
                                            u32 phase) {
    bool bad = false;
    const u32 peer = threadIdx.x;
    if (peer < WORLD && peer != session.comm.rank) {
        const bool left = PRESENT && withdrawn(entered(session, peer, 0), session.epoch);
        bad = !await_raised(session, kind, peer, data_block(), count, phase) || left;
    }
    return !__syncthreads_or(bad);
}

// The same of one peer's.
__device__ __forceinline__ bool await_flag(const Session& session, u32 kind, u32 peer, u32 block,
                                           u32 count, u32 phase) {
    bool bad = threadIdx.x == 0 && !await_raised(session, kind, peer, block, count, phase);
    return !__syncthreads_or(bad);
}

// So that blocks of one number turn to the next peer together. Only the links gain by it: no data
// depends on it, nothing is ordered by it, and who is far behind is not waited for. By all threads.
__device__ __forceinline__ void keep_step(const Session& session, u32 step) {
    constexpr u32 PATIENCE = 64;  // looks of about 0.7 us
    __syncthreads();
    if (threadIdx.x < WORLD && threadIdx.x != session.comm.rank) {
        const u64 here = static_cast<u64>(session.epoch) << 32 | step;
        *static_cast<volatile u64*>(flag(session, threadIdx.x, STEP, session.comm.rank)) = here;
        const volatile u64* there = flag(session, session.comm.rank, STEP, threadIdx.x);
        u64 value = *there;
        for (u32 look = 0; look < PATIENCE; ++look, value = *there) {
            if (static_cast<u32>(value >> 32) == session.epoch &&
                static_cast<u32>(value) >= step) {
                break;
            }
        }
    }
    __syncthreads();
}

}  // namespace symmpool
