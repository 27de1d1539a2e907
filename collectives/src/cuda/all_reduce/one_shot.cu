//! All-reduce in one shot: every rank sends its input to the inboxes of all peers and reduces all inputs.
//! Defines: WORLD, PROTOCOL (LL or LAMPORT), DTYPE, OP, THREADS, BLOCKS. It is fastest with one vector a thread.

#include <symmpool/reduce.cuh>
#include <symmpool/span.cuh>

#include "symmpool/impl/inbox.cuh"

using namespace symmpool;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_one_shot(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call) {
    begin_kernel(comm.early);
    const Source input(call.input, call.bytes);
    const Target output(call.output, call.bytes);
    const u64 vectors = input.vectors();
    u64 at = worker_thread();
    uint4 own = make_uint4(0, 0, 0, 0);
    if (!is_leader_block() && at < vectors) {
        own = input.load(at);  // under way while the session's state is read
    }
    Session session(comm);
    const SmGrant grant(comm);
    if (grant.is_over() || session.failed) {
        return;
    }
    const Inbox inbox(session, INBOX_SLOTS * vectors);
    if (is_leader_block()) {
        run_leader_block<false>(session, call, inbox.used());
        return;
    }
    for (bool first = true; first || at < vectors; at += worker_threads()) {
        if (at < vectors) {
            own = Inbox::prepare(first ? own : input.load(at));
#pragma unroll
            for (u32 distance = 1; distance < WORLD; ++distance) {
                inbox.send(comm, comm.after(distance), slot_at_peer(comm, distance) * vectors + at,
                           own);
            }
        }
        if (first) {
            session.advance();
            inbox.reset_stale(worker_thread(), worker_threads());
            first = false;
        }
        uint4 all[WORLD];
        if (at < vectors) {
            if (!await_all(session, inbox, at, vectors, own, all)) {
                return;
            }
            output.store(at, Reduce<DTYPE, OP>::all(all));
        }
    }
}
