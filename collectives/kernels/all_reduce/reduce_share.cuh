//! Reduces this rank's share of a two-shot all-reduce, for which its peers have put their inputs into its scratch.
//! Defines: WORLD, DTYPE, OP.

#pragma once

#include <symmpool/impl/partition.cuh>
#include <symmpool/reduce.cuh>

namespace symmpool {

// How many vectors of each rank a thread holds at once: eight loads are under way, for which registers suffice.
constexpr int HELD = WORLD < 8 ? 8 / WORLD : 1;

// Reduces the vectors of a range of the share into `own` and, with BOTH, gives them to `next` as well. `input` is this
// rank's own input; `theirs(rank, at)` loads a peer's vector. A thread holds AT_ONCE vectors of each rank.
// Called by all threads of a block.
template <bool BOTH, int AT_ONCE = HELD, typename Theirs, typename Next>
__device__ __forceinline__ void reduce_share(const Comm& comm, const Source& input, const Target& own, Range range,
                                             Theirs theirs, Next next) {
#pragma unroll 1
    for (u64 first = range.from + threadIdx.x; first < range.to; first += blockDim.x * AT_ONCE) {
        // All loads are made before the first value is used.
        uint4 all[AT_ONCE][WORLD], results[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const u64 at = first + i * blockDim.x;
#pragma unroll
            for (u32 rank = 0; at < range.to && rank < WORLD; ++rank) {
                all[i][rank] = rank == comm.rank ? input.load(at) : theirs(rank, at);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            results[i] = Reduce<DTYPE, OP>::all(all[i]);
        }
        // First to the peer, which takes longer.
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const u64 at = first + i * blockDim.x;
            if (BOTH && at < range.to) {
                next(at, results[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const u64 at = first + i * blockDim.x;
            if (at < range.to) {
                own.store(at, results[i]);
            }
        }
    }
}

// Reduces a share of peers' inputs that lie one behind the other in their parts of the scratch, `offset` bytes after the
// beginning.
template <bool BOTH>
__device__ __forceinline__ void reduce_share(const Comm& comm, const Source& input, const Target& own,
                                             const Target& next, Range range, u64 offset = 0) {
    reduce_share<BOTH>(
        comm, input, own, range,
        [&](u32 rank, u64 at) { return load_plain(comm.scratch_of(comm.rank, rank) + offset + 16 * at); },
        [&](u64 at, uint4 vector) { next.store(at, vector); });
}

}  // namespace symmpool
