//! All-reduce in two shots and reduce-scatter, which is the first shot alone, for data that no inbox can hold and of
//! which scratch holds a part: data goes through scratch in stages.
//! Defines: WORLD, DTYPE, OP, THREADS, COLLECTIVE (ALL_REDUCE or REDUCE_SCATTER).
//!
//! Peer blocks wait for each other alone. While the data of one stage travels, the stage before it is reduced. Scratch
//! has two halves, which stages use in turn. In an all-reduce, results go straight into outputs that are windows; for
//! other outputs (`CallParams::root` is not 0) they go through scratch, too, from where each rank copies them.
//!
//! Two flags of each index count stages: ARRIVED says that the inputs of that many stages are in the receiver's scratch,
//! and FINISHED that that many have been reduced, and that their results are where they go. Both say more, by the order in
//! which a block does things: when a stage's inputs have arrived, its sender has read them, and has copied the results
//! of all but the last two stages before it. So a half of the scratch is empty again when it is written.

#include <symmpool/impl/copy.cuh>
#include <symmpool/impl/peer_blocks.cuh>

#include "all_reduce/reduce_share.cuh"

using namespace symmpool;

enum class Collective { ALL_REDUCE, REDUCE_SCATTER };
constexpr bool GATHERS = Collective::COLLECTIVE == Collective::ALL_REDUCE;

constexpr int UNROLL = 4;
// Vectors of each rank that a thread holds at once: fewer than in other kernels, as stages take registers too.
constexpr int STAGE_HELD = WORLD == 2 ? 3 : WORLD == 3 ? 2 : 1;

// A stage has about a fourth of what an index has in all, so that calls of medium size overlap their stages too, but no
// fewer vectors than this, unless scratch has less room: what flags cost would show.
constexpr u32 MIN_STAGE_VECTORS = 2048;

struct Stages {
    const Session& session;
    const Comm& comm;
    const CallParams& call;
    const RankChunks<GATHERS> chunks;
    const PeerBlocks peer_blocks;
    const EvenSplit split;
    const bool through_scratch;  // whether results go through scratch
    u32 each;                    // vectors of an index in a stage; 32 bits, as registers are few
    u32 count;                   // how many stages there are, the same for all indices on all ranks

    __device__ __forceinline__ Stages(const Session& s, const CallParams& c)
        : session(s), comm(s.comm), call(c), chunks(c), peer_blocks(c.peer_blocks),
          split(chunks.vectors(), c.peer_blocks), through_scratch(GATHERS && c.root != 0) {
        const u64 whole = split.longest();
        const u64 most = comm.scratch_vectors() / (through_scratch ? 4 : 2) / call.peer_blocks / 8 * 8;
        u64 wanted = (whole + 31) / 32 * 8;
        wanted = wanted < MIN_STAGE_VECTORS ? MIN_STAGE_VECTORS : wanted;
        each = static_cast<u32>(wanted < most ? wanted : most);
        count = static_cast<u32>((whole + each - 1) / each);
    }

    // Vectors of an index that belong to a stage.
    __device__ __forceinline__ Range range(u32 index, u32 stage) const {
        const Range all = split[index];
        const u64 from = all.from + static_cast<u64>(stage) * each, to = from + each;
        return {from < all.to ? from : all.to, to < all.to ? to : all.to};
    }

    static __device__ __forceinline__ Range up_to(Range range, u64 end) {
        return {range.from, range.to < end ? range.to : end};
    }

    // Where the vectors of an index and a stage lie that `sender` stores in `owner`'s scratch: inputs, or results, which
    // have a part of their own behind both halves for inputs.
    template <bool RESULTS>
    __device__ __forceinline__ char* slot(u32 owner, u32 sender, u32 index, u32 stage) const {
        const u64 part = (RESULTS ? 2 : 0) + stage % 2;
        return comm.scratch_of(owner, sender) + 16 * (part * call.peer_blocks + index) * static_cast<u64>(each);
    }

    template <typename Act>
    __device__ __forceinline__ void each_index(Act act) const {
#pragma unroll 1
        for (u32 index = peer_blocks.first; index < peer_blocks.end; ++index) {
            act(index);
        }
    }

    // Gives `store` what `load` finds in a range of vectors.
    template <typename Load, typename Store>
    static __device__ __forceinline__ void copy(Range range, Load load, Store store) {
        copy_unrolled<UNROLL>(range.from + threadIdx.x, range.to, blockDim.x, load, store);
    }

    // Sends a stage of each peer's chunk of this rank's input.
    __device__ __forceinline__ void scatter(u32 stage) const {
        each_index([&](u32 index) {
            const Range all = range(index, stage);
#pragma unroll 1
            for (u32 distance = 1; distance < WORLD; ++distance) {
                const u32 peer = comm.after(distance);
                const Source chunk = chunks.of(call.input, peer);
                char* there = slot<false>(peer, comm.rank, index, stage);
                copy(up_to(all, chunk.vectors()), [&](u64 at) { return chunk.load(at); },
                     [&](u64 at, uint4 vector) { store_plain(there + 16 * (at - all.from), vector); });
            }
        });
    }

    // Reduces a stage of this rank's chunk. In an all-reduce, all peers get the results: the next one at the same time,
    // the others from this rank's output.
    __device__ __forceinline__ void reduce(u32 stage) const {
        const Source input = chunks.of(call.input, comm.rank);
        const Target own = GATHERS ? chunks.of(call.output, comm.rank) : Target(call.output, chunks.bytes);
        each_index([&](u32 index) {
            const Range all = range(index, stage), mine = up_to(all, input.vectors());
            auto theirs = [&](u32 rank, u64 at) {
                return load_plain(slot<false>(comm.rank, rank, index, stage) + 16 * (at - all.from));
            };
            auto send = [&](u32 distance) {
                const u32 peer = comm.after(distance);
                // One pointer serves both ways, as registers are few.
                char* there = through_scratch ? slot<true>(peer, comm.rank, index, stage)
                                              : comm.at_peer(own.begin, peer);
                return [this, there, from = all.from, bytes = own.bytes](u64 at, uint4 vector) {
                    through_scratch ? store_plain(there + 16 * (at - from), vector)
                                    : Target(there, bytes).store(at, vector);
                };
            };
            reduce_share<GATHERS, STAGE_HELD>(comm, input, own, mine, theirs, send(GATHERS ? 1 : 0));
            if (GATHERS && WORLD > 2) {
                // A thread sends what it has stored itself.
                const Source results(own.begin, own.bytes);
#pragma unroll 1
                for (u32 distance = 2; distance < WORLD; ++distance) {
                    copy(mine, [&](u64 at) { return results.load(at); }, send(distance));
                }
            }
        });
    }

    // Copies the peers' results of a stage from this rank's scratch to its output.
    __device__ __forceinline__ void collect(u32 stage) const {
        each_index([&](u32 index) {
            const Range all = range(index, stage);
#pragma unroll 1
            for (u32 distance = 1; distance < WORLD; ++distance) {
                const u32 peer = comm.after(distance);
                const Target chunk = chunks.of(call.output, peer);
                const char* here = slot<true>(comm.rank, peer, index, stage);
                copy(up_to(all, chunk.vectors()), [&](u64 at) { return load_plain(here + 16 * (at - all.from)); },
                     [&](u64 at, uint4 vector) { chunk.store(at, vector); });
            }
        });
    }

    // False where a peer is missing.
    __device__ __forceinline__ bool run() const {
        // In a turn, one stage is sent, the one before it is reduced, and the results of the one before that are copied.
        const u32 turns = count + (through_scratch ? 2 : 1);
#pragma unroll 1
        for (u32 turn = 0; turn < turns; ++turn) {
            // The peers have reduced the stage that was in this half of their scratch, and sent its results.
            if (turn >= 2 && (turn < count || through_scratch) &&
                !await_flags(session, peer_blocks, FINISHED, turn - 1, RESULT)) {
                return false;
            }
            if (turn < count) {
                scatter(turn);
            }
            if (through_scratch && turn >= 2) {
                collect(turn - 2);
            }
            if (turn < count) {
                raise_flags(session, peer_blocks, ARRIVED, turn + 1);
            }
            if (turn == 0 || turn > count) {
                continue;
            }
            // Results are written into peers' memory from here on, so handshakes are awaited first, while the flags travel.
            if (GATHERS && turn == 1 && !await_handshakes<false>(session, call)) {
                return false;
            }
            if (!await_flags<GATHERS>(session, peer_blocks, ARRIVED, turn, DATA)) {
                return false;
            }
            reduce(turn - 1);
            raise_flags(session, peer_blocks, FINISHED, turn);
        }
        // The next call uses the scratch, too.
        if (through_scratch) {
            raise_flags(session, peer_blocks, FINISHED, turns);
        }
        return await_flags(session, peer_blocks, FINISHED, through_scratch ? turns : count, RESULT);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_two_shot_pipeline(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call) {
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
    Stages(session, call).run();
}
