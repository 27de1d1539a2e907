//! How ranks meet in a call: every pair tells each other what it calls, and compares (rules S1, S6).
//!
//! A rank's details travel in four packets of 16 bytes, half data and half flags, into the peer's
//! entry slot. The first block of a grid attends to that and to nothing else, so that no data waits
//! for it; but the kernel ends only when every peer has come, which is what makes two parities
//! enough (rule S4).

#pragma once

#include <symmpool/comm.cuh>

namespace symmpool {

__device__ __forceinline__ bool flagged(uint4 packet, u32 epoch) {
    return packet.y == epoch && packet.w == epoch;
}

// By so many threads, of which this is one. With RELEASE, what this rank's stream did before is visible
// to whoever sees them.
template <bool RELEASE>
__device__ __forceinline__ void send_handshake(const Session& session, const Call& call, u32 thread,
                                      u32 threads) {
    const Comm& comm = session.comm;
    if constexpr (RELEASE) {
        fence();
    }
    for (u32 i = thread; i < 4 * WORLD; i += threads) {
        u32 peer = i / 4, word = i % 4;
        if (peer != comm.rank) {
            u64 data = call.description[word];
            uint4 packet = make_uint4(static_cast<u32>(data), session.epoch,
                                      static_cast<u32>(data >> 32), session.epoch);
            store_relaxed(handshake_slot(comm, session.epoch, peer, comm.rank) + 16 * word, packet);
        }
    }
}

// Looks at a peer's packet until it is there; false if that takes too long. With ACQUIRE what the
// peer's stream did before is visible then.
template <bool ACQUIRE = false>
__device__ __forceinline__ bool await_packet(const Session& session, u32 peer, const char* slot,
                                             uint4& packet) {
    Watch watch;
    while (packet = ACQUIRE ? load_acquired(slot) : load_relaxed(slot),
           !flagged(packet, session.epoch)) {
        if (watch.expired(session, peer, HANDSHAKE)) {
            return false;
        }
    }
    return true;
}

// Where a peer's packet of its entry comes to.
__device__ __forceinline__ const char* handshake_word(const Session& session, u32 peer, u32 word) {
    return handshake_slot(session.comm, session.epoch, session.comm.rank, peer) + 16 * word;
}

// A word of a peer's entry, which has come.
__device__ __forceinline__ void compare_handshake_word(const Session& session, const Call& call, u32 peer,
                                             u32 word, uint4 packet) {
    if ((static_cast<u64>(packet.z) << 32 | packet.x) != call.description[word]) {
        // All four are read by the host, and have been sent.
        bool there = true;
        for (u32 other = 0; other < 4; ++other) {
            there = there && await_packet(session, peer, handshake_word(session, peer, other), packet);
        }
        if (there) {
            report(session.comm, session.epoch, MISMATCH, peer, HANDSHAKE, &call);
        }
    }
}

// By one block.
__device__ __forceinline__ void compare_handshakes(const Session& session, const Call& call) {
    for (u32 i = threadIdx.x; i < 4 * WORLD; i += blockDim.x) {
        u32 peer = i / 4, word = i % 4;
        uint4 packet;
        if (peer != session.comm.rank &&
            await_packet(session, peer, handshake_word(session, peer, word), packet)) {
            compare_handshake_word(session, call, peer, word, packet);
        }
    }
}

// Puts flags that no call will wait for again in place of what old calls left.
__device__ __forceinline__ void expire_bytes(const Session& session, char* begin, u64 bytes) {
    const u32 old = session.epoch - 2;
    for (u64 at = 16 * threadIdx.x; at < bytes; at += 16 * blockDim.x) {
        store_plain(begin + at, make_uint4(0, old, old, old));
    }
}

// In a region of two parities, from `used` bytes on, which are this call's own.
__device__ __forceinline__ void expire_region(const Session& session, u64 region, u64 bytes, u64 used) {
    char* begin = session.comm.own() + region + session.parity() * (bytes / 2);
    expire_bytes(session, begin + used, used < bytes / 2 ? bytes / 2 - used : 0);
}

// How much of each region a call uses, in bytes from the beginning.
struct UsedBytes {
    u64 ll = 0;
    u64 ll128 = 0;
    u64 flags = 0;
    u64 traffic_rows = 0;
};

// Flags are 32 bits of epoch. Before the numbers come round again, whatever an old call left in
// places that were not written since is overwritten: four times on the way, in two calls running.
__device__ __noinline__ void expire_old_flags(const Session& session, UsedBytes used) {
    const Comm& comm = session.comm;
    expire_region(session, comm.ll, comm.ll_bytes, used.ll);
    expire_region(session, comm.ll128, comm.ll128_bytes, used.ll128);
    expire_region(session, comm.flags, comm.flags_bytes, used.flags);
    expire_region(session, traffic_rows(comm), TRAFFIC_ROWS_BYTES, used.traffic_rows);
}

// The same of marks of bare vectors, by calls that leave none.
__device__ __noinline__ void expire_escape_marks(const Session& session) {
    expire_region(session, session.comm.escape_marks, session.comm.escaped_bytes / 16, 0);
}

// The whole work of the first block.
template <bool RELEASE>
__device__ __forceinline__ void run_leader_block(const Session& session, const Call& call, UsedBytes used) {
    send_handshake<RELEASE>(session, call, threadIdx.x, blockDim.x);
    session.advance();
    compare_handshakes(session, call);
    if ((session.epoch & 0x3fffffffu) < 2) {
        expire_old_flags(session, used);
        expire_escape_marks(session);
    }
}

__device__ __forceinline__ bool is_leader_block() { return blockIdx.x == 0; }

// Data is handled by all blocks but the one that attends.
__device__ __forceinline__ u32 worker_blocks() { return gridDim.x - 1; }
__device__ __forceinline__ u32 worker_block() { return blockIdx.x - 1; }
__device__ __forceinline__ u32 worker_threads() { return worker_blocks() * blockDim.x; }
__device__ __forceinline__ u32 worker_thread() { return worker_block() * blockDim.x + threadIdx.x; }

// Until every peer has entered this very call: before that nobody writes into a peer's output, which is where
// this rank takes it to be, and as long, only if the peer called the same. With ACQUIRE what its stream did
// before is visible then. All threads of the block come here, and leave with the same answer: false if a peer
// is missing, has given up or called something else, which the block that attends reports.
template <bool ACQUIRE>
__device__ __forceinline__ bool await_handshakes(const Session& session, const Call& call) {
    bool bad = false;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < 4 * WORLD && !bad; i += blockDim.x) {
        const u32 peer = i / 4, word = i % 4;
        if (peer != session.comm.rank) {
            uint4 packet;
            bad = !await_packet<ACQUIRE>(session, peer, handshake_word(session, peer, word), packet) ||
                  (static_cast<u64>(packet.z) << 32 | packet.x) != call.description[word];
        }
    }
    return !__syncthreads_or(bad);
}

}  // namespace symmpool
