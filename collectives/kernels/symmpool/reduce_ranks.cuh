//! What all ranks have, reduced. Defines: WORLD, DTYPE, OP.

#pragma once

#include <symmpool/comm.cuh>
#include <symmpool/reduce.cuh>

namespace symmpool {

// In rank order, on every rank (rule S7).
__device__ __forceinline__ uint4 reduce_all(const uint4 (&vectors)[WORLD]) {
    using Reduction = Reduce<DTYPE, OP>;
    typename Reduction::Vector total = Reduction::widen(vectors[0]);
#pragma unroll
    for (u32 rank = 1; rank < WORLD; ++rank) {
        Reduction::accumulate(total, vectors[rank]);
    }
    return Reduction::finish(total, WORLD);
}

}  // namespace symmpool
