//! Arguments of kernels of a GEMM with parts of different ranks, and their waits for data of other ranks.

#pragma once

#include <fused/matmul_layout.cuh>
#include <fused/stages.cuh>
#include <symmpool/impl/comm.cuh>

namespace symmpool {

// Chunks that a part has at most: a copy engine sends each one by itself.
constexpr u32 MAX_CHUNKS = 8;
// Tiles whose sums blocks may leave in memory for others.
constexpr u32 MAX_PARTIAL_TILES = 144;
// Products that a launch makes at most.
constexpr u32 MAX_PROBLEMS = 4;

// Words that ranks write for each other, or for their own streams, in memory that is a window: zeros at first.
struct MatmulControl {
    u64 epoch;                         // the call's
    u64 arrived[WORLD][MAX_CHUNKS];   // the epoch in which a chunk of a rank has arrived
    u64 sent[WORLD][MAX_CHUNKS];      // 1 when a chunk was copied to a rank; the kernel sets it back
    u64 partial[MAX_PARTIAL_TILES][GROUPS];  // 1 when a group's sums are in memory; who adds them sets it back
    u32 finished[WORLD][MAX_CHUNKS];  // halves of tiles of a chunk for a rank; its stream sets it back
    u32 entered;                       // 1 when all ranks have begun the call; the stream that sends sets it back
};

static_assert(sizeof(MatmulWork::problems) == MAX_PROBLEMS * sizeof(GemmProblem), "the host gives so many");
static_assert(sizeof(Comm) % 8 == 0, "a kernel's next argument follows it");

// Waits until a chunk of a rank has arrived. After a failure it returns at once.
__device__ __forceinline__ void await_chunk(const Session& session, const MatmulWork& work, u32 source, u32 chunk) {
    Watch watch;
    while (load_acquire(&work.control->arrived[source][chunk]) != session.epoch &&
           !watch.expired(session, source, DATA)) {
    }
}

}  // namespace symmpool
