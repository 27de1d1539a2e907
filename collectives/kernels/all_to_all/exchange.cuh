//! What a call exchanges, as a block sees it: which way a pair's data travels, and where it lies.
//! Defines: WORLD, SHOTS.

#pragma once

#include <symmpool/copy.cuh>

#include "all_to_all/traffic.cuh"
#include "all_to_all/work_assignment.cuh"

namespace symmpool {

// Bits of SHOTS, which is 1 where all goes through inboxes: data that goes straight or through scratch
// too; counts on the device.
#define DIRECT 2
#define DEVICE_COUNTS 4

constexpr bool NEEDS_ROWS = SHOTS & (DIRECT | DEVICE_COUNTS);

// Items that a warp sends or receives at once, as registers allow: with fewer, links wait for loads where
// much is moved.
constexpr u32 ITEMS_AT_ONCE = !NEEDS_ROWS ? 3 : __CUDA_ARCH__ < 1000 ? 2 : 1;

// What blocks share of what leaves this rank, by distance to the peer: 0 is the own part. In shared
// memory, as no thread has registers for it.
using Transfers = Transfer[WORLD];

// How many bytes of a part go through the receiver's inbox: all of little; of more the beginning,
// which is on its way while the rows are.
__device__ __forceinline__ u64 in_inbox(const Traffic& traffic, u64 count) {
    const u64 length = count * traffic.size;
    return length <= traffic.inbox_bytes ? length : traffic.head;
}

// What a warp sends through inboxes, or what it receives, in an order in which it serves both ways pairs
// that are as far apart; and of this rank's own part, if `own` says so.
template <bool SENDS, typename Count>
__device__ __forceinline__ WorkAssignment assign_work(const Comm& comm, const Traffic& traffic, u32 direct_blocks, Count count,
                                      bool own = false) {
    return WorkAssignment(ITEMS_AT_ONCE, direct_blocks, [&](u32 distance) { return comm.after(SENDS ? distance : WORLD - distance); },
               [&](u32 peer) {
                   const u64 bytes = in_inbox(traffic, count(peer));
                   return peer == comm.rank && !own ? 0 : static_cast<u32>(bytes);
               });
}

// By counts of the host.
template <bool SENDS>
__device__ __forceinline__ WorkAssignment assign_work(const Comm& comm, const Traffic& traffic, u32 direct_blocks) {
    const u64* counts = SENDS ? traffic.send : traffic.receive;
    WorkAssignment assignment = assign_work<SENDS>(comm, traffic, direct_blocks, [&](u32 peer) { return counts[peer]; });
    if (assignment.peer != WORLD) {
        assignment.place = (SENDS ? traffic.send_begin : traffic.receive_begin)[assignment.peer];
    }
    return assignment;
}

// What is sent by counts on the device.
__device__ __forceinline__ WorkAssignment assign_work(const Comm& comm, const Traffic& traffic,
                                      const Splits& splits, u32 direct_blocks) {
    WorkAssignment assignment = assign_work<true>(comm, traffic, direct_blocks, [&](u32 peer) { return splits.to(peer); });
    assignment.place = splits.before(assignment.peer) * traffic.size;
    return assignment;
}

// How many blocks only push, where a rank sends much straight while a whole part of another pair goes through
// inboxes. Did the same blocks do both in turns, the links to who gets most would idle in the other turns, of
// which there are few, so long ones. By whole warps, of which each thread asks for the `count` of another pair: the first WORLD are sent,
// the next received.
template <typename Count>
__device__ __forceinline__ u32 count_direct_blocks(const Comm& comm, const Traffic& traffic, Count count) {
    constexpr u32 LEAST_BLOCKS = 8;
    // What goes through inboxes is moved twice.
    constexpr float TWICE = 2;
    const u32 lane = threadIdx.x % 32;
    const u64 known = count(lane), number = lane % WORLD == comm.rank ? 0 : known;
    const u64 bytes = number * traffic.size, inbox = in_inbox(traffic, number);
    const bool goes_straight = lane < WORLD && bytes > traffic.inbox_bytes;
    if (worker_blocks() < LEAST_BLOCKS || !__any_sync(~0u, goes_straight) ||
        !__any_sync(~0u, traffic.head < inbox)) {
        return 0;
    }
    auto sum_of = [&](bool which, u64 some) {  // in KiB
        return __reduce_add_sync(~0u, which ? static_cast<u32>(some >> 10) : 0);
    };
    const u32 direct = sum_of(goes_straight, bytes - inbox);
    const u32 sent = sum_of(lane < WORLD, inbox), received = sum_of(lane >= WORLD, inbox);
    const float all = static_cast<float>(direct) + TWICE * (sent > received ? sent : received);
    const u32 direct_blocks = static_cast<u32>(__fdividef(worker_blocks() * static_cast<float>(direct), all));
    const u32 most = worker_blocks() * 3 / 4;
    return direct_blocks < most ? direct_blocks : most;
}

struct Exchange {
    const Session& session;
    const Call& call;
    const Traffic& traffic;
    TrafficMatrix& matrix;
    Transfers& transfers;

    __device__ __forceinline__ u32 rank() const { return session.comm.rank; }
    __device__ __forceinline__ u64 bytes(u64 count) const { return count * traffic.size; }

    __device__ __forceinline__ bool uses_inbox(u32 from, u32 to) const {
        return bytes(matrix.sent(from, to)) <= traffic.inbox_bytes;
    }
    __device__ __forceinline__ bool is_window(u32 receiver) const {
        return matrix.words[receiver][PLACE_WORD] != UNKNOWN;
    }
    __device__ __forceinline__ bool direct(u32 from, u32 to) const {
        return from != to && !uses_inbox(from, to) && is_window(to);
    }
    __device__ __forceinline__ bool uses_scratch(u32 from, u32 to) const {
        return from != to && !uses_inbox(from, to) && !is_window(to);
    }

    // What this rank sends to and receives from a peer: without any peer's row where it can be.
    __device__ __forceinline__ u64 sends(u32 to) const {
        return SHOTS & DEVICE_COUNTS ? matrix.sent(rank(), to) : traffic.send[to];
    }
    __device__ __forceinline__ u64 receives(u32 from) const {
        return SHOTS & DEVICE_COUNTS ? matrix.sent(from, rank()) : traffic.receive[from];
    }
    __device__ __forceinline__ const char* input(u32 to) const {
        if (!(SHOTS & DEVICE_COUNTS)) {
            return call.input + traffic.send_begin[to];
        }
        u64 before = 0;
#pragma unroll
        for (u32 other = 0; other < WORLD; ++other) {
            before += other < to ? sends(other) : 0;
        }
        return call.input + bytes(before);
    }
    // A peer's part of this rank's output, as far as there is room.
    __device__ __forceinline__ Target output(u32 from) const {
        if (SHOTS & DEVICE_COUNTS) {
            const u64 begin = bytes(matrix.offset(from, rank())), length = bytes(receives(from));
            const u64 room = bytes(traffic.capacity), left = begin < room ? room - begin : 0;
            return Target(call.output + begin, length < left ? length : left);
        }
        return Target(call.output + traffic.receive_begin[from], bytes(receives(from)));
    }
    // This rank's part for itself; nothing where it is in its place.
    __device__ __forceinline__ Transfer own() const {
        const Target target = output(rank());
        const u64 most = target.begin == input(rank()) ? 0 : bytes(sends(rank()));
        return Transfer{input(rank()), target.begin, target.bytes < most ? target.bytes : most};
    }
    // What is behind the inbox's share of a part, as far as there is room.
    __device__ __forceinline__ u64 behind_inbox(u32 from, u32 to) const {
        const u64 most = bytes(matrix.fitting(from, to));
        return most > traffic.head ? most - traffic.head : 0;
    }
    // What goes straight into a peer's output; nothing if its data goes another way.
    __device__ __forceinline__ Transfer push(u32 to) const {
        const Comm& comm = session.comm;
        char* begin = comm.base + to * comm.stride + matrix.words[to][PLACE_WORD] +
                      bytes(matrix.offset(rank(), to));
        return Transfer{input(to) + traffic.head, begin + traffic.head,
                     direct(rank(), to) ? behind_inbox(rank(), to) : 0};
    }

    // What a warp receives through inboxes, and of this rank's own part, if `own` says so.
    __device__ __forceinline__ WorkAssignment incoming(u32 direct_blocks, bool own) const {
        if (!(SHOTS & DEVICE_COUNTS)) {
            return assign_work<false>(session.comm, traffic, direct_blocks);
        }
        WorkAssignment assignment = assign_work<false>(session.comm, traffic, direct_blocks, [&](u32 peer) { return receives(peer); }, own);
        if (assignment.peer != WORLD) {
            const Target target = output(assignment.peer);
            assignment.place = target.begin - call.output;
            assignment.fits = target.bytes < assignment.bytes ? static_cast<u32>(target.bytes) : assignment.bytes;
        }
        return assignment;
    }
    // Whether anything of this rank goes another way than through inboxes. By whole warps, of which each
    // thread looks at another pair.
    __device__ __forceinline__ bool has_more() const {
        const u32 peer = threadIdx.x % 32;
        const bool more = (SHOTS & DIRECT) && peer < WORLD && peer != rank() &&
                          (!uses_inbox(rank(), peer) || !uses_inbox(peer, rank()));
        return __any_sync(~0u, more);
    }
    // Whether anything of this rank passes through scratch.
    __device__ __forceinline__ bool has_scratch_stages() const {
        bool found = false;
        for (u32 peer = 0; peer < WORLD; ++peer) {
            found = found || uses_scratch(rank(), peer) || uses_scratch(peer, rank());
        }
        return found;
    }
    // Whether this rank's own part is taken as what comes is: where its place is not known earlier, and it
    // is little enough for that to be the quicker way.
    __device__ __forceinline__ bool pipelines_own() const {
        constexpr u64 LITTLE = 1536 << 10;
        const u64 own = bytes(matrix.sent(rank(), rank()));
        return (SHOTS & DEVICE_COUNTS) && own <= LITTLE && uses_inbox(rank(), rank());
    }
    // By all threads of a block.
    __device__ __forceinline__ void plan_transfers() const {
        if (threadIdx.x < WORLD) {
            transfers[threadIdx.x] =
                threadIdx.x == 0 ? own() : push(session.comm.after(threadIdx.x));
        }
        __syncthreads();
    }
};

}  // namespace symmpool
