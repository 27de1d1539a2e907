//! One call of a kernel that is written against the device API, from its handshake to its end.

#pragma once

#include <symmpool/impl/call_block.cuh>

namespace symmpool {

// One call, from its handshake to its end, which is the end of this object's scope. All threads of all blocks must make it
// before anything else, and must come to its end. It is false in blocks that have nothing to do: these must return.
class Collective : public CallBlock {
public:
    // `ll_vectors`, `ll128_lines` and `lamport_vectors` are how many vectors or lines of this rank's inboxes the call uses, from
    // all ranks together. `leave` says how it ends.
    __device__ Collective(const DeviceComm& device_comm, const DeviceCall& device_call, u64 ll_vectors = 0,
                          End leave = End::TOGETHER, u64 ll128_lines = 0);
    __device__ Collective(const DeviceComm& device_comm, const DeviceCall& device_call, u64 ll_vectors, End leave,
                          u64 ll128_lines, u64 lamport_vectors);
    __device__ ~Collective();

    // Whether this block has work. A block without must return at once.
    __device__ explicit operator bool() const;

    // The number of this block, and how many blocks there are, without the leader block. How many is the same on every rank.
    __device__ u32 block() const;
    __device__ u32 blocks() const;

    // This block's share of so many bytes: whole lines of 128 bytes but at the end.
    __device__ ByteRange share(u64 bytes) const;

    // Waits until all peers have made this call, so that their inputs and outputs may be accessed, which hold what their
    // streams wrote before. Called by all threads of a block, which get the same answer: false if a peer does not come,
    // or made another call.
    __device__ bool await_peers();

    // Copies within this rank, or to or from a peer's memory. Called by all threads of a block, of which each may copy
    // what another one has written.
    __device__ void copy(void* to, const void* from, u64 bytes) const;

    // Copies to the window of every rank at the place where `window` lies in this rank's, its own included. What is loaded
    // once is stored for all, so that all links and this rank's memory are busy at the same time. Called as `copy`.
    __device__ void copy_to_all(void* window, const void* from, u64 bytes) const;

    // A rank's scratch, as this rank maps it, and its bytes. It is undefined when a call begins: calls use its two halves by
    // turns.
    __device__ char* scratch(u32 rank) const;
    __device__ u64 scratch_bytes() const;

    const DeviceComm& comm;
    const DeviceCall& call;

private:
    const End end_;
};

}  // namespace symmpool

#include <symmpool/impl/collective_bodies.cuh>
