//! Transfers of an all-to-all, as a block sees them: which way the data of a pair travels, and where it lies.
//! Defines: WORLD, DIRECT, DEVICE_COUNTS.

#pragma once

#include <symmpool/impl/copy.cuh>

#include "all_to_all/traffic.cuh"
#include "all_to_all/work_assignment.cuh"

namespace symmpool {

// Whether worker blocks need the rows of the traffic matrix.
constexpr bool NEEDS_ROWS = DIRECT || DEVICE_COUNTS;

// Items that a warp sends or receives at once, as many as registers allow: with fewer, links wait for loads where much
// is moved.
constexpr u32 ITEMS_AT_ONCE = !NEEDS_ROWS ? 3 : __CUDA_ARCH__ < 1000 ? 2 : 1;

// Direct transfers to each peer, by distance; the first is this rank's own part. They are in shared memory, as no thread
// has registers for them.
using Transfers = Transfer[WORLD];

// How many bytes of a part go through the receiver's inbox: all of a short one; of a longer one the beginning, which is
// under way while rows are exchanged.
__device__ __forceinline__ u64 in_inbox(const Traffic& traffic, u64 count) {
    const u64 length = count * traffic.size;
    return length <= traffic.inbox_bytes ? length : traffic.head;
}

// What a warp sends through inboxes, or receives, if `count(peer)` elements go to or come from each peer. With `own`,
// this rank's own part is among them. The order of peers is such that a warp's two assignments are for peers at the same
// distance in both directions.
template <bool SENDS, typename Count>
__device__ __forceinline__ WorkAssignment assign_work(const Comm& comm, const Traffic& traffic, u32 direct_blocks,
                                                      Count count, bool own = false) {
    return WorkAssignment(
        ITEMS_AT_ONCE, direct_blocks,
        [&](u32 distance) { return comm.after(SENDS ? distance : WORLD - distance); },
        [&](u32 peer) {
            const u64 bytes = in_inbox(traffic, count(peer));
            return peer == comm.rank && !own ? 0 : static_cast<u32>(bytes);
        });
}

// Assigns work by counts that the host knows.
template <bool SENDS>
__device__ __forceinline__ WorkAssignment assign_work(const Comm& comm, const Traffic& traffic, u32 direct_blocks) {
    const u64* counts = SENDS ? traffic.send : traffic.receive;
    WorkAssignment assignment =
        assign_work<SENDS>(comm, traffic, direct_blocks, [&](u32 peer) { return counts[peer]; });
    if (assignment.peer != WORLD) {
        assignment.place = (SENDS ? traffic.send_begin : traffic.receive_begin)[assignment.peer];
    }
    return assignment;
}

// Assigns sends to a warp, by counts on the device.
__device__ __forceinline__ WorkAssignment assign_work(const Comm& comm, const Traffic& traffic,
                                                      const Splits& splits, u32 direct_blocks) {
    WorkAssignment assignment =
        assign_work<true>(comm, traffic, direct_blocks, [&](u32 peer) { return splits.to(peer); });
    assignment.place = splits.before(assignment.peer) * traffic.size;
    return assignment;
}

// How many blocks move only direct data, where this rank sends much directly while whole parts of other pairs go through
// inboxes. If the same blocks did both in turns, the links to the peer that gets most would be idle during the other
// turns, of which there are few and long ones. Called by whole warps, each of whose threads asks for the `count` of
// another pair: the first WORLD are sent by this rank, the next WORLD received.
template <typename Count>
__device__ __forceinline__ u32 count_direct_blocks(const Comm& comm, const Traffic& traffic, Count count) {
    constexpr u32 MIN_BLOCKS = 8;
    // Data in inboxes is moved twice.
    constexpr float TWICE = 2;
    const u32 lane = threadIdx.x % 32;
    const u64 known = count(lane), number = lane % WORLD == comm.rank ? 0 : known;
    const u64 bytes = number * traffic.size, inbox = in_inbox(traffic, number);
    const bool goes_direct = lane < WORLD && bytes > traffic.inbox_bytes;
    if (worker_blocks() < MIN_BLOCKS || !__any_sync(~0u, goes_direct) ||
        !__any_sync(~0u, traffic.head < inbox)) {
        return 0;
    }
    auto sum_of = [&](bool which, u64 some) {  // in KiB
        return __reduce_add_sync(~0u, which ? static_cast<u32>(some >> 10) : 0);
    };
    const u32 direct = sum_of(goes_direct, bytes - inbox);
    const u32 sent = sum_of(lane < WORLD, inbox), received = sum_of(lane >= WORLD, inbox);
    const float all = static_cast<float>(direct) + TWICE * (sent > received ? sent : received);
    const u32 direct_blocks = static_cast<u32>(__fdividef(worker_blocks() * static_cast<float>(direct), all));
    const u32 most = worker_blocks() * 3 / 4;
    return direct_blocks < most ? direct_blocks : most;
}

struct Exchange {
    const Session& session;
    const CallParams& call;
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

    // How many elements this rank sends to and receives from a peer; with the host's counts no row is needed.
    __device__ __forceinline__ u64 sends(u32 to) const {
        return DEVICE_COUNTS ? matrix.sent(rank(), to) : traffic.send[to];
    }
    __device__ __forceinline__ u64 receives(u32 from) const {
        return DEVICE_COUNTS ? matrix.sent(from, rank()) : traffic.receive[from];
    }
    __device__ __forceinline__ const char* input(u32 to) const {
        if (!DEVICE_COUNTS) {
            return call.input + traffic.send_begin[to];
        }
        u64 before = 0;
#pragma unroll
        for (u32 other = 0; other < WORLD; ++other) {
            before += other < to ? sends(other) : 0;
        }
        return call.input + bytes(before);
    }
    // A peer's part of this rank's output, as far as it fits.
    __device__ __forceinline__ Target output(u32 from) const {
        if (DEVICE_COUNTS) {
            const u64 begin = bytes(matrix.offset(from, rank())), length = bytes(receives(from));
            const u64 room = bytes(traffic.capacity), left = begin < room ? room - begin : 0;
            return Target(call.output + begin, length < left ? length : left);
        }
        return Target(call.output + traffic.receive_begin[from], bytes(receives(from)));
    }
    // This rank's part for itself; empty if it is in its place already.
    __device__ __forceinline__ Transfer own() const {
        const Target target = output(rank());
        const u64 most = target.begin == input(rank()) ? 0 : bytes(sends(rank()));
        return Transfer{input(rank()), target.begin, target.bytes < most ? target.bytes : most};
    }
    // How many bytes of a part do not go through the inbox, as far as they fit into the output.
    __device__ __forceinline__ u64 behind_inbox(u32 from, u32 to) const {
        const u64 most = bytes(matrix.fitting(from, to));
        return most > traffic.head ? most - traffic.head : 0;
    }
    // Transfer directly into a peer's output; empty if its data goes another way.
    __device__ __forceinline__ Transfer push(u32 to) const {
        const Comm& comm = session.comm;
        char* begin = comm.base + to * comm.stride + matrix.words[to][PLACE_WORD] +
                      bytes(matrix.offset(rank(), to));
        return Transfer{input(to) + traffic.head, begin + traffic.head,
                        direct(rank(), to) ? behind_inbox(rank(), to) : 0};
    }

    // Assigns a warp what it receives through inboxes; with `own`, this rank's own part is among it.
    __device__ __forceinline__ WorkAssignment incoming(u32 direct_blocks, bool own) const {
        if (!DEVICE_COUNTS) {
            return assign_work<false>(session.comm, traffic, direct_blocks);
        }
        WorkAssignment assignment = assign_work<false>(
            session.comm, traffic, direct_blocks, [&](u32 peer) { return receives(peer); }, own);
        if (assignment.peer != WORLD) {
            const Target target = output(assignment.peer);
            assignment.place = target.begin - call.output;
            assignment.fits = target.bytes < assignment.bytes ? static_cast<u32>(target.bytes) : assignment.bytes;
        }
        return assignment;
    }
    // Whether any data of this rank goes another way than through inboxes. Called by whole warps, each of whose threads
    // looks at another pair.
    __device__ __forceinline__ bool has_more() const {
        const u32 peer = threadIdx.x % 32;
        const bool more = DIRECT && peer < WORLD && peer != rank() &&
                          (!uses_inbox(rank(), peer) || !uses_inbox(peer, rank()));
        return __any_sync(~0u, more);
    }
    // Whether any data of this rank passes through scratch.
    __device__ __forceinline__ bool has_scratch_stages() const {
        bool found = false;
        for (u32 peer = 0; peer < WORLD; ++peer) {
            found = found || uses_scratch(rank(), peer) || uses_scratch(peer, rank());
        }
        return found;
    }
    // Whether this rank's own part is copied by the warps that receive, like what comes from peers: where its place is
    // not known earlier, and the part is short enough for this to be faster.
    __device__ __forceinline__ bool pipelines_own() const {
        constexpr u64 LITTLE = 1536 << 10;
        const u64 own = bytes(matrix.sent(rank(), rank()));
        return DEVICE_COUNTS && own <= LITTLE && uses_inbox(rank(), rank());
    }
    // Fills in `transfers`. Called by all threads of a block.
    __device__ __forceinline__ void plan_transfers() const {
        if (threadIdx.x < WORLD) {
            transfers[threadIdx.x] =
                threadIdx.x == 0 ? own() : push(session.comm.after(threadIdx.x));
        }
        __syncthreads();
    }
};

}  // namespace symmpool
