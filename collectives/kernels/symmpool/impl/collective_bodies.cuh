//! The functions of `Collective`. Included by `symmpool/collective.cuh` alone.

#pragma once

namespace symmpool {

// The kind of flags that say that a block has come to the end. Channels have the others.
constexpr u32 END_KIND = FLAG_KINDS - 1;

__device__ __forceinline__ Collective::Collective(const DeviceComm& device_comm, const DeviceCall& device_call,
                                                  u64 ll_vectors, End leave, u64 ll128_lines)
    : CallBlock(device_comm), comm(device_comm), call(device_call), end_(leave) {
    begin(call, ll_vectors, ll128_lines, [](const Session& session) { expire_escape_marks(session); });
}

__device__ __forceinline__ Collective::~Collective() {
    if (works_ && end_ == End::TOGETHER && !__syncthreads_or(failed_)) {
        const PeerBlocks own = peer_blocks();
        raise_flags_behind_barrier(session_, own, END_KIND, 1);
        await_flags(session_, own, END_KIND, 1, EXIT);
    }
}

__device__ __forceinline__ Collective::operator bool() const { return works_; }

__device__ __forceinline__ u32 Collective::block() const { return worker_block(); }
__device__ __forceinline__ u32 Collective::blocks() const { return worker_blocks(); }

__device__ __forceinline__ ByteRange Collective::share(u64 bytes) const {
    const EvenSplit split((bytes + 15) / 16, blocks());
    const u64 from = 16 * split.begin(block()), to = 16 * split.begin(block() + 1);
    return {from < bytes ? from : bytes, to < bytes ? to : bytes};
}

__device__ __forceinline__ bool Collective::await_peers() {
    return good_for_all(await_handshakes<true>(session_, call));
}

__device__ __forceinline__ char* Collective::scratch(u32 rank) const {
    return comm.of(rank) + comm.plan_scratch + session_.parity() * (comm.plan_scratch_bytes / 2);
}
__device__ __forceinline__ u64 Collective::scratch_bytes() const { return comm.plan_scratch_bytes / 2; }

}  // namespace symmpool
