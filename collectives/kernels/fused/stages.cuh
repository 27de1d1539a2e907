//! Stages of shared memory, into which all GEMM kernels load blocks along the inner dimension, in turn; and clusters.
//! Defines: CLUSTER, where blocks form clusters.

#pragma once

#include <symmpool/impl/comm.cuh>

namespace symmpool {

// Warpgroups of a block that multiply, and threads of one.
constexpr u32 GROUPS = 2, GROUP_THREADS = 128;
// Bytes of the inner dimension that are loaded at once, and multiplied at once.
constexpr u32 BLOCK_BYTES = 128, STEP_BYTES = 32;
// From one barrier in shared memory to the next.
constexpr u32 BARRIER_BYTES = 16;

// Blocks of the inner dimension.
struct Blocks {
    u32 begin, end;
};

// An index in a cycle of STAGES stages, and the parity of the phase of its barriers.
template <u32 STAGES> struct StageOf {
    u32 at = 0, phase = 0;

    __device__ __forceinline__ void advance() {
        if (++at == STAGES) {
            at = 0;
            phase ^= 1;
        }
    }
};

}  // namespace symmpool

// Kernels are compiled for older devices too, which do not run them.
#if defined(CLUSTER) && __CUDA_ARCH__ >= 900
#define SYMMPOOL_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define SYMMPOOL_CLUSTER
#endif
