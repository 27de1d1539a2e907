//! The caller's data, of any length and alignment, accessed as vectors of 16 bytes.

#pragma once

#include <symmpool/impl/comm.cuh>
#include <symmpool/impl/partial.cuh>

namespace symmpool {

// A range of memory in vectors of 16 bytes, of which the last may be partial. `begin` may have any alignment.
template <typename Byte>
struct Span {
    Byte* begin;
    u64 bytes;
    bool aligned;

    __device__ __forceinline__ Span(Byte* at, u64 length)
        : begin(at), bytes(length), aligned(reinterpret_cast<u64>(at) % 16 == 0) {}

    __device__ __forceinline__ u64 vectors() const { return (bytes + 15) / 16; }

    // Loads vector `at`, which must be below `vectors()`: nothing checks that. Bytes of it behind the range are zero, and are
    // not read. Called by a thread for itself.
    __device__ __forceinline__ uint4 load(u64 at) const {
        u64 from = 16 * at;
        if (aligned && from + 16 <= bytes) {
            return load_plain(begin + from);
        }
        return load_partial(begin + from, static_cast<u32>(bytes - from < 16 ? bytes - from : 16));
    }

    // Stores vector `at`, which must be below `vectors()`: nothing checks that. Bytes of it behind the range are not written.
    __device__ __forceinline__ void store(u64 at, uint4 vector) const {
        u64 from = 16 * at;
        if (aligned && from + 16 <= bytes) {
            store_plain(begin + from, vector);
        } else {
            u64 left = bytes - from;
            store_partial(begin + from, static_cast<u32>(left < 16 ? left : 16), vector);
        }
    }
};

using Source = Span<const char>;
using Target = Span<char>;

}  // namespace symmpool
