//! Results that a rank returns for the rows that it received, to the ranks of their tokens or to itself.
//! Defines: the macros of `experts/combine.cu`, which includes it.

#pragma once

#include <experts/params.cuh>
#include <symmpool/reduce.cuh>

namespace symmpool {

constexpr int VALUES = LANES<DTYPE>;

// Adds `term(value)` of each value of a piece's vectors to sums.
template <u32 COUNT, typename Term>
__device__ __forceinline__ void add_to(float (&sums)[COUNT][VALUES], const uint4 (&vectors)[COUNT], Term term) {
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        float values[VALUES];
        unpack<DTYPE>(vectors[i], values);
#pragma unroll
        for (int value = 0; value < VALUES; ++value) {
            sums[i][value] = __fadd_rn(sums[i][value], term(values[value]));
        }
    }
}

// Adds a piece's vectors to sums.
template <u32 COUNT>
__device__ __forceinline__ void add_to(float (&sums)[COUNT][VALUES], const uint4 (&vectors)[COUNT]) {
    add_to(sums, vectors, [](float value) { return value; });
}

template <u32 COUNT>
__device__ __forceinline__ void pack_sums(const float (&sums)[COUNT][VALUES], uint4 (&vectors)[COUNT]) {
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) {
        vectors[i] = pack<DTYPE>(sums[i]);
    }
}

// Stores a piece of a token's sums.
template <u32 COUNT>
__device__ __forceinline__ void store_sums(const ExpertsWork& work, u64 token, const Piece<COUNT>& piece,
                                           const float (&sums)[COUNT][VALUES]) {
    uint4 vectors[COUNT];
    pack_sums(sums, vectors);
    piece.store(work.output + token * work.row_bytes, vectors);
}

#if BY_EXPERT
static_assert(MAX_TOP_K <= 32, "each thread of a warp has an id of a row");

// Loads what this rank returns for a piece of a received row: the sum of what experts made of the row, each times its
// weight, in the order of the row's ids. Called by whole warps.
template <u32 COUNT>
__device__ __forceinline__ void load_returned(const ExpertsWork& work, u32 row, const float* weights,
                                              const Piece<COUNT>& piece, uint4 (&vectors)[COUNT]) {
    const u32 lane = threadIdx.x % 32;
    const bool has_id = lane < work.top_k;
    const int kept = has_id ? work.places[static_cast<u64>(row) * work.top_k + lane] : -1;
    const int place = index_or_none(kept, work.input_rows);
    const float weight = has_id ? weights[lane] : 0.0f;
    float sums[COUNT][VALUES] = {};
    // An expert's vectors are under way while those of the one before are added.
    uint4 next[COUNT] = {};
    u32 left = __ballot_sync(~0u, place >= 0), nth = 0;
    auto load_next = [&]() {
        nth = __ffs(left) - 1;
        left &= left - 1;
        piece.load(work.input + __shfl_sync(~0u, place, nth) * work.row_bytes, next);
    };
    bool has_next = left != 0;
    if (has_next) {
        load_next();
    }
    while (has_next) {
        uint4 found[COUNT];
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) {
            found[i] = next[i];
        }
        const float by = __shfl_sync(~0u, weight, nth);
        has_next = left != 0;
        if (has_next) {
            load_next();
        }
        add_to(sums, found, [&](float value) { return __fmul_rn(value, by); });
    }
    pack_sums(sums, vectors);
}
#else
// Loads what this rank returns for a piece of a received row: what it was given.
template <u32 COUNT>
__device__ __forceinline__ void load_returned(const ExpertsWork& work, u32 row, const float*,
                                              const Piece<COUNT>& piece, uint4 (&vectors)[COUNT]) {
    piece.load(work.input + row * work.row_bytes, vectors);
}
#endif

// The weights that this rank keeps for the ids of a row that it received.
__device__ __forceinline__ const float* kept_weights(const ExpertsWork& work, u32 row) {
    return work.kept_weights + static_cast<u64>(row) * work.top_k;
}

// The weights of a row that this rank sent itself.
__device__ __forceinline__ const float* own_weights(const ExpertsWork& work, u64 token, u32 row) {
    return work.sends_weights ? work.weights + token * work.top_k : kept_weights(work, row);
}

}  // namespace symmpool
