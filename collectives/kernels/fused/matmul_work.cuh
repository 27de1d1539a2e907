//! What kernels of a product with parts of different ranks are given, and how they wait for what other ranks send.

#pragma once

#include <fused/stages.cuh>
#include <symmpool/comm.cuh>
#include <symmpool/ptx_tensor.cuh>

namespace symmpool {

// Chunks that a part has at most: a copy engine sends each one by itself.
constexpr u32 MOST_CHUNKS = 8;
// Tiles whose sums blocks may leave in memory for others.
constexpr u32 MOST_PARTIAL_TILES = 144;
// Products that a launch makes at most.
constexpr u32 MOST_PRODUCTS = 4;

// What ranks write for each other, or for their own streams, in memory that is a window: zeros at first.
struct MatmulControl {
    u64 epoch;                         // of the call
    u64 arrived[WORLD][MOST_CHUNKS];   // the epoch in which a chunk of a rank has arrived
    u64 sent[WORLD][MOST_CHUNKS];      // 1 when a chunk was copied to a rank; the kernel sets it back
    u64 partial[MOST_PARTIAL_TILES][GROUPS];  // 1 when a group's sums are in memory; who adds them sets it back
    u32 finished[WORLD][MOST_CHUNKS];  // halves of tiles of a chunk for a rank; its stream sets it back
    u32 entered;                       // 1 when all ranks have begun the call; the stream that sends sets it back
};

// A product of a launch. With gathered rows all have the same left matrix and inner dimension, and their tiles lie side by
// side. Where products are added up, the blocks of their inner dimensions lie one after the other, and `out` and the factor
// of the sum are those of the first one.
struct MatmulProduct {
    TensorMap left;  // all ranks' rows: by ranks where they are gathered, else by batches
    TensorMap right;
    TensorMap out;   // the rows that a part has in each batch, once for each rank that has some there
    const float* right_scale;  // a factor of the sums, on the device, or null
    u32 end_column;            // of its tiles
    u32 end_block;             // of its inner dimension
};

// How clusters divide tiles; `cuda/ops/gemm/split.rs` says how these are chosen. Here a cluster's tiles of one place
// count once.
struct Split {
    u32 whole;    // tiles that are made whole, from the first one on
    u32 helpers;  // clusters that help with the others, from the first one on; each of the others makes one
    u32 per_tile, per_helper;  // helpers of a tile, or tiles of a helper: one of them is 1
    u32 helper_blocks;  // blocks of the inner dimension that a helper makes of a tile
};

// What a call is given besides `Call`; the host has the same layout in `cuda/layout/params.rs`.
struct MatmulWork {
    TensorMap own;  // this rank's part of the left matrix, where it is sent to the others
    MatmulProduct products[MOST_PRODUCTS];
    const float* left_scale;  // as `right_scale`
    // What other ranks get and what they send, in parts: products for the ranks after this one, the next one's first, and of
    // them, in the same order; or this rank's rows, and all ranks' rows.
    char* outgoing;
    const char* incoming;
    u64 part_bytes;           // from one of these parts to the next
    char* gathered;           // where all ranks' rows are copied to, as they are in results, or null
    MatmulControl* control;
    float* partials;          // sums of tiles that blocks leave for others
    u32 rows;          // of a part
    u32 batch_rows;    // rows of a part in each batch: all, or a multiple of a tile's
    u32 inner_blocks;  // blocks of the inner dimension, or of all of them
    u32 tile_rows;     // rows of a part's tiles, a multiple of CLUSTER
    u32 tile_columns;  // columns of all products' tiles
    // What a chunk has: tiles, where products are sent; rows of tiles, where rows are. A multiple of CLUSTER.
    u32 chunk_tiles;
    u32 chunks;        // of a part
    float factor;      // of the sum of all ranks
    // The parts that a launch makes, in the order of the kernel.
    u32 first_part;
    u32 end_part;
    Split split;
};
static_assert(sizeof(MatmulWork) == MATMUL_WORK_BYTES && sizeof(Comm) % 8 == 0, "layouts differ");

// Waits until a chunk of a rank has arrived. After a failure it returns at once.
__device__ __forceinline__ void await_chunk(const Session& session, const MatmulWork& work, u32 source, u32 chunk) {
    Watch watch;
    while (load_acquire(&work.control->arrived[source][chunk]) != session.epoch &&
           !watch.expired(session, source, DATA)) {
    }
}

}  // namespace symmpool
