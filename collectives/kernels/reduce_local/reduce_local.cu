//! Reduces arrays of one device, element by element, in the given order. Defines: DTYPE, OP.
//!
//! `inputs` points to `n` addresses, in memory that the device can read. Arrays hold `count` elements and are
//! aligned to their elements. `out` may be one of them. Any grid and any block will do. Without inputs
//! nothing is written.

#include <symmpool/reduce.cuh>

extern "C" __global__ void symmpool_reduce_local(const void* const* inputs, int n, void* out,
                                                 long long count) {
    using Reduce = symmpool::Reduce<DTYPE, OP>;
    using Item = Reduce::Item;
    if (n <= 0) {
        return;
    }
    const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
    const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;

    unsigned long long addresses = reinterpret_cast<unsigned long long>(out);
    for (int i = 0; i < n; ++i) {
        addresses |= reinterpret_cast<unsigned long long>(inputs[i]);
    }
    const long long vectors = addresses % 16 == 0 ? count / Reduce::LANES : 0;
    for (long long at = thread; at < vectors; at += threads) {
        Reduce::Vector total = Reduce::widen(
            symmpool::load_plain(static_cast<const uint4*>(inputs[0]) + at));
#pragma unroll 4
        for (int i = 1; i < n; ++i) {
            Reduce::accumulate(total, symmpool::load_plain(static_cast<const uint4*>(inputs[i]) + at));
        }
        symmpool::store_plain(static_cast<uint4*>(out) + at, Reduce::finish(total, n));
    }

    for (long long at = vectors * Reduce::LANES + thread; at < count; at += threads) {
        Reduce::Acc total = Reduce::widen(static_cast<const Item*>(inputs[0])[at]);
        for (int i = 1; i < n; ++i) {
            total = Reduce::accumulate(total, Reduce::widen(static_cast<const Item*>(inputs[i])[at]));
        }
        static_cast<Item*>(out)[at] = Reduce::narrow(Reduce::finalize(total, n));
    }
}
