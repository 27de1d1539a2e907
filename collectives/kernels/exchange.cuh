//! What a call exchanges, as a block sees it: which way a pair's data travels, and where it lies.
//! Defines: WORLD, SHOTS.

#pragma once

#include "bytes.cuh"
#include "line.cuh"
#include "rows.cuh"

namespace symmpool {

// Bits of SHOTS, which is 1 where all goes as lines: data that goes straight or through scratch too;
// counts on the device.
#define STRAIGHT 2
#define DEVICE 4

constexpr bool ROWS = SHOTS & (STRAIGHT | DEVICE);

// What a block makes of the rows once for all its threads, in shared memory: 64-bit sums in every
// thread would take longer than a small call's data is on its way.
struct Plan {
    u64 send_begin[WORLD];     // of parts, in bytes; and lines of what goes so
    u64 receive_begin[WORLD];
    u32 send_lines[WORLD];
    u32 receive_lines[WORLD];
    Route routes[WORLD];       // what blocks share, by distance to the peer: 0 is the own part
};

struct Exchange {
    const Session& session;
    const Call& call;
    const Traffic& traffic;
    Table& table;
    Plan& plan;

    __device__ __forceinline__ u32 rank() const { return session.comm.rank; }
    __device__ __forceinline__ u64 bytes(u64 count) const { return count * traffic.size; }

    // How many bytes of a part go as lines: all of little; of more the beginning, which is on its way
    // while the rows are.
    __device__ __forceinline__ u64 in_lines(u64 count) const {
        const u64 length = bytes(count);
        return length <= traffic.line_bytes ? length : traffic.head;
    }
    __device__ __forceinline__ bool by_lines(u32 from, u32 to) const {
        return bytes(table.sent(from, to)) <= traffic.line_bytes;
    }
    __device__ __forceinline__ bool is_window(u32 receiver) const {
        return table.words[receiver][PLACE] != UNKNOWN;
    }
    __device__ __forceinline__ bool straight(u32 from, u32 to) const {
        return from != to && !by_lines(from, to) && is_window(to);
    }
    __device__ __forceinline__ bool staged(u32 from, u32 to) const {
        return from != to && !by_lines(from, to) && !is_window(to);
    }

    // What this rank sends to and receives from a peer: without any peer's row where it can be.
    __device__ __forceinline__ u64 sends(u32 to) const {
        return SHOTS & DEVICE ? table.sent(rank(), to) : traffic.send[to];
    }
    __device__ __forceinline__ u64 receives(u32 from) const {
        return SHOTS & DEVICE ? table.sent(from, rank()) : traffic.receive[from];
    }
    __device__ __forceinline__ const char* input(u32 to) const {
        return call.input + (SHOTS & DEVICE ? plan.send_begin[to] : traffic.send_begin[to]);
    }
    // A peer's part of this rank's output, as far as there is room.
    __device__ __forceinline__ Target output(u32 from) const {
        if (SHOTS & DEVICE) {
            const u64 begin = plan.receive_begin[from], length = bytes(receives(from));
            const u64 room = bytes(traffic.capacity), left = begin < room ? room - begin : 0;
            return Target(call.output + begin, length < left ? length : left);
        }
        return Target(call.output + traffic.receive_begin[from], bytes(receives(from)));
    }
    // This rank's part for itself.
    __device__ __forceinline__ Route own() const {
        const Target target = output(rank());
        const u64 most = bytes(sends(rank()));
        return Route{input(rank()), target.begin, target.bytes < most ? target.bytes : most};
    }
    // What is behind the lines of a part, as far as there is room.
    __device__ __forceinline__ u64 behind_lines(u32 from, u32 to) const {
        const u64 most = bytes(table.fitting(from, to));
        return most > traffic.head ? most - traffic.head : 0;
    }
    // What goes straight into a peer's output; nothing if its data goes another way.
    __device__ __forceinline__ Route push(u32 to) const {
        const Comm& comm = session.comm;
        char* begin = comm.base + to * comm.stride + table.words[to][PLACE] +
                      bytes(table.offset(rank(), to));
        return Route{input(to) + traffic.head, begin + traffic.head,
                     straight(rank(), to) ? behind_lines(rank(), to) : 0};
    }

    // Once the rank's own row is there, of counts on the device. By all threads of a block.
    __device__ __forceinline__ void plan_sends() const {
        if (SHOTS & DEVICE) {
            if (threadIdx.x < WORLD) {
                const u32 peer = threadIdx.x;
                u64 before = 0;
                for (u32 other = 0; other < peer; ++other) {
                    before += sends(other);
                }
                plan.send_begin[peer] = bytes(before);
                plan.send_lines[peer] =
                    peer == rank() ? 0 : static_cast<u32>(lines_of(in_lines(sends(peer))));
            }
            __syncthreads();
        }
    }
    // The same once the peers' counts are there, and the own part. Whether anything of this rank goes
    // another way than in lines.
    __device__ __forceinline__ bool plan_receives() const {
        const u32 peer = threadIdx.x;
        if ((SHOTS & DEVICE) && peer < WORLD) {
            plan.receive_begin[peer] = bytes(table.offset(peer, rank()));
            plan.receive_lines[peer] =
                peer == rank() ? 0 : static_cast<u32>(lines_of(in_lines(receives(peer))));
        }
        bool more = false;
        if ((SHOTS & STRAIGHT) && peer < WORLD && peer != rank()) {
            more = !by_lines(rank(), peer) || !by_lines(peer, rank());
        }
        more = __syncthreads_or(more);
        if (threadIdx.x == 0) {
            plan.routes[0] = own();
        }
        __syncthreads();
        return more;
    }
    __device__ __forceinline__ void plan_routes() const {
        if (threadIdx.x > 0 && threadIdx.x < WORLD) {
            plan.routes[threadIdx.x] = push(session.comm.after(threadIdx.x));
        }
        __syncthreads();
    }

    // Of the peer with the most.
    __device__ __forceinline__ u32 most_lines(const u32 (&lines)[WORLD]) const {
        if (!(SHOTS & DEVICE)) {
            return traffic.lines;
        }
        u32 most = 0;
        for (u32 peer = 0; peer < WORLD; ++peer) {
            most = lines[peer] > most ? lines[peer] : most;
        }
        return most;
    }
};

}  // namespace symmpool
