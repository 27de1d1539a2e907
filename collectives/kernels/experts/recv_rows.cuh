//! A dispatch's work on the rows that have arrived.
//! Defines: the macros of `experts/dispatch.cu`, which includes it.

#pragma once

#include <experts/token_tile.cuh>

namespace symmpool {

// The rows of a source that blocks of this one's indices sent, counted from the source's first one.
struct ArrivedRows {
    u32 from;
    u32 to;
};

// Finds the rows that have arrived, and keeps what a later combine needs of them. With a handle that knows the routing,
// they are as it says: what peers sent of other routings lies in this rank's memory. There are none where the end lies before
// the beginning, as it may if the handle was written to or a peer called something else. Called by all threads of the block.
__device__ __forceinline__ ArrivedRows keep_arrived(const ExpertsWork& work, PeerBlocks own, u32 source) {
    const Chunks chunks(shared.counts.tokens[source], work.peer_blocks);
    const u32 first = own.first * chunks.steps, end = own.end * chunks.steps;
    int* kept = work.chunks + source * (MAX_CHUNKS + 1);
    const int* begins = work.known ? kept : work.chunk_begins + source * (MAX_CHUNKS + 1);
    const u32 begin = shared.sources[source];
    const u64 room = begin < work.capacity ? work.capacity - begin : 0;
    const u32 last = static_cast<u32>(begins[end]), to = last < room ? last : static_cast<u32>(room);
    const u32 from = static_cast<u32>(begins[first]);
    const ArrivedRows rows{from < to ? from : to, to};
    if (!work.known) {
        for (u32 chunk = first + threadIdx.x; chunk <= end; chunk += THREADS) {
            kept[chunk] = begins[chunk];
        }
        for (u32 row = begin + rows.from + threadIdx.x; row < begin + rows.to; row += THREADS) {
            work.kept_tokens[row] = work.row_tokens[row];
        }
    }
    return rows;
}

#if BY_EXPERT
// The place by expert of a row for an expert of this rank, of which it is row `before` of its source; -1 if there is no
// room for it.
__device__ __forceinline__ int place_for_expert(const ExpertsWork& work, u32 local, u32 source, u32 expert, u32 before) {
    const u64 within = static_cast<u64>(expert_rows.before[source * local + expert]) + before;
    const u64 at = expert_rows.offsets[expert] + within;
    const bool fits = at < work.output_capacity && (work.expert_rows == 0 || within < work.expert_rows);
    return fits ? static_cast<int>(at) : -1;
}

// Finds the places of the rows of a source by expert. Called by all threads of the block.
__device__ __forceinline__ void place_by_expert(const ExpertsWork& work, u32 local, u32 source, ArrivedRows rows) {
    const u64 first = (static_cast<u64>(shared.sources[source]) + rows.from) * work.top_k;
    const u32 items = (rows.to - rows.from) * work.top_k;
    for (u32 i = threadIdx.x; i < items; i += THREADS) {
        const int expert = work.row_ids[first + i];
        const u32 before = static_cast<u32>(work.row_places[first + i]);
        work.places[first + i] =
            is_index(expert, local) ? place_for_expert(work, local, source, static_cast<u32>(expert), before) : -1;
        work.kept_weights[first + i] = work.row_weights[first + i];
    }
    __syncthreads();
}

// Where the scales of a place lie, in units. If each expert has a part of its own, that part is column-major.
struct ScaleRow {
    u64 begin;
    u64 stride;  // from a scale to the next

    __device__ __forceinline__ ScaleRow(const ExpertsWork& work, u32 place, u32 units) {
        if (work.expert_rows == 0) {
            begin = static_cast<u64>(place) * units;
            stride = 1;
        } else {
            const u32 rows = static_cast<u32>(work.expert_rows), expert = place / rows;
            begin = static_cast<u64>(expert) * units * rows + (place - expert * rows);
            stride = rows;
        }
    }
};

// Stores a piece of a row at each of its places by expert.
template <u32 COUNT>
__device__ __forceinline__ void store_by_expert(const ExpertsWork& work, const int* places, const Piece<COUNT>& piece,
                                                const uint4 (&vectors)[COUNT]) {
    for (u32 k = 0; k < work.top_k; ++k) {
        if (is_index(places[k], work.output_capacity)) {
            piece.store(work.output + places[k] * work.row_bytes, vectors);
        }
    }
}

// Copies rows that have arrived to the places of their experts.
__device__ __forceinline__ void copy_by_expert(const ExpertsWork& work, u32 source, ArrivedRows rows) {
    const u32 begin = shared.sources[source];
    for (u32 tile = begin + rows.from; tile < begin + rows.to; tile += TILE) {
        const u32 left = begin + rows.to - tile, count = left < TILE ? left : TILE;
        const int* places = work.places + static_cast<u64>(tile) * work.top_k;
        const char* from = work.rows + tile * work.row_bytes;
        const u32 vectors = static_cast<u32>(work.row_bytes / 16);
        for_pieces<COPY_VECTORS>(count, vectors, 0, 1, [&](const Piece<COPY_VECTORS>& piece) {
            uint4 found[COPY_VECTORS];
            piece.load(from + piece.row * work.row_bytes, found);
            store_by_expert(work, places + piece.row * work.top_k, piece, found);
        });
        const u32 bytes = static_cast<u32>(work.scale_bytes);
        const bool words = bytes % 4 == 0;
        const u32 units = words ? bytes / 4 : bytes;
        for (u32 i = threadIdx.x; i < count * units; i += THREADS) {
            const u32 row = i / units, at = i - row * units;
            const u64 of = (static_cast<u64>(tile) + row) * units + at;
            for (u32 k = 0; k < work.top_k; ++k) {
                const int place = places[row * work.top_k + k];
                if (!is_index(place, work.output_capacity)) {
                    continue;
                }
                const ScaleRow scales(work, static_cast<u32>(place), units);
                const u64 to = scales.begin + at * scales.stride;
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

}  // namespace symmpool
