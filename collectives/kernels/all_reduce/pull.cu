//! All-reduce by loads from peers. Defines: WORLD, DTYPE, OP, THREADS, SHOTS.
//!
//! One shot: every rank lays its input into its scratch, and reduces from everybody's. Two shots:
//! every rank reduces its share straight from the peers' inputs, which are windows, and stores the
//! result into everybody's output, a window too.

#include <symmpool/partition.cuh>
#include <symmpool/peer_blocks.cuh>
#include <symmpool/reduce_ranks.cuh>

using namespace symmpool;

constexpr int UNROLL = 2;

// Reduces what `load` finds of every rank, by one block, and gives `store` the results.
template <typename Load, typename Store>
__device__ __forceinline__ void pull(Range range, Load load, Store store) {
    for (u64 at = range.from + threadIdx.x; at < range.to; at += blockDim.x * UNROLL) {
        uint4 all[UNROLL][WORLD];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const u64 index = at + i * blockDim.x;
#pragma unroll
            for (u32 rank = 0; rank < WORLD; ++rank) {
                if (index < range.to) {
                    all[i][rank] = load(index, rank);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const u64 index = at + i * blockDim.x;
            if (index < range.to) {
                store(index, reduce_all(all[i]));
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_pull(const __grid_constant__ Comm comm, const __grid_constant__ Call call) {
    begin(comm.early);
    Session session(comm);
    if (session.failed) {
        return;
    }
    if (is_leader_block()) {
        run_leader_block<true>(session, call, used_flags(call.peer_blocks));
        return;
    }
    session.advance();

    const PeerBlocks peer_blocks(call.peer_blocks);
    if (SHOTS == 1) {
        const Source input(call.input, call.bytes);
        const Target output(call.output, call.bytes);
        const u64 scratch = comm.scratch;
        const Division division(input.vectors(), call.peer_blocks);
#pragma unroll 1
        for (u32 block = peer_blocks.first; block < peer_blocks.end; ++block) {
            const Range range = division[block];
            for (u64 at = range.from + threadIdx.x; at < range.to; at += blockDim.x) {
                store_plain(comm.own() + scratch + 16 * at, input.load(at));
            }
        }
        raise_flags(session, peer_blocks, ARRIVED, 1);
        if (!await_flags(session, peer_blocks, ARRIVED, 1, DATA)) {
            return;
        }
#pragma unroll 1
        for (u32 block = peer_blocks.first; block < peer_blocks.end; ++block) {
            const Range range = division[block];
            pull(range, [&](u64 index, u32 rank) {
                return load_plain(comm.of(rank) + scratch + 16 * index);
            }, [&](u64 index, uint4 result) { output.store(index, result); });
        }
        // The next call may be one that writes into peers' scratch.
        raise_flags(session, peer_blocks, FINISHED, 1);
        await_flags(session, peer_blocks, FINISHED, 1, EXIT);
        return;
    }

    if (!await_handshakes<true>(session, call)) {
        return;
    }
    const Parts<true> parts(call);
    const u64 end = parts.of(call.input, comm.rank).vectors();
    const Division division(parts.vectors(), call.peer_blocks);
#pragma unroll 1
    for (u32 block = peer_blocks.first; block < peer_blocks.end; ++block) {
        const Range range = division[block];
        pull({range.from, end < range.to ? end : range.to}, [&](u64 index, u32 rank) {
            return parts.of(comm.at_peer(call.input, rank), comm.rank).load(index);
        }, [&](u64 index, uint4 result) {
#pragma unroll
            for (u32 distance = 1; distance <= WORLD; ++distance) {
                char* output = comm.at_peer(call.output, comm.after(distance % WORLD));
                parts.of(output, comm.rank).store(index, result);
            }
        });
    }
    raise_flags(session, peer_blocks, FINISHED, 1);
    await_flags(session, peer_blocks, FINISHED, 1, RESULT);
}
