//! Two shots for what no inbox holds: shares are pushed into peers' scratch, and results straight
//! into peers' output, which is a window. Also the first alone, a reduce-scatter.
//! Defines: WORLD, DTYPE, OP, THREADS, SHOTS.
//!
//! Teams of one number on all ranks work together and wait for each other alone. A team sends all
//! it has for one peer before it turns to the next, and ranks keep step, so that no two of them send
//! to one: links carry 361 GB/s on an H200 then, and 347 where blocks send as they come. Before a
//! team writes into a peer's output it has heard from that peer in this call, so nobody there still
//! reads what the call before left.

#include <symmpool/peer_blocks.cuh>

#include "all_reduce/reduce_share.cuh"

#define SCATTER 1
#define GATHER 2

using namespace symmpool;

constexpr int UNROLL = 4;

// A step is announced when so many sixteenths of the leg before it are done: 6 us ahead for 64 MiB of four
// H200s, where a word takes 1.2 and what is stored before it.
constexpr u32 ANNOUNCED = 14;

// Copies vectors `[from, to)` of a source to wherever `store` puts them.
template <typename Store>
__device__ __forceinline__ void copy(const Source& source, u64 from, u64 to, Store store) {
#pragma unroll 1
    for (u64 at = from + threadIdx.x; at < to; at += blockDim.x * UNROLL) {
        uint4 vectors[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            if (at + i * blockDim.x < to) {
                vectors[i] = source.load(at + i * blockDim.x);
            }
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            if (at + i * blockDim.x < to) {
                store(at + i * blockDim.x, vectors[i]);
            }
        }
    }
}

__device__ __forceinline__ u64 least(u64 a, u64 b) { return a < b ? a : b; }

// Shares, or parts, through scratch.
struct Push {
    const Session& session;
    const Comm& comm;
    const Call& call;
    const Parts<((SHOTS & (SCATTER | GATHER)) == (SCATTER | GATHER))> parts;
    const PeerBlocks peer_blocks;
    const Division division;

    __device__ __forceinline__ Push(const Session& s, const Call& c)
        : session(s), comm(s.comm), call(c), parts(c), peer_blocks(c.peer_blocks),
          division(parts.vectors(), c.peer_blocks) {}

    // Where a rank's results go: into this rank's memory, or a peer's.
    __device__ __forceinline__ Target output(u32 distance) const {
        if (SHOTS & GATHER) {
            return parts.of(comm.at_peer(call.output, comm.after(distance)), comm.rank);
        }
        return Target(call.output, parts.bytes);
    }

    // To one peer.
    __device__ __forceinline__ void scatter(u32 distance, u64 from, u64 to) const {
        const u32 peer = comm.after(distance);
        const Source part = parts.of(call.input, peer);
        char* there = comm.scratch_of(peer, comm.rank);
        copy(part, from, least(part.vectors(), to), [&](u64 at, uint4 vector) {
            store_plain(there + 16 * at, vector);
        });
    }

    // Into this rank's output and, with ONWARDS, the next rank's.
    template <bool ONWARDS>
    __device__ __forceinline__ void reduce(u64 from, u64 to) const {
        const Source input = parts.of(call.input, comm.rank);
        reduce_share<ONWARDS>(comm, input, output(0), output(ONWARDS ? 1 : 0), from,
                              least(input.vectors(), to));
    }

    // What every team of this block has, from one sixteenth to another.
    template <typename Do>
    __device__ __forceinline__ void each(u32 first, u32 last, Do act) const {
#pragma unroll 1
        for (u32 block = peer_blocks.first; block < peer_blocks.end; ++block) {
            const Range range = division[block];
            // Whole lines of 128 bytes stay together.
            const u64 lines = (range.to - range.from) / 8;
            const u64 from = range.from + lines * first / 16 * 8;
            act(from, last == 16 ? range.to : range.from + lines * last / 16 * 8);
        }
    }

    // One leg, which ends with a step.
    template <typename Do>
    __device__ __forceinline__ void leg(u32 step, Do act) const {
#pragma unroll 1
        for (u32 piece = 0; piece < 2; ++piece) {
            each(piece == 0 ? 0 : ANNOUNCED, piece == 0 ? ANNOUNCED : 16, act);
            if (piece == 0) {
                announce_step(session, peer_blocks, step);
            }
        }
    }

    // Both shots. False where a peer is missing.
    __device__ __forceinline__ bool run() const {
        constexpr bool ONWARDS = (SHOTS & GATHER) != 0;
        u32 step = 0;
#pragma unroll 1
        for (u32 distance = 1; distance + 1 < WORLD; ++distance) {
            leg(++step, [&](u64 from, u64 to) { scatter(distance, from, to); });
            keep_step(session, peer_blocks, step);
        }
        // The last leg of the scatter is in halves, so that the first can be reduced while the flags of the
        // second travel. Who raises those waits for all that is under way, and other warps go on meanwhile.
#pragma unroll 1
        for (u32 half = 0; half < 2; ++half) {
            each(8 * half, 8 * half + 8, [&](u64 from, u64 to) { scatter(WORLD - 1, from, to); });
            if (half == 0 || !ONWARDS) {
                raise_flags(session, peer_blocks, ARRIVED, half + 1);
            }
        }
        // Looked at while those flags are on their way.
        if (ONWARDS && !await_handshakes<false>(session, call)) {
            return false;
        }
        if (!await_flags<ONWARDS>(session, peer_blocks, ARRIVED, 1, DATA)) {
            return false;
        }
        if (ONWARDS) {
            raise_flags(session, peer_blocks, ARRIVED, 2);
        }
        ++step;
#pragma unroll 1
        for (u32 piece = 0; piece < 3; ++piece) {
            if (piece == 1 && !await_flags<ONWARDS>(session, peer_blocks, ARRIVED, 2, DATA)) {
                return false;
            }
            constexpr u32 BOUNDS = 0x10'00'08'00 | ANNOUNCED << 16;
            each(BOUNDS >> 8 * piece & 255, BOUNDS >> (8 * piece + 8) & 255,
                 [&](u64 from, u64 to) { reduce<ONWARDS>(from, to); });
            if (ONWARDS && piece == 1) {
                announce_step(session, peer_blocks, step);
            }
        }
#pragma unroll 1
        for (u32 distance = 2; ONWARDS && distance < WORLD; ++distance) {
            keep_step(session, peer_blocks, step);
            const Source results(output(0).begin, output(0).bytes);
            const Target peer = output(distance);
            leg(++step, [&](u64 from, u64 to) {
                copy(results, from, least(results.vectors(), to),
                     [&](u64 at, uint4 vector) { peer.store(at, vector); });
            });
        }
        raise_flags(session, peer_blocks, FINISHED, 1);
        return true;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_two_shot_push(const __grid_constant__ Comm comm, const __grid_constant__ Call call) {
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
    const Push push(session, call);
    if (push.run()) {
        await_flags(session, push.peer_blocks, FINISHED, 1, RESULT);
    }
}
