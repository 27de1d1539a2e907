//! What C++ has no words for: instructions of the device, each as a function. All PTX there is.
//!
//! Addresses are of global memory, this device's or a peer's; of vectors, multiples of 16. *Relaxed*
//! accesses are made exactly as often as written, and are atomic, half by half, for every device and the
//! host. Conversions round to nearest, ties to even.
//!
//! Whoever runs kernels without a device has another file in this one's place (`tests/emulator`).

#pragma once

namespace symmpool {

// --- memory that others touch meanwhile

__device__ __forceinline__ uint4 load_relaxed(const void* from) {
    uint4 value;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    return value;
}

// What its writer's stream did before is visible too, if its fence came before the write. Takes less
// than a fence here, which waits for what this thread has stored.
__device__ __forceinline__ uint4 load_acquired(const void* from) {
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

// A part of a line of 128 bytes, of which eight threads of a warp take one each, by the same instruction: it
// comes whole, and is seen whole (`protocol/ll128.cuh`).
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

// All earlier stores of this thread, and those it has learned of, before all later ones.
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// --- the kernel and its time

// Of the device's clock, which all its processors share.
__device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// What the stream did before has ended, and is visible. Without effect where kernels do not overlap.
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Programmatic dependent launch: the next kernel's blocks may take their places while this one
// still runs; they read nothing before it has ended. Without effect where it was not asked for.
__device__ __forceinline__ void begin(bool early) {
#if __CUDA_ARCH__ >= 900
    if (early) {
        asm volatile("griddepcontrol.launch_dependents;");
    }
#endif
    follow();
}

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

// --- 8-bit floats, by devices of compute capability 8.9. What is too large becomes the largest number.

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
