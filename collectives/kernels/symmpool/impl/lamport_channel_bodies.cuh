//! The functions of `LamportChannel` and `LamportChannels`. Included by `symmpool/lamport_channel.cuh` alone.

#pragma once

namespace symmpool {

__device__ __forceinline__ Collective::Collective(const DeviceComm& device_comm, const DeviceCall& device_call,
                                                  u64 ll_vectors, End leave, u64 ll128_lines, u64 lamport_vectors)
    : CallBlock(device_comm), comm(device_comm), call(device_call), end_(leave) {
    begin(call, ll_vectors, ll128_lines, [&](const Session& session) { expire_escape_marks(session, lamport_vectors / WORLD); });
}

__device__ __forceinline__ u64 LamportChannel::room(const DeviceComm& comm) { return EscapedSlot::length(comm); }

__device__ __forceinline__ LamportChannel::LamportChannel(Collective& collective, u32 peer, u64 vectors)
    : collective_(&collective), peer_(peer), vectors_(vectors),
      fits_(vectors <= room(collective.comm) && peer != collective.comm.rank),
      remote_(collective.session(), peer, collective.comm.rank),
      local_(collective.session(), collective.comm.rank, peer) {}

__device__ __forceinline__ void LamportChannel::send(u64 at, uint4 vector) const {
    remote_.send(collective_->session().epoch, static_cast<u32>(at), vector, fits_ && at < vectors_);
}

__device__ __forceinline__ bool LamportChannel::receive(u64 at, uint4& vector) const {
    const Session& session = collective_->session();
    if (!fits_) {
        return collective_->good(await_timeout(session, peer_, at < vectors_));
    }
    const u32 places[1] = {static_cast<u32>(at)};
    const bool awaited[1] = {at < vectors_};
    uint4 found[1] = {make_uint4(0, 0, 0, 0)};
    const bool there = local_.receive(session, peer_, places, awaited, found);
    vector = found[0];
    return collective_->good(there);
}

// Waits until the timeout for a vector for which there is no room. True if no thread of the warp has to.
__device__ __noinline__ bool LamportChannel::await_timeout(const Session& session, u32 peer, bool awaited) {
    Watch watch;
    while (__any_sync(~0u, awaited)) {
        if (__any_sync(~0u, watch.expired(session, peer, DATA))) {
            return false;
        }
    }
    return true;
}

__device__ __forceinline__ LamportChannels::LamportChannels(Collective& collective, u64 vectors) {
#pragma unroll
    for (u32 distance = 1; distance < WORLD; ++distance) {
        channels_[distance - 1] = LamportChannel(collective, collective.comm.after(distance), vectors);
    }
}

__device__ __forceinline__ const LamportChannel& LamportChannels::operator[](u32 distance) const {
    return channels_[distance - 1];
}

}  // namespace symmpool
