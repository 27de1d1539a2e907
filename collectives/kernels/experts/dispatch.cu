//! Dispatch to experts: every token goes to the ranks of its experts, once to each, where its row belongs at once.
//! Defines: WORLD, THREADS, BY_EXPERT, ONLY_LOW_LATENCY; with QUANTIZES also DTYPE, the type of the tokens that become
//! 8-bit floats.
//!
//! The leader block counts this rank's rows for each rank and expert and tells all ranks. Worker blocks count the tokens
//! before their own, so they know the places of their rows without waiting for other blocks. Before they write to a peer
//! they wait for its handshake: it has come to this call, so it has read what it received before. A rank with few tokens
//! sends them through inboxes, and so does not wait (`experts/dispatch_low_latency.cuh`). Which way rows travel is the choice of
//! their source, of which all ranks know how many tokens it has.
//!
//! With BY_EXPERT, blocks copy the rows that have arrived to the places of their experts.

#include <experts/dispatch_low_latency.cuh>

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

// Waits for the counts of all ranks, and finds where rows begin. Called by all threads of a block, which get the same
// answer: false if a rank does not come.
__device__ __forceinline__ bool know_rows(const LowLatencyDispatch& low_latency, bool is_leader) {
    const Session& session = low_latency.session;
    const ExpertsWork& work = low_latency.work;
    const u32 rank = session.comm.rank, local = low_latency.routing.local;
    bool there = true;
    if (work.known) {
        if (threadIdx.x < WORLD) {
            shared.bases[threadIdx.x] = static_cast<u32>(work.bases[threadIdx.x]);
            shared.counts.tokens[threadIdx.x] = static_cast<u32>(work.source_tokens[threadIdx.x]);
        }
        if (threadIdx.x <= WORLD) {
            shared.sources[threadIdx.x] = static_cast<u32>(work.source_offsets[threadIdx.x]);
        }
    } else {
        const CountVectors vectors(local);
        there = shared.counts.receive(session, vectors);
        if (BY_EXPERT || is_leader) {
            there = expert_rows.receive(session, vectors, local, is_leader ? work.expert_counts : nullptr) && there;
        }
    }
    if (__syncthreads_or(!there)) {
        return false;
    }
    const bool is_new = !work.known;
    if (is_new && threadIdx.x < 32 && (BY_EXPERT || is_leader)) {
        expert_rows.place(work, local);
    }
    if (is_new && thread_from(32) < WORLD) {
        shared.bases[thread_from(32)] = shared.counts.begin(rank, thread_from(32));
    }
    if (is_new && thread_from(64) <= WORLD) {
        shared.sources[thread_from(64)] = shared.counts.begin(thread_from(64), rank);
    }
    if (thread_from(96) == 0) {
        arriving.fill([&](u32 source) { return low_latency.arriving(source); });
    }
    __syncthreads();
    return true;
}

// The rows that this rank receives and has room for.
__device__ __forceinline__ u32 received_rows(const ExpertsWork& work) {
    const u32 rows = shared.sources[WORLD];
    return rows < work.capacity ? rows : static_cast<u32>(work.capacity);
}

// Writes the handle's numbers of all rows.
__device__ __forceinline__ void keep_counts(const Routing& routing) {
    const ExpertsWork& work = routing.work;
    for (u32 i = threadIdx.x; i <= routing.local; i += THREADS) {
        work.expert_offsets[i] = static_cast<int>(expert_rows.offsets[i]);
    }
    if (threadIdx.x < WORLD) {
        const u32 other = threadIdx.x;
        const u32 base = shared.bases[other];
        work.bases[other] = static_cast<int>(base < work.capacity ? base : work.capacity);
        work.source_tokens[other] = static_cast<int>(shared.counts.tokens[other]);
    }
    if (threadIdx.x <= WORLD) {
        const u32 begin = shared.sources[threadIdx.x];
        work.source_offsets[threadIdx.x] = static_cast<int>(begin < work.capacity ? begin : work.capacity);
    }
    if (threadIdx.x == 0) {
        work.head[0] = static_cast<int>(received_rows(work));
        work.head[1] = static_cast<int>(work.tokens);
        work.head[2] = static_cast<int>(expert_rows.offsets[routing.local]);
        work.head[3] = LAYOUT_WORD;
    }
}

// Tells the host of what did not fit: of the first of these kinds, which all ranks find alike but for the last. Called by
// one thread.
__device__ __forceinline__ void notify_host(const Session& session, const Routing& routing) {
    const ExpertsWork& work = routing.work;
    const u32 rank = session.comm.rank;
    const u64 by_expert = expert_rows.offsets[routing.local];
    for (u32 other = 0; other < WORLD; ++other) {
        const u64 all = shared.counts.begin(WORLD, other);
        if (shared.counts.bad_item[other] != 0) {
            write_async_error(session, NO_EXPERT, other, shared.counts.bad_item[other] - 1, shared.counts.bad_id[other]);
            return;
        }
        if (all > work.capacity) {
            write_async_error(session, ROWS_OVERFLOW, other, all, work.capacity);
            return;
        }
    }
    if (BY_EXPERT && work.expert_rows != 0) {
        if (expert_rows.most > work.expert_rows) {
            write_async_error(session, EXPERT_OVERFLOW, rank, expert_rows.most, work.expert_rows);
        }
    } else if (BY_EXPERT && by_expert > work.output_capacity) {
        write_async_error(session, EXPERTS_OVERFLOW, rank, by_expert, work.output_capacity);
    }
}

// Tells a host that waits for it how many rows there are: `Sizes` in `cuda/engine/recv_counts.rs`. Rows may still be
// on their way. Called by all threads of the leader block, after `notify_host`, as the host looks for asynchronous errors then.
__device__ __noinline__ void send_sizes(const ExpertsWork& work, u32 local) {
    volatile u32* sizes = work.sizes;
    for (u32 i = threadIdx.x; i < local; i += THREADS) {
        sizes[SIZES_COUNTS + i] = static_cast<u32>(work.expert_counts[i]);
    }
    if (threadIdx.x == 0) {
        sizes[SIZES_ROWS] = received_rows(work);
        sizes[SIZES_BY_EXPERT] = expert_rows.offsets[local];
    }
    fence();
    __syncthreads();
    if (threadIdx.x == 0) {
        sizes[SIZES_NUMBER] = work.sizes_number;
    }
}

__device__ __forceinline__ void lead(const Session& session, const CallParams& call, const Routing& routing) {
    const ExpertsWork& work = routing.work;
    if (!work.known) {
        clear_counts(work, true);
    }
    // The first warp sends the handshake, which may take it a fence, while the others begin to count.
    if (threadIdx.x < 32) {
        send_handshake_of(session, call, work, 32);
    }
    if (!work.known) {
        send_counts(session, routing, CountVectors(routing.local));
    } else {
        check_handle(session, work, 1ull << 31);
    }
    const LowLatencyDispatch low_latency(session, routing);
    if (work.known) {
        low_latency.sent().send(session, [&](u32 rank) { return low_latency_rows_of[rank]; });
    }
    session.advance();
    compare_handshakes(session, call, threadIdx.x, blockDim.x);
    if (!know_rows(low_latency, true)) {
        return;
    }
    if (!work.known) {
        keep_counts(routing);
        if (threadIdx.x == 0) {
            notify_host(session, routing);
        }
        if (work.sizes != nullptr) {
            send_sizes(work, routing.local);
        }
    } else if (BY_EXPERT && threadIdx.x == 0 && static_cast<u32>(work.head[2]) > work.output_capacity) {
        write_async_error(session, EXPERTS_OVERFLOW, session.comm.rank, static_cast<u32>(work.head[2]), work.output_capacity);
    }
    if (must_expire_flags(session)) {
        expire_unused(session, work);
    }
    if (work.known) {
        discard_unexpected(session, work);
    }
}

// --- worker blocks

// Sends many tokens directly to where their rows belong. Called by all threads of a block.
__device__ __forceinline__ void send_many(const Session& session, const Routing& routing) {
    const PeerBlocks own(routing.work.peer_blocks);
    const Chunks chunks(routing.work.tokens, routing.work.peer_blocks);
    const OwnTokens tokens(chunks, own);
    u32 tile = tokens.from;
    do {
        const u32 left = tokens.to - tile, count = left < TILE ? left : TILE;
        number_tile(routing, tile, count);
        place_tile(routing, tile, count);
        if (!routing.work.known) {
            send_chunk_begins(session.comm, routing.work, chunks, tokens, tile, count);
        }
        send_tile(session.comm, routing, tile, count);
        __syncthreads();
        tile += count;
    } while (tile < tokens.to);
    raise_flags(session, own, ARRIVED, 1);
}

// A name from which profilers make "symmpool::dispatch()": tools for expert parallelism look for "::dispatch".
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    _ZN8symmpool8dispatchEv(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call,
                      const __grid_constant__ ExpertsWork work) {
    begin_kernel(comm.early);
    const Session session(comm);
    const SmGrant grant(comm);
    // All threads find the same. Else some would go on without what others put into shared memory.
    if (grant.is_over() || __syncthreads_or(session.failed)) {
        return;
    }
    const Routing routing(work);
    if (is_leader_block()) {
        lead(session, call, routing);
        return;
    }
    session.advance();
    const LowLatencyDispatch low_latency(session, routing);
    const bool sends_low_latency = is_low_latency(work, work.tokens);
    const BlockRows own_rows(sends_low_latency ? work.tokens : 0, low_latency.pieces(), 0);
    if (!work.known && (!sends_low_latency || !own_rows.is_empty())) {
        clear_counts(work, BY_EXPERT);
        const u32 first = sends_low_latency ? own_rows.from : OwnTokens(work).from;
        count_ranks(routing, first, shared.next, [&](u32, long long, u32 expert) {
            if (BY_EXPERT && expert != NOWHERE) {
                atomicAdd(&experts_before[expert], 1);
            }
        });
    }
    if (!own_rows.is_empty()) {
        send_low_latency(low_latency, own_rows);
    }
    // A peer that called something else may have left anything where counts are: rows that are said to come through
    // inboxes are bounded, and nothing is written beyond what this rank's memory has room for.
    if (!know_rows(low_latency, false)) {
        return;
    }
    if (!own_rows.is_empty()) {
        keep_own(low_latency, own_rows);
    }
    if (!sends_low_latency) {
        if (!await_handshakes<true>(session, call)) {
            return;
        }
        send_many(session, routing);
    }
    if (!receive_low_latency(low_latency)) {
        return;
    }
    // Rows of ranks with many tokens have arrived when flags say so.
    const auto skips_inboxes = [&](u32 source) { return low_latency.skips_inboxes(source); };
    if (!any_skips_inboxes(low_latency)) {
        return;
    }
    const PeerBlocks own(work.peer_blocks);
    if (!await_flags(session, own, ARRIVED, 1, DATA, skips_inboxes)) {
        return;
    }
#pragma unroll 1
    for (u32 source = 0; source < WORLD; ++source) {
        if (!skips_inboxes(source) || (work.known && !BY_EXPERT)) {
            continue;
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
