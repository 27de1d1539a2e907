//! All-reduce in one shot in the LL128 protocol: every rank sends its input to all peers and reduces all inputs.
//! Defines: WORLD, DTYPE, OP, THREADS.

#include <symmpool/impl/handshake.cuh>
#include <symmpool/reduce.cuh>

#include "symmpool/impl/ll128.cuh"

using namespace symmpool;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_one_shot_ll128(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call) {
    begin_kernel(comm.early);
    const u64 lines = lines_of(call.bytes);
    const u32 thread = line_thread();
    u64 line = is_leader_block() ? 0 : worker_thread() / LINE_THREADS;
    auto load = [&](u64 at) {
        return load_piece(call.input + at * LINE_PAYLOAD + thread * 16,
                          piece_bytes(call.bytes, at, thread));
    };
    uint4 own = make_uint4(0, 0, 0, 0);
    if (!is_leader_block() && line < lines) {
        own = load(line);  // under way while the session's state is read
    }
    const Session session(comm);
    const SmGrant grant(comm);
    if (grant.is_over() || session.failed) {
        return;
    }
    const u64 inbox = comm.ll128 + session.parity() * (comm.ll128_bytes / 2);
    if (is_leader_block()) {
        UsedBytes used;
        used.ll128 = WORLD * lines * LINE_BYTES;
        run_leader_block<false>(session, call, used);
        return;
    }
    const u64 step = worker_threads() / LINE_THREADS;
    // All threads of a warp take as many rounds, also those whose lines are past the end.
    const u64 rounds = lines == 0 ? 1 : (lines + step - 1) / step;
    for (u64 round = 0; round < rounds; ++round, line += step) {
        const bool live = line < lines;
        if (live) {
            own = round == 0 ? own : load(line);
            const uint4 vector = with_flags(own, thread, session.epoch);
#pragma unroll
            for (u32 distance = 1; distance < WORLD; ++distance) {
                char* to = comm.of(comm.after(distance)) + inbox;
                store_line(to + (comm.rank * lines + line) * LINE_BYTES + thread * 16, vector);
            }
        }
        if (round == 0) {
            session.advance();
        }
        uint4 all[WORLD];
        Watch watch;
        bool waiting = true;
        while (waiting) {
            u32 missing = WORLD;
            if (live) {
                // All loads are made before the first is looked at. This rank's own slot is loaded too, for nothing.
#pragma unroll
                for (u32 rank = 0; rank < WORLD; ++rank) {
                    all[rank] = load_line(comm.own() + inbox +
                                          (rank * lines + line) * LINE_BYTES + thread * 16);
                }
#pragma unroll
                for (u32 rank = 0; rank < WORLD; ++rank) {
                    const bool here = rank == comm.rank;
                    missing = here || has_flags(all[rank], thread, session.epoch) ? missing : rank;
                    all[rank] = select(here, own, all[rank]);
                }
            }
            waiting = __any_sync(~0u, missing != WORLD);
            const u32 named = __reduce_min_sync(~0u, missing);
            if (waiting && __any_sync(~0u, watch.expired(session, named, DATA))) {
                return;
            }
        }
        if (live) {
            store_piece(call.output + line * LINE_PAYLOAD + thread * 16,
                        piece_bytes(call.bytes, line, thread), Reduce<DTYPE, OP>::all(all));
        }
    }
}
