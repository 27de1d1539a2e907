//! Copies to and from windows of peers, and counted signals.

#pragma once

#include <symmpool/collective.cuh>
#include <symmpool/impl/copy_bodies.cuh>

namespace symmpool {

// Counted signals between this block and the block of the same number on a peer. In a call you must not make more than one
// object that signals for a peer and number, nor more than one that waits. All threads of a block must call each function.
class MemoryChannel {
public:
    static constexpr u32 NUMBERS = FLAG_KINDS - 1;  // numbers of channels are below this

    __device__ MemoryChannel(Collective& collective, u32 peer, u32 number = 0);

    // Copies to, or from, the peer's memory that lies where `window` lies in this rank's.
    __device__ void put(void* window, const void* from, u64 bytes) const;
    __device__ void get(void* to, const void* window, u64 bytes) const;

    // Adds one to the count that the peer waits for, behind all that this block has done so far.
    __device__ void signal();
    __device__ void put_with_signal(void* window, const void* from, u64 bytes);

    // Waits for the next signal of the peer: what its block did before is visible then. All threads get the same answer:
    // false if none comes within the communicator's timeout, which the host reports with the rank.
    __device__ bool wait();

private:
    Collective& collective_;
    const u32 peer_;
    const u32 number_;
    u32 signals_;
    u32 waits_;
};

}  // namespace symmpool

#include <symmpool/impl/memory_channel_bodies.cuh>
