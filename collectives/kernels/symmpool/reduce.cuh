//! Reductions of elements, with the same bits as those of the host kernels.
//!
//! Elements are widened, accumulated in rank order, finalized (an average is divided) and narrowed
//! once. Every operation rounds by itself: nothing is fused, flushed to zero or approximated,
//! whatever the compiler's options are. Only the sign and payload of a NaN may differ from the host's.

#pragma once

#include <symmpool/types.cuh>
#include <symmpool/vector.cuh>

namespace symmpool {

// The codes of the Rust type `ReduceOp`.
constexpr int SUM = 1;
constexpr int PROD = 2;
constexpr int MIN = 3;
constexpr int MAX = 4;
constexpr int AVG = 5;

// --- arithmetic; integers wrap

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

// --- the reduction of elements of type `D` by operation `O`

template <int D, int O>
struct Reduce {
    static_assert(O >= SUM && O <= AVG, "OP must be a code of ReduceOp");

    template <bool AVERAGE, typename T> struct Choose { using Type = typename T::Acc; };
    template <typename T> struct Choose<true, T> { using Type = typename T::Wide; };

    using Item = typename Type<D>::Item;
    using Acc = typename Choose<O == AVG, Type<D>>::Type;
    static constexpr int LANES = symmpool::LANES<D>;

    // The widened elements of a vector.
    struct Vector {
        Acc lanes[LANES];
    };

    static __device__ __forceinline__ Acc widen(Item item) {
        return symmpool::widen<D, Acc>(item);
    }

    static __device__ __forceinline__ Acc accumulate(Acc so_far, Acc next) {
        if constexpr (O == SUM || O == AVG) {
            return add(so_far, next);
        } else if constexpr (O == PROD) {
            return multiply(so_far, next);
        } else if constexpr (O == MIN) {
            return least(so_far, next);
        } else {
            return greatest(so_far, next);
        }
    }

    static __device__ __forceinline__ Acc finalize(Acc total, int world) {
        if constexpr (O == AVG) {
            return divide(total, world);
        } else {
            return total;
        }
    }

    static __device__ __forceinline__ Item narrow(Acc total) {
        return symmpool::narrow<D, Acc>(total);
    }

    // --- the same for vectors

    static __device__ __forceinline__ Vector widen(uint4 bits) {
        Vector vector;
        unpack<D, Acc>(bits, vector.lanes);
        return vector;
    }

    static __device__ __forceinline__ void accumulate(Vector& so_far, uint4 next) {
        Vector wide = widen(next);
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            so_far.lanes[i] = accumulate(so_far.lanes[i], wide.lanes[i]);
        }
    }

    // Finalizes and narrows.
    static __device__ __forceinline__ uint4 finish(Vector total, int world) {
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            total.lanes[i] = finalize(total.lanes[i], world);
        }
        return pack<D, Acc>(total.lanes);
    }

    // The sums of two vectors' elements. Half as wide types are added as pairs: an f32 has more than twice their digits, so
    // a sum that is rounded to an f32 first is rounded to the same value.
    static __device__ __forceinline__ uint4 plus(uint4 a, uint4 b) {
        if constexpr (D == F16 || D == BF16) {
            const auto pair = [](unsigned one, unsigned other) {
                return D == F16 ? add_f16x2(one, other) : add_bf16x2(one, other);
            };
            return make_uint4(pair(a.x, b.x), pair(a.y, b.y), pair(a.z, b.z), pair(a.w, b.w));
        } else {
            Vector total = widen(a);
            accumulate(total, b);
            return finish(total, 2);
        }
    }

    // Reduces the vectors of all ranks, in rank order on every rank (rule S7).
    template <unsigned RANKS>
    static __device__ __forceinline__ uint4 all(const uint4 (&vectors)[RANKS]) {
        if constexpr (O == SUM && RANKS == 2) {
            return plus(vectors[0], vectors[1]);
        }
        Vector total = widen(vectors[0]);
#pragma unroll
        for (unsigned rank = 1; rank < RANKS; ++rank) {
            accumulate(total, vectors[rank]);
        }
        return finish(total, RANKS);
    }
};

}  // namespace symmpool
