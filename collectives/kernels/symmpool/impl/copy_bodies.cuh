//! The copies of `Collective`. They are apart from its other functions, as kernels that copy otherwise have no use for theirs.

#pragma once

#include <symmpool/collective.cuh>
#include <symmpool/impl/copy.cuh>

namespace symmpool {

__device__ __forceinline__ void Collective::copy(void* to, const void* from, u64 bytes) const {
    __syncthreads();
    if (to != from) {
        const Copy all(Transfer{static_cast<const char*>(from), static_cast<char*>(to), bytes});
        all.run(0, all.units());
    }
}

__device__ __forceinline__ void Collective::copy_to_all(void* window, const void* from, u64 bytes) const {
    __syncthreads();
    const Copy own(Transfer{static_cast<const char*>(from), static_cast<char*>(window), bytes});
    // In place, only peers lack it.
    const u32 first = window == from ? 1 : 0;
    own.visit(0, own.units(), [&](char* at, uint4 vector) {
#pragma unroll
        for (u32 distance = 1; distance < WORLD; ++distance) {
            store_plain(comm.peer_ptr(at, comm.after(distance)), vector);
        }
        if (first == 0) {
            store_plain(at, vector);
        }
    }, [&](char* at, char byte) {
        for (u32 distance = first; distance < WORLD; ++distance) {
            *comm.peer_ptr(at, comm.after(distance)) = byte;
        }
    });
}

}  // namespace symmpool
