//! All-reduce by loads from peers. Defines: WORLD, DTYPE, OP, THREADS, SHOTS.
//!
//! One shot: every rank lays its input into its scratch, and reduces from everybody's. Two shots:
//! every rank reduces its share straight from the peers' inputs, which are windows, and stores the
//! result into everybody's output, a window too.

#include "flags.cuh"
#include "parts.cuh"
#include "ranks.cuh"

using namespace symmpool;

constexpr int UNROLL = 2;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_pull(const __grid_constant__ Comm comm, const __grid_constant__ Call call) {
    begin();
    Session session(comm);
    if (session.failed) {
        return;
    }
    if (attends()) {
        attend<true>(session, call, used_flags());
        return;
    }
    session.advance();

    if (SHOTS == 1) {
        const Source input(call.input, call.bytes);
        const Target output(call.output, call.bytes);
        const u64 scratch = comm.scratch;
        const Range range(0, input.vectors());
        for (u64 at = range.from + threadIdx.x; at < range.to; at += blockDim.x) {
            store_plain(comm.own() + scratch + 16 * at, input.load(at));
        }
        raise(session, ARRIVED, 1);
        if (!await_flags(session, ARRIVED, 1, DATA)) {
            return;
        }
        for (u64 at = range.from + threadIdx.x; at < range.to; at += blockDim.x * UNROLL) {
            uint4 all[UNROLL][WORLD];
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                const u64 index = at + i * blockDim.x;
#pragma unroll
                for (u32 rank = 0; rank < WORLD; ++rank) {
                    if (index < range.to) {
                        all[i][rank] = load_plain(comm.of(rank) + scratch + 16 * index);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                const u64 index = at + i * blockDim.x;
                if (index < range.to) {
                    output.store(index, reduce_all(all[i]));
                }
            }
        }
        // The next call may be one that writes into peers' scratch.
        raise(session, FINISHED, 1);
        await_flags(session, FINISHED, 1, EXIT);
        return;
    }

    if (!all_entered(session)) {
        return;
    }
    const Parts<true> parts(call);
    const Range range(0, parts.vectors());
    const Source own = parts.of(call.input, comm.rank);
    const u64 end = own.vectors() < range.to ? own.vectors() : range.to;
    for (u64 at = range.from + threadIdx.x; at < end; at += blockDim.x * UNROLL) {
        uint4 all[UNROLL][WORLD];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const u64 index = at + i * blockDim.x;
#pragma unroll
            for (u32 rank = 0; rank < WORLD; ++rank) {
                if (index < end) {
                    const char* input = comm.at_peer(call.input, rank);
                    all[i][rank] = parts.of(input, comm.rank).load(index);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const u64 index = at + i * blockDim.x;
            if (index < end) {
                const uint4 result = reduce_all(all[i]);
#pragma unroll
                for (u32 distance = 1; distance <= WORLD; ++distance) {
                    char* output = comm.at_peer(call.output, comm.after(distance % WORLD));
                    parts.of(output, comm.rank).store(index, result);
                }
            }
        }
    }
    raise(session, FINISHED, 1);
    await_flags(session, FINISHED, 1, RESULT);
}
