//! Loops over vectors that all blocks divide among them.

#pragma once

#include <symmpool/impl/handshake.cuh>

namespace symmpool {

// Divides vectors among all blocks: calls `visit(at)` until it returns false. Whole warps come to each call, of which the
// last vectors may be past the end.
template <typename Visit> __device__ __forceinline__ void for_each_vector(u64 vectors, Visit visit);

// Divides vectors among all blocks, and sends a thread's next vector before this one is received, so that the link has work
// while threads wait: calls `send(at)`, and `receive(at)` until it returns false. Whole warps come to each call.
template <typename Send, typename Receive>
__device__ __forceinline__ void for_each_vector(u64 vectors, Send send, Receive receive);

}  // namespace symmpool

#include <symmpool/impl/vector_loop_bodies.cuh>
