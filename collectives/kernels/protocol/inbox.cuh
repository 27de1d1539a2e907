//! Inboxes: memory that peers fill with vectors of 16 bytes, which show by themselves that they
//! have arrived. So there is no barrier: whoever waits for data waits for nothing else.
//!
//! `Packets` halve the vector and put a flag beside each half: any bits can travel, and take twice
//! their space. `Sentinels` travel whole: fresh memory holds a pattern that data never does, as
//! data that would be it is changed into another NaN. Their inbox has three parts that take turns:
//! one is written, one may be read still, and the third is put back to fresh by its reader.
//!
//! Flag beside data: NCCL's LL protocol. Sentinels: TensorRT-LLM's "Lamport" all-reduce; there
//! they are negative zeros compared as floats, here bits (rule S7).

#pragma once

#include <symmpool/handshake.cuh>

namespace symmpool {

struct LlInbox {
    u64 offset;  // in the control block
    u32 epoch;
    u64 vectors;

    // Room for `count` vectors from all ranks together.
    __device__ __forceinline__ LlInbox(Session& session, u64 count)
        : offset(session.comm.ll + session.parity() * (session.comm.ll_bytes / 2)),
          epoch(session.epoch), vectors(count) {}

    __device__ __forceinline__ UsedBytes used() const {
        UsedBytes used;
        used.ll = 32 * vectors;
        return used;
    }
    __device__ __forceinline__ void reset_stale(const Session&) const {}
    static __device__ __forceinline__ uint4 prepare(uint4 vector) { return vector; }

    __device__ __forceinline__ void send(const Comm& comm, u32 peer, u64 at, uint4 vector) const {
        char* to = comm.of(peer) + offset + 32 * at;
        store_relaxed(to, make_uint4(vector.x, epoch, vector.y, epoch));
        store_relaxed(to + 16, make_uint4(vector.z, epoch, vector.w, epoch));
    }

    // Whether it has arrived.
    __device__ __forceinline__ bool receive(const Comm& comm, u64 at, uint4& vector) const {
        const char* from = comm.own() + offset + 32 * at;
        uint4 low = load_relaxed(from), high = load_relaxed(from + 16);
        vector = make_uint4(low.x, low.z, high.x, high.z);
        return flagged(low, epoch) && flagged(high, epoch);
    }
};

struct LamportInbox {
    static constexpr u32 EMPTY = 0xffffffffu;
    // A NaN as well, in every type that travels so.
    static constexpr u32 SUBSTITUTE = DTYPE == F8E4M3 ? 0xffffff7fu : 0xfffffffeu;

    u64 offset;
    uint4* stale;
    u32 stale_used;

    // Moves the turn on, for the call after.
    __device__ __forceinline__ LamportInbox(Session& session, u64 count) {
        const Comm& comm = session.comm;
        u64 part = comm.lamport_bytes / 3;
        u32 turn = session.lamport_turn, before = turn == 0 ? 2 : turn - 1;
        offset = comm.lamport + turn * part;
        stale = reinterpret_cast<uint4*>(comm.own() + comm.lamport + before * part);
        stale_used = session.lamport_used;
        session.lamport_turn = turn == 2 ? 0 : turn + 1;
        session.lamport_used = static_cast<u32>(count);
    }

    __device__ __forceinline__ UsedBytes used() const { return UsedBytes(); }

    // By all data blocks: the part that the call before used is fresh again for the one after.
    __device__ __forceinline__ void reset_stale(const Session&) const {
        for (u32 at = worker_thread(); at < stale_used; at += worker_threads()) {
            store_plain(stale + at, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
        }
    }

    static __device__ __forceinline__ uint4 prepare(uint4 vector) {
        vector.x = vector.x == EMPTY ? SUBSTITUTE : vector.x;
        vector.y = vector.y == EMPTY ? SUBSTITUTE : vector.y;
        vector.z = vector.z == EMPTY ? SUBSTITUTE : vector.z;
        vector.w = vector.w == EMPTY ? SUBSTITUTE : vector.w;
        return vector;
    }

    __device__ __forceinline__ void send(const Comm& comm, u32 peer, u64 at, uint4 vector) const {
        store_relaxed(comm.of(peer) + offset + 16 * at, vector);
    }

    __device__ __forceinline__ bool receive(const Comm& comm, u64 at, uint4& vector) const {
        vector = load_relaxed(comm.own() + offset + 16 * at);
        return vector.x != EMPTY && vector.y != EMPTY && vector.z != EMPTY &&
               vector.w != EMPTY;
    }
};

#if defined(SENTINELS)
using Inbox = LamportInbox;
#else
using Inbox = LlInbox;
#endif

// A vector from one peer, waited for; false if it does not come.
__device__ __forceinline__ bool await_vector(const Session& session, const Inbox& inbox, u32 peer, u64 at,
                                      uint4& vector) {
    Watch watch;
    while (!inbox.receive(session.comm, at, vector)) {
        if (watch.expired(session, peer, DATA)) {
            return false;
        }
    }
    return true;
}

// Whether a rank has no place for itself among those of its peers. That leaves less to put back, which
// takes longer to find than it saves where little is moved.
#if defined(BLOCKS) && BLOCKS > 1
constexpr bool COMPACT = true;
#else
constexpr bool COMPACT = false;
#endif
constexpr u64 INBOX_SLOTS = COMPACT ? WORLD - 1 : WORLD;

// The place of a peer at a distance, and this rank's own there.
__device__ __forceinline__ u32 slot_of(const Comm& comm, u32 distance) {
    return COMPACT ? distance - 1 : comm.after(distance);
}
__device__ __forceinline__ u32 slot_at_peer(const Comm& comm, u32 distance) {
    return COMPACT ? WORLD - 1 - distance : comm.rank;
}

// Vectors `at + place * each` from all peers at once, and `own` among them.
__device__ __forceinline__ bool await_all(const Session& session, const Inbox& inbox, u64 at,
                                          u64 each, uint4 own, uint4 (&vectors)[WORLD]) {
    const Comm& comm = session.comm;
    Watch watch;
    while (true) {
        u32 missing = WORLD;
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            if (rank == comm.rank) {
                vectors[rank] = own;
                continue;
            }
            // In line: as a function it takes registers.
            const u64 place = COMPACT ? comm.distance_to(rank) - 1 : rank;
            if (!inbox.receive(comm, at + place * each, vectors[rank])) {
                missing = rank;
            }
        }
        if (missing == WORLD) {
            return true;
        }
        if (watch.expired(session, missing, DATA)) {
            return false;
        }
    }
}

// The same of those peers that `has` says send one; nothing in this rank's own place.
template <typename Has>
__device__ __forceinline__ bool await_some(const Session& session, const Inbox& inbox, u64 at,
                                            u64 each, uint4 (&vectors)[WORLD], Has has) {
    static_assert(!COMPACT || sizeof(Has) == 0, "this rank's own place is read too");
    const Comm& comm = session.comm;
    Watch watch;
    while (true) {
        // All loads before the first look, those of places that nobody writes too.
        bool there[WORLD];
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            there[rank] = inbox.receive(comm, at + rank * each, vectors[rank]);
        }
        u32 missing = WORLD;
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            missing = rank != comm.rank && !there[rank] && has(rank) ? rank : missing;
        }
        if (missing == WORLD) {
            return true;
        }
        if (watch.expired(session, missing, DATA)) {
            return false;
        }
    }
}

}  // namespace symmpool
