//! Reductions of elements, with the same bits as those of the host kernels.
//!
//! Elements are widened, accumulated in rank order, finished (an average is divided) and narrowed
//! once. Every operation rounds by itself: nothing is fused, flushed to zero or approximated,
//! whatever the compiler's options are. Only the sign and payload of a NaN may differ from the host's.

#pragma once

namespace symmpool {

// The codes of the Rust type `ReduceOp`.
constexpr int SUM = 1;
constexpr int PROD = 2;
constexpr int MIN = 3;
constexpr int MAX = 4;
constexpr int AVG = 5;

}  // namespace symmpool

#include <symmpool/impl/reduce_lanes.cuh>

namespace symmpool {

// The reduction of elements of type `D` by operation `O`, the codes DTYPE and OP of a call.
template <int D, int O>
struct Reduce : ReduceLanes<D, O> {
    // Reduces two vectors element by element, `a` first. An average divides by 2.
    static __device__ uint4 plus(uint4 a, uint4 b);

    // Reduces the vectors of all ranks, in rank order on every rank (rule S7).
    template <unsigned RANKS>
    static __device__ uint4 all(const uint4 (&vectors)[RANKS]);
};

}  // namespace symmpool

#include <symmpool/impl/reduce_bodies.cuh>
