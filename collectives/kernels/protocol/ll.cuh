//! An inbox for the LL protocol: a vector travels as two words of 16 bytes, of which half are data and half are
//! flags. Any bits can travel, and take twice their space. The protocol is NCCL's.

#pragma once

#include <symmpool/handshake.cuh>

namespace symmpool {

struct LlInbox {
    u64 offset;  // in the control block
    u32 epoch;
    u64 vectors;

    // For `count` vectors from all ranks together.
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

    // Loads a vector of this rank's inbox. Whether it has arrived.
    __device__ __forceinline__ bool receive(const Comm& comm, u64 at, uint4& vector) const {
        const char* from = comm.own() + offset + 32 * at;
        uint4 low = load_relaxed(from), high = load_relaxed(from + 16);
        vector = make_uint4(low.x, low.z, high.x, high.z);
        return ll_arrived(low, epoch) && ll_arrived(high, epoch);
    }
};

}  // namespace symmpool
