//! All-reduce, residual and norm in one shot: every rank sends its rows to the inboxes of all peers, and adds up and norms
//! all rows. Defines: those of `fused/norm.cuh`.
//!
//! A block sends the row after the one that it waits for, so that links are not idle while it norms.

#include "fused/norm.cuh"
#include "fused/row_sums.cuh"

using namespace symmpool;

// Whether a thread has registers for its units of two rows.
constexpr bool HOLDS_NEXT = HELD;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_norm_one_shot(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call,
                           const __grid_constant__ NormWork work) {
    begin_kernel(comm.early);
    const Units units(work);
    u32 token = worker_block();
    auto input = [&](u32 of) { return call.input + of * units.bytes(); };
    Unit own[UNITS];
    // Loads are under way while the session's state is read.
    if (!is_leader_block() && token < work.tokens) {
        units.load(input(token), 0, own);
    }
    __shared__ float of_warps[2][ROW_WARPS];
    Norm<true> norm(call, work, units, of_warps);
    Session session(comm);
    const SmGrant grant(comm);
    if (grant.is_over() || session.failed) {
        return;
    }
    const u64 each = static_cast<u64>(work.tokens) * units.vectors();
    const Inbox inbox(session, WORLD > 1 ? INBOX_SLOTS * each : 0);
    if (is_leader_block()) {
        run_leader_block<false>(session, call, inbox.used());
        return;
    }
    auto send = [&](u32 of, u32 step, Unit(&row)[UNITS]) {
        prepare(row);
#pragma unroll 1
        for (u32 distance = 1; distance < WORLD; ++distance) {
            const u64 at = slot_at_peer(comm, distance) * each + static_cast<u64>(of) * units.vectors();
            send_units(comm, inbox, units, comm.after(distance), at, step, row);
        }
    };
    // Sends the steps of a row from `first` on.
    auto send_rest = [&](u32 of, u32 first) {
#pragma unroll 1
        for (u32 step = first; step < units.steps; ++step) {
            Unit row[UNITS];
            units.load(input(of), step, row);
            send(of, step, row);
        }
    };
    if (token < work.tokens) {
        send(token, 0, own);
        send_rest(token, 1);
    }
    session.advance();
    inbox.reset_stale(worker_thread(), worker_threads());
    norm.begin();
#pragma unroll 1
    for (; token < work.tokens; token += worker_blocks()) {
        const u32 following = token + worker_blocks();
        Unit next[UNITS];
        if (following < work.tokens) {
            if constexpr (HOLDS_NEXT) {
                units.load(input(following), 0, next);
                send(following, 0, next);
            } else {
                send_rest(following, 0);
            }
        }
        const bool arrived = norm.row(token, [&](u32 step, Unit(&row)[UNITS]) {
            const Residual residual(work, units, token, step);
            if (HOLDS_NEXT) {
#pragma unroll
                for (u32 nth = 0; nth < UNITS; ++nth) {
                    row[nth] = own[nth];
                }
            } else {
                units.load(input(token), step, row);
                prepare(row);
            }
            const u64 at = static_cast<u64>(token) * units.vectors();
            if (!sum_units(session, inbox, units, at, each, step, row)) {
                return false;
            }
            residual.add_to(work, units, step, row);
            return true;
        });
        if (!arrived) {
            return;
        }
        if constexpr (HOLDS_NEXT) {
#pragma unroll
            for (u32 nth = 0; nth < UNITS; ++nth) {
                own[nth] = next[nth];
            }
        }
    }
}
