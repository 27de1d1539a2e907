//! Combine from experts: rows go back to the ranks of their tokens, which sum up the rows of each token.
//! Defines: WORLD, THREADS, DTYPE, BY_EXPERT, ONLY_LOW_LATENCY.
//!
//! Of each worker block some warps send rows, chunk by chunk, and the others sum up the chunks that have arrived, so that
//! links and memory are busy at the same time. Warps that send wait for handshakes and for weights alone, and warps that sum
//! up a step for the sends of that step, whatever blocks make them. A peer's memory for rows is free when it has come to
//! this call. Before all that, rows of ranks with few tokens go through inboxes (`experts/combine_low_latency.cuh`).

#include <experts/tma_copy.cuh>
#include <experts/combine_low_latency.cuh>

using namespace symmpool;

constexpr u32 WEIGHTS_KIND = FINISHED;  // flags that weights of a combine have arrived
// How many vectors of each rank's rows a thread has under way at once.
constexpr u32 SUM_VECTORS = WORLD <= 2 ? 4 : WORLD <= 4 ? 2 : 1;
constexpr u32 SEND_VECTORS = BY_EXPERT ? SUM_VECTORS : COPY_VECTORS;

// Rows that go back as they were given are copied by one thread.
constexpr bool COPIES = HAS_BULK_COPIES && !BY_EXPERT;
// Chunks of a step. Rows by expert take longer, so that smaller steps are worth their flags.
constexpr u32 STEP_CHUNKS = BY_EXPERT ? 1 : 2;
constexpr u32 SENDERS = COPIES ? 1 : WARPS / 2;  // warps that send
constexpr Warps SENDING = {0, SENDERS, 1};
constexpr Warps SUMMING = {SENDERS, WARPS - SENDERS, 2};

__shared__ int places[TILE][WORLD];
#if !BY_EXPERT
__shared__ BulkPieces pieces;
#endif

// The weights of a row that a peer sent.
__device__ __forceinline__ const float* weights_of(const ExpertsWork& work, u32 row) {
    return work.sends_weights ? work.combine_weights + static_cast<u64>(row) * work.top_k : kept_weights(work, row);
}

// Sends the weights of this block's tokens to the ranks that have rows of them.
__device__ __forceinline__ void send_weights(const Comm& comm, const ExpertsWork& work, PeerBlocks own) {
    const Chunks chunks(work.tokens, work.peer_blocks);
    const u32 from = chunks.begin(own.first * chunks.steps), to = chunks.begin(own.end * chunks.steps);
    for (u64 i = threadIdx.x; i < static_cast<u64>(to - from) * work.top_k; i += THREADS) {
        const u32 token = from + static_cast<u32>(i / work.top_k), k = static_cast<u32>(i % work.top_k);
        const float weight = work.weights[static_cast<u64>(token) * work.top_k + k];
        for (u32 rank = 0; rank < WORLD; ++rank) {
            const int position = work.positions[static_cast<u64>(token) * WORLD + rank];
            const u64 row = static_cast<u32>(work.bases[rank]) + static_cast<u64>(static_cast<u32>(position));
            if (row < work.capacity) {
                *comm.at_peer(work.combine_weights + row * work.top_k + k, rank) = weight;
            }
        }
    }
}

__device__ __forceinline__ u32 steps_of(const Chunks& chunks) {
    return (chunks.steps + STEP_CHUNKS - 1) / STEP_CHUNKS;
}

// The first chunk of a step of an index, or behind the last step the end of its chunks.
__device__ __forceinline__ u32 chunk_of(const Chunks& chunks, u32 index, u32 step) {
    const u32 within = step * STEP_CHUNKS < chunks.steps ? step * STEP_CHUNKS : chunks.steps;
    return index * chunks.steps + within;
}

// Calls `send(received, count, to)` for the rows of a step's chunks.
template <typename Send>
__device__ __forceinline__ void for_rows_of_step(const Comm& comm, const ExpertsWork& work, PeerBlocks own, u32 step,
                                                 Send send) {
#pragma unroll 1
    for (u32 distance = 1; distance < WORLD; ++distance) {
        const u32 source = comm.after(distance);
        if (is_low_latency(work, sources.tokens[source])) {
            continue;
        }
        const Chunks chunks(sources.tokens[source], work.peer_blocks);
        const u32 begin = sources.begin[source];
        const u32 room = sources.rows(source, work.max_tokens);
        // At a peer, rows lie by the distance of their sender.
        char* slot = work.combined + (WORLD - distance - 1) * (work.max_tokens * work.row_bytes);
#pragma unroll 1
        for (u32 index = own.first; index < own.end && step < steps_of(chunks); ++index) {
            const int* begins = work.chunks + source * (MAX_CHUNKS + 1);
            const u32 first = static_cast<u32>(begins[chunk_of(chunks, index, step)]);
            const u32 last = static_cast<u32>(begins[chunk_of(chunks, index, step + 1)]);
            const u32 end = last < room ? last : room;
            if (first < end) {
                send(begin + first, end - first, comm.at_peer(slot + first * work.row_bytes, source));
            }
        }
    }
}

// Sends rows to their sources in `steps` steps, and raises a flag after each. Called by all threads that send.
__device__ __forceinline__ void send_steps(const Session& session, const ExpertsWork& work, PeerBlocks own, u32 steps) {
#if !BY_EXPERT
    if (COPIES) {
        if (SENDING.thread() != 0) {
            return;
        }
        BulkSender sender(session, own, ARRIVED, pieces);
#pragma unroll 1
        for (u32 step = 0; step < steps; ++step) {
            for_rows_of_step(session.comm, work, own, step, [&](u32 received, u32 count, char* to) {
                sender.copy(to, work.input + received * work.row_bytes, count * work.row_bytes);
            });
            sender.raise(step + 1);
        }
        sender.finish();
        return;
    }
#endif
    const u32 vectors = static_cast<u32>(work.row_bytes / 16);
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step) {
        for_rows_of_step(session.comm, work, own, step, [&](u32 received, u32 count, char* to) {
            for_pieces<SEND_VECTORS>(count, vectors, SENDING, [&](const Piece<SEND_VECTORS>& piece) {
                const u32 row = received + piece.row;
                uint4 found[SEND_VECTORS];
                load_returned(work, row, weights_of(work, row), piece, found);
                piece.store(to + piece.row * work.row_bytes, found);
            });
        });
        raise_flags(session, own, ARRIVED, step + 1, SENDING);
    }
}

// Sums up a piece of the rows of a token. `of` has the number of the token's row on each rank, or -1.
__device__ __forceinline__ void sum_piece(const Comm& comm, const ExpertsWork& work, u32 token, const int* of,
                                          const Piece<SUM_VECTORS>& piece) {
    const u32 received = sources.begin[comm.rank] + static_cast<u32>(of[comm.rank]);
    // All loads are under way before the first sum. A rank without a row adds zeros, which change no sum. Two rows have the
    // same sum in either order, so that of a single peer needs no place in the order of ranks.
    constexpr bool PAIR = BY_EXPERT && WORLD == 2;
    uint4 found[PAIR ? 1 : WORLD][SUM_VECTORS] = {};
#pragma unroll
    for (u32 rank = 0; rank < WORLD; ++rank) {
        const u64 slot = (comm.distance_to(rank) - 1) * static_cast<u64>(work.max_tokens);
        const char* from = work.combined + (slot + of[rank]) * work.row_bytes;
#if BY_EXPERT
        const bool loads = of[rank] >= 0 && rank != comm.rank;
#else
        const bool loads = of[rank] >= 0;
        from = rank == comm.rank ? work.input + received * work.row_bytes : from;
#endif
        if (loads) {
            piece.load(from, found[PAIR ? 0 : rank]);
        }
    }
#if BY_EXPERT
    uint4 mine[SUM_VECTORS] = {};
    if (of[comm.rank] >= 0) {
        load_returned(work, received, own_weights(work, token, received), piece, mine);
    }
#endif
    float sums[SUM_VECTORS][VALUES] = {};
#if BY_EXPERT
    if (PAIR) {
        add_to(sums, mine);
    }
#endif
#pragma unroll
    for (u32 rank = 0; rank < (PAIR ? 1 : WORLD); ++rank) {
#if BY_EXPERT
#pragma unroll
        for (u32 i = 0; i < SUM_VECTORS && !PAIR; ++i) {
            found[rank][i] = select(rank == comm.rank, mine[i], found[rank][i]);
        }
#endif
        add_to(sums, found[rank]);
    }
    store_sums(work, token, piece, sums);
}

// Sums up the rows of own tokens. Called by all threads that sum up.
__device__ __forceinline__ void sum_tokens(const Comm& comm, const ExpertsWork& work, u32 from, u32 end) {
    const u32 vectors = static_cast<u32>(work.row_bytes / 16);
    for (u32 first = from; first < end; first += TILE) {
        const u32 count = end - first < TILE ? end - first : TILE;
        SUMMING.sync();
        // At most a few places for each thread. Unrolled further, this loop takes registers of the sums below.
#pragma unroll (TILE * WORLD > THREADS ? 2 : 1)
        for (u32 i = SUMMING.thread(); i < count * WORLD; i += SUMMING.threads()) {
            const u32 most = i % WORLD == comm.rank ? sources.rows(comm.rank, work.tokens) : work.tokens;
            places[i / WORLD][i % WORLD] = index_or_none(work.positions[static_cast<u64>(first) * WORLD + i], most);
        }
        SUMMING.sync();
        for_pieces<SUM_VECTORS>(count, vectors, SUMMING, [&](const Piece<SUM_VECTORS>& piece) {
            sum_piece(comm, work, first + piece.row, places[piece.row], piece);
        });
    }
}

__device__ __forceinline__ void lead(const LowLatencyCombine& low_latency, const CallParams& call) {
    const Session& session = low_latency.session;
    send_handshake_of(session, call, low_latency.work, THREADS);
    check_handle(session, low_latency.work, low_latency.work.input_rows);
    low_latency.sent.send(session, [&](u32 source) { return low_latency.returns(source); });
    session.advance();
    compare_handshakes(session, call, threadIdx.x, blockDim.x);
    if (must_expire_flags(session)) {
        expire_unused(session, low_latency.work);
    }
    discard_unexpected(session, low_latency.work);
}

// A name from which profilers make "symmpool::combine()", as that of a dispatch.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    _ZN8symmpool7combineEv(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call,
                     const __grid_constant__ ExpertsWork work) {
    begin_kernel(comm.early);
    const Session session(comm);
    // It is loaded while the communicator's state is.
    const u32 word = CombineSources::load(work);
    const SmGrant grant(comm);
    // All threads find the same. Else some would go on without what others put into shared memory.
    if (grant.is_over() || __syncthreads_or(session.failed)) {
        return;
    }
    sources.keep(work, word);
    const LowLatencyCombine low_latency(session, work);
    if (is_leader_block()) {
        lead(low_latency, call);
        return;
    }
    session.advance();
    const bool sums_low_latency = is_low_latency(work, work.tokens);
    const BlockRows own_rows(sums_low_latency ? work.tokens : 0, low_latency.pieces(), 0);
#if BY_EXPERT
    if (work.sends_weights && sums_low_latency) {
        send_low_latency_weights(low_latency, own_rows);
    }
#endif
    if (!return_low_latency(low_latency) || __syncthreads_or(!sum_low_latency(low_latency, own_rows))) {
        return;
    }
    const auto skips_inboxes = [&](u32 source) { return low_latency.skips_inboxes(source); };
    if (!any_skips_inboxes(low_latency)) {
        return;
    }
    const PeerBlocks own(work.peer_blocks);
    u32 steps = 0;
    for (u32 distance = 1; distance < WORLD; ++distance) {
        const u32 source = comm.after(distance);
        const Chunks chunks(sources.tokens[source], work.peer_blocks);
        steps = skips_inboxes(source) && steps_of(chunks) > steps ? steps_of(chunks) : steps;
    }
    const bool gives_weights = work.sends_weights && !sums_low_latency;
    if (steps != 0 || gives_weights) {
        if (!await_handshakes<true>(session, call)) {
            return;
        }
        if (gives_weights) {
            send_weights(comm, work, own);
            raise_flags(session, own, WEIGHTS_KIND, 1);
        }
        // Ranks with few tokens send their weights through inboxes.
        if (work.sends_weights && !await_flags(session, own, WEIGHTS_KIND, 1, DATA, skips_inboxes)) {
            return;
        }
    }
    if (threadIdx.x < SENDING.threads()) {
        send_steps(session, work, own, steps);
        return;
    }
    const Chunks chunks(work.tokens, work.peer_blocks);
#pragma unroll 1
    for (u32 step = 0; step < steps_of(chunks) && !sums_low_latency; ++step) {
        // Blocks sum up chunks by turns, so that all have equally many, whatever blocks send them.
        for (u32 index = worker_block(); index < work.peer_blocks; index += worker_blocks()) {
            const PeerBlocks one(work.peer_blocks, index, work.peer_blocks);
            if (!await_flags(session, one, ARRIVED, step + 1, DATA, EveryPeer{}, SUMMING)) {
                return;
            }
            const u32 from = chunks.begin(chunk_of(chunks, index, step));
            sum_tokens(comm, work, from, chunks.begin(chunk_of(chunks, index, step + 1)));
        }
    }
}
