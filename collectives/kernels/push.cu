//! Two shots for what no inbox holds: shares are pushed into peers' scratch, and results straight
//! into peers' output, which is a window. Also the halves alone, and broadcast.
//! Defines: WORLD, DTYPE, OP, THREADS, SHOTS.
//!
//! Data goes in rounds that fill half of the scratch each. Blocks of one number on all ranks work
//! together and wait for each other alone. Before a block writes into a peer's output it has heard
//! from that peer in this call, so nobody there still reads what the call before left.

#include "flags.cuh"
#include "parts.cuh"
#include "ranks.cuh"

#define SCATTER 1
#define GATHER 2
#define BROADCAST 4

using namespace symmpool;

constexpr int UNROLL = 4;

// Copies vectors `[from, to)` of a source to wherever `store` puts them.
template <typename Store>
__device__ __forceinline__ void copy(const Source& source, u64 from, u64 to, Store store) {
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

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_push(const __grid_constant__ Comm comm, const __grid_constant__ Call call) {
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

    if (SHOTS & (GATHER | BROADCAST) && !(SHOTS & SCATTER)) {
        const bool sends = !(SHOTS & BROADCAST) || comm.rank == call.root;
        const Source input(call.input, call.bytes);
        char* part = call.output + ((SHOTS & BROADCAST) ? 0 : comm.rank * call.stride);
        const Range range(0, input.vectors());
        if (sends) {
            if (!all_entered(session)) {
                return;
            }
            for (u32 distance = 0; distance < WORLD; ++distance) {
                const Target output(comm.at_peer(part, comm.after(distance)), call.bytes);
                if (output.begin != input.begin) {
                    copy(input, range.from, range.to,
                         [&](u64 at, uint4 vector) { output.store(at, vector); });
                }
            }
            raise(session, FINISHED, 1);
        }
        if (SHOTS & BROADCAST) {
            if (!sends) {
                bool bad = false;
                if (threadIdx.x == 0) {
                    const u64* own = flag(session, comm.rank, FINISHED, call.root);
                    Watch watch;
                    while (static_cast<u32>(load_acquire(own) >> 32) != session.epoch && !bad) {
                        bad = watch.expired(session, call.root, RESULT);
                    }
                }
                __syncthreads_or(bad);
            }
        } else {
            await_flags(session, FINISHED, 1, RESULT);
        }
        return;
    }

    const Parts<(SHOTS == (SCATTER | GATHER))> parts(call);
    const u64 vectors = parts.vectors();
    const u64 room = comm.scratch_bytes / 32 / WORLD / 8 * 8;  // vectors from a rank in a round
    const u32 rounds = static_cast<u32>((vectors + room - 1) / room);
    auto slot = [&](u32 owner, u32 from, u32 round) {
        return comm.of(owner) + comm.scratch + 16 * room * ((round & 1) * WORLD + from);
    };
    auto range_of = [&](u32 round) {
        u64 begin = round * room, left = vectors - begin;
        return Range(begin, left < room ? left : room);
    };
    auto scatter = [&](u32 round) {
        const Range range = range_of(round);
        for (u32 distance = 1; distance < WORLD; ++distance) {
            u32 peer = comm.after(distance);
            const Source part = parts.of(call.input, peer);
            char* to = slot(peer, comm.rank, round);
            u64 end = part.vectors() < range.to ? part.vectors() : range.to;
            copy(part, range.from, end, [&](u64 at, uint4 vector) {
                store_plain(to + 16 * (at - round * room), vector);
            });
        }
        raise(session, ARRIVED, round + 1);
    };
    auto reduce = [&](u32 round) {
        const Range range = range_of(round);
        const Source input = parts.of(call.input, comm.rank);
        u64 end = input.vectors() < range.to ? input.vectors() : range.to;
        for (u64 at = range.from + threadIdx.x; at < end; at += blockDim.x) {
            uint4 all[WORLD];
#pragma unroll
            for (u32 rank = 0; rank < WORLD; ++rank) {
                all[rank] = rank == comm.rank
                    ? input.load(at)
                    : load_plain(slot(comm.rank, rank, round) + 16 * (at - round * room));
            }
            const uint4 result = reduce_all(all);
            if (SHOTS & GATHER) {
#pragma unroll
                for (u32 distance = 1; distance <= WORLD; ++distance) {
                    char* output = comm.at_peer(call.output, comm.after(distance % WORLD));
                    parts.of(output, comm.rank).store(at, result);
                }
            } else {
                Target(call.output, parts.bytes).store(at, result);
            }
        }
        raise(session, FINISHED, round + 1);
    };
    if (rounds > 0) {
        scatter(0);
    }
    for (u32 round = 0; round < rounds; ++round) {
        if (round + 1 < rounds) {
            // Its half of the scratch held the round before.
            if (round > 0 && !await_flags(session, FINISHED, round, RESULT)) {
                return;
            }
            scatter(round + 1);
        }
        if (!await_flags(session, ARRIVED, round + 1, DATA)) {
            return;
        }
        reduce(round);
    }
    await_flags(session, FINISHED, rounds, RESULT);
}
