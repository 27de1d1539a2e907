//! Flags between the blocks of equal number on all ranks, for data that cannot show by itself
//! that it has arrived. A flag is the call's epoch and a count within the call; it only grows.

#pragma once

#include "entry.cuh"

namespace symmpool {

// In order of blocks, so that those a call uses lie at the beginning.
__device__ __forceinline__ u64* flag_of(const Session& session, u32 owner, u32 kind, u32 from,
                                        u32 block) {
    const Comm& comm = session.comm;
    char* flags = comm.of(owner) + comm.flags + session.parity() * (comm.flags_bytes / 2);
    return reinterpret_cast<u64*>(flags) + (block * 2ull + kind) * WORLD + from;
}

__device__ __forceinline__ u64* flag(const Session& session, u32 owner, u32 kind, u32 from) {
    return flag_of(session, owner, kind, from, data_block());
}

__device__ __forceinline__ Used used_flags() {
    Used used;
    used.flags = data_blocks() * (16ull * WORLD);
    return used;
}

constexpr u32 ARRIVED = 0;   // what the sender put into scratch
constexpr u32 FINISHED = 1;  // results, or that the sender needs this rank's memory no more

// After the block's stores so far, tells every peer's block (rule S3). By all threads.
__device__ __forceinline__ void raise(const Session& session, u32 kind, u32 count) {
    __syncthreads();
    if (threadIdx.x < WORLD && threadIdx.x != session.comm.rank) {
        fence();
        store_release(flag(session, threadIdx.x, kind, session.comm.rank),
                      static_cast<u64>(session.epoch) << 32 | count);
    }
}

// Until every peer's block has raised its flag to `count`. By all threads; false on all of them
// if one takes too long.
__device__ __forceinline__ bool await_flags(const Session& session, u32 kind, u32 count,
                                            u32 phase) {
    bool bad = false;
    if (threadIdx.x < WORLD && threadIdx.x != session.comm.rank) {
        const u64* own = flag(session, session.comm.rank, kind, threadIdx.x);
        Watch watch;
        for (u64 value = load_acquire(own);
             static_cast<u32>(value >> 32) != session.epoch || static_cast<u32>(value) < count;
             value = load_acquire(own)) {
            if (watch.expired(session, threadIdx.x, phase)) {
                bad = true;
                break;
            }
        }
    }
    return !__syncthreads_or(bad);
}

}  // namespace symmpool
