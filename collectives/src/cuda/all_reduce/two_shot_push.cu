//! All-reduce in two shots for data that no inbox can hold, and that scratch can: shares are pushed into the peers'
//! scratch, and results into the peers' outputs, which are windows. `two_shot_pipeline.cu` is for more data.
//! Defines: WORLD, DTYPE, OP, THREADS.
//!
//! Peer blocks wait for each other alone. A block sends all its data for one peer before it turns to the next, and
//! ranks keep step, so that no two of them send to one peer: links then carry 361 GB/s on an H200, and 347 where
//! blocks do not keep step. Before a block writes into a peer's output it has received that peer's flag in this call,
//! so nobody there still reads what the call before left.

#include <symmpool/impl/copy.cuh>
#include <symmpool/impl/peer_blocks.cuh>

#include "all_reduce/reduce_share.cuh"

using namespace symmpool;

constexpr int UNROLL = 4;

// A step is announced when this many sixteenths of the one before are done: 6 us ahead for 64 MiB on four H200s, where a
// word takes 1.2 us, and the stores before it some time more.
constexpr u32 ANNOUNCED = 14;

// Copies a range of vectors from `source` to wherever `store` puts them. Called by all threads of a block.
template <typename Store>
__device__ __forceinline__ void copy(const Source& source, Range range, Store store) {
    copy_unrolled<UNROLL>(range.from + threadIdx.x, range.to, blockDim.x,
                          [&](u64 at) { return source.load(at); }, store);
}

__device__ __forceinline__ Range up_to(Range range, u64 end) {
    return {range.from, range.to < end ? range.to : end};
}

struct Push {
    const Session& session;
    const Comm& comm;
    const CallParams& call;
    const RankChunks<true> chunks;
    const PeerBlocks peer_blocks;
    const EvenSplit split;

    __device__ __forceinline__ Push(const Session& s, const CallParams& c)
        : session(s), comm(s.comm), call(c), chunks(c), peer_blocks(c.peer_blocks),
          split(chunks.vectors(), c.peer_blocks) {}

    // Where this rank's results go: in its own output, or in that of the peer at a distance.
    __device__ __forceinline__ Target output(u32 distance) const {
        return chunks.of(comm.at_peer(call.output, comm.after(distance)), comm.rank);
    }

    // Sends a range of the peer's chunk of this rank's input.
    __device__ __forceinline__ void scatter(u32 distance, Range range) const {
        const u32 peer = comm.after(distance);
        const Source chunk = chunks.of(call.input, peer);
        char* there = comm.scratch_of(peer, comm.rank);
        copy(chunk, up_to(range, chunk.vectors()), [&](u64 at, uint4 vector) {
            store_plain(there + 16 * at, vector);
        });
    }

    // Reduces a range of this rank's chunk, also into the output of the next rank.
    __device__ __forceinline__ void reduce(Range range) const {
        const Source input = chunks.of(call.input, comm.rank);
        reduce_share<true>(comm, input, output(0), output(1), up_to(range, input.vectors()));
    }

    // Does `act` for the data of each of this block's indices, from one sixteenth of it to another.
    template <typename Act>
    __device__ __forceinline__ void each(u32 first, u32 last, Act act) const {
#pragma unroll 1
        for (u32 index = peer_blocks.first; index < peer_blocks.end; ++index) {
            const Range range = split[index];
            // Whole lines of 128 bytes stay together.
            const u64 lines = (range.to - range.from) / 8;
            const u64 from = range.from + lines * first / 16 * 8;
            act(Range{from, last == 16 ? range.to : range.from + lines * last / 16 * 8});
        }
    }

    // Does `act` for all of it, and announces a step on the way.
    template <typename Act>
    __device__ __forceinline__ void announcing(u32 step, Act act) const {
#pragma unroll 1
        for (u32 piece = 0; piece < 2; ++piece) {
            each(piece == 0 ? 0 : ANNOUNCED, piece == 0 ? ANNOUNCED : 16, act);
            if (piece == 0) {
                announce_step(session, peer_blocks, step);
            }
        }
    }

    // False where a peer is missing.
    __device__ __forceinline__ bool run() const {
        u32 step = 0;
#pragma unroll 1
        for (u32 distance = 1; distance + 1 < WORLD; ++distance) {
            announcing(++step, [&](Range range) { scatter(distance, range); });
            keep_step(session, peer_blocks, step);
        }
        // The last peer's share is sent in halves, so that the first can be reduced while the flags of the second travel.
        // The threads that raise flags wait for all their stores, and other warps go on meanwhile.
#pragma unroll 1
        for (u32 half = 0; half < 2; ++half) {
            each(8 * half, 8 * half + 8, [&](Range range) { scatter(WORLD - 1, range); });
            if (half == 0) {
                raise_flags(session, peer_blocks, ARRIVED, 1);
            }
        }
        // Handshakes are awaited while those flags travel.
        if (!await_handshakes<false>(session, call)) {
            return false;
        }
        if (!await_flags<true>(session, peer_blocks, ARRIVED, 1, DATA)) {
            return false;
        }
        raise_flags(session, peer_blocks, ARRIVED, 2);
        ++step;
        // In three pieces: the first half; until the next step is announced; the rest.
#pragma unroll 1
        for (u32 piece = 0; piece < 3; ++piece) {
            if (piece == 1 && !await_flags<true>(session, peer_blocks, ARRIVED, 2, DATA)) {
                return false;
            }
            // The bounds of the pieces in sixteenths, a byte each.
            constexpr u32 BOUNDS = 0x10'00'08'00 | ANNOUNCED << 16;
            each(BOUNDS >> 8 * piece & 255, BOUNDS >> (8 * piece + 8) & 255,
                 [&](Range range) { reduce(range); });
            if (piece == 1) {
                announce_step(session, peer_blocks, step);
            }
        }
        // The next rank has the results already.
#pragma unroll 1
        for (u32 distance = 2; distance < WORLD; ++distance) {
            keep_step(session, peer_blocks, step);
            const Source results(output(0).begin, output(0).bytes);
            const Target peer = output(distance);
            announcing(++step, [&](Range range) {
                copy(results, up_to(range, results.vectors()),
                     [&](u64 at, uint4 vector) { peer.store(at, vector); });
            });
        }
        raise_flags(session, peer_blocks, FINISHED, 1);
        return true;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_two_shot_push(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call) {
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
    const Push push(session, call);
    if (push.run()) {
        await_flags(session, push.peer_blocks, FINISHED, 1, RESULT);
    }
}
