//! Dispatch to experts: every token goes to the ranks of its experts, once to each, where its row belongs at once.
//! Defines: WORLD, THREADS, BY_EXPERT; with QUANTIZES also DTYPE, the type of the tokens that become 8-bit floats.
//!
//! The leader block counts this rank's rows for each rank and expert and tells all ranks. Worker blocks count the tokens
//! before their own, so they know the places of their rows without waiting for other blocks. Before they write to a peer
//! they wait for its handshake: it has come to this call, so it has read what it received before.
//!
//! With BY_EXPERT, blocks copy the rows that have arrived to the places of their experts.

#include <experts/counts.cuh>
#include <symmpool/reduce.cuh>

using namespace symmpool;

// A rank that learns nothing of peers' rows needs no peers.
struct Shared {
    Counts counts;
    u32 next[WORLD];                // rows of this rank, for each rank, before the tile
    u32 warps[TILE / 32][WORLD];    // rows of each warp's tokens
    u32 before[TILE + 1][WORLD];    // rows of this rank, for each rank, before each token of the tile
    u32 places[TILE][WORLD];        // the row of the receiver that each token of the tile becomes, or NOWHERE
    u32 bases[WORLD];               // where this rank's rows begin on each rank
    u32 sources[WORLD + 1];         // where the rows of each rank begin on this one
};

// Rows of each expert: of tokens before this block's own in worker blocks, of all tokens in the leader block.
__shared__ u32 experts_before[MOST_EXPERTS];
__shared__ Shared shared;
__shared__ ExpertRows expert_rows;
__shared__ u32 first_bad;

__device__ __forceinline__ void clear_counts(const ExpertsWork& work) {
    for (u32 expert = threadIdx.x; expert < work.experts; expert += THREADS) {
        experts_before[expert] = 0;
    }
    if (threadIdx.x < WORLD) {
        shared.next[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) {
        first_bad = NOWHERE;
    }
    __syncthreads();
}

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
        !expert_rows.receive(session, vectors, routing.local, work.alignment, work.expert_counts)) {
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
            notice(session, NO_EXPERT, other, of.y - 1, of.z);
            return;
        }
        if (all > work.capacity) {
            notice(session, ROWS_OVERFLOW, other, all, work.capacity);
            return;
        }
    }
    if (BY_EXPERT && by_expert > work.output_capacity) {
        notice(session, EXPERTS_OVERFLOW, rank, by_expert, work.output_capacity);
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

// --- tokens of a tile

// The tokens that a block sends, and their chunks.
struct OwnTokens {
    u32 from;
    u32 to;
    u32 first_chunk;
    u32 end_chunk;

    __device__ __forceinline__ OwnTokens(const Chunks& chunks, PeerBlocks blocks)
        : from(chunks.begin(blocks.first * chunks.steps)), to(chunks.begin(blocks.end * chunks.steps)),
          first_chunk(blocks.first * chunks.steps), end_chunk(blocks.end * chunks.steps) {}
};

// Finds the places of a tile's rows. Called by all threads of the block.
__device__ __forceinline__ void place_tile(const Routing& routing, u32 tile, u32 tokens) {
    const ExpertsWork& work = routing.work;
    const u32 within = threadIdx.x, warp = within / 32, lane = within % 32;
    const u32 mask = within < tokens && !work.known ? routing.ranks(tile + within) : 0;
    u32 lower[WORLD];
    if (within < TILE) {
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            const u32 same = __ballot_sync(~0u, mask >> rank & 1);
            lower[rank] = __popc(same & ((1u << lane) - 1));
            if (lane == 0) {
                shared.warps[warp][rank] = __popc(same);
            }
        }
    }
    __syncthreads();
    if (within < TILE) {
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            u32 row = shared.next[rank] + lower[rank];
            for (u32 other = 0; other < warp; ++other) {
                row += shared.warps[other][rank];
            }
            shared.before[within][rank] = row;
            if (within < tokens) {
                int* position = work.positions + (static_cast<u64>(tile) + within) * WORLD + rank;
                u32 place = NOWHERE;
                if (work.known) {
                    place = *position < 0 ? NOWHERE : shared.bases[rank] + *position;
                } else {
                    place = mask >> rank & 1 ? shared.bases[rank] + row : NOWHERE;
                    place = place < work.capacity ? place : NOWHERE;
                    *position = place == NOWHERE ? -1 : static_cast<int>(row);
                }
                shared.places[within][rank] = place;
            }
        }
    }
    __syncthreads();
    if (within < WORLD) {
        u32 all = shared.next[within];
        for (u32 other = 0; other < TILE / 32; ++other) {
            all += shared.warps[other][within];
        }
        shared.next[within] = all;
        shared.before[TILE][within] = all;
    }
    __syncthreads();
}

// Tells peers at which row each chunk begins that begins in the tile, or at its end if that is the block's last one.
__device__ __forceinline__ void send_chunk_begins(const Comm& comm, const ExpertsWork& work, const Chunks& chunks,
                                                  const OwnTokens& own, u32 tile, u32 tokens) {
    const u32 count = own.end_chunk - own.first_chunk + 1;
    for (u32 i = threadIdx.x; i < count * WORLD; i += THREADS) {
        const u32 chunk = own.first_chunk + i / WORLD, to = i % WORLD;
        const u32 begin = chunk == own.end_chunk ? own.to : chunks.begin(chunk);
        const bool last = tile + tokens == own.to;
        if (begin < tile || begin > tile + tokens || (begin == tile + tokens && !last)) {
            continue;
        }
        const u32 within = begin - tile;
        const u32 row = within < tokens ? shared.before[within][to] : shared.before[TILE][to];
        *comm.at_peer(work.chunk_begins + comm.rank * (MOST_CHUNKS + 1) + chunk, to) = static_cast<int>(row);
    }
}

// The place of an id's row among those of its expert from this rank: how many ids before it are the same.
__device__ __forceinline__ u32 place_in_expert(const Routing& routing, u32 tile, u32 within, u32 expert) {
    u32 before = experts_before[expert];
    const u32 first = tile * routing.work.top_k;
    for (u32 item = 0; item < within; ++item) {
        before += routing.expert(first + item) == expert;
    }
    return before;
}

// Sends what belongs to each row of a tile.
__device__ __forceinline__ void send_details(const Comm& comm, const Routing& routing, u32 tile, u32 tokens) {
    const ExpertsWork& work = routing.work;
    const u32 top_k = work.top_k;
    for (u32 i = threadIdx.x; i < tokens * top_k && !work.known; i += THREADS) {
        const u32 within = i / top_k, k = i - within * top_k;
        const u32 item = tile * top_k + i;
        const u32 expert = routing.expert(item);
        const u32 owner = expert == NOWHERE ? NOWHERE : expert / routing.local;
        const float weight = work.weights == nullptr ? 1.0f : work.weights[item];
        const u32 before = BY_EXPERT && expert != NOWHERE ? place_in_expert(routing, tile, i, expert) : 0;
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            const u32 place = shared.places[within][rank];
            if (place == NOWHERE) {
                continue;
            }
            const u64 at = static_cast<u64>(place) * top_k + k;
            *comm.at_peer(work.row_ids + at, rank) =
                owner == rank ? static_cast<int>(expert - owner * routing.local) : -1;
            *comm.at_peer(work.row_weights + at, rank) = owner == rank ? weight : 0.0f;
            if (BY_EXPERT) {
                *comm.at_peer(work.row_places + at, rank) = static_cast<int>(before);
            }
            if (k == 0) {
                *comm.at_peer(work.row_tokens + place, rank) = static_cast<int>(tile + within);
            }
        }
    }
    if (BY_EXPERT && !work.known) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < tokens * top_k; i += THREADS) {
            const u32 expert = routing.expert(tile * top_k + i);
            if (expert != NOWHERE) {
                atomicAdd(&experts_before[expert], 1);
            }
        }
    }
}

// Sends bytes of each row of a tile that `from` has, in the unit of the largest that fits.
template <typename Unit>
__device__ __forceinline__ void send_scales_as(const Comm& comm, const ExpertsWork& work, u32 tile, u32 tokens) {
    const u32 units = static_cast<u32>(work.scale_bytes / sizeof(Unit));
    const Unit* from = reinterpret_cast<const Unit*>(work.input_scales) + static_cast<u64>(tile) * units;
    for (u32 i = threadIdx.x; i < tokens * units; i += THREADS) {
        const u32 within = i / units, at = i - within * units;
        const Unit value = from[i];
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            const u32 place = shared.places[within][rank];
            if (place != NOWHERE) {
                reinterpret_cast<Unit*>(comm.at_peer(work.row_scales, rank))[static_cast<u64>(place) * units + at] =
                    value;
            }
        }
    }
}

__device__ __forceinline__ void store_row_vector(const Comm& comm, const ExpertsWork& work, u32 within, u32 at,
                                                 uint4 vector) {
#pragma unroll
    for (u32 rank = 0; rank < WORLD; ++rank) {
        const u32 place = shared.places[within][rank];
        if (place != NOWHERE) {
            store_plain(comm.at_peer(work.rows + place * work.row_bytes + 16ull * at, rank), vector);
        }
    }
}

#if QUANTIZES
// Sixteen channels become a vector of 8-bit floats; eight threads in a row have the 128 channels of a scale.
__device__ __forceinline__ void send_quantized(const Comm& comm, const ExpertsWork& work, u32 tile, u32 tokens) {
    constexpr u32 VECTORS = 16 / LANES<DTYPE>;  // of the tokens, for one of the rows
    constexpr u32 POWER_OF_TWO = 2, UE8M0 = 3;
    const u32 vectors = static_cast<u32>(work.row_bytes / 16), groups = vectors / 8;
    const char* input = work.input + static_cast<u64>(tile) * vectors * VECTORS * 16;
    // All threads of a warp come to the shuffles. What is loaded next is under way meanwhile.
    uint4 next[VECTORS] = {};
    auto load_next = [&](u32 item) {
#pragma unroll
        for (u32 i = 0; i < VECTORS; ++i) {
            if (item < tokens * vectors) {
                next[i] = load_plain(input + 16ull * (static_cast<u64>(item) * VECTORS + i));
            }
        }
    };
    load_next(threadIdx.x);
    for (u32 first = 0; first < tokens * vectors; first += THREADS) {
        const u32 item = first + threadIdx.x;
        const bool there = item < tokens * vectors;
        float values[16];
        float largest = 0.0f;
#pragma unroll
        for (u32 i = 0; i < VECTORS; ++i) {
            float some[LANES<DTYPE>];
            unpack<DTYPE>(next[i], some);
#pragma unroll
            for (int lane = 0; lane < LANES<DTYPE>; ++lane) {
                values[i * LANES<DTYPE> + lane] = some[lane];
                largest = fmaxf(largest, fabsf(some[lane]));
            }
        }
        load_next(item + THREADS);
#pragma unroll
        for (u32 step = 1; step < 8; step *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        }
        // As `ExpertRows::quantize` in `host/kernels/expert_rows.rs` does it.
        float scale = __fdiv_rn(fmaxf(largest, 1e-4f), 448.0f);
        if (work.quantize >= POWER_OF_TWO) {
            const u32 bits = __float_as_uint(scale);
            scale = __uint_as_float((bits & 0x7fffffu) != 0 ? (bits & 0x7f800000u) + 0x800000u : bits);
        }
        const float inverse = __fdiv_rn(1.0f, scale);
        u32 words[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const float* of = values + 4 * word;
            const u32 low = f32_to_e4m3x2(__fmul_rn(of[0], inverse), __fmul_rn(of[1], inverse));
            const u32 high = f32_to_e4m3x2(__fmul_rn(of[2], inverse), __fmul_rn(of[3], inverse));
            words[word] = low | high << 16;
        }
        if (!there) {
            continue;
        }
        const u32 within = item / vectors, at = item - within * vectors;
        store_row_vector(comm, work, within, at, make_uint4(words[0], words[1], words[2], words[3]));
        if (at % 8 == 0) {
#pragma unroll
            for (u32 rank = 0; rank < WORLD; ++rank) {
                const u32 place = shared.places[within][rank];
                if (place == NOWHERE) {
                    continue;
                }
                const u64 group = static_cast<u64>(place) * groups + at / 8;
                char* scales = comm.at_peer(work.row_scales, rank);
                if (work.quantize == UE8M0) {
                    reinterpret_cast<unsigned char*>(scales)[group] =
                        static_cast<unsigned char>(__float_as_uint(scale) >> 23);
                } else {
                    reinterpret_cast<float*>(scales)[group] = scale;
                }
            }
        }
    }
}
#endif

__device__ __forceinline__ void send_tile(const Comm& comm, const Routing& routing, u32 tile, u32 tokens) {
    const ExpertsWork& work = routing.work;
    send_details(comm, routing, tile, tokens);
    const bool words = (work.scale_bytes | reinterpret_cast<u64>(work.input_scales)) % 4 == 0;
#if QUANTIZES
    send_quantized(comm, work, tile, tokens);
#else
    words ? send_scales_as<u32>(comm, work, tile, tokens) : send_scales_as<unsigned char>(comm, work, tile, tokens);
    const char* input = work.input + tile * work.row_bytes;
    for_rows<COPY_UNROLL>(tokens, static_cast<u32>(work.row_bytes / 16),
             [&](u32 row, u32 at) { return load_plain(input + row * work.row_bytes + 16ull * at); },
             [&](u32 row, u32 at, uint4 vector) { store_row_vector(comm, work, row, at, vector); });
#endif
    (void)words;
}

// --- what has arrived

// The rows of a source that blocks of this one's indices sent, counted from the source's first one.
struct ArrivedRows {
    u32 from;
    u32 to;
};

// Keeps what a later combine needs of the rows that have arrived. Called by all threads of the block.
__device__ __forceinline__ ArrivedRows keep_arrived(const ExpertsWork& work, PeerBlocks own, u32 source) {
    const Chunks chunks(shared.counts.tokens[source], work.peer_blocks);
    const u32 first = own.first * chunks.steps, end = own.end * chunks.steps;
    const int* begins = work.chunk_begins + source * (MOST_CHUNKS + 1);
    int* kept = work.chunks + source * (MOST_CHUNKS + 1);
    for (u32 chunk = first + threadIdx.x; chunk <= end; chunk += THREADS) {
        kept[chunk] = begins[chunk];
    }
    const u32 begin = shared.sources[source];
    const u64 room = begin < work.capacity ? work.capacity - begin : 0;
    const u32 from = static_cast<u32>(begins[first]), to = static_cast<u32>(begins[end]);
    const ArrivedRows rows{from < room ? from : static_cast<u32>(room), to < room ? to : static_cast<u32>(room)};
    for (u32 row = begin + rows.from + threadIdx.x; row < begin + rows.to; row += THREADS) {
        work.kept_tokens[row] = work.row_tokens[row];
    }
    return rows;
}

#if BY_EXPERT
// Finds the places of the rows of a source by expert. Called by all threads of the block.
__device__ __forceinline__ void place_by_expert(const ExpertsWork& work, u32 local, u32 source, ArrivedRows rows) {
    const u64 first = (static_cast<u64>(shared.sources[source]) + rows.from) * work.top_k;
    const u32 items = (rows.to - rows.from) * work.top_k;
    for (u32 i = threadIdx.x; i < items; i += THREADS) {
        const int expert = work.row_ids[first + i];
        int place = -1;
        if (expert >= 0) {
            const u64 at = static_cast<u64>(expert_rows.offsets[expert]) +
                           expert_rows.before[source * local + expert] + static_cast<u32>(work.row_places[first + i]);
            place = at < work.output_capacity ? static_cast<int>(at) : -1;
        }
        work.places[first + i] = place;
        work.kept_weights[first + i] = work.row_weights[first + i];
    }
    __syncthreads();
}

// Copies rows that have arrived to the places of their experts.
__device__ __forceinline__ void copy_by_expert(const ExpertsWork& work, u32 source, ArrivedRows rows) {
    const u32 begin = shared.sources[source];
    for (u32 tile = begin + rows.from; tile < begin + rows.to; tile += TILE) {
        const u32 left = begin + rows.to - tile, count = left < TILE ? left : TILE;
        const int* places = work.places + static_cast<u64>(tile) * work.top_k;
        const char* from = work.rows + tile * work.row_bytes;
        for_rows<COPY_UNROLL>(count, static_cast<u32>(work.row_bytes / 16),
                 [&](u32 row, u32 at) { return load_plain(from + row * work.row_bytes + 16ull * at); },
                 [&](u32 row, u32 at, uint4 vector) {
                     for (u32 k = 0; k < work.top_k; ++k) {
                         const int place = places[row * work.top_k + k];
                         if (place >= 0) {
                             store_plain(work.output + place * work.row_bytes + 16ull * at, vector);
                         }
                     }
                 });
        const u32 bytes = static_cast<u32>(work.scale_bytes);
        const bool words = bytes % 4 == 0;
        const u32 units = words ? bytes / 4 : bytes;
        for (u32 i = threadIdx.x; i < count * units; i += THREADS) {
            const u32 row = i / units, at = i - row * units;
            for (u32 k = 0; k < work.top_k; ++k) {
                const int place = places[row * work.top_k + k];
                if (place < 0) {
                    continue;
                }
                const u64 to = static_cast<u64>(place) * units + at, of = (static_cast<u64>(tile) + row) * units + at;
                if (words) {
                    reinterpret_cast<u32*>(work.output_scales)[to] = reinterpret_cast<const u32*>(work.row_scales)[of];
                } else {
                    work.output_scales[to] = work.row_scales[of];
                }
            }
        }
    }
}
#endif

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
        return expert_rows.receive(session, vectors, routing.local, work.alignment, nullptr);
    }
    __syncthreads();
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_dispatch(const __grid_constant__ Comm comm, const __grid_constant__ Call call,
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
