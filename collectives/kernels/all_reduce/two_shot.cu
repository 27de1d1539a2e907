//! All-reduce in two shots: every rank reduces a share, which it sends to every inbox. Also the
//! halves alone. Defines: WORLD, DTYPE, OP, THREADS, BLOCKS of a
//! processor, SHOTS; SENTINELS for that inbox.
//!
//! Nothing stands between the shots but data, so that they overlap: a thread sends a vector of
//! the next round before it reduces one of this round, and collects results one round later.

#include <symmpool/partition.cuh>
#include <symmpool/reduce_ranks.cuh>
#include <symmpool/span.cuh>

#include "protocol/inbox.cuh"

#define SCATTER 1
#define GATHER 2
#define BROADCAST 4  // a gather of the root's part alone

using namespace symmpool;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    symmpool_two_shot(const __grid_constant__ Comm comm, const __grid_constant__ Call call) {
    begin(comm.early);
    const Parts<(SHOTS == (SCATTER | GATHER))> parts(call);
    const u64 vectors = parts.vectors();
    // Shares of the input first, then results.
    const u64 results = (SHOTS & SCATTER) ? INBOX_SLOTS * vectors : 0;
    Session session(comm);
    if (session.failed) {
        return;
    }
    const Inbox inbox(session, results + ((SHOTS & (GATHER | BROADCAST)) ? INBOX_SLOTS * vectors : 0));
    if (is_leader_block()) {
        run_leader_block<false>(session, call, inbox.used());
        return;
    }

    auto scatter = [&](u64 at) {
        if (at >= vectors) {
            return;
        }
        uint4 out[WORLD - 1];
#pragma unroll
        for (u32 distance = 1; distance < WORLD; ++distance) {
            const Source part = parts.of(call.input, comm.after(distance));
            if (at < part.vectors()) {
                out[distance - 1] = part.load(at);
            }
        }
#pragma unroll
        for (u32 distance = 1; distance < WORLD; ++distance) {
            u32 peer = comm.after(distance);
            if (at < parts.of(call.input, peer).vectors()) {
                inbox.send(comm, peer, slot_at_peer(comm, distance) * vectors + at,
                           Inbox::prepare(out[distance - 1]));
            }
        }
    };
    // This rank's result, or its input where nothing is reduced, to itself and to the others.
    auto reduce = [&](u64 at) {
        if ((SHOTS & BROADCAST) && comm.rank != call.root) {
            return true;
        }
        const Source input = (SHOTS & SCATTER) ? parts.of(call.input, comm.rank)
                                               : Source(call.input, parts.bytes);
        if (at >= input.vectors()) {
            return true;
        }
        uint4 own = Inbox::prepare(input.load(at));
        if (SHOTS & SCATTER) {
            uint4 all[WORLD];
            if (!await_all(session, inbox, at, vectors, own, all)) {
                return false;
            }
            own = Inbox::prepare(reduce_all(all));
        }
        if (SHOTS & (GATHER | BROADCAST)) {
#pragma unroll
            for (u32 distance = 1; distance < WORLD; ++distance) {
                const u64 there = results + slot_at_peer(comm, distance) * vectors + at;
                inbox.send(comm, comm.after(distance), there, own);
            }
        }
        const Target output = (SHOTS & GATHER) ? parts.of(call.output, comm.rank)
                                               : Target(call.output, parts.bytes);
        output.store(at, own);
        return true;
    };
    auto gather = [&](u64 at) {
        if constexpr (BLOCKS == 1 && !(SHOTS & BROADCAST)) {
            // Shares are whole vectors: only the last can be short.
            const u64 end = (SHOTS & SCATTER) ? parts.bytes - 16 * at : ~0ull;
            auto has = [&](u32 rank) { return rank * parts.stride < end || !(SHOTS & SCATTER); };
            uint4 all[WORLD];
            if (!await_some(session, inbox, results + at, vectors, all, has)) {
                return false;
            }
#pragma unroll
            for (u32 rank = 0; rank < WORLD; ++rank) {
                if (rank != comm.rank && has(rank)) {
                    parts.of(call.output, rank).store(at, all[rank]);
                }
            }
        } else {
            // One after the other: registers are few.
#pragma unroll
            for (u32 distance = 1; distance < WORLD; ++distance) {
                u32 peer = comm.after(WORLD - distance);
                const Target part = (SHOTS & BROADCAST) ? Target(call.output, parts.bytes)
                                                        : parts.of(call.output, peer);
                if (at < part.vectors() && (!(SHOTS & BROADCAST) || peer == call.root)) {
                    uint4 result;
                    const u64 from = results + slot_of(comm, WORLD - distance) * vectors + at;
                    if (!await_vector(session, inbox, peer, from, result)) {
                        return false;
                    }
                    part.store(at, result);
                }
            }
        }
        return true;
    };

    // Of much, two rounds are on their way before anything is put back; the second of little is sent
    // behind that. Then every round is sent before the one ahead of it is reduced.
    constexpr bool MUCH = BLOCKS > 1;
    const u64 step = worker_threads();
    u64 at = worker_thread();
    if (SHOTS & SCATTER) {
        scatter(at);
    }
    session.advance();
    if ((SHOTS & SCATTER) && MUCH) {
        scatter(at + step);
    }
    inbox.reset_stale(session);
    for (; at < vectors; at += step) {
        if ((SHOTS & SCATTER) && !MUCH) {
            scatter(at + step);
        }
        if (!reduce(at)) {
            return;
        }
        if ((SHOTS & (GATHER | BROADCAST)) && at >= step && !gather(at - step)) {
            return;
        }
        if ((SHOTS & (GATHER | BROADCAST)) && at + step >= vectors && !gather(at)) {
            return;
        }
        if ((SHOTS & SCATTER) && MUCH) {
            scatter(at + 2 * step);
        }
    }
}
