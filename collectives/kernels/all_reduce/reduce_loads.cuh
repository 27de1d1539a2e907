//! Reduces what a rank loads from all ranks' memory. Defines: WORLD, DTYPE, OP.

#pragma once

#include <symmpool/impl/partition.cuh>
#include <symmpool/reduce.cuh>

namespace symmpool {

// Reduces a range of vectors, of which `load(index, rank)` gives those of each rank, and passes each result to
// `store(index, vector)`. Called by all threads of a block.
template <typename Load, typename Store>
__device__ __forceinline__ void reduce_loads(Range range, Load load, Store store) {
    constexpr int UNROLL = 2;
    for (u64 at = range.from + threadIdx.x; at < range.to; at += blockDim.x * UNROLL) {
        uint4 all[UNROLL][WORLD];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const u64 index = at + i * blockDim.x;
#pragma unroll
            for (u32 rank = 0; rank < WORLD; ++rank) {
                if (index < range.to) {
                    all[i][rank] = load(index, rank);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const u64 index = at + i * blockDim.x;
            if (index < range.to) {
                store(index, Reduce<DTYPE, OP>::all(all[i]));
            }
        }
    }
}

}  // namespace symmpool
