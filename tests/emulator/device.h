//! Replacements of CUDA's built-in names for kernels. The threads of a block are fibers of one thread of the process;
//! `threads.cpp` runs them in an order that differs from run to run.

#pragma once

#include "place.h"

extern "C" {
float fabsf(float);
float fmaxf(float, float);
float sqrtf(float);
}

struct uint2 { unsigned x, y; };
struct float2 { float x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

// Blocks of a cluster, which one thread of the process runs: they would have a static variable together.
#ifdef CLUSTER
constexpr unsigned EMULATED_CLUSTER = CLUSTER;
#define __shared__ static_assert(false, "kernels with clusters have shared memory by shared_memory alone"); static thread_local
#else
constexpr unsigned EMULATED_CLUSTER = 1;
#define __shared__ static thread_local
#endif

// The function through which the driver's library calls a kernel.
#define EMULATED_KERNEL(name) \
    extern "C" emulated::Call emulated_##name(void** given) { return emulated::call(&name, given, EMULATED_CLUSTER); }

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
// Where the compiler inlines what it likes, it takes half the time.
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))

#define threadIdx (emulated_place->thread)
#define blockIdx (emulated_place->block)
#define blockDim (emulated_place->block_dim)
#define gridDim (emulated_place->grid_dim)

using emulated::emulated_place;

inline void __syncthreads() { emulated::emulated_block(0); }
inline int __syncthreads_or(int predicate) { return emulated::emulated_block(predicate); }

inline long long clock64() { return static_cast<long long>(emulated::emulated_nanoseconds()); }

namespace emulated {
inline unsigned lane() { return emulated_place->thread.x % 32; }

template <typename T>
T shuffled(T value, unsigned from, char kind) {
    static_assert(sizeof(T) <= 8, "");
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    unsigned ended = 0;
    const unsigned long long* all = emulated_warp(bits, kind, &ended);
    T found = value;
    if (from < 32) {
        __builtin_memcpy(&found, &all[from], sizeof(T));
    }
    return found;
}
}  // namespace emulated

// Each thread goes on by itself.
inline unsigned __activemask() { return 1u << emulated::lane(); }
inline void __syncwarp(unsigned = ~0u) {
    unsigned ended = 0;
    emulated::emulated_warp(0, 's', &ended);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    unsigned ended = 0, found = 0;
    const unsigned long long* all = emulated::emulated_warp(predicate != 0, 'b', &ended);
    for (unsigned i = 0; i < 32; ++i) {
        found |= !(ended >> i & 1) && all[i] ? 1u << i : 0;
    }
    return found;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
template <typename T>
T __shfl_sync(unsigned, T value, unsigned from) {
    return emulated::shuffled(value, from % 32, 'i');
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned by) {
    const unsigned lane = emulated::lane();
    return emulated::shuffled(value, lane < by ? lane : lane - by, 'u');
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, unsigned with) {
    return emulated::shuffled(value, emulated::lane() ^ with, 'x');
}

namespace emulated {
template <typename F>
unsigned reduced(unsigned value, char kind, F&& fold) {
    unsigned ended = 0;
    const unsigned long long* all = emulated_warp(value, kind, &ended);
    for (unsigned i = 0; i < 32; ++i) {
        value = ended >> i & 1 || i == lane() ? value : fold(value, static_cast<unsigned>(all[i]));
    }
    return value;
}
}  // namespace emulated

inline unsigned __reduce_min_sync(unsigned, unsigned value) {
    return emulated::reduced(value, 'm', [](unsigned a, unsigned b) { return a < b ? a : b; });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    return emulated::reduced(value, 'M', [](unsigned a, unsigned b) { return a < b ? b : a; });
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    return emulated::reduced(value, '+', [](unsigned a, unsigned b) { return a + b; });
}

template <typename T, typename V>
T atomicAdd(T* at, V value) {
    emulated::emulated_act();
    return __atomic_fetch_add(at, static_cast<T>(value), __ATOMIC_SEQ_CST);
}
template <typename T, typename V>
T atomicExch(T* at, V value) {
    emulated::emulated_act();
    return __atomic_exchange_n(at, static_cast<T>(value), __ATOMIC_SEQ_CST);
}
template <typename T, typename E, typename V>
T atomicCAS(T* at, E expected, V value) {
    emulated::emulated_act();
    T seen = static_cast<T>(expected);
    __atomic_compare_exchange_n(at, &seen, static_cast<T>(value), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return seen;
}
inline unsigned atomicInc(unsigned* at, unsigned most) {
    emulated::emulated_act();
    unsigned seen = __atomic_load_n(at, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(at, &seen, seen >= most ? 0 : seen + 1, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST)) {
    }
    return seen;
}
template <typename T, typename V>
T atomicMin(T* at, V value) {
    emulated::emulated_act();
    T seen = __atomic_load_n(at, __ATOMIC_SEQ_CST);
    while (static_cast<T>(value) < seen &&
           !__atomic_compare_exchange_n(at, &seen, static_cast<T>(value), false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST)) {
    }
    return seen;
}

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
    return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (bits & 31));
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

template <typename To, typename From>
To emulated_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float value) { return emulated_bits<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return emulated_bits<float>(bits); }
inline double __longlong_as_double(long long bits) { return emulated_bits<double>(bits); }
inline long long __double_as_longlong(double value) { return emulated_bits<long long>(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsqrt_rn(float value) { return sqrtf(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
