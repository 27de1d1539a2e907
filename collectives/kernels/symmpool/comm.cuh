//! A rank's view of its communicator: the control block, and how a call begins, waits and fails.
//!
//! Every rank has the same control block at the same offset of its slot of the heap. It begins
//! with `Local`, which only its own rank touches; peers write into the entry slots, flags and
//! inboxes behind it. The call's number, the epoch, is kept there, in device memory, so that a
//! replayed graph counts on (rule S2). Layouts here are those of cuda/params.rs,
//! which defines COMM_BYTES, CALL_BYTES and FAULT_BYTES.

#pragma once

#include <symmpool/vector.cuh>

namespace symmpool {

using u32 = unsigned;
using u64 = unsigned long long;

// What a call wants the host to know that goes on all the same; the last one's, and how many.
struct Notice {
    u64 calls;
    u32 kind;
    u32 epoch;
    u32 rank;
    u32 unused;
    u64 needed;
    u64 room;
};

// Where the host reads what went wrong (rule S5); in pinned host memory. Written at most once, but
// for the notice, which only the device writes.
struct Fault {
    u32 complete;
    u32 kind;
    u32 epoch;      // the call's; of a wait on a channel, the low half of the signal's number
    u32 peer;
    u32 phase;
    u32 bad_epoch;  // not of a failure: the call that told of a row whose destination is no rank,
    u32 bad_row;    // the row,
    int bad_destination;  // and where it was to go
    u64 ours[4];    // for MISMATCH: what this rank called,
    u64 theirs[4];  // and what the peer did; for GAVE_UP whom it had waited for
    Notice notice;
};

constexpr u32 TIMEOUT = 1;
constexpr u32 MISMATCH = 2;
constexpr u32 COUNTS = 3;  // of a pair of ranks: `ours` has them, what is sent, what is expected
constexpr u32 GAVE_UP = 4;  // the peer did, on this call

constexpr u32 HANDSHAKE = 0;
constexpr u32 DATA = 1;
constexpr u32 RESULT = 2;
constexpr u32 EXIT = 3;
constexpr u32 COMPANION = 4;  // of the call's own kernels for each other
constexpr u32 CHANNEL = 16;  // and the channel's number, of waits outside calls

// Between two ranks, each way.
constexpr u32 CHANNELS = 16;
constexpr u64 CHANNELS_BYTES = 4 * 8ull * WORLD * CHANNELS;  // of four counts each, see one_sided.cu

// The first 16 bytes are read at once, by every block of every call.
struct Local {
    u32 epoch;          // calls completed
    u32 failed;         // a wait expired or ranks differed: nothing runs any more
    u32 lamport_turn;  // which third of the sentinel inbox is next
    u32 lamport_used;  // vectors of the third before it that its call used
    u32 blocks_arrived; // blocks of the running call that have read the above
    u32 companion_blocks; // and `symmpool/companion.cuh` has these
    u64 handshakes_reported;
    u64 handshakes_consumed;
};

struct Comm {
    char* base;    // of slot 0
    u64 stride;    // from slot to slot
    u64 control;   // offset of the control block in every slot
    // Offsets in the control block, and lengths of all parities together, in bytes.
    u64 handshake;
    u64 flags;
    u64 flags_bytes;
    u64 ll;
    u64 ll_bytes;
    u64 ll128;
    u64 ll128_bytes;
    u64 lamport;
    u64 lamport_bytes;
    u64 escape_marks;
    u64 escaped;
    u64 escaped_bytes;
    u64 scratch;
    u64 scratch_bytes;
    u64 channels;
    u64 timeout;   // nanoseconds
    Fault* fault;
    u32 rank;
    u32 early;     // whether the stream's next kernel may take its places while this one runs

    __device__ __forceinline__ char* of(u32 peer) const { return base + peer * stride + control; }
    __device__ __forceinline__ char* own() const { return of(rank); }
    __device__ __forceinline__ Local* local() const { return reinterpret_cast<Local*>(own()); }
    // Vectors of scratch that a rank has for each of the others. The host asks for no more at once.
    __device__ __forceinline__ u64 scratch_vectors() const {
        return scratch_bytes / 16 / (WORLD > 1 ? WORLD - 1 : 1) / 8 * 8;
    }
    // What `sender` alone writes in the owner's scratch, in whatever call: nobody but the two of
    // them need to be done with one call before it is written in the next.
    __device__ __forceinline__ char* scratch_of(u32 owner, u32 sender) const {
        u32 slot = sender < owner ? sender : sender - 1;
        return of(owner) + scratch + 16 * scratch_vectors() * slot;
    }
    // Where the peer has what this rank has at `window`.
    template <typename T>
    __device__ __forceinline__ T* at_peer(T* window, u32 peer) const {
        long long slots = static_cast<long long>(peer) - static_cast<long long>(rank);
        return window + slots * static_cast<long long>(stride / sizeof(T));
    }
    // The others in an order that differs from rank to rank, so that they do not all write to one.
    __device__ __forceinline__ u32 after(u32 distance) const {
        u32 peer = rank + distance;
        return peer < WORLD ? peer : peer - WORLD;
    }
    __device__ __forceinline__ u32 distance_to(u32 peer) const {
        return peer > rank ? peer - rank : peer + WORLD - rank;
    }
};

// What a call is: ranks compare the details, all of them (rule S6).
struct Call {
    u64 description[4];
    const char* input;
    char* output;
    u64 bytes;   // of the whole, or of a rank's part
    u64 stride;  // from part to part
    u32 root;
    u32 peer_blocks;   // that work together, of kernels that have them (`symmpool/peer_blocks.cuh`)
};

// As the host has them.
static_assert(sizeof(Comm) == COMM_BYTES && sizeof(Call) == CALL_BYTES, "layouts differ");
static_assert(sizeof(Fault) == FAULT_BYTES, "layouts differ");

// One call, as a block sees it.
struct Session {
    const Comm& comm;
    u32 epoch;
    u32 failed;
    u32 lamport_turn;
    u32 lamport_used;

    __device__ __forceinline__ explicit Session(const Comm& c) : comm(c) {
        uint4 state = load_relaxed(c.local());
        epoch = following(state.x);
        failed = state.y;
        lamport_turn = state.z;
        lamport_used = state.w;
    }

    // Never 0, which fresh memory holds. After the largest comes 2, so that parities alternate.
    static __device__ __forceinline__ u32 following(u32 epoch) {
        return epoch == 0xffffffffu ? 2 : epoch + 1;
    }

    __device__ __forceinline__ u32 parity() const { return epoch & 1; }

    // The last block to have read the state moves it on; no other waits for that. All threads of
    // a block come here once. What was in the sentinel's members is the state from now on.
    __device__ __forceinline__ void advance() const {
        __syncthreads();
        if (threadIdx.x != blockDim.x - 1) {
            return;
        }
        Local* local = comm.local();
        if (atomicAdd(&local->blocks_arrived, 1) == gridDim.x - 1) {
            local->blocks_arrived = 0;
            local->lamport_turn = lamport_turn;
            local->lamport_used = lamport_used;
            local->epoch = epoch;
        }
    }
};

// Where a peer's details arrive: four packets of 16 bytes.
__device__ __forceinline__ char* handshake_slot(const Comm& comm, u32 epoch, u32 owner, u32 from) {
    return comm.of(owner) + comm.handshake + (epoch & 1) * (64ull * WORLD) + 64ull * from;
}

// Behind the entry slots: rows of what ranks send each other, of two parities (`all_to_all/traffic.cuh`).
constexpr u64 TRAFFIC_ROW_WORDS = 2 * WORLD + 3;
constexpr u64 TRAFFIC_ROWS_BYTES = 2 * WORLD * 16 * TRAFFIC_ROW_WORDS;
__device__ __forceinline__ u64 traffic_rows(const Comm& comm) { return comm.handshake + 2 * 64ull * WORLD; }

__device__ __forceinline__ char* traffic_row_slot(const Comm& comm, u32 epoch, u32 owner, u32 from) {
    return comm.of(owner) + traffic_rows(comm) + (epoch & 1) * (TRAFFIC_ROWS_BYTES / 2) + 16 * TRAFFIC_ROW_WORDS * from;
}

// A rank that gives up takes back what it told of a call: its memory may be something else from now on,
// so who comes late must not find that it has entered, and where its output was. Who has found it goes on
// until it misses something. The second half of each packet has whom it had waited for, and a flag that no
// packet of a call has; nothing more, as whoever may come here has few registers to give.
// That flag: of the other parity than any call whose packets come there, and not 0, as in fresh memory.
__device__ __forceinline__ u32 withdrawal(u32 epoch) { return ~epoch | 2; }

__device__ __forceinline__ bool withdrawn(const char* packet, u32 epoch) {
    return *reinterpret_cast<const volatile u32*>(packet + 12) == withdrawal(epoch);
}

// By one thread, when the record of the failure is written but for its last word.
__device__ __noinline__ void withdraw(const Comm& comm) {
    const volatile Fault* fault = comm.fault;
    const u32 epoch = fault->epoch;
    const u64 missing = fault->kind == GAVE_UP ? fault->theirs[0] >> 32 : fault->peer;
    const u64 half = static_cast<u64>(withdrawal(epoch)) << 32 | missing;
    char* entry = handshake_slot(comm, epoch, 0, comm.rank) + 8;
    const u32 to_row = static_cast<u32>(traffic_row_slot(comm, epoch, 0, comm.rank) + 8 - entry) - 64;
#pragma unroll 1
    for (u32 peer = 0; peer < WORLD; ++peer, entry += comm.stride) {
#pragma unroll 1
        for (u32 word = 0; word < 16 * (4 + TRAFFIC_ROW_WORDS) && peer != comm.rank; word += 16) {
            *reinterpret_cast<volatile u64*>(entry + (word < 64 ? word : word + to_row)) = half;
        }
    }
}

// Notes what went wrong, if nothing was before: later calls see it and do nothing.
__device__ __noinline__ void report(const Comm& comm, u32 epoch, u32 kind, u32 peer, u32 phase,
                                    const Call* call) {
    if (atomicExch(&comm.local()->failed, 1) != 0) {
        return;
    }
    Fault* fault = comm.fault;
    fault->kind = kind;
    fault->epoch = epoch;
    fault->peer = peer;
    fault->phase = phase;
    for (u32 word = 0; word < 4; ++word) {
        uint4 packet = load_relaxed(handshake_slot(comm, epoch, comm.rank, peer) + 16 * word);
        fault->theirs[word] = static_cast<u64>(packet.z) << 32 | packet.x;
        fault->ours[word] = call ? call->description[word] : 0;
    }
    // Where ranks differ, each finds that itself; signals on channels belong to no call.
    if (kind != MISMATCH && phase < CHANNEL) {
        withdraw(comm);
    }
    fence();
    *static_cast<volatile u32*>(&fault->complete) = 1;
}

// What a wait of a call does now and then: since when it waits, or NO_MORE.
constexpr u64 NO_MORE = ~0ull;
__device__ __noinline__ u64 still_waiting(const Comm& comm, u32 epoch, u64 since, u32 peer,
                                          u32 phase) {
    if (*static_cast<volatile u32*>(&comm.local()->failed)) {
        return NO_MORE;
    }
    u64 now = nanoseconds();
    since = since == 0 ? now : since;
    const bool left = withdrawn(handshake_slot(comm, epoch, comm.rank, peer), epoch);
    if (!left && now - since < comm.timeout) {
        return since;
    }
    report(comm, epoch, left ? GAVE_UP : TIMEOUT, peer, phase, nullptr);
    return NO_MORE;
}

// Bounds a wait (rule S5): asked after every look in vain.
struct Watch {
    u64 since = 0;
    u32 looks = 0;

    // Whether to give up: time is over, or the call has failed elsewhere.
    __device__ __forceinline__ bool expired(const Session& session, u32 peer, u32 phase) {
        if ((++looks & 255) != 0) {
            return false;
        }
        since = still_waiting(session.comm, session.epoch, since, peer, phase);
        return since == NO_MORE;
    }
};

}  // namespace symmpool
