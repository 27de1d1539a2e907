//! Lines of 128 bytes that show by flags of their own that they have arrived: the LL128 protocol.

#pragma once

#include <symmpool/collective.cuh>

namespace symmpool {

// Memory of any alignment and length as the payloads of lines. Eight threads in a row have a piece of a line each: sixteen
// bytes, the last of them eight. Beyond the last line nothing is loaded or stored.
template <typename Byte> struct LineSpan {
    Byte* begin;
    u64 bytes;

    __device__ u64 lines() const;
    __device__ uint4 load(u64 line) const;
    __device__ void store(u64 line, uint4 piece) const;
};

using SourceLines = LineSpan<const char>;
using TargetLines = LineSpan<char>;

// Divides lines among all blocks: calls `visit(line)` until it returns false. Whole warps come to each call, of which the
// last lines may be past the end.
template <typename Visit> __device__ __forceinline__ void for_each_line(u64 lines, Visit visit);

// Lines of 128 bytes that show by themselves that they have arrived: the last eight are flags. Only NVLink keeps lines
// whole, so there is no room on other links. All threads of a warp must call `send` and `receive` together, for four lines at
// once. The inbox of a rank has `lines` lines of each rank. You must pass WORLD times as many to `Collective`, as `ll128_lines`.
class Ll128Channel {
public:
    // How many lines of each rank an inbox has room for: 0 where not all ranks are linked by NVLink.
    static __device__ u64 room(const DeviceComm& comm);

    __device__ Ll128Channel(Collective& collective, u32 peer, u64 lines);

    // Sends this thread's piece of a line, once a call at most. A line for which there is no room is not sent.
    __device__ void send(u64 line, uint4 piece) const;

    // Waits for this thread's piece of a line of the peer; lines past the end are not waited for. All threads of a warp get
    // the same answer: false if a line does not arrive within the timeout. These threads must return.
    __device__ bool receive(u64 line, uint4& piece) const;

private:
    __device__ char* address(u32 owner, u32 from, u64 line) const;

    Collective& collective_;
    const u32 peer_;
    const u64 lines_;
};

}  // namespace symmpool

#include <symmpool/impl/ll128_channel_bodies.cuh>
