//! The handshake that opens a call: every pair of ranks exchanges and compares call descriptions (rules S1, S6).
//!
//! A description has four words, which travel in the LL protocol: 16 bytes, of which half are data and half
//! are flags. The first block of a grid, the leader block, does the handshake and nothing else, so that no
//! data waits for it; all other blocks are worker blocks. The kernel ends only when every peer has
//! entered the call, so two parities of handshake slots are enough (rule S4).

#pragma once

#include <symmpool/impl/comm.cuh>

namespace symmpool {

// --- the LL protocol, for single words of 64 bits

__device__ __forceinline__ uint4 ll_pack(u64 data, u32 flag) {
    return make_uint4(static_cast<u32>(data), flag, static_cast<u32>(data >> 32), flag);
}

__device__ __forceinline__ u64 ll_data(uint4 word) { return static_cast<u64>(word.z) << 32 | word.x; }

__device__ __forceinline__ bool ll_arrived(uint4 word, u32 flag) {
    return word.y == flag && word.w == flag;
}

// A vector in two words, each of which has half of it and shows by itself that it has arrived.
__device__ __forceinline__ void ll_store_vector(char* to, uint4 vector, u32 flag) {
    store_relaxed(to, make_uint4(vector.x, flag, vector.y, flag));
    store_relaxed(to + 16, make_uint4(vector.z, flag, vector.w, flag));
}

// Loads a vector that `ll_store_vector` has stored. Returns whether both of its words have arrived.
__device__ __forceinline__ bool ll_load_vector(const char* from, u32 flag, uint4& vector) {
    const uint4 low = load_relaxed(from), high = load_relaxed(from + 16);
    vector = make_uint4(low.x, low.z, high.x, high.z);
    return ll_arrived(low, flag) && ll_arrived(high, flag);
}

// Waits for a word of a peer; false if that takes too long. With ACQUIRE, what the peer's stream did before
// is visible then.
template <bool ACQUIRE = false>
__device__ __forceinline__ bool ll_await(const Session& session, u32 peer, const char* slot, uint4& word) {
    Watch watch;
    while (word = ACQUIRE ? load_acquire_vector(slot) : load_relaxed(slot),
           !ll_arrived(word, session.epoch)) {
        if (watch.expired(session, peer, HANDSHAKE)) {
            return false;
        }
    }
    return true;
}

// --- sending and comparing descriptions

// Sends this rank's description to all peers. Called by `threads` threads, of which `thread` is this one's number. With RELEASE,
// what this rank's stream did before is visible to a peer that acquires the words.
template <bool RELEASE>
__device__ __forceinline__ void send_handshake(const Session& session, const CallParams& call, u32 thread,
                                               u32 threads) {
    const Comm& comm = session.comm;
    for (u32 i = thread; i < 4 * WORLD; i += threads) {
        u32 peer = i / 4, word = i % 4;
        if (peer != comm.rank) {
            // Fences of the system take two microseconds, and longer if many warps have one.
            if constexpr (RELEASE) {
                fence();
            }
            store_relaxed(handshake_slot(comm, session.epoch, peer, comm.rank) + 16 * word,
                          ll_pack(call.description[word], session.epoch));
        }
    }
}

// Where a word of a peer's description arrives.
__device__ __forceinline__ const char* handshake_word(const Session& session, u32 peer, u32 word) {
    return handshake_slot(session.comm, session.epoch, session.comm.rank, peer) + 16 * word;
}

// Compares a word of a peer's description that has arrived.
__device__ __forceinline__ void compare_handshake_word(const Session& session, const CallParams& call, u32 peer,
                                                       u32 word, uint4 found) {
    if (ll_data(found) != call.description[word]) {
        // The record of the failure holds the whole description, so the other words must have arrived.
        bool there = true;
        for (u32 other = 0; other < 4; ++other) {
            there = there && ll_await(session, peer, handshake_word(session, peer, other), found);
        }
        if (there) {
            report(session.comm, session.epoch, MISMATCH, peer, HANDSHAKE, &call);
        }
    }
}

// Waits for the descriptions of all peers and compares them. Called by `threads` threads, which are those of the leader
// block in most kernels, of which `thread` is this one's number.
__device__ __forceinline__ void compare_handshakes(const Session& session, const CallParams& call, u32 thread, u32 threads) {
    for (u32 i = thread; i < 4 * WORLD; i += threads) {
        u32 peer = i / 4, word = i % 4;
        uint4 found;
        if (peer != session.comm.rank &&
            ll_await(session, peer, handshake_word(session, peer, word), found)) {
            compare_handshake_word(session, call, peer, word, found);
        }
    }
}

// --- flags of old calls
//
// A flag is 32 bits of the epoch. Before epochs repeat, flags that old calls left in places that no call has
// written since must go, or a later call would take them for its own. So three times while the epochs go
// round, and at first, two calls in a row, one of each parity, overwrite what they do not use with flags for which no call waits.

// How many bytes at the beginning of each region of this parity a call uses, a multiple of 8.
struct UsedBytes {
    u64 ll = 0;
    u64 ll128 = 0;
    u64 flags = 0;
    u64 traffic_rows = 0;
};

__device__ __forceinline__ bool must_expire_flags(const Session& session) {
    return (session.epoch & 0x3fffffffu) < 2;
}

__device__ __forceinline__ void expire_bytes(const Session& session, char* begin, u64 bytes) {
    const u32 old = session.epoch - 2;
    // The bytes that a call uses may end in the middle of a vector: its first flag is live then, and its second is not.
    const u64 half = reinterpret_cast<u64>(begin) % 16;
    if (half != 0 && bytes != 0 && threadIdx.x == 0) {
        *reinterpret_cast<u64*>(begin) = static_cast<u64>(old) << 32;
    }
    for (u64 at = half + 16 * threadIdx.x; at < bytes; at += 16 * blockDim.x) {
        store_plain(begin + at, make_uint4(0, old, old, old));
    }
}

// A region of two parities, whose first `used` bytes in this parity belong to the running call.
__device__ __forceinline__ void expire_region(const Session& session, u64 region, u64 bytes, u64 used) {
    char* begin = session.comm.own() + region + session.parity() * (bytes / 2);
    expire_bytes(session, begin + used, used < bytes / 2 ? bytes / 2 - used : 0);
}

__device__ __noinline__ void expire_old_flags(const Session& session, UsedBytes used) {
    const Comm& comm = session.comm;
    expire_region(session, comm.ll, comm.ll_bytes, used.ll);
    expire_region(session, comm.ll128, comm.ll128_bytes, used.ll128);
    expire_region(session, comm.flags, comm.flags_bytes, used.flags);
    expire_region(session, traffic_rows(comm), TRAFFIC_ROWS_BYTES, used.traffic_rows);
    const AreaFlags& other = comm.local()->areas[1 - comm.area];
    expire_region(session, other.ll, other.ll_bytes, 0);
    expire_region(session, other.ll128, other.ll128_bytes, 0);
    expire_region(session, other.escape_marks, other.escape_mark_bytes, 0);
}

// Expires escape marks, in calls that write none (`symmpool/impl/lamport_escaped.cuh`).
__device__ __noinline__ void expire_escape_marks(const Session& session) {
    expire_region(session, session.comm.escape_marks, session.comm.escaped_bytes / 16, 0);
}

// --- the leader block and the worker blocks

__device__ __forceinline__ bool is_leader_block() { return blockIdx.x == 0; }

__device__ __forceinline__ u32 worker_blocks() { return grid_blocks() - 1; }
__device__ __forceinline__ u32 worker_block() { return blockIdx.x - 1; }
__device__ __forceinline__ u32 worker_threads() { return worker_blocks() * blockDim.x; }
__device__ __forceinline__ u32 worker_thread() { return worker_block() * blockDim.x + threadIdx.x; }

// Sends this rank's description and compares those of its peers. Called by all threads of the leader block.
template <bool RELEASE>
__device__ __forceinline__ void exchange_handshakes(const Session& session, const CallParams& call) {
    send_handshake<RELEASE>(session, call, threadIdx.x, blockDim.x);
    session.advance();
    compare_handshakes(session, call, threadIdx.x, blockDim.x);
}

// All that the leader block does in most kernels. `used` says what the call's workers use.
template <bool RELEASE>
__device__ __forceinline__ void run_leader_block(const Session& session, const CallParams& call, UsedBytes used) {
    exchange_handshakes<RELEASE>(session, call);
    if (must_expire_flags(session)) {
        expire_old_flags(session, used);
        expire_escape_marks(session);
    }
}

// Waits until every peer has entered this call with an equal description. A worker block must not write into a peer's
// output before: only if the peer made the same call is the output where this rank takes it to be, and as long. With
// ACQUIRE, what the peers' streams did before is visible then. Called by all threads of the block, which get the same
// answer: false if a peer is missing, has failed or called something else, which the leader block reports.
template <bool ACQUIRE>
__device__ __forceinline__ bool await_handshakes(const Session& session, const CallParams& call) {
    bool bad = false;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < 4 * WORLD && !bad; i += blockDim.x) {
        const u32 peer = i / 4, word = i % 4;
        if (peer != session.comm.rank) {
            uint4 found;
            bad = !ll_await<ACQUIRE>(session, peer, handshake_word(session, peer, word), found) ||
                  ll_data(found) != call.description[word];
        }
    }
    return !__syncthreads_or(bad);
}

}  // namespace symmpool
