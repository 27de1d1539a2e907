//! All-reduce in two shots through inboxes: every rank reduces a share of the data and sends the result to all peers.
//! Also the shots alone, which are reduce-scatter and all-gather, and a broadcast, which is an all-gather of the root's
//! chunk alone. Defines: WORLD, PROTOCOL (LL or LAMPORT), DTYPE, OP, THREADS, BLOCKS of an SM,
//! COLLECTIVE (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER or BROADCAST).
//!
//! Nothing but data stands between the shots, so that they overlap: a thread sends a vector of the next round
//! before it reduces one of this round, and takes results one round later.

#include <symmpool/impl/partition.cuh>
#include <symmpool/reduce.cuh>
#include <symmpool/span.cuh>

#include "symmpool/impl/inbox.cuh"

using namespace symmpool;

enum class Collective { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST };
constexpr Collective RUN = Collective::COLLECTIVE;
constexpr bool BROADCASTS = RUN == Collective::BROADCAST;
// Which shots there are: inputs are scattered and reduced; results, or inputs, are sent to all ranks.
constexpr bool SCATTERS = RUN == Collective::ALL_REDUCE || RUN == Collective::REDUCE_SCATTER;
constexpr bool GATHERS = RUN != Collective::REDUCE_SCATTER;

// Whether a warp's threads, which find their vectors at different looks, go on together, where registers suffice.
constexpr bool TOGETHER = BLOCKS == 1;

// Vectors that a thread sends at once.
constexpr u32 SENT = SCATTERS ? WORLD - 1 : 1;

// With little data the first loads are under way while the session's state is read.
constexpr bool LOADS_EARLY = BLOCKS == 1;

// Blocks that share SMs with other communicators may have one each, and have more threads.
constexpr int RESIDENT = SHARES_SMS ? 1 : BLOCKS;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    symmpool_two_shot(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call) {
    begin_kernel(comm.early);
    const RankChunks<(RUN == Collective::ALL_REDUCE)> chunks(call);
    const u64 vectors = chunks.vectors();
    // Inputs come first in the inbox, results behind them.
    const u64 results = SCATTERS ? INBOX_SLOTS * vectors : 0;
    // Loads what is sent of vector `at`: that of each peer's chunk, or of this rank's input alone.
    auto load = [&](u64 at, uint4 (&found)[SENT]) {
#pragma unroll
        for (u32 nth = 0; nth < SENT; ++nth) {
            const Source from = SCATTERS ? chunks.of(call.input, comm.after(nth + 1)) : Source(call.input, chunks.bytes);
            if (at < from.vectors()) {
                found[nth] = from.load(at);
            }
        }
    };
    uint4 first[SENT];
    if (LOADS_EARLY && !is_leader_block() && (!BROADCASTS || comm.rank == call.root)) {
        load(worker_thread(), first);
    }
    Session session(comm);
    const SmGrant grant(comm);
    if (grant.is_over() || session.failed) {
        return;
    }
    const Inbox inbox(session, results + (GATHERS ? INBOX_SLOTS * vectors : 0));
    if (is_leader_block()) {
        run_leader_block<false>(session, call, inbox.used());
        return;
    }

    // Sends a vector of each peer's chunk to that peer.
    auto scatter = [&](u64 at, bool is_first) {
        if (at >= vectors) {
            return;
        }
        uint4 out[SENT];
        if (LOADS_EARLY && is_first) {
#pragma unroll
            for (u32 nth = 0; nth < SENT; ++nth) {
                out[nth] = first[nth];
            }
        } else {
            load(at, out);
        }
#pragma unroll
        for (u32 distance = 1; distance < WORLD; ++distance) {
            u32 peer = comm.after(distance);
            if (at < chunks.of(call.input, peer).vectors()) {
                inbox.send(comm, peer, slot_at_peer(comm, distance) * vectors + at,
                           Inbox::prepare(out[distance - 1]));
            }
        }
    };
    // Reduces a vector of this rank's chunk, or takes its input where nothing is reduced, stores it and sends it to
    // all peers.
    auto reduce = [&](u64 at, bool is_first) {
        if (BROADCASTS && comm.rank != call.root) {
            return true;
        }
        const Source input = SCATTERS ? chunks.of(call.input, comm.rank) : Source(call.input, chunks.bytes);
        const bool has = at < input.vectors();
        if (!TOGETHER && !has) {
            return true;
        }
        uint4 own;
        if (has) {
            own = Inbox::prepare(!SCATTERS && LOADS_EARLY && is_first ? first[0] : input.load(at));
        }
        if (SCATTERS) {
            uint4 all[WORLD];
            const bool arrived = !has || await_all(session, inbox, at, vectors, own, all);
            if (TOGETHER) {
                __syncwarp();
            }
            if (!arrived) {
                return false;
            }
            if (has) {
                own = Inbox::prepare(Reduce<DTYPE, OP>::all(all));
            }
        }
        if (!has) {
            return true;
        }
        if (GATHERS) {
#pragma unroll
            for (u32 distance = 1; distance < WORLD; ++distance) {
                const u64 there = results + slot_at_peer(comm, distance) * vectors + at;
                inbox.send(comm, comm.after(distance), there, own);
            }
        }
        const Target output = GATHERS && !BROADCASTS ? chunks.of(call.output, comm.rank)
                                                     : Target(call.output, chunks.bytes);
        output.store(at, own);
        return true;
    };
    // Takes a vector of each peer's result, or of the root's.
    auto gather = [&](u64 at) {
        if constexpr (BLOCKS == 1 && !BROADCASTS) {
            // Shares are whole vectors: only the last can be shorter.
            const u64 end = SCATTERS ? chunks.bytes - 16 * at : ~0ull;
            auto sends = [&](u32 rank) { return rank * chunks.stride < end || !SCATTERS; };
            uint4 all[WORLD];
            if (!await_some(session, inbox, results + at, vectors, all, sends)) {
                return false;
            }
#pragma unroll
            for (u32 rank = 0; rank < WORLD; ++rank) {
                if (rank != comm.rank && sends(rank)) {
                    chunks.of(call.output, rank).store(at, all[rank]);
                }
            }
        } else {
            // One peer after the other, as registers are few.
#pragma unroll
            for (u32 distance = 1; distance < WORLD; ++distance) {
                u32 peer = comm.after(WORLD - distance);
                const Target chunk = BROADCASTS ? Target(call.output, chunks.bytes)
                                                : chunks.of(call.output, peer);
                if (at < chunk.vectors() && (!BROADCASTS || peer == call.root)) {
                    uint4 result;
                    const u64 from = results + slot_of(comm, WORLD - distance) * vectors + at;
                    if (!await_vector(session, inbox, peer, from, result)) {
                        return false;
                    }
                    chunk.store(at, result);
                }
            }
        }
        return true;
    };

    // Much data, which two blocks of an SM move: two rounds are sent before the inbox's stale part is emptied, and then
    // each round before the one two behind it. Little data: each round is sent before the one behind it is reduced.
    constexpr bool MUCH = BLOCKS > 1;
    const u64 step = worker_threads();
    u64 at = worker_thread();
    if (SCATTERS) {
        scatter(at, true);
    }
    session.advance();
    if (SCATTERS && MUCH) {
        scatter(at + step, false);
    }
    inbox.reset_stale(worker_thread(), worker_threads());
    for (bool is_first = true; at < vectors; at += step, is_first = false) {
        if (SCATTERS && !MUCH) {
            scatter(at + step, false);
        }
        if (!reduce(at, is_first)) {
            return;
        }
        if (GATHERS && at >= step && !gather(at - step)) {
            return;
        }
        if (GATHERS && at + step >= vectors && !gather(at)) {
            return;
        }
        if (SCATTERS && MUCH) {
            scatter(at + 2 * step, false);
        }
    }
}
