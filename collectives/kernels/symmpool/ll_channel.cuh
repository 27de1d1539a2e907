//! Vectors that show by flags of their own that they have arrived: the LL protocol.

#pragma once

#include <symmpool/collective.cuh>

namespace symmpool {

// Vectors of 16 bytes that show by themselves that they have arrived: half of what travels is flags. Each thread sends and
// receives for itself. The inbox of a rank has `vectors` vectors of each rank. You must pass WORLD times as many to
// `Collective`, as `ll_vectors`.
class LlChannel {
public:
    // How many vectors of each rank an inbox has room for.
    static __device__ u64 room(const DeviceComm& comm);

    __device__ LlChannel(Collective& collective, u32 peer, u64 vectors);

    // Sends a vector; you must send each once a call at most. A vector for which there is no room is not sent.
    __device__ void send(u64 at, uint4 vector) const;

    // Waits for a vector of the peer, within the communicator's timeout. False if it does not arrive: the thread must return.
    __device__ bool receive(u64 at, uint4& vector) const;

private:
    __device__ char* address(u32 owner, u32 from, u64 at) const;

    Collective& collective_;
    const u32 peer_;
    const u64 vectors_;
};

}  // namespace symmpool

#include <symmpool/impl/ll_channel_bodies.cuh>
