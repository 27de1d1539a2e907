//! The pipeline through scratch: data for an output that is no window passes through the receiver's scratch, in rounds.

#pragma once

#include "all_to_all/exchange.cuh"

namespace symmpool {

// The data of a pair is cut into stages, at most `MAX_STAGE_BLOCKS`. On every rank, any number of blocks runs the stages in
// order. There are fewer stages where scratch has no room for so many bytes of each in a round. Not measured yet.
constexpr u64 MIN_STAGE_SCRATCH = 32 << 10;
// Bytes that a stage moves in a round: a quarter of what it has, so that the sender stores while the receiver
// copies. On two H200s, an all-gather of 256 MiB takes 481 us with 256 KiB and 495 us with half of that; a broadcast
// of 64 MiB takes 200 us with 128 KiB and 221 us with twice that.
constexpr u64 MIN_CHUNK = 128 << 10;
constexpr u64 MAX_CHUNK = 256 << 10;

// Bytes of one pair's data that a stage moves.
struct PipelineStage {
    u64 from;
    u64 to;
    u64 chunk;
    u32 rounds;

    __device__ __forceinline__ PipelineStage(const Exchange& exchange, u32 sender, u32 receiver, u32 stage) {
        const Comm& comm = exchange.session.comm;
        const u64 length =
            exchange.uses_scratch(sender, receiver) ? exchange.behind_inbox(sender, receiver) : 0;
        const u32 stages = count(comm);
        const EvenSplit split(length, stages, 128);
        from = exchange.traffic.head + split.begin(stage);
        to = exchange.traffic.head + split.begin(stage + 1);
        const u64 most = 16 * (half(comm) / stages / 8 * 8);
        const u64 quarter = split.longest() / 512 * 128;
        chunk = quarter < MIN_CHUNK ? MIN_CHUNK : quarter < MAX_CHUNK ? quarter : MAX_CHUNK;
        chunk = chunk < most ? chunk : most;
        rounds = static_cast<u32>((to - from + chunk - 1) / chunk);
    }
    // Vectors of a sender's part of the scratch that hold one of two rounds.
    static __device__ __forceinline__ u64 half(const Comm& comm) {
        return comm.scratch_vectors() / 2;
    }
    // How many stages there are, the same on all ranks.
    static __device__ __forceinline__ u32 count(const Comm& comm) {
        const u64 stages = 16 * half(comm) / MIN_STAGE_SCRATCH;
        return stages < 1 ? 1 : stages < MAX_STAGE_BLOCKS ? static_cast<u32>(stages) : MAX_STAGE_BLOCKS;
    }
    __device__ __forceinline__ u64 begin(u32 round) const { return from + round * chunk; }
    __device__ __forceinline__ u64 length(u32 round) const {
        const u64 left = to - begin(round);
        return left < chunk ? left : chunk;
    }
    __device__ __forceinline__ char* scratch(const Comm& comm, u32 owner, u32 sender, u32 stage,
                                             u32 round) const {
        return comm.scratch_of(owner, sender) + 16 * half(comm) * (round & 1) + stage * chunk;
    }
};

// Raises a stage's flags on those peers of which `which(peer)` is true, after all that the block has stored and read.
// Called by all threads of the block.
template <typename Which>
__device__ __forceinline__ void raise_stage_flags(const Session& session, u32 kind, u32 stage, u32 count,
                                                  Which which) {
    __syncthreads();
    if (threadIdx.x < WORLD && which(threadIdx.x)) {
        store_release(flag_of(session, threadIdx.x, kind, session.comm.rank, stage),
                      static_cast<u64>(session.epoch) << 32 | count);
    }
}

// Copies what a stage has to copy in one of `turns` turns of this rank's own part, which needs no link. The part is
// divided among stages first: the number of turns differs from stage to stage.
__device__ __forceinline__ void copy_own(const Exchange& exchange, u32 stage, u32 turn, u32 turns) {
    const Copy copy(exchange.transfers[0]);
    const Range mine = EvenSplit(copy.units(), PipelineStage::count(exchange.session.comm))[stage];
    const EvenSplit split(mine.to - mine.from, turns);
    copy.run(mine.from + split.begin(turn), mine.from + split.begin(turn + 1));
}

// Runs a stage for all pairs of this rank. Stages run in the same order on every rank, so the first one that is not done
// can always go on. The own part is copied while data is under way. Called by all threads of a block; false if
// a peer does not come.
__device__ __forceinline__ bool run_stage(const Exchange& exchange, u32 stage) {
    const Session& session = exchange.session;
    const Comm& comm = session.comm;
    const u32 rank = comm.rank;
    u32 rounds = 0;
    for (u32 distance = 1; distance < WORLD; ++distance) {
        const u32 peer = comm.after(distance);
        const u32 out = PipelineStage(exchange, rank, peer, stage).rounds;
        const u32 in = PipelineStage(exchange, peer, rank, stage).rounds;
        rounds = out > rounds ? out : rounds;
        rounds = in > rounds ? in : rounds;
    }
    if (rounds == 0) {
        copy_own(exchange, stage, 0, 1);
    }
    for (u32 round = 0; round < rounds; ++round) {
        for (u32 distance = 1; distance < WORLD; ++distance) {
            const u32 peer = comm.after(distance);
            const PipelineStage out(exchange, rank, peer, stage);
            if (round < out.rounds) {
                // This half of the scratch held the data of the round before the last.
                if (round >= 2 &&
                    !block_await_flag(session, FINISHED, peer, stage, round - 1, DATA)) {
                    return false;
                }
                const Copy copy(Transfer{exchange.input(peer) + out.begin(round),
                                      out.scratch(comm, peer, rank, stage, round),
                                      out.length(round)});
                copy.run(0, copy.units());
            }
        }
        raise_stage_flags(session, ARRIVED, stage, round + 1,
             [&](u32 peer) { return round < PipelineStage(exchange, rank, peer, stage).rounds; });
        copy_own(exchange, stage, round, rounds);
        for (u32 distance = 1; distance < WORLD; ++distance) {
            const u32 peer = comm.after(distance);
            const PipelineStage in(exchange, peer, rank, stage);
            if (round < in.rounds) {
                if (!block_await_flag(session, ARRIVED, peer, stage, round + 1, DATA)) {
                    return false;
                }
                const Copy copy(Transfer{in.scratch(comm, rank, peer, stage, round),
                                      exchange.output(peer).begin + in.begin(round),
                                      in.length(round)});
                copy.run(0, copy.units());
            }
        }
        raise_stage_flags(session, FINISHED, stage, round + 1,
             [&](u32 peer) { return round < PipelineStage(exchange, peer, rank, stage).rounds; });
    }
    // Later calls use the scratch too, so the peers must have copied all of it.
    for (u32 distance = 1; distance < WORLD; ++distance) {
        const u32 peer = comm.after(distance);
        const u32 sent = PipelineStage(exchange, rank, peer, stage).rounds;
        if (sent > 0 && !block_await_flag(session, FINISHED, peer, stage, sent, DATA)) {
            return false;
        }
    }
    return true;
}

}  // namespace symmpool
