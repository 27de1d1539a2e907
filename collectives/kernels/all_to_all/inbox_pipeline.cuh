//! The pipeline through inboxes: how a warp sends and receives its items, in rounds.

#pragma once

#include "all_to_all/exchange.cuh"

namespace symmpool {

// Stores an item into memory that is not aligned, as whole aligned vectors, each of bytes of two threads. Called by
// whole warps.
__device__ __noinline__ void store_across(char* to, u32 shift, uint4 vector) {
    uint4 before;
    before.x = __shfl_up_sync(~0u, vector.x, 1);
    before.y = __shfl_up_sync(~0u, vector.y, 1);
    before.z = __shfl_up_sync(~0u, vector.z, 1);
    before.w = __shfl_up_sync(~0u, vector.w, 1);
    const u32 lane = threadIdx.x % 32;
    if (lane == 0) {
        store_partial(to, 16 - shift, vector);
    } else {
        store_plain(to - shift, from_pair(before, vector, 16 - shift));
    }
    if (lane == 31) {
        store_partial(to + 16 - shift, shift, from_pair(vector, vector, 16 - shift));
    }
}

// Stores this thread's vector of an item into a span of any alignment, as far as it reaches. Called by whole warps.
__device__ __forceinline__ void store_item(const Target& target, u32 at, bool live, uint4 vector) {
    const bool whole = live && u64{16} * at + 16 <= target.bytes;
    char* to = target.begin + u64{16} * at;
    if (target.aligned && whole) {
        store_plain(to, vector);
    } else if (!target.aligned && __all_sync(~0u, whole)) {
        store_across(to, static_cast<u32>(reinterpret_cast<u64>(to) % 16), vector);
    } else if (live && u64{16} * at < target.bytes) {
        const u64 left = target.bytes - u64{16} * at;
        store_partial(to, static_cast<u32>(left < 16 ? left : 16), vector);
    }
}

// Sends the warp's items of a round.
template <u32 COUNT>
__device__ __forceinline__ void send_items(const EscapedSlot& slot, u32 epoch, const Source& source,
                                           const WorkAssignment& assignment, u32 round) {
    u32 at[COUNT];
    bool live[COUNT];
    uint4 vectors[COUNT];
    assignment.find(round, at, live);
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        if (live[i]) {
            vectors[i] = source.load(at[i]);
        }
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        slot.send(epoch, at[i], vectors[i], live[i]);
    }
}

// Data that a warp sends through inboxes, and how many rounds of it are done.
struct Outgoing {
    const Exchange& exchange;
    const WorkAssignment& assignment;
    u32 done = 0;

    __device__ __forceinline__ Outgoing(const Exchange& e, const WorkAssignment& l) : exchange(e), assignment(l) {}

    __device__ __forceinline__ void send_next() {
        if (done < assignment.rounds.number && assignment.peer != WORLD) {
            const Session& session = exchange.session;
            const EscapedSlot slot(session, assignment.peer, session.comm.rank);
            const Source source(exchange.call.input + assignment.place, assignment.bytes);
            if (assignment.one_item_a_round(ITEMS_AT_ONCE)) {
                send_items<1>(slot, session.epoch, source, assignment, done);
            } else {
                send_items<ITEMS_AT_ONCE>(slot, session.epoch, source, assignment, done);
            }
        }
        ++done;
    }
    // Sends the rounds before this one.
    __device__ __forceinline__ void send_until(u32 round) {
#pragma unroll 1
        while (done < round && done < assignment.rounds.number) {
            send_next();
        }
    }
};

// Receives the warp's items of a round. Those that do not fit into the output are received too, and not stored.
template <u32 COUNT>
__device__ __forceinline__ bool receive_items(const Exchange& exchange, const WorkAssignment& assignment, u32 round) {
    const Session& session = exchange.session;
    const EscapedSlot slot(session, session.comm.rank, assignment.peer);
    const Target target(exchange.call.output + assignment.place, assignment.fits);
    u32 at[COUNT];
    bool live[COUNT];
    uint4 vectors[COUNT];
    assignment.find(round, at, live);
    if (!slot.receive(session, assignment.peer, at, live, vectors)) {
        return false;
    }
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        store_item(target, at[i], live[i], vectors[i]);
    }
    return true;
}

// Copies the warp's items of a round of this rank's own part.
__device__ __forceinline__ void copy_own_items(const Exchange& exchange, const WorkAssignment& assignment, u32 round) {
    const Source own(exchange.input(assignment.peer), assignment.bytes);
    const Target target(exchange.call.output + assignment.place, assignment.fits);
#pragma unroll 1
    for (u32 item = assignment.begin(round); item < assignment.end(round); item += assignment.warps) {
        const u32 at = item * ITEM + threadIdx.x % 32;
        const bool live = 16 * at < assignment.bytes;
        store_item(target, at, live, live ? own.load(at) : make_uint4(0, 0, 0, 0));
    }
}

// Where the first `nth` of `parts` equal parts of `whole` end.
__device__ __forceinline__ u64 fraction(u64 whole, u32 nth, u32 parts) {
    if (whole == parts) {
        return nth;
    }
    // A division of 64 bits takes ten times as long.
    const u64 product = whole * nth;
    return product >> 32 == 0 ? static_cast<u32>(product) / parts : product / parts;
}

// Moves all data that goes through inboxes, in both directions, in turns, and does a turn of `work` in each. Before a
// fraction of what comes is waited for, more than this fraction of what goes has been sent: so among warps that wait for
// each other one can always go on.
template <typename Work>
__device__ __forceinline__ bool run_inbox_pipeline(Outgoing& outgoing, const WorkAssignment& incoming, Work work) {
    const Exchange& exchange = outgoing.exchange;
    // Counts of rounds are read again in each turn, as registers are few.
    const u32 sends = outgoing.assignment.rounds.number, takes = incoming.rounds.number;
    const u32 turns = sends > takes ? sends : takes;
    u32 taken = 0;
#pragma unroll 1
    for (u32 turn = 0; turn < turns; ++turn) {
        outgoing.send_until(static_cast<u32>(fraction(outgoing.assignment.rounds.number, turn + 1, turns)) + 1);
        work(turn, turns);
        const u32 end = static_cast<u32>(fraction(incoming.rounds.number, turn + 1, turns));
#pragma unroll 1
        for (; taken < end && incoming.peer != WORLD; ++taken) {
            if (DEVICE_COUNTS && incoming.peer == exchange.rank()) {
                copy_own_items(exchange, incoming, taken);
                continue;
            }
            const bool there = incoming.one_item_a_round(ITEMS_AT_ONCE)
                                   ? receive_items<1>(exchange, incoming, taken)
                                   : receive_items<ITEMS_AT_ONCE>(exchange, incoming, taken);
            if (!there) {
                return false;
            }
        }
    }
    return true;
}

}  // namespace symmpool
