//! What kernels of a product with parts of different ranks are given, and how they wait for what other ranks send.

#pragma once

#include <fused/matmul_layout.cuh>
#include <fused/stages.cuh>
#include <symmpool/comm.cuh>

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

static_assert(sizeof(MatmulWork::products) == MOST_PRODUCTS * sizeof(MatmulProduct), "the host gives so many");
static_assert(sizeof(Comm) % 8 == 0, "a kernel's next argument follows it");

// Waits until a chunk of a rank has arrived. After a failure it returns at once.
__device__ __forceinline__ void await_chunk(const Session& session, const MatmulWork& work, u32 source, u32 chunk) {
    Watch watch;
    while (load_acquire(&work.control->arrived[source][chunk]) != session.epoch &&
           !watch.expired(session, source, DATA)) {
    }
}

}  // namespace symmpool
