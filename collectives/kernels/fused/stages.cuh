//! How a product of matrices goes along the inner dimension: blocks of it are loaded into stages of shared memory, which take
//! turns.

#pragma once

#include <symmpool/comm.cuh>

namespace symmpool {

// Blocks of the inner dimension.
struct Blocks {
    u32 begin, end;
};

// A place in a cycle of so many stages, and the parity of the phase of its barriers.
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
