//! Structs that the host and kernels share, made of those in `cuda/layout/params.rs`.
//! SYMMPOOL_BLESS=1 cargo test -p symmpool-collectives --all-features --lib headers writes this file.

#pragma once

#include <symmpool/impl/ptx_tensor.cuh>
#include <symmpool/impl/types.cuh>

namespace symmpool {

struct MatmulControl;

// A product of a launch. With gathered rows all have the same left matrix and inner dimension, and their tiles lie side by
// side. Where products are added up, the blocks of their inner dimensions lie one after the other, and `out` and the factor
// of the sum are those of the first one.
struct GemmProblem {
    // The rows of all ranks: by ranks where they are gathered, else by batches.
    TensorMap left;
    TensorMap right;
    // The rows that a part has in each batch, once for each rank that has some there.
    TensorMap out;
    // A factor of the sums, on the device, or null.
    const float* right_scale;
    // The column behind the last of its tiles.
    u32 end_column;
    // The block behind the last of its inner dimension.
    u32 end_block;
};
static_assert(sizeof(GemmProblem) == 448, "the host has another layout");

// How clusters divide tiles; `cuda/ops/gemm/stream_k.rs` says how these are chosen. Here a cluster's tiles of one place count
// once.
struct StreamK {
    // Tiles that are made whole, from the first one on.
    u32 whole;
    // Clusters that help with the others, from the first one on; each of the others makes one.
    u32 helpers;
    // Helpers of a tile, or else tiles of a helper: one of them is 1.
    u32 per_tile;
    u32 per_helper;
    // Blocks of the inner dimension that a helper makes of a tile.
    u32 helper_blocks;
};
static_assert(sizeof(StreamK) == 20, "the host has another layout");

// The arguments of a product of tensor cores besides those of `CallParams`.
struct MatmulWork {
    // This rank's part of the left matrix, where it is sent to the others.
    TensorMap own;
    GemmProblem problems[4];
    // A factor of the sums, as `right_scale`.
    const float* left_scale;
    // Parts that other ranks get and that they send: products for the ranks after this one, the next one's first, and of
    // them, in the same order; or this rank's rows, and all ranks' rows.
    char* outgoing;
    const char* incoming;
    // Bytes from one of these parts to the next.
    u64 part_bytes;
    // Where all ranks' rows are copied to, as they are in results, or null.
    char* gathered;
    MatmulControl* control;
    // Sums of tiles that blocks leave for others.
    float* partials;
    // Rows of a part.
    u32 rows;
    // Rows of a part in each batch: all, or a multiple of a tile's.
    u32 batch_rows;
    // Blocks of the inner dimension, or of all of them.
    u32 inner_blocks;
    // Rows of a part's tiles, a multiple of `CLUSTER`.
    u32 tile_rows;
    // Columns of the tiles of all products.
    u32 tile_columns;
    // Tiles of a chunk where products are sent; rows of tiles where rows are. A multiple of `CLUSTER`.
    u32 chunk_tiles;
    // Chunks of a part.
    u32 chunks;
    // A factor of the sum of all ranks.
    float factor;
    // The parts that a launch makes, in the order of the kernel.
    u32 first_part;
    u32 end_part;
    StreamK split;
};
static_assert(sizeof(MatmulWork) == 2048, "the host has another layout");

// The arguments of a product of few rows besides those of `CallParams`, whose output is the sum.
struct MatmulSmallMWork {
    TensorMap left;
    TensorMap right;
    u32 rows;
    // Columns of the product, a multiple of 8.
    u32 columns;
    // Blocks of the inner dimension.
    u32 inner_blocks;
    // Tiles of 128 columns.
    u32 tiles;
    // Whether this launch adds up what all ranks send.
    u32 receives;
};
static_assert(sizeof(MatmulSmallMWork) == 320, "the host has another layout");

}  // namespace symmpool
