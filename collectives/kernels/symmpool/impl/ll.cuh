//! An inbox for the LL protocol: a vector travels as two words of 16 bytes, of which half are data and half are
//! flags. Any bits can travel, and take twice their space. The protocol is NCCL's.

#pragma once

#include <symmpool/impl/handshake.cuh>

namespace symmpool {

struct LlInbox {
    u64 offset;  // in the control block
    u32 epoch;
    u64 vectors;

    // An inbox for `count` vectors from all ranks together.
    __device__ __forceinline__ LlInbox(Session& session, u64 count)
        : offset(session.comm.ll + session.parity() * (session.comm.ll_bytes / 2)),
          epoch(session.epoch), vectors(count) {}

    __device__ __forceinline__ UsedBytes used() const {
        UsedBytes used;
        used.ll = 32 * vectors;
        return used;
    }
    __device__ __forceinline__ void reset_stale(u32, u32) const {}
    static __device__ __forceinline__ uint4 prepare(uint4 vector) { return vector; }

    __device__ __forceinline__ void send(const Comm& comm, u32 peer, u64 at, uint4 vector) const {
        ll_store_vector(comm.of(peer) + offset + 32 * at, vector, epoch);
    }

    // Loads a vector of this rank's inbox. Whether it has arrived.
    __device__ __forceinline__ bool receive(const Comm& comm, u64 at, uint4& vector) const {
        return ll_load_vector(comm.own() + offset + 32 * at, epoch, vector);
    }
};

}  // namespace symmpool
