//! An inbox for the Lamport protocol with escapes, in which any bits can travel.
//!
//! Every word of the inbox is EMPTY until it is written, and the receiver empties a vector as soon as it has read
//! it: the inbox has two parities, and a peer writes into the same one only in the call after the next (rule S4).
//! A word of data that is EMPTY travels as ESCAPED. So an ESCAPED word may have been either, and the escape mark of
//! its line says which: a mark has 64 bits for 128 bytes of data, the epoch and a bit for each word. Marks are
//! written only for lines with an ESCAPED word, and there are few such.
//!
//! TensorRT-LLM's "Lamport" all-reduce changes data that looks like empty memory (`symmpool/impl/lamport.cuh`), which an
//! all-to-all must not do.

#pragma once

#include <symmpool/impl/handshake.cuh>

namespace symmpool {

// An arbitrary pattern that is rare in data. It is even, so that ESCAPED differs from it in one bit.
constexpr u32 EMPTY = 0xc35a96e8u;
constexpr u32 ESCAPED = EMPTY | 1;

constexpr u32 ITEM = 32;         // vectors that a warp moves at once, one in each thread
constexpr u32 MARK_VECTORS = 8;  // vectors for which there is one mark

__device__ __forceinline__ bool holds(uint4 vector, u32 word) {
    return vector.x == word || vector.y == word || vector.z == word || vector.w == word;
}

// Where a sender's vectors lie in a receiver's inbox, and their marks. `send` and `receive` are called by whole
// warps, each of whose threads moves a vector of an item, or none if it is not `live`.
struct EscapedSlot {
    char* vectors;
    u64* escape_marks;

    // Vectors of an inbox that belong to one sender.
    static __device__ __forceinline__ u64 length(const Comm& comm) {
        return comm.escaped_bytes / 32 / (WORLD > 1 ? WORLD - 1 : 1) / ITEM * ITEM;
    }

    EscapedSlot() = default;
    __device__ __forceinline__ EscapedSlot(const Session& session, u32 owner, u32 sender) {
        const Comm& comm = session.comm;
        const u64 before = length(comm) * (sender < owner ? sender : sender - 1);
        const u64 half = session.parity() * (comm.escaped_bytes / 2);
        vectors = comm.of(owner) + comm.escaped + half + 16 * before;
        escape_marks =
            reinterpret_cast<u64*>(comm.of(owner) + comm.escape_marks + half / 16) + before / MARK_VECTORS;
    }

    __device__ __forceinline__ void send(u32 epoch, u32 at, uint4 vector, bool live) const {
        const uint4 odd = make_uint4(vector.x | 1, vector.y | 1, vector.z | 1, vector.w | 1);
        const bool marked = live && holds(odd, ESCAPED);
        if (__any_sync(~0u, marked)) {
            vector = escape(escape_marks + at / MARK_VECTORS, epoch, vector, marked);
        }
        if (live) {
            store_relaxed(vectors + u64{16} * at, vector);
        }
    }

    // Waits for this thread's vectors of COUNT items; false if one does not arrive.
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
                missing = missing || (live[i] && holds(found[i], EMPTY));
                marked = marked || (live[i] && holds(found[i], ESCAPED));
            }
            missing = __any_sync(~0u, missing);
            if (missing && __any_sync(~0u, watch.expired(session, peer, DATA))) {
                return false;
            }
        }
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            if (live[i]) {
                store_plain(vectors + u64{16} * at[i], make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
            }
        }
        if (!__any_sync(~0u, marked)) {
            return true;
        }
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            if (live[i] && holds(found[i], ESCAPED)) {
                const u32 bits = read_escape_mark(session, peer, escape_marks + at[i] / MARK_VECTORS,
                                                  at[i] % MARK_VECTORS);
                missing = missing || bits == MISSING;
                found[i].x = bits & 1 ? EMPTY : found[i].x;
                found[i].y = bits & 2 ? EMPTY : found[i].y;
                found[i].z = bits & 4 ? EMPTY : found[i].z;
                found[i].w = bits & 8 ? EMPTY : found[i].w;
            }
        }
        return !__any_sync(~0u, missing);
    }

private:
    // The vector as it travels. Writes the mark of its line. Called by whole warps; `marked` is whether this thread's
    // vector has a word that is EMPTY or ESCAPED.
    static __device__ __noinline__ uint4 escape(u64* line, u32 epoch, uint4 vector, bool marked) {
        const u32 lane = threadIdx.x % 32, nth = lane % MARK_VECTORS;
        u32 bits = 0;
        if (marked) {
            bits = (vector.x == EMPTY ? 1 : 0) | (vector.y == EMPTY ? 2 : 0) |
                   (vector.z == EMPTY ? 4 : 0) | (vector.w == EMPTY ? 8 : 0);
            vector.x = vector.x == EMPTY ? ESCAPED : vector.x;
            vector.y = vector.y == EMPTY ? ESCAPED : vector.y;
            vector.z = vector.z == EMPTY ? ESCAPED : vector.z;
            vector.w = vector.w == EMPTY ? ESCAPED : vector.w;
        }
        bits <<= 4 * nth;
        for (u32 other = 1; other < MARK_VECTORS; other *= 2) {
            bits |= __shfl_xor_sync(~0u, bits, other);
        }
        const u32 all = __ballot_sync(~0u, marked);
        if (nth == 0 && (all >> lane & 0xff) != 0) {
            *static_cast<volatile u64*>(line) = static_cast<u64>(epoch) << 32 | bits;
        }
        return vector;
    }

    // Which words of the `nth` vector of a line were EMPTY, a bit for each; MISSING if the mark does not arrive.
    static constexpr u32 MISSING = ~0u;
    static __device__ __noinline__ u32 read_escape_mark(const Session& session, u32 peer, const u64* line,
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

// Expires escape marks of old calls behind those of the first `used` vectors of each peer. Called by all threads of the leader
// block. Marks expire in pairs, as two of them belong to an item.
__device__ __noinline__ void expire_escape_marks(const Session& session, u64 used) {
    const u64 most = EscapedSlot::length(session.comm), used_items = (used + ITEM - 1) / ITEM * ITEM;
    for (u32 peer = 0; peer < WORLD; ++peer) {
        if (peer != session.comm.rank && used_items < most) {
            const EscapedSlot slot(session, session.comm.rank, peer);
            expire_bytes(session, reinterpret_cast<char*>(slot.escape_marks + used_items / MARK_VECTORS),
                         8 * (most - used_items) / MARK_VECTORS);
        }
    }
}

}  // namespace symmpool
