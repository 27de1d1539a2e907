//! All-reduce in one shot by loads: every rank copies its input into its scratch, and reduces what it loads from the
//! scratch of all ranks. Defines: WORLD, DTYPE, OP, THREADS.

#include <symmpool/impl/peer_blocks.cuh>

#include "all_reduce/reduce_loads.cuh"

using namespace symmpool;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_one_shot_pull(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call) {
    begin_kernel(comm.early);
    Session session(comm);
    const SmGrant grant(comm);
    if (grant.is_over() || session.failed) {
        return;
    }
    if (is_leader_block()) {
        run_leader_block<true>(session, call, used_flags(call.peer_blocks));
        return;
    }
    session.advance();

    const PeerBlocks peer_blocks(call.peer_blocks);
    const Source input(call.input, call.bytes);
    const Target output(call.output, call.bytes);
    const u64 scratch = comm.scratch;
    const EvenSplit split(input.vectors(), call.peer_blocks);
#pragma unroll 1
    for (u32 index = peer_blocks.first; index < peer_blocks.end; ++index) {
        const Range range = split[index];
        for (u64 at = range.from + threadIdx.x; at < range.to; at += blockDim.x) {
            store_plain(comm.own() + scratch + 16 * at, input.load(at));
        }
    }
    raise_flags(session, peer_blocks, ARRIVED, 1);
    if (!await_flags(session, peer_blocks, ARRIVED, 1, DATA)) {
        return;
    }
#pragma unroll 1
    for (u32 index = peer_blocks.first; index < peer_blocks.end; ++index) {
        reduce_loads(split[index], [&](u64 at, u32 rank) {
            return load_plain(comm.of(rank) + scratch + 16 * at);
        }, [&](u64 at, uint4 result) { output.store(at, result); });
    }
    // The next call may write into this scratch.
    raise_flags(session, peer_blocks, FINISHED, 1);
    await_flags(session, peer_blocks, FINISHED, 1, EXIT);
}
