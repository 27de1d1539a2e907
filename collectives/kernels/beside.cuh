//! How a kernel on another stream learns that all ranks have entered the call which it is a part of.
//!
//! It is launched behind the entry's kernel, which is bounded (rule S5) and either tells it or fails: so
//! its own wait ends, too. The two counts are this rank's alone, and only their difference matters.

#pragma once

#include "entry.cuh"

namespace symmpool {

// By one thread, when its block has seen every peer's entry.
__device__ __forceinline__ void tell_beside(const Comm& comm) {
    u64* told = &comm.local()->told;
    store_release(told, *told + 1);
}

// By all threads of a block; false if the call has failed.
__device__ __forceinline__ bool await_entered(const Comm& comm) {
    bool failed = false;
    if (threadIdx.x == 0) {
        const Local* local = comm.local();
        while (load_acquire(&local->told) == local->heard && !failed) {
            failed = *static_cast<const volatile u32*>(&local->failed) != 0;
        }
    }
    return !__syncthreads_or(failed);
}

// By all threads of every block that has waited. The last one makes the next wait one for the next call.
__device__ __forceinline__ void hear_entered(const Comm& comm) {
    Local* local = comm.local();
    if (threadIdx.x == 0 && atomicAdd(&local->hearing, 1) == gridDim.x - 1) {
        local->hearing = 0;
        local->heard += 1;
    }
}

}  // namespace symmpool
