//! All-reduce in one shot, in lines: eight threads store 128 bytes at once, of which the last eight
//! are flags. Any bits can travel, and take little more than their space.
//! Defines: WORLD, DTYPE, OP, THREADS.
//!
//! A line that one warp stores with one instruction arrives whole over NVLink, and one that it loads
//! with one instruction is seen whole: NCCL's LL128 protocol rests on the same.

#include "data.cuh"
#include "entry.cuh"
#include "ranks.cuh"

using namespace symmpool;

constexpr u32 LINE = 128;
constexpr u32 PAYLOAD = 120;
constexpr u32 PARTS = 8;  // threads of a line

// Up to sixteen bytes, as two halves: what data of lines is aligned to if its beginning is.
__device__ __forceinline__ uint4 load_halves(const char* at, u32 count) {
    if (reinterpret_cast<u64>(at) % 8 != 0 || count % 8 != 0) {
        return gather_bytes(at, count);
    }
    const uint2* halves = reinterpret_cast<const uint2*>(at);
    uint2 low = make_uint2(0, 0), high = make_uint2(0, 0);
    if (count >= 8) {
        low = halves[0];
    }
    if (count == 16) {
        high = halves[1];
    }
    return make_uint4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ void store_halves(char* at, u32 count, uint4 vector) {
    if (reinterpret_cast<u64>(at) % 8 != 0 || count % 8 != 0) {
        scatter_bytes(at, count, vector);
        return;
    }
    uint2* halves = reinterpret_cast<uint2*>(at);
    if (count >= 8) {
        halves[0] = make_uint2(vector.x, vector.y);
    }
    if (count == 16) {
        halves[1] = make_uint2(vector.z, vector.w);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_one_shot_line(const __grid_constant__ Comm comm, const __grid_constant__ Call call) {
    begin();
    const u64 lines = (call.bytes + PAYLOAD - 1) / PAYLOAD;
    const u32 part = threadIdx.x % PARTS;
    const u64 step = data_threads() / PARTS;
    u64 line = attends() ? 0 : data_thread() / PARTS;
    // This thread's bytes of a line: sixteen, in the last thread eight; fewer at the end.
    auto bytes_of = [&](u64 at) {
        const u64 from = at * PAYLOAD + part * 16;
        const u64 left = from < call.bytes ? call.bytes - from : 0;
        const u32 most = part == PARTS - 1 ? 8 : 16;
        return static_cast<u32>(left < most ? left : most);
    };
    auto load = [&](u64 at) {
        return load_halves(call.input + at * PAYLOAD + part * 16, bytes_of(at));
    };
    uint4 own = make_uint4(0, 0, 0, 0);
    if (!attends() && line < lines) {
        own = load(line);  // on its way while the state is read
    }
    const Session session(comm);
    if (session.failed) {
        return;
    }
    const u64 inbox = comm.lines + session.parity() * (comm.lines_bytes / 2);
    if (attends()) {
        Used used;
        used.lines = WORLD * lines * LINE;
        attend<false>(session, call, used);
        return;
    }
    // Warps stay together: lines past the end are waited for by nobody.
    const u64 rounds = lines == 0 ? 1 : (lines + step - 1) / step;
    for (u64 round = 0; round < rounds; ++round, line += step) {
        const bool live = line < lines;
        if (live) {
            own = round == 0 ? own : load(line);
            uint4 vector = own;
            if (part == PARTS - 1) {
                vector.z = session.epoch, vector.w = session.epoch;
            }
#pragma unroll
            for (u32 distance = 1; distance < WORLD; ++distance) {
                char* to = comm.of(comm.after(distance)) + inbox;
                store_relaxed(to + (comm.rank * lines + line) * LINE + part * 16, vector);
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
                // All loads before the first look; this rank's own place holds nothing.
#pragma unroll
                for (u32 rank = 0; rank < WORLD; ++rank) {
                    all[rank] = load_relaxed(comm.own() + inbox +
                                             (rank * lines + line) * LINE + part * 16);
                }
#pragma unroll
                for (u32 rank = 0; rank < WORLD; ++rank) {
                    bool flagged = all[rank].z == session.epoch && all[rank].w == session.epoch;
                    const bool here = rank == comm.rank;
                    all[rank] = either(here, own, all[rank]);
                    missing = !here && part == PARTS - 1 && !flagged ? rank : missing;
                }
            }
            waiting = __any_sync(~0u, missing != WORLD);
            const u32 named = __reduce_min_sync(~0u, missing);
            if (waiting && __any_sync(~0u, watch.expired(session, named, DATA))) {
                return;
            }
        }
        if (live) {
            store_halves(call.output + line * PAYLOAD + part * 16, bytes_of(line),
                         reduce_all(all));
        }
    }
}
