//! Dispatch to experts: every token goes to the ranks of its experts, once to each, where its row belongs at once.
//! Defines: WORLD, THREADS, BY_EXPERT; with QUANTIZES also DTYPE, the type of the tokens that become 8-bit floats.
//!
//! The leader block counts this rank's rows for each rank and expert and tells all ranks. Worker blocks count the tokens
//! before their own, so they know the places of their rows without waiting for other blocks. Before they write to a peer
//! they wait for its handshake: it has come to this call, so it has read what it received before.
//!
//! With BY_EXPERT, blocks copy the rows that have arrived to the places of their experts.

#include <experts/arrived.cuh>

using namespace symmpool;

// --- the leader block

__device__ __forceinline__ void send_counts(const Session& session, const Routing& routing, const CountVectors& vectors) {
    const ExpertsWork& work = routing.work;
    count_ranks(routing, work.tokens, shared.next, [&](u32 item, long long id, u32 expert) {
        if (expert != NOWHERE) {
            atomicAdd(&experts_before[expert], 1);
        } else if (id != -1) {
            atomicMin(&first_bad, item);
        }
    });
    __syncthreads();
    for (u32 i = threadIdx.x; i < WORLD * vectors.vectors; i += THREADS) {
        const u32 to = session.comm.after(i % WORLD), at = i / WORLD;
        uint4 value = make_uint4(0, 0, 0, 0);
        if (at == 0) {
            const bool bad = first_bad != NOWHERE;
            const long long id = bad ? routing.id(first_bad) : 0;
            const long long least = -0x80000000ll, most = 0x7fffffffll;
            value.x = work.tokens;
            value.y = bad ? first_bad / work.top_k + 1 : 0;
            value.z = static_cast<u32>(static_cast<int>(id < least ? least : id > most ? most : id));
        } else {
            const bool ranks = at < CountVectors::EXPERTS;
            const u32 first = 4 * (at - (ranks ? CountVectors::RANKS : CountVectors::EXPERTS));
            const u32 end = ranks ? WORLD : routing.local;
            const u32* from = ranks ? shared.next : experts_before + to * routing.local;
            value.x = first < end ? from[first] : 0;
            value.y = first + 1 < end ? from[first + 1] : 0;
            value.z = first + 2 < end ? from[first + 2] : 0;
            value.w = first + 3 < end ? from[first + 3] : 0;
        }
        vectors.send(session, to, at, value);
    }
}

// Writes the handle's numbers of all rows, and tells the host of what did not fit.
__device__ __forceinline__ void keep_counts(const Session& session, const Routing& routing, const CountVectors& vectors) {
    const ExpertsWork& work = routing.work;
    const u32 rank = session.comm.rank;
    if (!shared.counts.receive(session, vectors) ||
        !expert_rows.receive(session, vectors, routing.local, work, work.expert_counts)) {
        return;
    }
    for (u32 i = threadIdx.x; i <= routing.local; i += THREADS) {
        work.expert_offsets[i] = static_cast<int>(expert_rows.offsets[i]);
    }
    if (threadIdx.x < WORLD) {
        const u32 other = threadIdx.x;
        work.bases[other] = static_cast<int>(shared.counts.begin(rank, other));
        work.source_tokens[other] = static_cast<int>(shared.counts.tokens[other]);
    }
    if (threadIdx.x != 0) {
        return;
    }
    const u64 by_expert = expert_rows.offsets[routing.local];
    u32 rows = 0;
    for (u32 from = 0; from <= WORLD; ++from) {
        const u32 begin = shared.counts.begin(from, rank);
        work.source_offsets[from] = static_cast<int>(begin < work.capacity ? begin : work.capacity);
        rows = begin;
    }
    work.head[0] = static_cast<int>(rows < work.capacity ? rows : work.capacity);
    work.head[1] = static_cast<int>(work.tokens);
    work.head[2] = static_cast<int>(by_expert);
    // The first of these, which all ranks find alike but for the last kind.
    for (u32 other = 0; other < WORLD; ++other) {
        uint4 of;
        const u64 all = shared.counts.begin(WORLD, other);
        if (vectors.receive(session, other, 0, of) && of.y != 0) {
            write_notice(session, NO_EXPERT, other, of.y - 1, of.z);
            return;
        }
        if (all > work.capacity) {
            write_notice(session, ROWS_OVERFLOW, other, all, work.capacity);
            return;
        }
    }
    if (BY_EXPERT && work.expert_rows != 0) {
        if (expert_rows.most > work.expert_rows) {
            write_notice(session, EXPERT_OVERFLOW, rank, expert_rows.most, work.expert_rows);
        }
    } else if (BY_EXPERT && by_expert > work.output_capacity) {
        write_notice(session, EXPERTS_OVERFLOW, rank, by_expert, work.output_capacity);
    }
}

__device__ __forceinline__ void lead(const Session& session, const Call& call, const Routing& routing) {
    const CountVectors vectors(routing.local);
    if (!routing.work.known) {
        clear_counts(routing.work);
    }
    // The first warp sends the handshake, which takes it a fence, while the others begin to count.
    if (threadIdx.x < 32) {
        send_handshake<true>(session, call, threadIdx.x, 32);
    }
    if (!routing.work.known) {
        send_counts(session, routing, vectors);
    }
    session.advance();
    compare_handshakes(session, call);
    if (must_expire_flags(session)) {
        UsedBytes used = used_flags(routing.work.peer_blocks);
        used.ll = CountVectors::bytes_of(routing.local);
        expire_old_flags(session, used);
        expire_escape_marks(session);
    }
    if (!routing.work.known) {
        keep_counts(session, routing, vectors);
    }
}

// --- worker blocks

// What worker blocks know before they send: where rows begin. False if a rank does not come.
__device__ __forceinline__ bool know_rows(const Session& session, const Routing& routing) {
    const ExpertsWork& work = routing.work;
    const u32 rank = session.comm.rank;
    if (work.known) {
        if (threadIdx.x < WORLD) {
            shared.bases[threadIdx.x] = static_cast<u32>(work.bases[threadIdx.x]);
            shared.counts.tokens[threadIdx.x] = static_cast<u32>(work.source_tokens[threadIdx.x]);
        }
        if (threadIdx.x <= WORLD) {
            shared.sources[threadIdx.x] = static_cast<u32>(work.source_offsets[threadIdx.x]);
        }
        __syncthreads();
        return true;
    }
    const CountVectors vectors(routing.local);
    if (!shared.counts.receive(session, vectors)) {
        return false;
    }
    if (threadIdx.x < WORLD) {
        shared.bases[threadIdx.x] = shared.counts.begin(rank, threadIdx.x);
    }
    if (threadIdx.x <= WORLD) {
        shared.sources[threadIdx.x] = shared.counts.begin(threadIdx.x, rank);
    }
    if (BY_EXPERT) {
        return expert_rows.receive(session, vectors, routing.local, work, nullptr);
    }
    __syncthreads();
    return true;
}

// A name from which profilers make "symmpool::dispatch()": tools for expert parallelism look for "::dispatch".
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    _ZN8symmpool8dispatchEv(const __grid_constant__ Comm comm, const __grid_constant__ Call call,
                      const __grid_constant__ ExpertsWork work) {
    begin_kernel(comm.early);
    const Session session(comm);
    if (session.failed) {
        return;
    }
    const Routing routing(work);
    if (is_leader_block()) {
        lead(session, call, routing);
        return;
    }
    session.advance();
    const PeerBlocks own(work.peer_blocks);
    const Chunks chunks(work.tokens, work.peer_blocks);
    const OwnTokens tokens(chunks, own);
    if (!work.known) {
        clear_counts(work);
        count_ranks(routing, tokens.from, shared.next, [&](u32, long long, u32 expert) {
            if (BY_EXPERT && expert != NOWHERE) {
                atomicAdd(&experts_before[expert], 1);
            }
        });
    }
    if (!await_handshakes<true>(session, call) || !know_rows(session, routing)) {
        return;
    }
    u32 tile = tokens.from;
    do {
        const u32 left = tokens.to - tile, count = left < TILE ? left : TILE;
        place_tile(routing, tile, count);
        if (!work.known) {
            send_chunk_begins(comm, work, chunks, tokens, tile, count);
        }
        send_tile(comm, routing, tile, count);
        __syncthreads();
        tile += count;
    } while (tile < tokens.to);
    raise_flags(session, own, ARRIVED, 1);
    if (!await_flags(session, own, ARRIVED, 1, DATA)) {
        return;
    }
#pragma unroll 1
    for (u32 source = 0; source < WORLD; ++source) {
        if (work.known && !BY_EXPERT) {
            break;
        }
        const ArrivedRows rows = keep_arrived(work, own, source);
#if BY_EXPERT
        if (!work.known) {
            place_by_expert(work, routing.local, source, rows);
        }
        copy_by_expert(work, source, rows);
#endif
    }
}
