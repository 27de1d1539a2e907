//! Combine from experts: rows go back to the ranks of their tokens, which sum up the rows of each token.
//! Defines: WORLD, THREADS, DTYPE, BY_EXPERT.
//!
//! Some worker blocks send rows, chunk by chunk, and others sum up the chunks that have arrived, so that links and memory
//! are busy at the same time; few blocks do both by turns. Blocks that send wait for handshakes and for weights alone, and
//! blocks that sum up a step for the sends of that step, whatever blocks make them. A peer's memory for rows is free when
//! it has come to this call. Before all that, rows of ranks with few tokens go through inboxes
//! (`experts/combine_few.cuh`).

#include <experts/combine_few.cuh>

using namespace symmpool;

constexpr u32 WEIGHTS_KIND = FINISHED;  // flags that weights of a combine have arrived
// How many vectors of each rank's rows a thread has under way at once.
constexpr u32 SUM_VECTORS = WORLD <= 2 ? 4 : WORLD <= 4 ? 2 : 1;
constexpr u32 SEND_VECTORS = BY_EXPERT ? SUM_VECTORS : COPY_VECTORS;

__shared__ int places[TILE][WORLD];

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
            if (position >= 0) {
                const u64 row = static_cast<u32>(work.bases[rank]) + static_cast<u64>(position);
                *comm.at_peer(work.combine_weights + row * work.top_k + k, rank) = weight;
            }
        }
    }
}

// Sends the rows of a step's chunks to their sources.
__device__ __forceinline__ void send_step(const Comm& comm, const ExpertsWork& work, PeerBlocks own, u32 step) {
    const u32 vectors = static_cast<u32>(work.row_bytes / 16);
#pragma unroll 1
    for (u32 distance = 1; distance < WORLD; ++distance) {
        const u32 source = comm.after(distance);
        if (has_few(work, sources.tokens[source])) {
            continue;
        }
        const Chunks chunks(sources.tokens[source], work.peer_blocks);
        const u32 begin = sources.begin[source];
        const u64 room = work.capacity - begin;
        // At a peer, rows lie by the distance of their sender.
        char* slot = work.combined + (WORLD - distance - 1) * (work.max_tokens * work.row_bytes);
#pragma unroll 1
        for (u32 index = own.first; index < own.end && step < chunks.steps; ++index) {
            const int* at = work.chunks + source * (MOST_CHUNKS + 1) + index * chunks.steps + step;
            const u32 end = static_cast<u32>(at[1]) < room ? static_cast<u32>(at[1]) : static_cast<u32>(room);
            for (u32 first = static_cast<u32>(at[0]); first < end; first += TILE) {
                const u32 count = end - first < TILE ? end - first : TILE;
                char* to = comm.at_peer(slot + first * work.row_bytes, source);
                for_pieces<SEND_VECTORS>(count, vectors, 0, 1, [&](const Piece<SEND_VECTORS>& piece) {
                    const u32 received = begin + first + piece.row;
                    uint4 found[SEND_VECTORS];
                    load_returned(work, received, weights_of(work, received), piece, found);
                    piece.store(to + piece.row * work.row_bytes, found);
                });
            }
        }
    }
}

// Sums up a piece of the rows of a token. `of` has the number of the token's row on each rank, or -1.
__device__ __forceinline__ void sum_piece(const Comm& comm, const ExpertsWork& work, u32 token, const int* of,
                                          const Piece<SUM_VECTORS>& piece) {
    const u32 received = sources.begin[comm.rank] + static_cast<u32>(of[comm.rank]);
    // All loads are under way before the first sum. A rank without a row adds zeros, which change no sum.
    uint4 found[WORLD][SUM_VECTORS] = {};
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
            piece.load(from, found[rank]);
        }
    }
#if BY_EXPERT
    uint4 mine[SUM_VECTORS] = {};
    if (of[comm.rank] >= 0) {
        load_returned(work, received, own_weights(work, token, received), piece, mine);
    }
#endif
    float sums[SUM_VECTORS][VALUES] = {};
#pragma unroll
    for (u32 rank = 0; rank < WORLD; ++rank) {
#if BY_EXPERT
#pragma unroll
        for (u32 i = 0; i < SUM_VECTORS; ++i) {
            found[rank][i] = select(rank == comm.rank, mine[i], found[rank][i]);
        }
#endif
        add_to(sums, found[rank]);
    }
    store_sums(work, token, piece, sums);
}

// Sums up the rows of a chunk of own tokens. Called by all threads of a block.
__device__ __forceinline__ void sum_chunk(const Comm& comm, const ExpertsWork& work, const Chunks& chunks, u32 chunk) {
    const u32 vectors = static_cast<u32>(work.row_bytes / 16), end = chunks.begin(chunk + 1);
    for (u32 first = chunks.begin(chunk); first < end; first += TILE) {
        const u32 count = end - first < TILE ? end - first : TILE;
        __syncthreads();
        // At most two places for each thread. Unrolled further, this loop takes registers of the sums below.
#pragma unroll (TILE * WORLD > THREADS ? 2 : 1)
        for (u32 i = threadIdx.x; i < count * WORLD; i += THREADS) {
            places[i / WORLD][i % WORLD] = work.positions[static_cast<u64>(first) * WORLD + i];
        }
        __syncthreads();
        for_pieces<SUM_VECTORS>(count, vectors, 0, 1, [&](const Piece<SUM_VECTORS>& piece) {
            sum_piece(comm, work, first + piece.row, places[piece.row], piece);
        });
    }
}

__device__ __forceinline__ void lead(const FewSums& few, const Call& call) {
    const Session& session = few.session;
    send_handshake_of(session, call, few.work, THREADS);
    session.advance();
    compare_handshakes(session, call);
    if (must_expire_flags(session)) {
        expire_unused(session, few.work);
    }
}

// A name from which profilers make "symmpool::combine()", as that of a dispatch.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    _ZN8symmpool7combineEv(const __grid_constant__ Comm comm, const __grid_constant__ Call call,
                     const __grid_constant__ ExpertsWork work) {
    begin_kernel(comm.early);
    const Session session(comm);
    // It is loaded while the communicator's state is.
    const u32 word = Sources::load(work);
    // All threads find the same: some of them would go on without what others put into shared memory.
    if (__syncthreads_or(session.failed)) {
        return;
    }
    sources.keep(word);
    const FewSums few(session, work);
    if (is_leader_block()) {
        lead(few, call);
        return;
    }
    session.advance();
    const bool sums_few = has_few(work, work.tokens);
    const Share share(sums_few ? work.tokens : 0, few.pieces(), 0);
#if BY_EXPERT
    if (work.sends_weights && sums_few) {
        send_few_weights(few, share);
    }
#endif
    if (!return_few(few) || __syncthreads_or(!sum_few(few, share))) {
        return;
    }
    const auto has_many = [&](u32 source) { return few.has_many(source); };
    if (!any_has_many(few)) {
        return;
    }
    // Few blocks send and sum up, so that each of them can use the link.
    const u32 workers = worker_blocks(), block = worker_block();
    const bool both = workers < work.peer_blocks;
    const u32 senders = both ? workers : workers / 2, summers = both ? workers : workers - senders;
    const bool sends = block < senders, sums = (both || !sends) && !sums_few;
    const PeerBlocks own(work.peer_blocks, sends ? block : 0, senders);
    u32 steps = 0;
    for (u32 distance = 1; distance < WORLD && sends; ++distance) {
        const u32 source = comm.after(distance);
        const Chunks chunks(sources.tokens[source], work.peer_blocks);
        steps = has_many(source) && chunks.steps > steps ? chunks.steps : steps;
    }
    const bool gives_weights = work.sends_weights && sends && !sums_few;
    if (steps != 0 || gives_weights) {
        if (!await_handshakes<true>(session, call)) {
            return;
        }
        if (gives_weights) {
            send_weights(comm, work, own);
            raise_flags(session, own, WEIGHTS_KIND, 1);
        }
        // Ranks with few tokens send their weights through inboxes.
        if (work.sends_weights && !await_flags(session, own, WEIGHTS_KIND, 1, DATA, has_many)) {
            return;
        }
    }
    // A block that does both sums up one step behind, when that step's rows have arrived meanwhile.
    const u32 behind = both ? 1 : 0;
    const Chunks chunks(work.tokens, work.peer_blocks);
    const u32 own_steps = sums ? chunks.steps : 0;
    u32 index = both ? block : block - senders;
#pragma unroll 1
    for (u32 step = 0; step < steps || step < own_steps + behind; ++step) {
        if (step < steps) {
            send_step(comm, work, own, step);
            raise_flags(session, own, ARRIVED, step + 1);
        }
        if (step < behind || step - behind >= own_steps) {
            continue;
        }
        // Blocks sum up chunks by turns, so that all have equally many, whatever blocks send them.
        for (; index < work.peer_blocks; index += summers) {
            const PeerBlocks one(work.peer_blocks, index, work.peer_blocks);
            if (!await_flags(session, one, ARRIVED, step - behind + 1, DATA)) {
                return;
            }
            sum_chunk(comm, work, chunks, index * chunks.steps + step - behind);
        }
        index -= work.peer_blocks;
    }
}
