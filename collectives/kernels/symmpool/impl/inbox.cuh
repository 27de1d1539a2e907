//! Inboxes: memory that peers fill with vectors of 16 bytes, which show by themselves that they have arrived. So
//! there is no barrier, and nobody waits for anything but the data that it needs.
//! Defines: WORLD, PROTOCOL (LL or LAMPORT), DTYPE; BLOCKS of an SM.

#pragma once

#include "symmpool/impl/lamport.cuh"
#include "symmpool/impl/ll.cuh"

namespace symmpool {

enum class Protocol { LL, LAMPORT };

template <Protocol> struct InboxOf;
template <> struct InboxOf<Protocol::LL> { using Type = LlInbox; };
template <> struct InboxOf<Protocol::LAMPORT> { using Type = LamportInbox; };
using Inbox = InboxOf<Protocol::PROTOCOL>::Type;

// Waits for a vector of one peer; false if it does not arrive.
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

// Whether the inbox has a slot for each peer only, rather than one for each rank. Then there is less memory to empty
// again, but slots take longer to find, which costs more than it saves where little is moved.
constexpr bool COMPACT = BLOCKS > 1;
constexpr u64 INBOX_SLOTS = COMPACT ? WORLD - 1 : WORLD;

// The slot here of the peer that comes `distance` ranks after this one, and this rank's slot at that peer.
__device__ __forceinline__ u32 slot_of(const Comm& comm, u32 distance) {
    return COMPACT ? distance - 1 : comm.after(distance);
}
__device__ __forceinline__ u32 slot_at_peer(const Comm& comm, u32 distance) {
    return COMPACT ? WORLD - 1 - distance : comm.rank;
}

// Waits for one vector of every peer: vector `at` of each slot, where slots have `each` vectors. This rank's own
// vector is put among them.
__device__ __forceinline__ bool await_all(const Session& session, const Inbox& inbox, u64 at,
                                          u64 each, uint4 own, uint4 (&vectors)[WORLD]) {
    const Comm& comm = session.comm;
    Watch watch;
    while (true) {
        u32 missing = WORLD;
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            // Without this the slot of the rank itself is read too, as a load that depends on which rank this is waits for
            // the one before it. Together the loads take more registers than there are for two blocks of an SM.
            if (COMPACT && rank == comm.rank) {
                vectors[rank] = own;
                continue;
            }
            // In a function of its own this takes more registers.
            const u64 slot = COMPACT ? comm.distance_to(rank) - 1 : rank;
            const bool there = inbox.receive(comm, at + slot * each, vectors[rank]);
            missing = there || rank == comm.rank ? missing : rank;
        }
        if (missing == WORLD) {
            break;
        }
        if (watch.expired(session, missing, DATA)) {
            return false;
        }
    }
#pragma unroll
    for (u32 rank = 0; !COMPACT && rank < WORLD; ++rank) {
        vectors[rank] = rank == comm.rank ? own : vectors[rank];
    }
    return true;
}

// Waits for one vector of each peer for which `sends(rank)` is true, as `await_all`. `vectors` holds anything at this rank.
template <typename Sends>
__device__ __forceinline__ bool await_some(const Session& session, const Inbox& inbox, u64 at,
                                           u64 each, uint4 (&vectors)[WORLD], Sends sends) {
    static_assert(!COMPACT || sizeof(Sends) == 0, "this rank's own slot is read too");
    const Comm& comm = session.comm;
    Watch watch;
    while (true) {
        // All loads are made before the first is looked at, also of slots that nobody writes.
        bool there[WORLD];
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            there[rank] = inbox.receive(comm, at + rank * each, vectors[rank]);
        }
        u32 missing = WORLD;
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            missing = rank != comm.rank && !there[rank] && sends(rank) ? rank : missing;
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
