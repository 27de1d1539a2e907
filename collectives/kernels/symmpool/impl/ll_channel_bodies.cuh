//! The functions of `LlChannel`. Included by `symmpool/ll_channel.cuh` alone.

#pragma once

namespace symmpool {

__device__ __forceinline__ u64 LlChannel::room(const DeviceComm& comm) { return comm.ll_bytes / 2 / 32 / WORLD; }

__device__ __forceinline__ LlChannel::LlChannel(Collective& collective, u32 peer, u64 vectors)
    : collective_(collective), peer_(peer), vectors_(vectors) {}

__device__ __forceinline__ void LlChannel::send(u64 at, uint4 vector) const {
    if (at < vectors_ && vectors_ <= room(collective_.comm)) {
        ll_store_vector(address(peer_, collective_.comm.rank, at), vector, collective_.session().epoch);
    }
}

__device__ __forceinline__ bool LlChannel::receive(u64 at, uint4& vector) const {
    const Session& session = collective_.session();
    const bool fits = at < vectors_ && vectors_ <= room(collective_.comm);
    // The address of a vector that does not fit lies outside of the inbox, where there may be no memory.
    const char* from = address(collective_.comm.rank, peer_, at);
    Watch watch;
    while (true) {
        if (fits && ll_load_vector(from, session.epoch, vector)) {
            return true;
        }
        if (watch.expired(session, peer_, DATA)) {
            return collective_.good(false);
        }
    }
}

__device__ __forceinline__ char* LlChannel::address(u32 owner, u32 from, u64 at) const {
    const Comm& comm = collective_.comm;
    const u64 half = collective_.session().parity() * (comm.ll_bytes / 2);
    return comm.of(owner) + comm.ll + half + 32 * (from * vectors_ + at);
}

}  // namespace symmpool
