//! A product of matrices in tiles, whose parts are for different ranks: what the warps of a block have in common.
//!
//! A left matrix has a part of its rows for each rank. The product's parts are made in tiles of 128 x 256 elements, by
//! clusters of CLUSTER blocks, which make tiles with the same columns at once and load the right matrix's for each other. Of
//! a block, one warp loads, two groups of four warps multiply, each a half of the tile's rows, and a warp for each group
//! moves what becomes of the sums.

#pragma once

#include <fused/matmul_work.cuh>

namespace symmpool {

constexpr u32 TILE_ROWS = 128, TILE_COLUMNS = 256;
// Bytes of the inner dimension that are loaded at once, and multiplied at once.
constexpr u32 BLOCK_BYTES = 128, STEP_BYTES = 32;
// Blocks of both matrices that are in shared memory at the same time.
constexpr u32 STAGES = 3;
constexpr u32 LEFT_BYTES = TILE_ROWS * BLOCK_BYTES, RIGHT_BYTES = TILE_COLUMNS * BLOCK_BYTES;
// A group's half of a tile leaves in pieces of 64 rows and columns. Pieces for other ranks are in the order of threads: each
// thread has four vectors, 128 of which lie one after the other.
constexpr u32 PIECES = 4, PIECE_BYTES = 64 * 64 * 2, PIECE_COLUMNS = 64;
constexpr u32 GROUPS = 2, GROUP_THREADS = 128;
// What travels of a tile.
constexpr u32 TILE_BYTES = GROUPS * PIECES * PIECE_BYTES;
// Rows of tiles that are made together, so that their blocks of the right matrix are in the cache.
constexpr u32 ROWS_TOGETHER = 8;

// Where barriers lie behind blocks and pieces, and how many bytes there are.
constexpr u32 BARRIER_BYTES = 16;
constexpr u32 PIECES_AT = STAGES * (LEFT_BYTES + RIGHT_BYTES);
constexpr u32 BARRIERS_AT = PIECES_AT + TILE_BYTES;
constexpr u32 SHARED_BYTES = BARRIERS_AT + (2 * STAGES + 3 * GROUPS * PIECES) * BARRIER_BYTES;

// A tile, as a block of a cluster sees it.
struct Tile {
    u32 distance;  // of the rank that its part is for: after how many ranks it comes; WORLD for this one
    u32 row, column;
    u32 number;    // in its part
    u32 chunk;
};

// The tiles that a cluster makes, in order: those for the next rank first, and this rank's own last.
class Tiles {
    const MatmulWork& work_;
    u32 block_, nth_, step_;

    // How often a cluster makes tiles in a part, if it makes all of them.
    __device__ __forceinline__ u32 each() const { return work_.tile_rows / CLUSTER * work_.tile_columns; }

public:
    __device__ __forceinline__ Tiles(const MatmulWork& work, u32 block)
        : work_(work), block_(block), nth_(work.first_part * each() + blockIdx.x / CLUSTER),
          step_(gridDim.x / CLUSTER) {}

    // The cluster's next tile; false if there is none.
    __device__ __forceinline__ bool next(Tile& tile) {
        const u32 rows = work_.tile_rows / CLUSTER, count = each();
        if (nth_ >= work_.end_part * count) {
            return false;
        }
        const u32 part = nth_ / count, nth = nth_ - part * count;
        nth_ += step_;
        const u32 before = nth / (ROWS_TOGETHER * work_.tile_columns) * ROWS_TOGETHER;
        const u32 together = rows - before < ROWS_TOGETHER ? rows - before : ROWS_TOGETHER;
        const u32 within = nth - before * work_.tile_columns;
        tile.distance = part + 1;
        tile.column = within / together;
        tile.row = (before + within - tile.column * together) * CLUSTER + block_;
        tile.number = nth * CLUSTER + block_;
        tile.chunk = tile.number / work_.chunk_tiles;
        return true;
    }
};

// A place in the cycle of stages, and the parity of the phase of its barriers.
struct Stage {
    u32 at = 0, phase = 0;

    __device__ __forceinline__ void advance() {
        if (++at == STAGES) {
            at = 0;
            phase ^= 1;
        }
    }
};

// Shared memory of a block, by purpose.
class SharedMemory {
    SharedAt begin_;

    __device__ __forceinline__ SharedAt barrier(u32 nth) const { return begin_ + BARRIERS_AT + nth * BARRIER_BYTES; }

public:
    __device__ __forceinline__ SharedMemory() : begin_(shared_memory<SHARED_BYTES>()) {}

    __device__ __forceinline__ SharedAt left(u32 stage) const { return begin_ + stage * LEFT_BYTES; }
    __device__ __forceinline__ SharedAt right(u32 stage) const {
        return begin_ + STAGES * LEFT_BYTES + stage * RIGHT_BYTES;
    }
    __device__ __forceinline__ SharedAt piece(u32 group, u32 nth) const {
        return begin_ + PIECES_AT + (group * PIECES + nth) * PIECE_BYTES;
    }
    // A stage's blocks are there; and all groups of the cluster have multiplied them.
    __device__ __forceinline__ SharedAt is_full(u32 stage) const { return barrier(stage); }
    __device__ __forceinline__ SharedAt is_empty(u32 stage) const { return barrier(STAGES + stage); }
    // A piece was written by its group; or loaded for it; or nobody needs what it holds any more.
    __device__ __forceinline__ SharedAt is_written(u32 group, u32 nth) const {
        return barrier(2 * STAGES + group * PIECES + nth);
    }
    __device__ __forceinline__ SharedAt is_loaded(u32 group, u32 nth) const {
        return barrier(2 * STAGES + (GROUPS + group) * PIECES + nth);
    }
    __device__ __forceinline__ SharedAt is_free(u32 group, u32 nth) const {
        return barrier(2 * STAGES + (2 * GROUPS + group) * PIECES + nth);
    }

    __device__ __forceinline__ void make_barriers() const {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            make_barrier(is_full(stage), 1);
            make_barrier(is_empty(stage), GROUPS * CLUSTER);
        }
        for (u32 nth = 0; nth < 3 * GROUPS * PIECES; ++nth) {
            make_barrier(barrier(2 * STAGES + nth), 1);
        }
        publish_barriers();
    }
};

}  // namespace symmpool
