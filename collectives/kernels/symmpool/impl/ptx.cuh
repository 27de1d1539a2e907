//! Instructions of the device that C++ has no expression for, each as a function. No other file has PTX but
//! `ptx_tensor.cuh`, which has those that move and multiply tiles of matrices.
//!
//! Addresses are of global memory, this device's or a peer's, and those of vectors are multiples of 16. *Relaxed*
//! accesses are made exactly as often as written, and each half of eight bytes is atomic for every device and
//! the host. Conversions round to nearest, ties to even.
//!
//! The emulator has another file in the place of this one (`tests/emulator/ptx.cuh`).

#pragma once

namespace symmpool {

// --- memory that other threads, devices or the host access at the same time

__device__ __forceinline__ uint4 load_relaxed(const void* from) {
    uint4 value;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    return value;
}

// Loads a vector, and acquires: where it finds what another thread stored behind a fence, what that thread stored before the
// fence is visible to this one. It takes less time than a relaxed load and a fence, which would wait for this thread's stores.
__device__ __forceinline__ uint4 load_acquire_vector(const void* from) {
    uint4 value;
    asm volatile("ld.acquire.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed(void* to, uint4 value) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(__cvta_generic_to_global(to)), "r"(value.x), "r"(value.y), "r"(value.z),
                   "r"(value.w)
                 : "memory");
}

// A vector of a line of 128 bytes, of which eight threads of a warp access one vector each by the same
// instruction: the line arrives whole, and is seen whole (`symmpool/impl/ll128.cuh`).
__device__ __forceinline__ uint4 load_line(const void* from) { return load_relaxed(from); }
__device__ __forceinline__ void store_line(void* to, uint4 value) { store_relaxed(to, value); }

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* from) {
    unsigned long long value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
                 : "=l"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(unsigned long long* to, unsigned long long value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;"
                 :: "l"(__cvta_generic_to_global(to)), "l"(value) : "memory");
}

// Orders all earlier stores of this thread, and those that it has observed, before all its later ones.
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// --- time, and the kernels of a stream

// Whether a wait that has polled `looks` times in vain also reads the clock, which takes longer than a poll.
__device__ __forceinline__ bool is_time_for_clock(unsigned looks) { return (looks & 255) == 0; }

// The device's clock, which all its SMs share.
__device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Waits until the stream's earlier work has ended and is visible. It has no effect where kernels do not overlap.
__device__ __forceinline__ void wait_for_stream() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// How most kernels begin. With `early` (programmatic dependent launch) the blocks of the stream's next kernel
// may start while this kernel still runs; they access no data before it has ended.
__device__ __forceinline__ void begin_kernel(bool early) {
#if __CUDA_ARCH__ >= 900
    if (early) {
        asm volatile("griddepcontrol.launch_dependents;");
    }
#endif
    wait_for_stream();
}

// --- threads of a block

// A barrier of some warps of a block, which have `threads` threads in all. These get the same answer: whether a predicate of
// any is true. `barrier` is 1 to 15, and must be no other warps' barrier.
__device__ __forceinline__ bool barrier_of_warps(unsigned barrier, unsigned threads, bool predicate) {
    unsigned any;
    asm volatile("{\n"
                 ".reg .pred given, found;\n"
                 "setp.ne.u32 given, %3, 0;\n"
                 "barrier.red.or.pred found, %1, %2, given;\n"
                 "selp.u32 %0, 1, 0, found;\n"
                 "}"
                 : "=r"(any) : "r"(barrier), "r"(threads), "r"(static_cast<unsigned>(predicate)) : "memory");
    return any != 0;
}

// --- bulk copies, on devices from compute capability 9.0 on
//
// A unit of the SM (the TMA) copies between global and shared memory, as one thread asks it to: threads and their registers
// are free for other work. Addresses and lengths are multiples of 16.

#if __CUDA_ARCH__ >= 900
constexpr bool HAS_BULK_COPIES = true;

__device__ __forceinline__ unsigned shared_address(const void* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// Makes an mbarrier in shared memory, which shows when loads have ended.
__device__ __forceinline__ void make_mbarrier(unsigned long long* mbarrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(mbarrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Begins to load `bytes` bytes into shared memory.
__device__ __forceinline__ void bulk_load(void* shared, const void* from, unsigned bytes, unsigned long long* mbarrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(shared_address(mbarrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(shared)), "l"(__cvta_generic_to_global(from)), "r"(bytes),
                    "r"(shared_address(mbarrier))
                 : "memory");
}

// Waits until the `nth` load with this mbarrier has ended: 0 is the first.
__device__ __forceinline__ void await_mbarrier(unsigned long long* mbarrier, unsigned nth) {
    asm volatile("{\n"
                 ".reg .pred there;\n"
                 "WAIT:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
                 "@!there bra WAIT;\n"
                 "}"
                 :: "r"(shared_address(mbarrier)), "r"(nth & 1) : "memory");
}

// Begins to store `bytes` bytes of shared memory into global memory, this device's or a peer's.
__device__ __forceinline__ void bulk_store(void* to, const void* shared, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(__cvta_generic_to_global(to)), "r"(shared_address(shared)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last `LEFT` stores of this thread have read what they store.
template <unsigned LEFT> __device__ __forceinline__ void await_bulk_reads() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(LEFT) : "memory");
}

// Waits until these stores have ended: they come before a later fence.
template <unsigned LEFT> __device__ __forceinline__ void await_bulk_stores() {
    asm volatile("cp.async.bulk.wait_group %0;" :: "n"(LEFT) : "memory");
}
#else
constexpr bool HAS_BULK_COPIES = false;

__device__ __forceinline__ void make_mbarrier(unsigned long long*) {}
__device__ __forceinline__ void bulk_load(void*, const void*, unsigned, unsigned long long*) {}
__device__ __forceinline__ void await_mbarrier(unsigned long long*, unsigned) {}
__device__ __forceinline__ void bulk_store(void*, const void*, unsigned) {}
template <unsigned LEFT> __device__ __forceinline__ void await_bulk_reads() {}
template <unsigned LEFT> __device__ __forceinline__ void await_bulk_stores() {}
#endif

// --- conversions

__device__ __forceinline__ unsigned short f32_to_bf16(float value) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ unsigned f32_to_bf16x2(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float f16_to_f32(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned short f32_to_f16(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ unsigned f32_to_f16x2(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// --- sums of pairs, each rounded once

__device__ __forceinline__ unsigned add_bf16x2(unsigned a, unsigned b) {
    constexpr unsigned ONES = 0x3f803f80u;
    unsigned sum;
    // Devices before sm_90 have no plain addition.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(ONES), "r"(b));
    return sum;
}

__device__ __forceinline__ unsigned add_f16x2(unsigned a, unsigned b) {
    unsigned sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

// --- 8-bit floats, on devices from compute capability 8.9 on. Values that are too large become the largest number.

__device__ __forceinline__ unsigned e4m3x2_to_f16x2(unsigned short pair) {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}

__device__ __forceinline__ unsigned short f32_to_e4m3x2_finite(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ unsigned short f32_to_e5m2x2_finite(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

}  // namespace symmpool
