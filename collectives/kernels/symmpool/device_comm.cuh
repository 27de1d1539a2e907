//! The communicator and the call that a kernel is given.

#pragma once

#include <symmpool/impl/comm.cuh>

namespace symmpool {

// This rank in its communicator: `rank`, and the order of peers. `after(n)` is the rank that comes n ranks after this one.
struct DeviceComm : Comm {
    static constexpr u32 world = WORLD;

    // A peer's memory where `window` lies in this rank's: memory of the pool, at the same place on every rank.
    template <typename T>
    __device__ __forceinline__ T* peer_ptr(T* window, u32 peer) const {
        return at_peer(window, peer);
    }
};

// A call: `input` and `output` in this rank's memory, `bytes` of a part, and the `root` of a broadcast. A part is what one rank
// contributes, or gets: an all-gather's output has WORLD of them.
struct DeviceCall : CallParams {};

static_assert(sizeof(DeviceComm) == sizeof(Comm) && sizeof(DeviceCall) == sizeof(CallParams), "layouts differ");

// A range of bytes: from `from` to before `to`.
struct ByteRange {
    u64 from;
    u64 to;

    __device__ __forceinline__ u64 bytes() const { return to - from; }
};

// How a rank leaves a call.
enum class End {
    TOGETHER,  // when all peers have come to the end, so that memory that peers access is the program's own again
    ALONE,     // at once: peers reach nothing but this rank's inbox and scratch
};

}  // namespace symmpool
