//! Vectors that show without flags that they have arrived: the Lamport protocol.

#pragma once

#include <symmpool/collective.cuh>
#include <symmpool/impl/lamport_escaped.cuh>

namespace symmpool {

// Vectors of 16 bytes, of any bits, that show without flags that they have arrived: the inbox holds a pattern where nothing
// has arrived, and who receives a vector puts it back. So you must receive each vector in the call that sends it: what is
// left would be taken for a vector of a later call. All threads of a warp must call `send` and `receive` together, for 32
// vectors in a row, the first of which is a multiple of 32. The inbox of a rank has `vectors` vectors of each rank. You must
// pass WORLD times as many to `Collective`, as `lamport_vectors`.
class LamportChannel {
public:
    // How many vectors of each rank an inbox has room for.
    static __device__ u64 room(const DeviceComm& comm);

    LamportChannel() = default;
    // `peer` is another rank.
    __device__ LamportChannel(Collective& collective, u32 peer, u64 vectors);

    // Sends a vector of each thread; you must send each once a call at most. Vectors past the end of `vectors`, or for which
    // there is no room, are not sent.
    __device__ void send(u64 at, uint4 vector) const;

    // Waits for this thread's vector of the peer; those past the end are not waited for. All threads of a warp get the same
    // answer: false if a vector does not arrive within the timeout. These threads must return.
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

// The channels to all peers by their distance, from 1: that of `comm.after(1)` first. Make them before a loop: a vector then
// takes half the instructions, as a channel that is made within a loop computes its addresses for each vector anew.
class LamportChannels {
public:
    __device__ LamportChannels(Collective& collective, u64 vectors);
    __device__ const LamportChannel& operator[](u32 distance) const;

private:
    LamportChannel channels_[WORLD > 1 ? WORLD - 1 : 1];
};

}  // namespace symmpool

#include <symmpool/impl/lamport_channel_bodies.cuh>
