//! Which warps serve which peer, with what data and in which rounds, of all that goes through inboxes.

#pragma once

#include <symmpool/impl/partition.cuh>

#include "symmpool/impl/lamport_escaped.cuh"

namespace symmpool {

__device__ __forceinline__ u32 items_of(u32 bytes) {
    return (bytes + 16 * ITEM - 1) / (16 * ITEM);
}

// Divides repeatedly by one number, faster than `/`. It is exact while results are below 2^20.
struct Divisor {
    u32 number;
    float inverse;

    Divisor() = default;
    __device__ __forceinline__ explicit Divisor(u32 by)
        : number(by), inverse(__fdividef(1.0f, static_cast<float>(by))) {}

    __device__ __forceinline__ u32 of(u32 whole) const {
        // The estimate is off by one at most.
        u32 times = static_cast<u32>(static_cast<float>(whole) * inverse);
        times -= u64{times} * number > whole ? 1 : 0;
        times += u64{times + 1} * number <= whole ? 1 : 0;
        return times;
    }
};

// What a warp sends to one peer through inboxes, or receives from one. Warps are divided among peers in proportion to
// the data of each, and all peers are served at the same pace: every round moves the same fraction of the data of
// each. So what is sent early is waited for early, however much goes to whom.
struct WorkAssignment {
    u64 place;   // where the data of the peer lies in this rank's input or output, in bytes
    u32 fits;    // how many of its bytes the output holds
    u32 peer;    // WORLD if the warp has nothing to do
    u32 nth;     // the warp's number among those that serve this peer
    u32 warps;   // how many serve it
    u32 bytes;   // bytes of data, to or from this peer
    Divisor rounds;  // how many there are, for all warps alike

    WorkAssignment() = default;
    // `peer_at(distance)` is the peer at a distance, of which the last is this rank, and `bytes_of(peer)` its data. A
    // warp moves `at_once` items in a round. Blocks below `direct_blocks` have nothing to do. Called by whole warps,
    // each of whose threads looks at another peer.
    template <typename Peer, typename Bytes>
    __device__ __forceinline__ WorkAssignment(u32 at_once, u32 direct_blocks, Peer peer_at, Bytes bytes_of)
        : place(0), fits(0), peer(WORLD), nth(0), warps(0), bytes(0) {
        const u32 lane = threadIdx.x % 32, other = peer_at(lane < WORLD ? lane + 1 : WORLD);
        const u32 known = bytes_of(other), own_bytes = lane < WORLD ? known : 0;
        const u32 own_items = items_of(own_bytes), all = __reduce_add_sync(~0u, own_items);
        // Every peer gets one warp, and the other warps are divided in proportion.
        const u32 before = direct_blocks * (blockDim.x / 32), most = worker_threads() / 32 - before;
        const u32 rest = most - WORLD;
        u32 serve = own_items, needed = 1;
        if (all > most && own_items > 0) {
            serve = 1 + Divisor(all).of(own_items * rest);
            needed = 1 + Divisor(serve * at_once).of(own_items - 1);
        }
        rounds = Divisor(__reduce_max_sync(~0u, needed));
        u32 end = serve;
#pragma unroll
        for (u32 step = 1; step < WORLD; step *= 2) {
            const u32 others = __shfl_up_sync(~0u, end, step);
            end += lane >= step ? others : 0;
        }
        // In a block below `direct_blocks` this number is larger than all others.
        const u32 warp = worker_thread() / 32 - before;
        const u32 found = __ballot_sync(~0u, end - serve <= warp && warp < end);
        if (found != 0) {
            const u32 from = __ffs(found) - 1;
            peer = __shfl_sync(~0u, other, from);
            nth = warp - __shfl_sync(~0u, end - serve, from);
            warps = __shfl_sync(~0u, serve, from);
            bytes = fits = __shfl_sync(~0u, own_bytes, from);
        }
    }

    // Whether the warp has at most one item in each round.
    __device__ __forceinline__ bool one_item_a_round(u32 at_once) const {
        return at_once == 1 || warps >= items();
    }
    __device__ __forceinline__ u32 items() const { return items_of(bytes); }
    // The warp's items in a round: the first, and every `warps`th one after it below the end.
    __device__ __forceinline__ u32 begin(u32 round) const {
        return rounds.of(items() * round) + nth;
    }
    __device__ __forceinline__ u32 end(u32 round) const {
        return rounds.of(items() * (round + 1));
    }
    // This thread's vectors of these items. Those that are not `live` lie behind the end of the round or the data.
    template <u32 COUNT>
    __device__ __forceinline__ void find(u32 round, u32 (&at)[COUNT], bool (&live)[COUNT]) const {
        const u32 first = begin(round), behind = end(round);
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            const u32 item = first + i * warps;
            at[i] = item * ITEM + threadIdx.x % 32;
            live[i] = item < behind && 16 * at[i] < bytes;
        }
    }
};

}  // namespace symmpool
