//! Arithmetic of reductions, with the same bits as that of the host kernels. Every operation rounds by itself: nothing is
//! fused, flushed to zero or approximated, whatever the compiler's options are. Integers wrap.

#pragma once

#include <symmpool/impl/types.cuh>

namespace symmpool {

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ int add(int a, int b) {
    return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
}
__device__ __forceinline__ long long add(long long a, long long b) {
    return static_cast<long long>(static_cast<unsigned long long>(a) +
                                  static_cast<unsigned long long>(b));
}
__device__ __forceinline__ Int128 add(Int128 a, Int128 b) {
    unsigned long long low = a.low + b.low;
    return Int128{low, a.high + b.high + (low < a.low ? 1 : 0)};
}

__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ int multiply(int a, int b) {
    return static_cast<int>(static_cast<unsigned>(a) * static_cast<unsigned>(b));
}
__device__ __forceinline__ long long multiply(long long a, long long b) {
    return static_cast<long long>(static_cast<unsigned long long>(a) *
                                  static_cast<unsigned long long>(b));
}

// If `a` is a NaN it stays; if `b` is one, the comparison fails and `b` is taken. Of equal values, such as zeros
// of different signs, `b` is taken.
template <typename Acc>
__device__ __forceinline__ Acc least(Acc a, Acc b) {
    return a < b || a != a ? a : b;
}
template <typename Acc>
__device__ __forceinline__ Acc greatest(Acc a, Acc b) {
    return a > b || a != a ? a : b;
}

// Averages of `world` ranks' elements; integers are rounded toward zero. The reciprocal of a power of two is exact, so to
// multiply by it rounds the same number as a division, which takes ten times as long: in few blocks, reduce-scatters of
// averages took twice as long as those of sums.
__device__ __forceinline__ bool is_power_of_two(int world) { return (world & (world - 1)) == 0; }
__device__ __forceinline__ float reciprocal(int of) { return __fdiv_rn(1.0f, static_cast<float>(of)); }
__device__ __forceinline__ float divide(float total, int by, float reciprocal_of_by) {
    return is_power_of_two(by) ? __fmul_rn(total, reciprocal_of_by) : __fdiv_rn(total, static_cast<float>(by));
}
__device__ __forceinline__ float divide(float total, int world) { return divide(total, world, reciprocal(world)); }
__device__ __forceinline__ double divide(double total, int world) {
    const double by = static_cast<double>(world);
    return is_power_of_two(world) ? __dmul_rn(total, __ddiv_rn(1.0, by)) : __ddiv_rn(total, by);
}
__device__ __forceinline__ int divide(int total, int world) { return total / world; }
__device__ __forceinline__ long long divide(long long total, int world) { return total / world; }
__device__ __forceinline__ Int128 divide(Int128 total, int world) {
    // Long division of the magnitude, 32 bits at a time. The quotient is an average of 64-bit numbers, so
    // it fits 64 bits, and its upper half is its sign.
    bool negative = total.high < 0;
    unsigned long long low = negative ? 0 - total.low : total.low;
    unsigned long long high = static_cast<unsigned long long>(total.high);
    high = negative ? ~high + (total.low == 0 ? 1 : 0) : high;
    unsigned long long by = static_cast<unsigned>(world);
    unsigned long long rest = high % by;
    unsigned long long upper = rest << 32 | low >> 32;
    unsigned long long lower = upper % by << 32 | (low & 0xffffffffu);
    unsigned long long quotient = upper / by << 32 | lower / by;
    return Int128{negative ? 0 - quotient : quotient, negative && quotient != 0 ? -1 : 0};
}

}  // namespace symmpool
