//! An inbox for the Lamport protocol: vectors travel as they are, into memory that holds a pattern which no data
//! has. Defines: DTYPE.
//!
//! The pattern is a NaN, and data that would be it is changed into another NaN. The inbox has three parts that calls
//! use in turn: one is written, one may still be read, and the third is filled with the pattern again by
//! its reader.
//!
//! The protocol is that of TensorRT-LLM's "Lamport" all-reduce. There the pattern is a negative zero and
//! compared as a float; here bits are compared (rule S7).

#pragma once

#include <symmpool/impl/handshake.cuh>

namespace symmpool {

struct LamportInbox {
    static constexpr u32 EMPTY = 0xffffffffu;
    // A NaN as well, in every type that travels so.
    static constexpr u32 SUBSTITUTE = DTYPE == F8E4M3 ? 0xffffff7fu : 0xfffffffeu;

    u64 offset;
    uint4* stale;
    u32 stale_used;

    // For `count` vectors from all ranks together. Sets `lamport_turn` and `lamport_used` of the session to those of the next
    // call: `Session::advance` writes them.
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

    // Empties the part that the call before used, for the call after this one. Called by `threads` threads of this device, of
    // which `thread` is this one's number.
    __device__ __forceinline__ void reset_stale(u32 thread, u32 threads) const {
        for (u32 at = thread; at < stale_used; at += threads) {
            store_plain(stale + at, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
        }
    }

    // Replaces what looks like empty memory. The sender uses the prepared vector itself too (rule S7).
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

    // Loads a vector of this rank's inbox. Whether it has arrived.
    __device__ __forceinline__ bool receive(const Comm& comm, u64 at, uint4& vector) const {
        vector = load_relaxed(comm.own() + offset + 16 * at);
        return vector.x != EMPTY && vector.y != EMPTY && vector.z != EMPTY && vector.w != EMPTY;
    }
};

}  // namespace symmpool
