//! What kernels of a product whose parts are for different ranks are given, and how they wait for parts of other ranks.

#pragma once

#include <symmpool/comm.cuh>
#include <symmpool/ptx_tensor.cuh>

namespace symmpool {

// Chunks that a part has at most: a copy engine sends each when it is whole.
constexpr u32 MOST_CHUNKS = 8;
// Streams that send chunks in turn.
constexpr u32 SENDING_STREAMS = 2;

// What ranks write for each other, or for their own streams, in memory that is a window: zeros at first.
struct MatmulControl {
    u32 finished[WORLD][MOST_CHUNKS];  // halves of tiles of a chunk for a rank; its stream sets it back
    u32 entered[SENDING_STREAMS];      // 1 when all ranks have begun the call; the streams set it back
    u64 epoch;                         // of the call, which is copied behind each chunk
    u64 arrived[WORLD][MOST_CHUNKS];   // the epoch in which a chunk of a rank has arrived
};

// What a call is given besides `Call`; the host has the same layout in `cuda/params.rs`.
struct MatmulWork {
    TensorMap left;   // of all ranks' parts
    TensorMap right;
    TensorMap out;    // of this rank's part
    const float* left_scale;  // factors of the sums, on the device, or null
    const float* right_scale;
    char* outgoing;           // parts for the ranks after this one, the next one's first
    const char* incoming;     // and parts of them, in the same order
    u64 part_bytes;           // from one of these parts to the next
    MatmulControl* control;
    u32 rows;          // of a part
    u32 inner_blocks;  // blocks of the inner dimension
    u32 tile_rows;     // rows of a part's tiles, a multiple of CLUSTER
    u32 tile_columns;
    u32 chunk_tiles;   // tiles of a chunk, a multiple of CLUSTER
    float factor;      // of the sum of all ranks
    // The parts that a launch makes: 0 is that of the next rank, and WORLD - 1 this rank's own.
    u32 first_part;
    u32 end_part;
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
