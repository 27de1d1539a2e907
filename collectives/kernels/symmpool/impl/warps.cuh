//! Threads that do a part of a kernel's work together: all those of a block, or some of its warps.

#pragma once

#include <symmpool/impl/comm.cuh>

namespace symmpool {

// All threads of a block.
struct WholeBlock {
    __device__ __forceinline__ u32 thread() const { return threadIdx.x; }
    __device__ __forceinline__ u32 threads() const { return blockDim.x; }
    // A barrier, which says whether any passed true.
    __device__ __forceinline__ bool sync_or(bool predicate) const { return __syncthreads_or(predicate); }
    __device__ __forceinline__ void sync() const { __syncthreads(); }
};

// Some warps in a row. Those that work at the same time have different barriers.
struct Warps {
    u32 first;
    u32 count;
    u32 barrier;

    __device__ __forceinline__ u32 thread() const { return threadIdx.x - 32 * first; }
    __device__ __forceinline__ u32 threads() const { return 32 * count; }
    __device__ __forceinline__ u32 warp() const { return thread() / 32; }
    __device__ __forceinline__ bool sync_or(bool predicate) const {
        return barrier_of_warps(barrier, threads(), predicate);
    }
    __device__ __forceinline__ void sync() const { sync_or(false); }
};

}  // namespace symmpool
