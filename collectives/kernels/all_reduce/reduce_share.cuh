//! Reduces this rank's share of a two-shot all-reduce, which its peers have put into its scratch.
//! Defines: WORLD, DTYPE, OP.

#pragma once

#include <symmpool/partition.cuh>
#include <symmpool/reduce.cuh>

namespace symmpool {

// How many vectors of each rank a thread holds at once: eight loads are under way, for which registers suffice.
constexpr int HELD = WORLD < 8 ? 8 / WORLD : 1;

// Reduces the vectors of a range of the share into `own` and, with BOTH, into `next` as well. `input` is this rank's
// own input; those of its peers lie `offset` bytes after the beginning of their parts of the scratch. Called by all
// threads of a block.
template <bool BOTH>
__device__ __forceinline__ void reduce_share(const Comm& comm, const Source& input, const Target& own,
                                             const Target& next, Range range, u64 offset = 0) {
#pragma unroll 1
    for (u64 first = range.from + threadIdx.x; first < range.to; first += blockDim.x * HELD) {
        // All loads are made before the first value is used.
        uint4 all[HELD][WORLD], results[HELD];
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const u64 at = first + i * blockDim.x;
#pragma unroll
            for (u32 rank = 0; at < range.to && rank < WORLD; ++rank) {
                all[i][rank] = rank == comm.rank
                    ? input.load(at)
                    : load_plain(comm.scratch_of(comm.rank, rank) + offset + 16 * at);
            }
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            results[i] = Reduce<DTYPE, OP>::all(all[i]);
        }
        // First to the peer, which takes longer.
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const u64 at = first + i * blockDim.x;
            if (BOTH && at < range.to) {
                next.store(at, results[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const u64 at = first + i * blockDim.x;
            if (at < range.to) {
                own.store(at, results[i]);
            }
        }
    }
}

}  // namespace symmpool
