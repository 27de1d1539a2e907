//! The functions of `MemoryChannel`. Included by `symmpool/memory_channel.cuh` alone.

#pragma once

namespace symmpool {

__device__ __forceinline__ MemoryChannel::MemoryChannel(Collective& collective, u32 peer, u32 number)
    : collective_(collective), peer_(peer), number_(number), signals_(0), waits_(0) {}

__device__ __forceinline__ void MemoryChannel::put(void* window, const void* from, u64 bytes) const {
    collective_.copy(collective_.comm.peer_ptr(static_cast<char*>(window), peer_), from, bytes);
}

__device__ __forceinline__ void MemoryChannel::get(void* to, const void* window, u64 bytes) const {
    collective_.copy(to, collective_.comm.peer_ptr(static_cast<const char*>(window), peer_), bytes);
}

__device__ __forceinline__ void MemoryChannel::signal() {
    ++signals_;
    __syncthreads();
    if (threadIdx.x == 0) {
        const Session& session = collective_.session();
        store_release(flag_of(session, peer_, number_, session.comm.rank, worker_block()),
                      static_cast<u64>(session.epoch) << 32 | signals_);
    }
}

__device__ __forceinline__ void MemoryChannel::put_with_signal(void* window, const void* from, u64 bytes) {
    put(window, from, bytes);
    signal();
}

__device__ __forceinline__ bool MemoryChannel::wait() {
    ++waits_;
    return collective_.good_for_all(
        block_await_flag(collective_.session(), number_, peer_, worker_block(), waits_, DATA));
}

}  // namespace symmpool
