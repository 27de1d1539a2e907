//! Vectors that show without flags that they have arrived: the Lamport protocol.

#pragma once

#include <symmpool/collective.cuh>
#include <symmpool/impl/lamport_escaped.cuh>

namespace symmpool {

// Vectors of 16 bytes, of any bits, that show without flags that they have arrived: the inbox holds a pattern where nothing
// has arrived, and who receives a vector puts it back. So each vector that is sent is received in the same call; what is
// left would be taken for a vector of a later one. Whole warps send and receive together, 32 vectors in a row of which the
// first is a multiple of 32. The inbox of a rank has `vectors` of each rank; a call passes WORLD times as many to
// `Collective`.
class LamportChannel {
public:
    // How many vectors of each rank an inbox has room for.
    static __device__ u64 room(const DeviceComm& comm);

    LamportChannel() = default;
    // `peer` is another rank.
    __device__ LamportChannel(Collective& collective, u32 peer, u64 vectors);

    // Sends a vector of each thread, once a call at most. Those past the end, or that there is no room for, are not sent.
    __device__ void send(u64 at, uint4 vector) const;

    // Waits for this thread's vector of the peer; those past the end are not waited for. All threads of a warp get the same
    // answer: false if a vector does not arrive in time. These threads must return.
    __device__ bool receive(u64 at, uint4& vector) const;

private:
    static __device__ bool await_timeout(const Session& session, u32 peer, bool awaited);

    Collective* collective_;
    u32 peer_;
    u64 vectors_;
    bool fits_;
    EscapedSlot remote_;  // in the peer's inbox, for what this rank sends
    EscapedSlot local_;   // in this rank's inbox, for what the peer sends
};

// The channels to all peers by their distance, from 1: that of `comm.after(1)` first. They are made before a loop, so that
// a vector takes half the instructions: a channel that is made within a loop computes its addresses for each anew.
class LamportChannels {
public:
    __device__ LamportChannels(Collective& collective, u64 vectors);
    __device__ const LamportChannel& operator[](u32 distance) const;

private:
    LamportChannel channels_[WORLD > 1 ? WORLD - 1 : 1];
};

}  // namespace symmpool

#include <symmpool/impl/lamport_channel_bodies.cuh>
