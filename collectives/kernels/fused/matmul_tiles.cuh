//! The tiles of a matrix product, which cluster makes which of them, and what a block has in shared memory for them.
//! Defines: those of `fused/matmul.cuh`.

#pragma once

#include <fused/matmul_work.cuh>
#include <symmpool/impl/types.cuh>

namespace symmpool {

constexpr u32 TYPE = DTYPE == BF16 ? MULTIPLIES_BF16 : DTYPE == F16 ? MULTIPLIES_F16 : MULTIPLIES_E4M3;
constexpr u32 BLOCK_ELEMENTS = TYPE == MULTIPLIES_E4M3 ? 128 : 64;
constexpr int OUTPUT = OUTPUT_F16 ? F16 : BF16;

constexpr u32 TILE_ROWS = 128, TILE_COLUMNS = 256;
// Blocks of both matrices that are in shared memory at the same time.
constexpr u32 STAGES = 3;
constexpr u32 LEFT_BYTES = TILE_ROWS * BLOCK_BYTES, RIGHT_BYTES = TILE_COLUMNS * BLOCK_BYTES;
// A group's half of a tile leaves in pieces of 64 rows and columns. Pieces for other ranks are in the order of threads: each
// thread has four vectors, 128 of which lie one after the other.
constexpr u32 PIECES = 4, PIECE_BYTES = 64 * 64 * 2, PIECE_COLUMNS = 64;
// Bytes of a tile that travel.
constexpr u32 TILE_BYTES = GROUPS * PIECES * PIECE_BYTES;
// Rows of tiles that are made together, so that their blocks of the right matrix are in the cache.
constexpr u32 ROWS_TOGETHER = 8;

// Buffers through which a warp copies.
constexpr u32 BUFFERS = 2, BUFFER_BYTES = 8192;

// Where buffers and barriers lie behind blocks and pieces, and how many bytes there are.
constexpr u32 PIECES_AT = STAGES * (LEFT_BYTES + RIGHT_BYTES);
constexpr u32 BUFFERS_AT = PIECES_AT + TILE_BYTES;
constexpr u32 BARRIERS_AT = BUFFERS_AT + BUFFERS * BUFFER_BYTES;
constexpr u32 SHARED_BYTES = BARRIERS_AT + (2 * STAGES + 3 * GROUPS * PIECES + BUFFERS) * BARRIER_BYTES;

// A tile, as a block of a cluster sees it.
struct Tile {
    u32 part;  // in the order of the kernel
    u32 row, column;
    u32 number;      // in its part
    u32 begin, end;  // the blocks of the inner dimension that this cluster makes
    // Whether others add what this cluster makes; the sums are the partial ones of this number, or of those from this number
    // on that this cluster adds.
    bool helps;
    u32 partial, partials;
};

// The tiles that a cluster makes, part by part.
class Tiles {
    const MatmulWork& work_;
    u32 block_, nth_;
    // Parts of tiles that a helper has made after its whole tiles; for others, whether they have made their last tile.
    u32 rest_ = 0;

    // How often a cluster makes tiles in a part, if it makes all of them.
    __device__ __forceinline__ u32 each() const { return work_.tile_rows / CLUSTER * work_.tile_columns; }

    __device__ __forceinline__ void place(Tile& tile, u32 of_all) const {
        const u32 rows = work_.tile_rows / CLUSTER, count = each();
        tile.part = of_all / count;
        const u32 nth = of_all - tile.part * count;
        const u32 before = nth / (ROWS_TOGETHER * work_.tile_columns) * ROWS_TOGETHER;
        const u32 together = rows - before < ROWS_TOGETHER ? rows - before : ROWS_TOGETHER;
        const u32 within = nth - before * work_.tile_columns;
        tile.column = within / together;
        tile.row = (before + within - tile.column * together) * CLUSTER + block_;
        tile.number = nth * CLUSTER + block_;
    }

    // A tile that several clusters make.
    __device__ __forceinline__ bool next_of_rest(Tile& tile) {
        const StreamK& split = work_.split;
        const u32 begin = work_.first_part * each(), cluster = blockIdx.x / CLUSTER;
        tile.helps = cluster < split.helpers;
        const u32 item = tile.helps ? cluster * split.per_helper + rest_ : cluster - split.helpers;
        const u32 nth = tile.helps ? item / split.per_tile : item;
        const u32 of_all = (begin < split.whole ? split.whole : begin) + nth;
        if (of_all >= work_.end_part * each() || rest_ == (tile.helps ? split.per_helper : 1)) {
            return false;
        }
        ++rest_;
        place(tile, of_all);
        if (tile.helps) {
            tile.begin = item % split.per_tile * split.helper_blocks;
            tile.end = tile.begin + split.helper_blocks;
            tile.partial = item;
        } else {
            tile.begin = split.per_tile * split.helper_blocks;
            tile.end = work_.inner_blocks;
            tile.partial = nth * split.per_tile;
            tile.partials = split.per_tile;
        }
        return true;
    }

public:
    __device__ __forceinline__ Tiles(const MatmulWork& work, u32 block)
        : work_(work), block_(block), nth_(work.first_part * each() + blockIdx.x / CLUSTER) {}

    // The cluster's next tile; false if there is none.
    __device__ __forceinline__ bool next(Tile& tile) {
        const u32 all = work_.end_part * each();
        if (nth_ >= (work_.split.whole < all ? work_.split.whole : all)) {
            return next_of_rest(tile);
        }
        place(tile, nth_);
        nth_ += gridDim.x / CLUSTER;
        tile.begin = 0;
        tile.end = work_.inner_blocks;
        tile.helps = false;
        tile.partials = 0;
        return true;
    }
};

using Stage = StageOf<STAGES>;

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
    __device__ __forceinline__ SharedAt buffer(u32 nth) const { return begin_ + BUFFERS_AT + nth * BUFFER_BYTES; }
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

    // A buffer was loaded.
    __device__ __forceinline__ SharedAt is_filled(u32 nth) const {
        return barrier(2 * STAGES + 3 * GROUPS * PIECES + nth);
    }

    __device__ __forceinline__ void make_barriers() const {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            make_barrier(is_full(stage), 1);
            make_barrier(is_empty(stage), GROUPS * CLUSTER);
        }
        for (u32 nth = 0; nth < 3 * GROUPS * PIECES + BUFFERS; ++nth) {
            make_barrier(barrier(2 * STAGES + nth), 1);
        }
        publish_barriers();
    }
};

}  // namespace symmpool
