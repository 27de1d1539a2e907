//! Bare vectors: sixteen bytes of any bits, with nothing beside them, which show by themselves that
//! they have arrived.
//!
//! Their inbox holds FRESH in every word that nobody has written, and who reads a vector puts that
//! back at once: the inbox has two parities, and a peer writes the same one only in the call after the
//! next (rule S4). A word of data that is FRESH travels as INSTEAD. So a vector with INSTEAD in it may
//! have held either, and the mark of its line says which words it was: 64 bits for 128 bytes, the call's
//! number and a bit a word. Marks are written for such lines alone.
//!
//! Data that shows its arrival: TensorRT-LLM's "Lamport" all-reduce, which changes data that looks like
//! what fresh memory holds. All-to-alls may not.

#pragma once

#include "bytes.cuh"
#include "entry.cuh"

namespace symmpool {

// Of no meaning; seldom in data, and even.
constexpr u32 FRESH = 0xc35a96e8u;
constexpr u32 INSTEAD = FRESH | 1;

constexpr u32 ITEM = 32;         // vectors that a warp handles at once
constexpr u32 LINE_VECTORS = 8;  // that a mark is for

__device__ __forceinline__ bool holds(uint4 vector, u32 word) {
    return vector.x == word || vector.y == word || vector.z == word || vector.w == word;
}

// Where a sender's vectors lie in a receiver's inbox, and their marks. By whole warps, of which each
// thread handles a vector of an item, or none if it is not `live`.
struct Slot {
    char* vectors;
    u64* marks;

    // Vectors that a pair of ranks has.
    static __device__ __forceinline__ u64 length(const Comm& comm) {
        return comm.bare_bytes / 32 / (WORLD > 1 ? WORLD - 1 : 1) / ITEM * ITEM;
    }

    __device__ __forceinline__ Slot(const Session& session, u32 owner, u32 sender) {
        const Comm& comm = session.comm;
        const u64 before = length(comm) * (sender < owner ? sender : sender - 1);
        const u64 half = session.parity() * (comm.bare_bytes / 2);
        vectors = comm.of(owner) + comm.bare + half + 16 * before;
        marks = reinterpret_cast<u64*>(comm.of(owner) + comm.marks + half / 16) + before / LINE_VECTORS;
    }

    __device__ __forceinline__ void send(u32 epoch, u32 at, uint4 vector, bool live) const {
        const uint4 odd = make_uint4(vector.x | 1, vector.y | 1, vector.z | 1, vector.w | 1);
        const bool marked = live && holds(odd, INSTEAD);
        if (__any_sync(~0u, marked)) {
            vector = mark(marks + at / LINE_VECTORS, epoch, vector, marked);
        }
        if (live) {
            store_relaxed(vectors + u64{16} * at, vector);
        }
    }

    // Of each of so many items a vector, as far as it is `live`; false if they do not come.
    template <u32 COUNT>
    __device__ __forceinline__ bool receive(const Session& session, u32 peer, const u32 (&at)[COUNT],
                                            const bool (&live)[COUNT], uint4 (&found)[COUNT]) const {
        Watch watch;
        bool missing = true, marked = false;
        while (missing) {
            missing = false, marked = false;
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i) {
                if (live[i]) {
                    found[i] = load_relaxed(vectors + u64{16} * at[i]);
                }
            }
#pragma unroll
            for (u32 i = 0; i < COUNT; ++i) {
                missing = missing || (live[i] && holds(found[i], FRESH));
                marked = marked || (live[i] && holds(found[i], INSTEAD));
            }
            missing = __any_sync(~0u, missing);
            if (missing && __any_sync(~0u, watch.expired(session, peer, DATA))) {
                return false;
            }
        }
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            if (live[i]) {
                store_plain(vectors + u64{16} * at[i], make_uint4(FRESH, FRESH, FRESH, FRESH));
            }
        }
        if (!__any_sync(~0u, marked)) {
            return true;
        }
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            if (live[i] && holds(found[i], INSTEAD)) {
                const u32 bits = look(session, peer, marks + at[i] / LINE_VECTORS,
                                      at[i] % LINE_VECTORS);
                missing = missing || bits == MISSING;
                found[i].x = bits & 1 ? FRESH : found[i].x;
                found[i].y = bits & 2 ? FRESH : found[i].y;
                found[i].z = bits & 4 ? FRESH : found[i].z;
                found[i].w = bits & 8 ? FRESH : found[i].w;
            }
        }
        return !__any_sync(~0u, missing);
    }

private:
    static __device__ __noinline__ uint4 mark(u64* line, u32 epoch, uint4 vector, bool marked) {
        const u32 lane = threadIdx.x % 32, nth = lane % LINE_VECTORS;
        u32 bits = 0;
        if (marked) {
            bits = (vector.x == FRESH ? 1 : 0) | (vector.y == FRESH ? 2 : 0) |
                   (vector.z == FRESH ? 4 : 0) | (vector.w == FRESH ? 8 : 0);
            vector.x = vector.x == FRESH ? INSTEAD : vector.x;
            vector.y = vector.y == FRESH ? INSTEAD : vector.y;
            vector.z = vector.z == FRESH ? INSTEAD : vector.z;
            vector.w = vector.w == FRESH ? INSTEAD : vector.w;
        }
        bits <<= 4 * nth;
        for (u32 other = 1; other < LINE_VECTORS; other *= 2) {
            bits |= __shfl_xor_sync(~0u, bits, other);
        }
        const u32 all = __ballot_sync(~0u, marked);
        if (nth == 0 && (all >> lane & 0xff) != 0) {
            *static_cast<volatile u64*>(line) = static_cast<u64>(epoch) << 32 | bits;
        }
        return vector;
    }
    // Which of a vector's words are FRESH, by the mark of its line; MISSING if that does not come.
    static constexpr u32 MISSING = ~0u;
    static __device__ __noinline__ u32 look(const Session& session, u32 peer, const u64* line,
                                            u32 nth) {
        const volatile u64* at = line;
        Watch watch;
        u64 mark = *at;
        while (static_cast<u32>(mark >> 32) != session.epoch) {
            if (watch.expired(session, peer, DATA)) {
                return MISSING;
            }
            mark = *at;
        }
        return static_cast<u32>(mark) >> 4 * nth & 15;
    }
};

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
    u32 peer = WORLD;  // none
    u32 nth = 0;       // of the warps that serve it,
    u32 warps = 0;     // so many
    u32 bytes = 0;     // of the pair
    u32 rounds = 1;    // the same of all warps

    Lot() = default;
    // `bytes_of` the pair with the peer that `peer_at` a distance, of which the last is this rank; so many
    // items of a warp in a round.
    template <typename Peer, typename Bytes>
    __device__ __forceinline__ Lot(u32 at_once, Peer peer_at, Bytes bytes_of) {
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
    __device__ __forceinline__ bool few() const { return warps >= items(); }
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

// By a warp: an item into memory that is not aligned, as whole vectors of it, each of bytes of two
// threads.
__device__ __noinline__ void store_across(char* to, u32 shift, uint4 vector) {
    uint4 before;
    before.x = __shfl_up_sync(~0u, vector.x, 1);
    before.y = __shfl_up_sync(~0u, vector.y, 1);
    before.z = __shfl_up_sync(~0u, vector.z, 1);
    before.w = __shfl_up_sync(~0u, vector.w, 1);
    const u32 lane = threadIdx.x % 32;
    if (lane == 0) {
        scatter_bytes(to, 16 - shift, vector);
    } else {
        store_plain(to - shift, from_pair(before, vector, 16 - shift));
    }
    if (lane == 31) {
        scatter_bytes(to + 16 - shift, shift, from_pair(vector, vector, 16 - shift));
    }
}

// By a warp: a vector of an item into a stretch of any alignment, as far as that goes.
__device__ __forceinline__ void store_item(const Target& target, u32 at, bool live, uint4 vector) {
    const bool whole = live && u64{16} * at + 16 <= target.bytes;
    char* to = target.begin + u64{16} * at;
    if (target.aligned && whole) {
        store_plain(to, vector);
    } else if (!target.aligned && __all_sync(~0u, whole)) {
        store_across(to, static_cast<u32>(reinterpret_cast<u64>(to) % 16), vector);
    } else if (live && u64{16} * at < target.bytes) {
        const u64 left = target.bytes - u64{16} * at;
        scatter_bytes(to, static_cast<u32>(left < 16 ? left : 16), vector);
    }
}

}  // namespace symmpool
