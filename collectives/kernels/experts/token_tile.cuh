//! How a dispatch sends its tokens, a tile after the other.
//! Defines: as `experts/dispatch.cu`, which includes it.

#pragma once

#include <experts/counts.cuh>
#include <symmpool/reduce.cuh>

namespace symmpool {

// State that the threads of a block share.
struct Shared {
    Counts counts;
    u32 next[WORLD];                // rows of this rank, for each rank, before the tile
    u32 ranks[TILE];                // a bit for each rank that a token of the tile goes to
    u32 warps[TILE / 32][WORLD];    // rows of each warp's tokens
    u32 before[TILE + 1][WORLD];    // rows of this rank, for each rank, before each token of the tile
    u32 places[TILE][WORLD];        // the row of the receiver that each token of the tile becomes, or NOWHERE
    u32 bases[WORLD];               // where this rank's rows begin on each rank
    u32 sources[WORLD + 1];         // where the rows of each rank begin on this one
};

// Rows of each expert: of tokens before this block's own in worker blocks, of all tokens in the leader block.
__shared__ u32 experts_before[MAX_EXPERTS];
__shared__ Shared shared;
__shared__ ExpertRows expert_rows;
__shared__ u32 first_bad;

// Called by all threads of a block. `by_expert` is whether it counts the rows of experts.
__device__ __forceinline__ void clear_counts(const ExpertsWork& work, bool by_expert) {
    for (u32 expert = threadIdx.x; expert < work.experts && by_expert; expert += THREADS) {
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

// The tokens that a block sends, and their chunks.
struct OwnTokens {
    u32 from;
    u32 to;
    u32 first_chunk;
    u32 end_chunk;

    __device__ __forceinline__ explicit OwnTokens(const ExpertsWork& work)
        : OwnTokens(Chunks(work.tokens, work.peer_blocks), PeerBlocks(work.peer_blocks)) {}
    __device__ __forceinline__ OwnTokens(const Chunks& chunks, PeerBlocks blocks)
        : from(chunks.begin(blocks.first * chunks.steps)), to(chunks.begin(blocks.end * chunks.steps)),
          first_chunk(blocks.first * chunks.steps), end_chunk(blocks.end * chunks.steps) {}
};

// Numbers the rows that a tile's tokens become: `shared.places` gets each row's number among those of this rank for a
// rank. Called by all threads of the block.
__device__ __forceinline__ void number_tile(const Routing& routing, u32 tile, u32 tokens) {
    const ExpertsWork& work = routing.work;
    const u32 within = threadIdx.x, warp = within / 32, lane = within % 32;
    if (!work.known) {
        routing.for_tokens(tile, tile + tokens, 0, [](u32, long long, u32) {},
                           [&](u32 token, u32 ranks) { shared.ranks[token - tile] = ranks; });
        __syncthreads();
    }
    const u32 mask = within < tokens && !work.known ? shared.ranks[within] : 0;
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
            if (within < tokens && work.known) {
                // NOWHERE is -1. A rank sends no more rows to another one than it has tokens.
                const int found = work.positions[(static_cast<u64>(tile) + within) * WORLD + rank];
                row = static_cast<u32>(index_or_none(found, work.tokens));
            } else {
                row = mask >> rank & 1 ? row : NOWHERE;
            }
            shared.places[within][rank] = row;
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
}

// Makes places of the rows' numbers, and keeps these in the handle. Called by all threads of the block.
__device__ __forceinline__ void place_tile(const Routing& routing, u32 tile, u32 tokens) {
    const ExpertsWork& work = routing.work;
    for (u32 i = threadIdx.x; i < tokens * WORLD; i += THREADS) {
        const u32 within = i / WORLD, rank = i % WORLD, row = shared.places[within][rank];
        u32 place = row == NOWHERE ? NOWHERE : shared.bases[rank] + row;
        place = place < work.capacity ? place : NOWHERE;
        if (!work.known) {
            work.positions[static_cast<u64>(tile) * WORLD + i] = place == NOWHERE ? -1 : static_cast<int>(row);
        }
        shared.places[within][rank] = place;
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
        *comm.at_peer(work.chunk_begins + comm.rank * (MAX_CHUNKS + 1) + chunk, to) = static_cast<int>(row);
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
__device__ __forceinline__ void send_tile_details(const Comm& comm, const Routing& routing, u32 tile, u32 tokens) {
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

// Stores a vector of a row on all ranks that get it. Ranks alternate from vector to vector: where each got several in a
// row, a dispatch of 512 tokens among four ranks took 89 us instead of 66.
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
constexpr u32 TOKEN_VECTORS = 16 / LANES<DTYPE>;  // vectors of the tokens, for one of the rows
constexpr u32 POWER_OF_TWO = 2, UE8M0 = 3;        // ways to quantise

// Sixteen channels become a vector of 8-bit floats; eight threads in a row have the 128 channels of a scale. Called by
// whole warps.
__device__ __forceinline__ uint4 quantize(const uint4 (&channels)[TOKEN_VECTORS], u32 how, float& scale) {
    float values[16];
    float largest = 0.0f;
#pragma unroll
    for (u32 i = 0; i < TOKEN_VECTORS; ++i) {
        float some[LANES<DTYPE>];
        unpack<DTYPE>(channels[i], some);
#pragma unroll
        for (int lane = 0; lane < LANES<DTYPE>; ++lane) {
            values[i * LANES<DTYPE> + lane] = some[lane];
            largest = fmaxf(largest, fabsf(some[lane]));
        }
    }
#pragma unroll
    for (u32 step = 1; step < 8; step *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    }
    // `ExpertRows::quantize` in `host/kernels/expert_rows.rs` does the same.
    scale = __fdiv_rn(fmaxf(largest, 1e-4f), 448.0f);
    if (how >= POWER_OF_TWO) {
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
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void send_quantized(const Comm& comm, const ExpertsWork& work, u32 tile, u32 tokens) {
    const u32 vectors = static_cast<u32>(work.row_bytes / 16), groups = vectors / 8;
    const char* input = work.input + static_cast<u64>(tile) * vectors * TOKEN_VECTORS * 16;
    // All threads of a warp come to the shuffles. What is loaded next is under way meanwhile.
    uint4 next[TOKEN_VECTORS] = {};
    auto load_next = [&](u32 item) {
#pragma unroll
        for (u32 i = 0; i < TOKEN_VECTORS; ++i) {
            if (item < tokens * vectors) {
                next[i] = load_plain(input + 16ull * (static_cast<u64>(item) * TOKEN_VECTORS + i));
            }
        }
    };
    load_next(threadIdx.x);
    for (u32 first = 0; first < tokens * vectors; first += THREADS) {
        const u32 item = first + threadIdx.x;
        uint4 channels[TOKEN_VECTORS];
#pragma unroll
        for (u32 i = 0; i < TOKEN_VECTORS; ++i) {
            channels[i] = next[i];
        }
        load_next(item + THREADS);
        float scale;
        const uint4 vector = quantize(channels, work.quantize, scale);
        if (item >= tokens * vectors) {
            continue;
        }
        const u32 within = item / vectors, at = item - within * vectors;
        store_row_vector(comm, work, within, at, vector);
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
    send_tile_details(comm, routing, tile, tokens);
#if QUANTIZES
    send_quantized(comm, work, tile, tokens);
#else
    const bool words = (work.scale_bytes | reinterpret_cast<u64>(work.input_scales)) % 4 == 0;
    words ? send_scales_as<u32>(comm, work, tile, tokens) : send_scales_as<unsigned char>(comm, work, tile, tokens);
    const char* input = work.input + tile * work.row_bytes;
    const u32 vectors = static_cast<u32>(work.row_bytes / 16);
    for_pieces<COPY_VECTORS>(tokens, vectors, 0, 1, [&](const Piece<COPY_VECTORS>& piece) {
        uint4 found[COPY_VECTORS];
        piece.load(input + piece.row * work.row_bytes, found);
#pragma unroll
        for (u32 i = 0; i < COPY_VECTORS; ++i) {
            if (piece.live[i]) {
                store_row_vector(comm, work, piece.row, piece.at[i], found[i]);
            }
        }
    });
#endif
}

}  // namespace symmpool
