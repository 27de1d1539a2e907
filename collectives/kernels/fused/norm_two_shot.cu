//! All-reduce, residual and norm in two shots: every rank adds up the rows of its share of the tokens, and the residual to
//! them, sends these rows to all peers, and norms all rows. Defines: those of `fused/norm.cuh`.
//!
//! Sums travel, and not norms: a layer needs both, and a rank that has the sum of a row makes the norm of it in less time
//! than a link takes for the norm. As in `all_reduce/two_shot.cu` nothing but data stands between the shots: a block sends
//! rows of the next round before it adds up one of this round, and takes results one round later.

#include "fused/norm.cuh"
#include "fused/row_sums.cuh"

using namespace symmpool;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_norm_two_shot(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call,
                           const __grid_constant__ NormWork work) {
    begin_kernel(comm.early);
    const Units units(work);
    // Tokens of a rank's share; the last shares may be shorter or empty.
    const u32 share = (work.tokens + WORLD - 1) / WORLD;
    const u64 each = static_cast<u64>(share) * units.vectors();
    // Inputs come first in the inbox, results behind them.
    const u64 results = INBOX_SLOTS * each;
    Session session(comm);
    const SmGrant grant(comm);
    if (grant.is_over() || session.failed) {
        return;
    }
    const Inbox inbox(session, 2 * results);
    if (is_leader_block()) {
        run_leader_block<false>(session, call, inbox.used());
        return;
    }
    auto has = [&](u32 rank, u32 at) { return at < share && rank * share + at < work.tokens; };
    auto input = [&](u32 token) { return call.input + token * units.bytes(); };
    auto row_at = [&](u32 at) { return static_cast<u64>(at) * units.vectors(); };

    // Sends a row of each peer's share to that peer.
    auto scatter = [&](u32 at) {
#pragma unroll 1
        for (u32 distance = 1; distance < WORLD; ++distance) {
            const u32 peer = comm.after(distance);
            const u64 there = slot_at_peer(comm, distance) * each + row_at(at);
#pragma unroll 1
            for (u32 step = 0; step < units.steps && has(peer, at); ++step) {
                Unit row[UNITS];
                units.load(input(peer * share + at), step, row);
                prepare(row);
                send_units(comm, inbox, units, peer, there, step, row);
            }
        }
    };
    u32 at = worker_block();
    const u32 stride = worker_blocks();
    scatter(at);
    session.advance();
    __shared__ float of_warps[2][ROW_WARPS];
    Norm<false> norm(call, work, units, of_warps);
    inbox.reset_stale(worker_thread(), worker_threads());
    norm.begin();

    // Adds up a row of this rank's share, sends the sum to all peers, and norms it.
    auto reduce = [&](u32 row_of_share) {
        const u32 token = comm.rank * share + row_of_share;
        if (!has(comm.rank, row_of_share)) {
            return true;
        }
        return norm.row(token, [&](u32 step, Unit(&row)[UNITS]) {
            const Residual residual(work, units, token, step);
            units.load(input(token), step, row);
            prepare(row);
            if (!sum_units(session, inbox, units, row_at(row_of_share), each, step, row)) {
                return false;
            }
            residual.add_to(work, units, step, row);
            prepare(row);
#pragma unroll 1
            for (u32 distance = 1; distance < WORLD; ++distance) {
                const u64 there = results + slot_at_peer(comm, distance) * each + row_at(row_of_share);
                send_units(comm, inbox, units, comm.after(distance), there, step, row);
            }
            return true;
        });
    };
    // Takes the sum of a row of each peer's share, and norms it.
    auto gather = [&](u32 row_of_share) {
#pragma unroll 1
        for (u32 distance = 1; distance < WORLD; ++distance) {
            const u32 peer = comm.after(WORLD - distance);
            if (!has(peer, row_of_share)) {
                continue;
            }
            const u64 from = results + slot_of(comm, WORLD - distance) * each + row_at(row_of_share);
            const bool arrived = norm.row(peer * share + row_of_share, [&](u32 step, Unit(&row)[UNITS]) {
                return await_units(session, inbox, units, peer, from, step, row);
            });
            if (!arrived) {
                return false;
            }
        }
        return true;
    };
#pragma unroll 1
    for (; at < share; at += stride) {
        scatter(at + stride);
        if (!reduce(at) || (at >= stride && !gather(at - stride))) {
            return;
        }
        if (at + stride >= share && !gather(at)) {
            return;
        }
    }
}
