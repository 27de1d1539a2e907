//! Reductions of elements, and of the vectors that hold them, in steps: widen, accumulate, finish. Included by
//! `symmpool/reduce.cuh` alone, behind the codes of operations.

#pragma once

#include <symmpool/impl/arithmetic.cuh>
#include <symmpool/impl/vector.cuh>

namespace symmpool {

template <int D, int O>
struct ReduceLanes {
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
};

}  // namespace symmpool
