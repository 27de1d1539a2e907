//! What a call exchanges, as a block sees it: which way a pair's data travels, and where it lies.
//! Defines: WORLD, SHOTS.

#pragma once

#include "bytes.cuh"
#include "rows.cuh"

namespace symmpool {

// Bits of SHOTS: packets alone; data that goes straight or through scratch; counts on the device.
#define STRAIGHT 2
#define DEVICE 4

constexpr bool ROWS = SHOTS & (STRAIGHT | DEVICE);

struct Exchange {
    const Session& session;
    const Call& call;
    const Traffic& traffic;
    Table& table;

    __device__ __forceinline__ u32 rank() const { return session.comm.rank; }
    __device__ __forceinline__ u64 bytes(u64 count) const { return count * traffic.size; }

    __device__ __forceinline__ bool by_packets(u32 from, u32 to) const {
        return from != to && bytes(table.sent(from, to)) <= traffic.packet_bytes;
    }
    __device__ __forceinline__ bool is_window(u32 receiver) const {
        return table.words[receiver][PLACE] != UNKNOWN;
    }
    __device__ __forceinline__ bool straight(u32 from, u32 to) const {
        return from != to && !by_packets(from, to) && is_window(to);
    }
    __device__ __forceinline__ bool staged(u32 from, u32 to) const {
        return from != to && !by_packets(from, to) && !is_window(to);
    }

    // What this rank sends to and receives from a peer, without any peer's row where it can be.
    __device__ __forceinline__ u64 sends(u32 to) const {
        return SHOTS & DEVICE ? table.sent(rank(), to) : traffic.send[to];
    }
    __device__ __forceinline__ u64 receives(u32 from) const {
        return SHOTS & DEVICE ? table.sent(from, rank()) : traffic.receive[from];
    }
    __device__ __forceinline__ const char* input(u32 to) const {
        u64 before = 0;
        for (u32 peer = 0; peer < to; ++peer) {
            before += sends(peer);
        }
        return call.input + bytes(before);
    }
    // A peer's part of this rank's output, as far as there is room.
    __device__ __forceinline__ Target output(u32 from) const {
        u64 before = 0;
        for (u32 peer = 0; peer < from; ++peer) {
            before += receives(peer);
        }
        const u64 left = before < traffic.capacity ? traffic.capacity - before : 0;
        const u64 count = receives(from);
        return Target(call.output + bytes(before), bytes(count < left ? count : left));
    }
    // This rank's part for itself.
    __device__ __forceinline__ Copy own() const {
        const Target target = output(rank());
        const u64 most = bytes(sends(rank()));
        return Copy(input(rank()), target.begin, target.bytes < most ? target.bytes : most);
    }
    // What goes straight into a peer's output; nothing if its data goes another way.
    __device__ __forceinline__ Copy push(u32 to) const {
        const Comm& comm = session.comm;
        char* begin = comm.base + to * comm.stride + table.words[to][PLACE] +
                      bytes(table.offset(rank(), to));
        const u64 length = straight(rank(), to) ? bytes(table.fitting(rank(), to)) : 0;
        return Copy(input(to), begin, length);
    }
};

}  // namespace symmpool
