//! The loops of `symmpool/vector_loops.cuh`, which alone includes this.

#pragma once

namespace symmpool {

template <typename Visit>
__device__ void for_each_vector(u64 vectors, Visit visit) {
    const u32 before = threadIdx.x % 32;
#pragma unroll 1
    for (u64 at = worker_thread(); at - before < vectors; at += worker_threads()) {
        if (!visit(at)) {
            return;
        }
    }
}

template <typename Send, typename Receive>
__device__ void for_each_vector(u64 vectors, Send send, Receive receive) {
    const u32 before = threadIdx.x % 32;
    const u64 step = worker_threads();
    u64 at = worker_thread();
    if (at - before < vectors) {
        send(at);
    }
#pragma unroll 1
    for (; at - before < vectors; at += step) {
        if (at + step - before < vectors) {
            send(at + step);
        }
        if (!receive(at)) {
            return;
        }
    }
}

}  // namespace symmpool
