//! The functions of `LineSpan` and `Ll128Channel`. Included by `symmpool/ll128_channel.cuh` alone.

#pragma once

namespace symmpool {

// Where this thread's piece of a line begins, and how many bytes it has.
template <typename Byte> __device__ __forceinline__ Byte* piece_of(const LineSpan<Byte>& span, u64 line) {
    return span.begin + line * LINE_PAYLOAD + 16 * line_thread();
}
template <typename Byte> __device__ __forceinline__ u32 piece_length(const LineSpan<Byte>& span, u64 line) {
    return piece_bytes(span.bytes, line, line_thread());
}

template <typename Byte> __device__ __forceinline__ u64 LineSpan<Byte>::lines() const { return lines_of(bytes); }
template <typename Byte> __device__ __forceinline__ uint4 LineSpan<Byte>::load(u64 line) const {
    return load_piece(piece_of(*this, line), piece_length(*this, line));
}
template <typename Byte> __device__ __forceinline__ void LineSpan<Byte>::store(u64 line, uint4 piece) const {
    store_piece(piece_of(*this, line), piece_length(*this, line), piece);
}

template <typename Visit> __device__ void for_each_line(u64 lines, Visit visit) {
    const u64 first = worker_thread() / LINE_THREADS, before = threadIdx.x % 32 / LINE_THREADS;
#pragma unroll 1
    for (u64 line = first; line - before < lines; line += worker_threads() / LINE_THREADS) {
        if (!visit(line)) {
            return;
        }
    }
}

__device__ __forceinline__ u64 Ll128Channel::room(const DeviceComm& comm) {
    return comm.ll128_bytes / 2 / LINE_BYTES / WORLD;
}

__device__ __forceinline__ Ll128Channel::Ll128Channel(Collective& collective, u32 peer, u64 lines)
    : collective_(collective), peer_(peer), lines_(lines) {}

__device__ __forceinline__ void Ll128Channel::send(u64 line, uint4 piece) const {
    if (line < lines_ && lines_ <= room(collective_.comm)) {
        const uint4 vector = with_flags(piece, line_thread(), collective_.session().epoch);
        store_line(address(peer_, collective_.comm.rank, line), vector);
    }
}

__device__ __forceinline__ bool Ll128Channel::receive(u64 line, uint4& piece) const {
    const Session& session = collective_.session();
    const bool fits = lines_ <= room(collective_.comm), awaited = line < lines_;
    const char* from = address(collective_.comm.rank, peer_, line);
    Watch watch;
    bool missing = true;
    while (missing) {
        missing = awaited && !fits;
        if (awaited && fits) {
            piece = load_line(from);
            missing = !has_flags(piece, line_thread(), session.epoch);
        }
        missing = __any_sync(~0u, missing);
        if (missing && __any_sync(~0u, watch.expired(session, peer_, DATA))) {
            return collective_.good(false);
        }
    }
    return true;
}

__device__ __forceinline__ char* Ll128Channel::address(u32 owner, u32 from, u64 line) const {
    const Comm& comm = collective_.comm;
    const u64 half = collective_.session().parity() * (comm.ll128_bytes / 2);
    return comm.of(owner) + comm.ll128 + half + LINE_BYTES * (from * lines_ + line) + 16 * line_thread();
}

}  // namespace symmpool
