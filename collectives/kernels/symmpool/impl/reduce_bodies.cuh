//! The functions of `Reduce`. Included by `symmpool/reduce.cuh` alone.

#pragma once

namespace symmpool {

// `all` calls this for sums alone, and the fused kernels do. Elements of 16 bits are added by an instruction for pairs, which
// rounds once. Its sums have the bits of those that go by way of an f32: that has more than twice the digits, so rounding to it
// first changes nothing.
template <int D, int O>
__device__ __forceinline__ uint4 Reduce<D, O>::plus(uint4 a, uint4 b) {
    if constexpr (D == F16 || D == BF16) {
        const auto pair = [](unsigned one, unsigned other) {
            return D == F16 ? add_f16x2(one, other) : add_bf16x2(one, other);
        };
        return make_uint4(pair(a.x, b.x), pair(a.y, b.y), pair(a.z, b.z), pair(a.w, b.w));
    } else {
        auto total = Reduce::widen(a);
        Reduce::accumulate(total, b);
        return Reduce::finish(total, 2);
    }
}

template <int D, int O>
template <unsigned RANKS>
__device__ __forceinline__ uint4 Reduce<D, O>::all(const uint4 (&vectors)[RANKS]) {
    if constexpr (O == SUM && RANKS == 2) {
        return plus(vectors[0], vectors[1]);
    }
    auto total = Reduce::widen(vectors[0]);
#pragma unroll
    for (unsigned rank = 1; rank < RANKS; ++rank) {
        Reduce::accumulate(total, vectors[rank]);
    }
    return Reduce::finish(total, RANKS);
}

}  // namespace symmpool
