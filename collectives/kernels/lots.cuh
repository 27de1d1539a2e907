//! Who moves what of all that goes through inboxes: warps, in rounds.

#pragma once

#include "bare.cuh"

namespace symmpool {

__device__ __forceinline__ u32 items_of(u32 bytes) {
    return (bytes + 16 * ITEM - 1) / (16 * ITEM);
}

// `nth` of `parts` equal parts of a number ends where the one after begins.
__device__ __forceinline__ u64 part(u64 whole, u32 nth, u32 parts) {
    // Division of 64 bits takes ten times as long.
    const u64 product = whole * nth;
    return product >> 32 == 0 ? static_cast<u32>(product) / parts : product / parts;
}

// What a warp does of all that goes through inboxes one way. Warps are given out to pairs in
// proportion to what these exchange, and all pairs advance together: every round moves the same fraction
// of every pair's. So what is sent early is waited for early, however much goes to whom.
struct Lot {
    u32 peer;    // WORLD: none
    u32 nth;     // of the warps that serve it,
    u32 warps;   // so many
    u32 bytes;   // of the pair
    u32 rounds;  // the same of all warps

    Lot() = default;
    // `bytes_of` the pair with the peer that `peer_at` a distance, of which the last is this rank; so many
    // items of a warp in a round.
    template <typename Peer, typename Bytes>
    __device__ __forceinline__ Lot(u32 at_once, Peer peer_at, Bytes bytes_of)
        : peer(WORLD), nth(0), warps(0), bytes(0), rounds(1) {
        u32 all = 0;
#pragma unroll
        for (u32 distance = 1; distance <= WORLD; ++distance) {
            all += items_of(static_cast<u32>(bytes_of(peer_at(distance))));
        }
        // One for every pair, and the rest in proportion.
        const u32 most = data_threads() / 32, rest = most - WORLD;
        u32 left = data_thread() / 32;
#pragma unroll
        for (u32 distance = 1; distance <= WORLD; ++distance) {
            const u32 some_bytes = bytes_of(peer_at(distance));
            const u32 some = items_of(some_bytes);
            u32 serve = some;
            if (all > most && some > 0) {
                serve = 1 + static_cast<u32>(part(some, rest, all));
                const u32 needed = (some - 1) / (serve * at_once) + 1;
                rounds = needed > rounds ? needed : rounds;
            }
            if (peer == WORLD && left < serve) {
                peer = peer_at(distance);
                nth = left, warps = serve, bytes = some_bytes;
            }
            left -= serve;
        }
    }

    // Whether a warp has one item a round at most.
    __device__ __forceinline__ bool few(u32 at_once) const {
        return at_once == 1 || warps >= items();
    }
    __device__ __forceinline__ u32 items() const { return items_of(bytes); }
    // The warp's items in a round: from the first on, below the end, each `warps` behind the one before.
    __device__ __forceinline__ u32 begin(u32 round) const {
        return (rounds == 1 ? 0 : static_cast<u32>(part(items(), round, rounds))) + nth;
    }
    __device__ __forceinline__ u32 end(u32 round) const {
        return rounds == 1 ? items() : static_cast<u32>(part(items(), round + 1, rounds));
    }
    // This thread's vectors of these items, of which are `live` what the pair has.
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
