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
__device__ __forceinline__ void enter(const Session& session, const Call& call, u32 thread,
                                      u32 threads) {
    const Comm& comm = session.comm;
    if constexpr (RELEASE) {
        fence();
    }
    for (u32 i = thread; i < 4 * WORLD; i += threads) {
        u32 peer = i / 4, word = i % 4;
        if (peer != comm.rank) {
            u64 data = call.details[word];
            uint4 packet = make_uint4(static_cast<u32>(data), session.epoch,
                                      static_cast<u32>(data >> 32), session.epoch);
            store_relaxed(entry_slot(comm, session.epoch, peer, comm.rank) + 16 * word, packet);
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
        if (watch.expired(session, peer, ENTRY)) {
            return false;
        }
    }
    return true;
}

// Where a peer's packet of its entry comes to.
__device__ __forceinline__ const char* entered(const Session& session, u32 peer, u32 word) {
    return entry_slot(session.comm, session.epoch, session.comm.rank, peer) + 16 * word;
}

// A word of a peer's entry, which has come.
__device__ __forceinline__ void compare_word(const Session& session, const Call& call, u32 peer,
                                             u32 word, uint4 packet) {
    if ((static_cast<u64>(packet.z) << 32 | packet.x) != call.details[word]) {
        // All four are read by the host, and have been sent.
        bool there = true;
        for (u32 other = 0; other < 4; ++other) {
            there = there && await_packet(session, peer, entered(session, peer, other), packet);
        }
        if (there) {
            report(session.comm, session.epoch, MISMATCH, peer, ENTRY, &call);
        }
    }
}

// By one block.
__device__ __forceinline__ void compare(const Session& session, const Call& call) {
    for (u32 i = threadIdx.x; i < 4 * WORLD; i += blockDim.x) {
        u32 peer = i / 4, word = i % 4;
        uint4 packet;
        if (peer != session.comm.rank &&
            await_packet(session, peer, entered(session, peer, word), packet)) {
            compare_word(session, call, peer, word, packet);
        }
    }
}

// Puts flags that no call will wait for again in place of what old calls left.
__device__ __forceinline__ void forget_bytes(const Session& session, char* begin, u64 bytes) {
    const u32 old = session.epoch - 2;
    for (u64 at = 16 * threadIdx.x; at < bytes; at += 16 * blockDim.x) {
        store_plain(begin + at, make_uint4(0, old, old, old));
    }
}

// In a region of two parities, from `used` bytes on, which are this call's own.
__device__ __forceinline__ void forget(const Session& session, u64 region, u64 bytes, u64 used) {
    char* begin = session.comm.own() + region + session.parity() * (bytes / 2);
    forget_bytes(session, begin + used, used < bytes / 2 ? bytes / 2 - used : 0);
}

// How much of each region a call uses, in bytes from the beginning.
struct Used {
    u64 packets = 0;
    u64 lines = 0;
    u64 flags = 0;
    u64 rows = 0;
};

// Flags are 32 bits of epoch. Before the numbers come round again, whatever an old call left in
// places that were not written since is overwritten: four times on the way, in two calls running.
__device__ __noinline__ void forget_old(const Session& session, Used used) {
    const Comm& comm = session.comm;
    forget(session, comm.packets, comm.packets_bytes, used.packets);
    forget(session, comm.lines, comm.lines_bytes, used.lines);
    forget(session, comm.flags, comm.flags_bytes, used.flags);
    forget(session, rows(comm), ROWS_BYTES, used.rows);
}

// The same of marks of bare vectors, by calls that leave none.
__device__ __noinline__ void forget_marks(const Session& session) {
    forget(session, session.comm.marks, session.comm.bare_bytes / 16, 0);
}

// The whole work of the first block.
template <bool RELEASE>
__device__ __forceinline__ void attend(const Session& session, const Call& call, Used used) {
    enter<RELEASE>(session, call, threadIdx.x, blockDim.x);
    session.advance();
    compare(session, call);
    if ((session.epoch & 0x3fffffffu) < 2) {
        forget_old(session, used);
        forget_marks(session);
    }
}

__device__ __forceinline__ bool attends() { return blockIdx.x == 0; }

// Data is handled by all blocks but the one that attends.
__device__ __forceinline__ u32 data_blocks() { return gridDim.x - 1; }
__device__ __forceinline__ u32 data_block() { return blockIdx.x - 1; }
__device__ __forceinline__ u32 data_threads() { return data_blocks() * blockDim.x; }
__device__ __forceinline__ u32 data_thread() { return data_block() * blockDim.x + threadIdx.x; }

// Until every peer has entered this very call: before that nobody writes into a peer's output, which is where
// this rank takes it to be, and as long, only if the peer called the same. With ACQUIRE what its stream did
// before is visible then. All threads of the block come here, and leave with the same answer: false if a peer
// is missing, has given up or called something else, which the block that attends reports.
template <bool ACQUIRE>
__device__ __forceinline__ bool all_entered(const Session& session, const Call& call) {
    bool bad = false;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < 4 * WORLD && !bad; i += blockDim.x) {
        const u32 peer = i / 4, word = i % 4;
        if (peer != session.comm.rank) {
            uint4 packet;
            bad = !await_packet<ACQUIRE>(session, peer, entered(session, peer, word), packet) ||
                  (static_cast<u64>(packet.z) << 32 | packet.x) != call.details[word];
        }
    }
    return !__syncthreads_or(bad);
}

}  // namespace symmpool
