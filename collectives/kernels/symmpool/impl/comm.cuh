//! A rank's view of its communicator: the control block, and how a call begins, waits and fails.
//!
//! Every rank has a control block at the same offset of its slot of the heap. It begins with `LocalState`,
//! which only its own rank accesses; peers write into the handshake slots, flags and inboxes behind it.
//! The number of the call, its epoch, is kept there in device memory, so that the replays of a CUDA graph
//! have epochs of their own (rule S2). The host defines what it shares with kernels, and `comm_layout.cuh` is made of that.

#pragma once

#include <symmpool/impl/comm_layout.cuh>
#include <symmpool/impl/sm_grant.cuh>
#include <symmpool/impl/vector.cuh>

namespace symmpool {

// Kinds of failures.
constexpr u32 TIMEOUT = 1;
constexpr u32 MISMATCH = 2;     // call descriptions differ
constexpr u32 COUNTS = 3;       // a rank sends another count than its peer expects
constexpr u32 PEER_FAILED = 4;  // the peer has failed in this call
constexpr u32 PAYLOADS = 5;     // the two ends of a message have different payloads

// Phases of a call, in which a wait can expire.
constexpr u32 HANDSHAKE = 0;
constexpr u32 DATA = 1;
constexpr u32 RESULT = 2;
constexpr u32 EXIT = 3;
constexpr u32 COMPANION = 4;  // a companion kernel waits for the kernel that does the handshake
constexpr u32 CHANNEL = 16;   // plus the number of the channel: waits outside of calls

// Signal channels from a rank to each peer.
constexpr u32 CHANNELS = 16;
// Each has the four counts that `one_sided/one_sided.cu` describes.
constexpr u64 CHANNELS_BYTES = 4 * 8ull * WORLD * CHANNELS;

// Areas of memory for data, each of which has calls of its own: one for small calls, and one for large ones where a
// communicator's memory has grown. A graph keeps the area that its calls were captured with.
constexpr u32 AREAS = 2;

static_assert(sizeof(LocalState::areas) == AREAS * sizeof(AreaFlags), "the host writes there");

struct Comm : CommFields {
    __device__ __forceinline__ char* of(u32 peer) const { return base + peer * stride + control; }
    __device__ __forceinline__ char* own() const { return of(rank); }
    __device__ __forceinline__ LocalState* local() const { return reinterpret_cast<LocalState*>(own()); }
    // Vectors of a rank's scratch that belong to one peer. The host launches no call that needs more.
    __device__ __forceinline__ u64 scratch_vectors() const {
        return scratch_bytes / 16 / (WORLD > 1 ? WORLD - 1 : 1) / 8 * 8;
    }
    // The part of the owner's scratch that `sender` alone writes in all calls: only these two ranks need to
    // have finished a call before the sender writes there in the next one.
    __device__ __forceinline__ char* scratch_of(u32 owner, u32 sender) const {
        u32 slot = sender < owner ? sender : sender - 1;
        return of(owner) + scratch + 16 * scratch_vectors() * slot;
    }
    // The address of the peer's memory that lies in its window where `window` lies in this rank's.
    template <typename T>
    __device__ __forceinline__ T* at_peer(T* window, u32 peer) const {
        long long slots = static_cast<long long>(peer) - static_cast<long long>(rank);
        return window + slots * static_cast<long long>(stride / sizeof(T));
    }
    // The rank that comes `distance` ranks after this one. Ranks that go through their peers by distance do
    // not all write to the same peer at once.
    __device__ __forceinline__ u32 after(u32 distance) const {
        u32 peer = rank + distance;
        return peer < WORLD ? peer : peer - WORLD;
    }
    __device__ __forceinline__ u32 distance_to(u32 peer) const {
        return peer > rank ? peer - rank : peer + WORLD - rank;
    }
};

static_assert(sizeof(Comm) == sizeof(CommFields), "the host gives kernels the fields alone");

// One call, as a block of it sees it.
struct Session {
    const Comm& comm;
    u32 epoch;
    u32 failed;
    u32 lamport_turn;
    u32 lamport_used;

    __device__ __forceinline__ explicit Session(const Comm& c) : comm(c) {
        uint4 state = load_relaxed(c.local());
        epoch = next_epoch(state.x);
        failed = state.y;
        const u32 lamport = c.area == 0 ? state.z : state.w;
        lamport_turn = lamport & 3;
        lamport_used = lamport >> 2;
    }

    // The epoch after another. It is never 0, which fresh memory holds; 2 follows the largest, so that
    // parities alternate.
    static __device__ __forceinline__ u32 next_epoch(u32 epoch) {
        return epoch == 0xffffffffu ? 2 : epoch + 1;
    }

    __device__ __forceinline__ u32 parity() const { return epoch & 1; }

    // Called once by all threads of every block. The last block of the grid that comes here writes the state for the next
    // call, with `lamport_turn` and `lamport_used` as they are in this session. No block waits for that.
    __device__ __forceinline__ void advance() const {
        __syncthreads();
        if (threadIdx.x != blockDim.x - 1) {
            return;
        }
        LocalState* local = comm.local();
        if (atomicAdd(&local->blocks_arrived, 1) == grid_blocks() - 1) {
            local->blocks_arrived = 0;
            local->lamport[comm.area] = lamport_turn | lamport_used << 2;
            local->epoch = epoch;
        }
    }
};

// Where a peer's call description arrives: 64 bytes, in the LL protocol.
__device__ __forceinline__ char* handshake_slot(const Comm& comm, u32 epoch, u32 owner, u32 from) {
    return comm.of(owner) + comm.handshake + (epoch & 1) * (64ull * WORLD) + 64ull * from;
}

// Behind the handshake slots lie rows of the traffic matrix, in two parities (`all_to_all/traffic.cuh`).
constexpr u64 TRAFFIC_ROW_WORDS = 2 * WORLD + 3;
constexpr u64 TRAFFIC_ROWS_BYTES = 2 * WORLD * 16 * TRAFFIC_ROW_WORDS;
__device__ __forceinline__ u64 traffic_rows(const Comm& comm) { return comm.handshake + 2 * 64ull * WORLD; }

__device__ __forceinline__ char* traffic_row_slot(const Comm& comm, u32 epoch, u32 owner, u32 from) {
    return comm.of(owner) + traffic_rows(comm) + (epoch & 1) * (TRAFFIC_ROWS_BYTES / 2) + 16 * TRAFFIC_ROW_WORDS * from;
}

// Behind the rows lies a departure of each rank: the message that it leaves here when it makes no further call.
__device__ __forceinline__ Departure* departure(const Comm& comm, u32 owner, u32 from) {
    return reinterpret_cast<Departure*>(comm.of(owner) + traffic_rows(comm) + TRAFFIC_ROWS_BYTES) + from;
}

// Whether a peer that has departed may be absent from the call of an epoch. It has done all calls before the
// last one that it had begun.
__device__ __noinline__ bool has_departed(const Comm& comm, u32 peer, u32 epoch) {
    const u64 when = load_acquire(&departure(comm, comm.rank, peer)->when);
    const u32 last = static_cast<u32>(when);
    return when != 0 && (last == 0 || static_cast<int>(epoch - last) >= 0);
}

// A rank that fails in a call marks its handshake and its row of the traffic matrix as failed at all peers. Its memory may
// be used for something else from then on, so a peer that comes late must not rely on them. A peer that has read them
// already goes on until it misses something.
//
// The second half of each LL word then holds a reason and a flag. The reason is the rank that was waited for, the ranks of
// a message that was refused, or the rank that failed halfway; callers have no registers for more. No call uses the flag:
// its parity is that of the other slots, and it is not 0, which fresh memory holds.
constexpr u32 REFUSED_MESSAGE = 1u << 31;  // its sender is the lowest byte, and its receiver the next one
constexpr u32 MESSAGE_FOLLOWS = 1u << 30;  // in departures and records, what the message was is said in the next words
constexpr u32 HALFWAY = 1u << 29;          // the rank failed on the host, behind a call's handshake
// Value of `LocalState::failed` when this rank failed on the host, which writes it (`CudaEngine::depart`).
constexpr u32 FAILED_ON_HOST = 3;
__device__ __forceinline__ u32 failed_flag(u32 epoch) { return ~epoch | 2; }

__device__ __forceinline__ bool has_failed_handshake(const char* ll_word, u32 epoch) {
    return *reinterpret_cast<const volatile u32*>(ll_word + 12) == failed_flag(epoch);
}

// The reason that a rank writes into its failed handshake. The record of its failure is written, perhaps except for
// `complete`.
__device__ __forceinline__ u32 recorded_reason(const Comm& comm) {
    const volatile FaultRecord* fault = comm.fault;
    const u32 kind = fault->kind;
    // The words of a message are not passed on.
    const u32 left = static_cast<u32>(fault->theirs[0] >> 32) & ~MESSAGE_FOLLOWS;
    return kind == PEER_FAILED || kind == PAYLOADS ? left : fault->peer;
}

__device__ __forceinline__ void fail_handshake_with(const Comm& comm, u32 epoch, u32 reason) {
    const u64 half = static_cast<u64>(failed_flag(epoch)) << 32 | reason;
    char* handshake = handshake_slot(comm, epoch, 0, comm.rank) + 8;
    const u32 to_row = static_cast<u32>(traffic_row_slot(comm, epoch, 0, comm.rank) + 8 - handshake) - 64;
#pragma unroll 1
    for (u32 peer = 0; peer < WORLD; ++peer, handshake += comm.stride) {
#pragma unroll 1
        for (u32 word = 0; word < 16 * (4 + TRAFFIC_ROW_WORDS) && peer != comm.rank; word += 16) {
            *reinterpret_cast<volatile u64*>(handshake + (word < 64 ? word : word + to_row)) = half;
        }
    }
}

__device__ __noinline__ void fail_handshake(const Comm& comm) {
    fail_handshake_with(comm, static_cast<volatile FaultRecord*>(comm.fault)->epoch, recorded_reason(comm));
}

// Puts what a departed peer has left into the slot of its handshake, as if that had failed: from there it comes
// into the record of the failure. `epoch` is that of the wait, or the number of a signal or a message.
__device__ __noinline__ void take_departure(const Comm& comm, u32 epoch, u32 peer) {
    const volatile Departure* left = departure(comm, comm.rank, peer);
    char* slot = handshake_slot(comm, epoch, comm.rank, peer);
    const u32 flag = failed_flag(epoch);
    const u64 reason = left->reason, sent = left->sent, expected = left->expected;
    store_relaxed(slot + 32, make_uint4(static_cast<u32>(expected), flag, static_cast<u32>(expected >> 32), flag));
    store_relaxed(slot + 16, make_uint4(static_cast<u32>(sent), flag, static_cast<u32>(sent >> 32), flag));
    store_relaxed(slot, make_uint4(static_cast<u32>(reason), flag, static_cast<u32>(reason >> 32), flag));
}

// Records a failure, unless there was one before. Later calls see it and do nothing.
__device__ __noinline__ void report(const Comm& comm, u32 epoch, u32 kind, u32 peer, u32 phase,
                                    const CallParams* call) {
    if (atomicExch(&comm.local()->failed, 1) != 0) {
        return;
    }
    FaultRecord* fault = comm.fault;
    fault->kind = kind;
    fault->epoch = epoch;
    fault->peer = peer;
    fault->phase = phase;
    // The first word of a failed handshake comes after the others.
    fence();
    for (u32 word = 0; word < 4; ++word) {
        uint4 theirs = load_relaxed(handshake_slot(comm, epoch, comm.rank, peer) + 16 * word);
        fault->theirs[word] = static_cast<u64>(theirs.z) << 32 | theirs.x;
        fault->ours[word] = call ? call->description[word] : 0;
    }
    // Where call descriptions differ, every rank finds that itself; signals on channels belong to no call.
    if (kind != MISMATCH && phase < CHANNEL) {
        fail_handshake(comm);
    }
    fence();
    *static_cast<volatile u32*>(&fault->complete) = 1;
}

// Reports an error of a call that goes on to the host. Called by one thread.
__device__ __noinline__ void write_async_error(const Session& session, u32 kind, u32 rank, u64 needed, u64 room) {
    volatile AsyncError* at = &session.comm.fault->async_error;
    at->kind = kind;
    at->epoch = session.epoch;
    at->rank = rank;
    at->needed = needed;
    at->room = room;
    fence();
    at->calls = at->calls + 1;
}

// Marks this call's handshake as failed on a rank that has failed before, once the record is complete or the host knows why:
// a failure outside of calls has not done that.
__device__ __noinline__ void leave_failed_call(const Comm& comm, u32 epoch) {
    const bool on_host = *static_cast<volatile u32*>(&comm.local()->failed) == FAILED_ON_HOST;
    if (on_host || static_cast<volatile FaultRecord*>(comm.fault)->phase >= CHANNEL) {
        fail_handshake_with(comm, epoch, on_host ? HALFWAY | comm.rank : recorded_reason(comm));
    }
}

// Called now and then by a wait of a call. Returns the time at which the wait began, or STOP_WAITING. The lowest bit says
// that the peer has departed: what it had sent before is found by the next look, and missed after that.
constexpr u64 STOP_WAITING = ~0ull;
__device__ __noinline__ u64 still_waiting(const Comm& comm, u32 epoch, u64 since, u32 peer,
                                          u32 phase) {
    const u32 failed = *static_cast<volatile u32*>(&comm.local()->failed);
    if (failed != 0 && (failed == FAILED_ON_HOST || *static_cast<volatile u32*>(&comm.fault->complete) != 0)) {
        leave_failed_call(comm, epoch);
        return STOP_WAITING;
    }
    since = since == 0 ? nanoseconds() & ~1ull : since;
    u32 kind = PEER_FAILED;
    if (!has_failed_handshake(handshake_slot(comm, epoch, comm.rank, peer), epoch)) {
        if (has_departed(comm, peer, epoch)) {
            if ((since & 1) == 0) {
                return since | 1;
            }
            take_departure(comm, epoch, peer);
        } else if (nanoseconds() - since < comm.timeout) {
            return since;
        } else {
            kind = TIMEOUT;
        }
    }
    report(comm, epoch, kind, peer, phase, nullptr);
    return STOP_WAITING;
}

// Bounds a wait (rule S5).
struct Watch {
    u64 since = 0;
    u32 looks = 0;

    // Whether to stop waiting: the timeout is over, the peer has failed, or the call has failed in another block of this rank.
    // Called after every poll that found nothing.
    __device__ __forceinline__ bool expired(const Session& session, u32 peer, u32 phase) {
        if (!is_time_for_clock(++looks)) {
            return false;
        }
        since = still_waiting(session.comm, session.epoch, since, peer, phase);
        return since == STOP_WAITING;
    }
};

}  // namespace symmpool
