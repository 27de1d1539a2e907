//! How many rows each rank and each expert gets: every rank counts its own tokens, and tells the others in the LL
//! protocol.

#pragma once

#include <experts/params.cuh>

namespace symmpool {

// Which experts tokens name.
struct Routing {
    const ExpertsWork& work;
    u32 local;  // experts of a rank

    __device__ __forceinline__ explicit Routing(const ExpertsWork& w) : work(w), local(w.experts / WORLD) {}

    // Id number `item` of all tokens' ids.
    __device__ __forceinline__ long long id(u32 item) const {
        return work.wide ? static_cast<const long long*>(work.ids)[item] : static_cast<const int*>(work.ids)[item];
    }

    // The expert that an id names, or NOWHERE.
    __device__ __forceinline__ u32 expert_of(long long id) const {
        return id >= 0 && id < work.experts ? static_cast<u32>(id) : NOWHERE;
    }

    __device__ __forceinline__ u32 expert(u32 item) const { return expert_of(id(item)); }

    // Calls `visit(item, id, expert)` for each id of the tokens from `from` to `to`, and `done(token, ranks)` for each
    // token: a bit for each rank that has an expert of it. `warp` is the first of the block's warps to begin. Called by
    // all threads of a block. Several threads in a row divide the ids of a token where there are few tokens, so that
    // no thread has to wait for one id after the other.
    template <typename Visit, typename Done>
    __device__ __forceinline__ void for_tokens(u32 from, u32 to, u32 warp, Visit visit, Done done) const {
        // Ids that a thread has under way. Of few tokens a thread has one, and more would only be instructions to load.
        constexpr u32 BATCH = ONLY_LOW_LATENCY ? 1 : 4;
        // A power of two for each token, so that nothing is divided, which takes long.
        u32 log = 0;
        while (log < 5 && 1u << log < work.top_k && 2 * (to - from) << log <= THREADS) {
            ++log;
        }
        const u32 thread = (threadIdx.x + THREADS - 32 * warp) % THREADS;
        const u32 threads = 1u << log, lane = thread & (threads - 1);
#pragma unroll 1
        for (u32 first = from + (thread / 32 << (5 - log)); first < to; first += THREADS >> log) {
            const u32 token = first + (thread % 32 >> log);
            u32 ranks = 0;
#pragma unroll 1
            for (u32 k = lane; k < work.top_k && token < to; k += BATCH * threads) {
                long long found[BATCH];
#pragma unroll
                for (u32 i = 0; i < BATCH; ++i) {
                    found[i] = k + i * threads < work.top_k ? id(token * work.top_k + k + i * threads) : -1;
                }
#pragma unroll
                for (u32 i = 0; i < BATCH; ++i) {
                    const u32 expert = expert_of(found[i]);
                    ranks |= expert == NOWHERE ? 0 : 1u << expert / local;
                    if (k + i * threads < work.top_k) {
                        visit(token * work.top_k + k + i * threads, found[i], expert);
                    }
                }
            }
            for (u32 apart = 1; apart < threads; apart *= 2) {
                ranks |= __shfl_xor_sync(~0u, ranks, apart);
            }
            if (token < to && lane == 0) {
                done(token, ranks);
            }
        }
    }
};

// Counts the tokens below `end` that go to each rank. `sums` is in shared memory, and holds zeros before. `visit` is
// called for each id. Called by all threads of a block; whoever reads `sums` waits for a barrier first.
template <typename Visit>
__device__ __forceinline__ void count_ranks(const Routing& routing, u32 end, u32* sums, Visit visit) {
    if (end == 0) {
        return;
    }
    u32 own[WORLD] = {};
    // The first warp is the last to begin, as it is busy with a handshake in the leader block.
    routing.for_tokens(0, end, 1, visit, [&](u32, u32 ranks) {
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            own[rank] += ranks >> rank & 1;
        }
    });
#pragma unroll
    for (u32 rank = 0; rank < WORLD; ++rank) {
        const u32 sum = __reduce_add_sync(~0u, own[rank]);
        if (threadIdx.x % 32 == 0 && sum != 0) {
            atomicAdd(&sums[rank], sum);
        }
    }
}

// Counts that a rank sends each rank, itself included, in vectors of 16 bytes: how many tokens it has, the first id that
// is no expert; its rows for each rank; its rows for each expert of the receiver.
struct CountVectors {
    static constexpr u32 RANKS = 1;                        // where the rows for each rank begin
    static constexpr u32 EXPERTS = RANKS + (WORLD + 3) / 4;  // where those for experts begin

    u32 vectors;

    __device__ __forceinline__ explicit CountVectors(u32 local_experts) : vectors(EXPERTS + (local_experts + 3) / 4) {}

    static __device__ __forceinline__ u64 bytes_of(u32 local_experts) {
        return 32ull * WORLD * CountVectors(local_experts).vectors;
    }

    __device__ __forceinline__ char* slot(const Session& session, u32 owner, u32 from, u32 at) const {
        const Comm& comm = session.comm;
        return comm.of(owner) + comm.ll + session.parity() * (comm.ll_bytes / 2) + 32ull * (from * vectors + at);
    }

    __device__ __forceinline__ void send(const Session& session, u32 owner, u32 at, uint4 value) const {
        ll_store_vector(slot(session, owner, session.comm.rank, at), value, session.epoch);
    }

    // Waits for a vector; false if it does not arrive in time.
    __device__ __forceinline__ bool receive(const Session& session, u32 from, u32 at, uint4& value) const {
        return await_vector(session, from, slot(session, session.comm.rank, from, at), value);
    }
};

// The number of this thread among those of a block from `first` on. Threads that wait for different things do so at the
// same time.
__device__ __forceinline__ u32 thread_from(u32 first) { return (threadIdx.x + THREADS - first) % THREADS; }

// The rows of every rank for every rank, and how many tokens each has; in shared memory.
struct Counts {
    u32 rows[WORLD][(WORLD + 3) / 4 * 4];
    u32 tokens[WORLD];
    u32 bad_item[WORLD];  // one more than the first token with an id that is no expert, or 0
    u32 bad_id[WORLD];

    // Called by all threads of a block, which wait for a barrier then: false, in some threads, if a rank does not come.
    __device__ __forceinline__ bool receive(const Session& session, const CountVectors& vectors) {
        bool bad = false;
        for (u32 i = thread_from(64); i < WORLD * CountVectors::EXPERTS && !bad; i += THREADS) {
            const u32 from = i / CountVectors::EXPERTS, at = i % CountVectors::EXPERTS;
            uint4 value;
            bad = !vectors.receive(session, from, at, value);
            if (at == 0) {
                tokens[from] = value.x;
                bad_item[from] = value.y;
                bad_id[from] = value.z;
            } else {
                u32* row = &rows[from][4 * (at - CountVectors::RANKS)];
                row[0] = value.x;
                row[1] = value.y;
                row[2] = value.z;
                row[3] = value.w;
            }
        }
        return !bad;
    }

    // Where the rows of a rank begin among those that another one receives.
    __device__ __forceinline__ u32 begin(u32 from, u32 to) const {
        u32 before = 0;
        for (u32 rank = 0; rank < from; ++rank) {
            before += rows[rank][to];
        }
        return before;
    }
};

// How the rows of experts lie; in shared memory.
struct ExpertRows {
    u32 offsets[MAX_EXPERTS / WORLD + 1];         // the first row of each expert, and the end
    u32 before[WORLD * (MAX_EXPERTS / WORLD)];  // rows of earlier ranks, for each rank and expert
    u32 most;                                    // the most rows that an expert has; if each has a part of its own

    // Called by all threads of a block, which wait for a barrier then: false, in some threads, if a rank does not come.
    // `counts` gets the rows of each expert, if it is an address.
    __device__ __forceinline__ bool receive(const Session& session, const CountVectors& vectors, u32 local,
                                            int* counts) {
        bool bad = false;
        for (u32 group = thread_from(128); group < (local + 3) / 4; group += THREADS) {
            u32 sums[4] = {};
            for (u32 from = 0; from < WORLD && !bad; ++from) {
                uint4 value;
                bad = !vectors.receive(session, from, CountVectors::EXPERTS + group, value);
                const u32 found[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    if (4 * group + i < local) {
                        before[from * local + 4 * group + i] = sums[i];
                        sums[i] += found[i];
                    }
                }
            }
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                if (4 * group + i < local) {
                    offsets[4 * group + i] = sums[i];
                    if (counts != nullptr) {
                        counts[4 * group + i] = static_cast<int>(sums[i]);
                    }
                }
            }
        }
        return !bad;
    }

    // Makes offsets of the counts that were received. Called by the first warp; others wait for a barrier then.
    __device__ __forceinline__ void place(const ExpertsWork& work, u32 local) {
        if (work.expert_rows != 0) {
            divide(local, static_cast<u32>(work.expert_rows));
        } else {
            scan(local, work.alignment);
        }
    }

private:
    // Each thread adds up some experts in a row.
    __device__ __forceinline__ void scan(u32 local, u32 alignment) {
        const u32 each = (local + 31) / 32, first = threadIdx.x * each;
        const u32 end = first + each < local ? first + each : local;
        u32 own = 0;
        for (u32 i = first; i < end; ++i) {
            own += padded(offsets[i], alignment);
        }
        u32 sum = own;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 lower = __shfl_up_sync(~0u, sum, step);
            sum += threadIdx.x >= step ? lower : 0;
        }
        u32 at = sum - own;
        for (u32 i = first; i < end; ++i) {
            const u32 count = padded(offsets[i], alignment);
            offsets[i] = at;
            at += count;
        }
        if (threadIdx.x == 31) {
            offsets[local] = sum;
        }
    }

    // Gives each expert a part of `rows` rows, whatever the counts are that stand there.
    __device__ __forceinline__ void divide(u32 local, u32 rows) {
        u32 own = 0;
        for (u32 i = threadIdx.x; i <= local; i += 32) {
            own = i < local && offsets[i] > own ? offsets[i] : own;
            offsets[i] = i * rows;
        }
        own = __reduce_max_sync(~0u, own);
        if (threadIdx.x == 0) {
            most = own;
        }
    }

    static __device__ __forceinline__ u32 padded(u32 count, u32 alignment) {
        return (count + alignment - 1) / alignment * alignment;
    }
};

}  // namespace symmpool
