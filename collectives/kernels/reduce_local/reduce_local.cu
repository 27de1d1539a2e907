//! Reduces arrays of one device, element by element, in the given order: what hosts have sent, in calls over hosts.
//! Defines: DTYPE, OP.
//!
//! Arrays have `call.bytes` bytes of whole elements, to which they are aligned. The output may be one of them. An average is
//! divided by `work.divisor`. Any grid and any block will do. Without inputs nothing is written.

#include <reduce_local/reduce_local_layout.cuh>
#include <symmpool/impl/comm_layout.cuh>
#include <symmpool/impl/ptx.cuh>
#include <symmpool/reduce.cuh>

using namespace symmpool;

extern "C" __global__ void symmpool_reduce_local(const __grid_constant__ CommFields,
                                                 const __grid_constant__ CallParams call,
                                                 const __grid_constant__ LocalReduceWork work) {
    using R = Reduce<DTYPE, OP>;
    using Item = R::Item;
    wait_for_stream();
    if (work.count == 0) {
        return;
    }
    const u64 count = call.bytes / sizeof(Item);
    const u64 threads = static_cast<u64>(gridDim.x) * blockDim.x;
    const u64 thread = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int divisor = static_cast<int>(work.divisor);

    u64 addresses = reinterpret_cast<u64>(call.output);
    for (u32 i = 0; i < work.count; ++i) {
        addresses |= reinterpret_cast<u64>(work.inputs[i]);
    }
    const u64 vectors = addresses % 16 == 0 ? count / R::LANES : 0;
    for (u64 at = thread; at < vectors; at += threads) {
        R::Vector total = R::widen(load_plain(reinterpret_cast<const uint4*>(work.inputs[0]) + at));
#pragma unroll 4
        for (u32 i = 1; i < work.count; ++i) {
            R::accumulate(total, load_plain(reinterpret_cast<const uint4*>(work.inputs[i]) + at));
        }
        store_plain(reinterpret_cast<uint4*>(call.output) + at, R::finish(total, divisor));
    }

    for (u64 at = vectors * R::LANES + thread; at < count; at += threads) {
        R::Acc total = R::widen(reinterpret_cast<const Item*>(work.inputs[0])[at]);
        for (u32 i = 1; i < work.count; ++i) {
            total = R::accumulate(total, R::widen(reinterpret_cast<const Item*>(work.inputs[i])[at]));
        }
        reinterpret_cast<Item*>(call.output)[at] = R::narrow(R::finalize(total, divisor));
    }
}
