//! All-reduce in two shots by loads: every rank reduces its share, which it loads from all ranks' inputs, and
//! stores the result into all ranks' outputs. Inputs and outputs are windows. Reduce-scatter is the first shot alone, whose
//! output may be anywhere. Defines: WORLD, DTYPE, OP, THREADS, COLLECTIVE (ALL_REDUCE or REDUCE_SCATTER).

#include <symmpool/impl/peer_blocks.cuh>

#include "all_reduce/reduce_loads.cuh"

using namespace symmpool;

enum class Collective { ALL_REDUCE, REDUCE_SCATTER };
constexpr bool GATHERS = Collective::COLLECTIVE == Collective::ALL_REDUCE;
constexpr u32 OUTPUTS = GATHERS ? WORLD : 1;  // into which a rank stores its results

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_two_shot_pull(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call) {
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
    if (!await_handshakes<true>(session, call)) {
        return;
    }
    const RankChunks<GATHERS> shares(call);
    const u64 end = shares.of(call.input, comm.rank).vectors();
    const EvenSplit split(shares.vectors(), call.peer_blocks);
#pragma unroll 1
    for (u32 index = peer_blocks.first; index < peer_blocks.end; ++index) {
        const Range range = split[index];
        reduce_loads({range.from, end < range.to ? end : range.to}, [&](u64 at, u32 rank) {
            return shares.of(comm.at_peer(call.input, rank), comm.rank).load(at);
        }, [&](u64 at, uint4 result) {
#pragma unroll
            for (u32 distance = 1; distance <= OUTPUTS; ++distance) {
                char* output = GATHERS ? comm.at_peer(call.output, comm.after(distance % WORLD)) : call.output;
                const Target all = GATHERS ? shares.of(output, comm.rank) : Target(output, shares.bytes);
                all.store(at, result);
            }
        });
    }
    raise_flags(session, peer_blocks, FINISHED, 1);
    await_flags(session, peer_blocks, FINISHED, 1, RESULT);
}
