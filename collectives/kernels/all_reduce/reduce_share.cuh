//! The shares of a two-shot all-reduce that lie in their owner's scratch. Defines: WORLD, DTYPE, OP.

#pragma once

#include <symmpool/partition.cuh>
#include <symmpool/reduce_ranks.cuh>

namespace symmpool {

// Vectors of each rank that a thread holds at once: eight loads under way, which registers allow.
constexpr int HELD = WORLD < 8 ? 8 / WORLD : 1;

// Vectors `[from, to)` of this rank's input and of what peers left in its scratch, `there` bytes behind
// where that begins, by one block: into its own output and, with ONWARDS, into another.
template <bool ONWARDS>
__device__ __forceinline__ void reduce_share(const Comm& comm, const Source& input,
                                             const Target& own, const Target& next, u64 from,
                                             u64 to, u64 there = 0) {
#pragma unroll 1
    for (u64 first = from + threadIdx.x; first < to; first += blockDim.x * HELD) {
        // All loads before the first use.
        uint4 all[HELD][WORLD], results[HELD];
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const u64 at = first + i * blockDim.x;
#pragma unroll
            for (u32 rank = 0; at < to && rank < WORLD; ++rank) {
                all[i][rank] = rank == comm.rank
                    ? input.load(at)
                    : load_plain(comm.scratch_of(comm.rank, rank) + there + 16 * at);
            }
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            results[i] = reduce_all(all[i]);
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const u64 at = first + i * blockDim.x;
            if (ONWARDS && at < to) {
                next.store(at, results[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const u64 at = first + i * blockDim.x;
            if (at < to) {
                own.store(at, results[i]);
            }
        }
    }
}

}  // namespace symmpool
