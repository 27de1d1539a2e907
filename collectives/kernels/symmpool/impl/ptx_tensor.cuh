//! Instructions of devices of compute capability 9.0 that move tiles of matrices and multiply them, each as a function.
//! With `ptx.cuh` this is the only file that has PTX; other devices compile it, and never run it.
//!
//! A tile in shared memory has rows of 128 bytes in the 128-byte swizzle of the CUDA driver's tensor maps: the 16-byte pieces of
//! a row change places by its number. It begins at a multiple of 1024 bytes. A *barrier* in this file is an mbarrier: threads
//! arrive at it, copies report their bytes to it, and others wait for the end of its phases, whose parities alternate from 0 on.
//!
//! The emulator has another file in the place of this one (`tests/emulator/ptx_tensor.cuh`).

#pragma once

#include <symmpool/impl/ptx.cuh>

namespace symmpool {

// How the CUDA driver describes a matrix for copies of tiles (CUtensorMap); the host makes it.
struct alignas(64) TensorMap {
    char bytes[128];
};

// A place in shared memory, to which bytes can be added.
using SharedAt = unsigned;

// Where a tile begins in a matrix that has several parts, each of as many rows: a column, and a row of a part.
struct TileAt {
    unsigned column, row, part;
};

// Types of the elements that are multiplied.
constexpr unsigned MULTIPLIES_BF16 = 0;
constexpr unsigned MULTIPLIES_F16 = 1;
constexpr unsigned MULTIPLIES_E4M3 = 2;

// Sums that a thread of a warpgroup (four warps, 128 threads) has of a product of 64 rows and 256 columns. Let w be its warp and
// l its lane. For each j below 32 and h below 2, the sum at 4 * j + 2 * h is that of row 16 * w + 8 * h + l / 4 and column
// 8 * j + 2 * (l % 4), and the next one is that of the next column.
constexpr unsigned SUMS = 128;

// Sums that a thread has of a product of fewer columns: 8, 16, 32 or 64.
template <unsigned COLUMNS> constexpr unsigned SUMS_OF = COLUMNS / 2;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SYMMPOOL_HAS_TENSOR_PTX 1
#else
#define SYMMPOOL_HAS_TENSOR_PTX 0
#endif

// The dynamic shared memory of a block, from a multiple of 1024 on: the launch has 1024 bytes more than `BYTES`.
template <unsigned BYTES> __device__ __forceinline__ SharedAt shared_memory() {
    extern __shared__ char all[];
    return (static_cast<unsigned>(__cvta_generic_to_shared(all)) + 1023) & ~1023u;
}

#if SYMMPOOL_HAS_TENSOR_PTX

// --- clusters of blocks

__device__ __forceinline__ unsigned block_in_cluster() {
    unsigned rank;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all threads of the cluster's blocks.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// --- barriers in shared memory, of 16 bytes each

// Makes a barrier, each phase of which ends with `arrivals` arrivals and all bytes that were expected.
__device__ __forceinline__ void make_barrier(SharedAt barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// Called by the thread that has made barriers, before a barrier of all threads that use them.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(SharedAt barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Arrives at a block's barrier of this place, in the same cluster. It orders no memory, which would take a
// microsecond: products have read their operands when they have ended.
__device__ __forceinline__ void arrive_at_block(SharedAt barrier, unsigned block) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}"
                 :: "r"(barrier), "r"(block) : "memory");
}

// Arrives, and lets the phase end only when copies have reported `bytes` bytes too.
__device__ __forceinline__ void arrive_expecting(SharedAt barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// Waits until the barrier's phase of this parity has ended.
__device__ __forceinline__ void await_phase(SharedAt barrier, unsigned parity) {
    asm volatile("{\n"
                 ".reg .pred ended;\n"
                 "WAIT:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
                 "@!ended bra WAIT;\n"
                 "}"
                 :: "r"(barrier), "r"(parity & 1) : "memory");
}

// --- copies by a unit of the SM (the TMA), which one thread asks for

// Begins to load a tile; what is outside of the matrix, or of the part, becomes zeros.
__device__ __forceinline__ void load_tile(SharedAt to, const TensorMap& map, TileAt at, SharedAt barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(to), "l"(&map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.part) : "memory");
}

// Begins to load a tile into this place of each block of a cluster of two, and reports to their barriers.
__device__ __forceinline__ void load_tile_for_both(SharedAt to, const TensorMap& map, TileAt at, SharedAt barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5}], [%2], %6;"
                 :: "r"(to), "l"(&map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.part),
                    "h"(static_cast<unsigned short>(3)) : "memory");
}

// Begins to store a tile; what is outside of the matrix, or of the part, is left out. It is one of the thread's bulk stores.
__device__ __forceinline__ void store_tile(const TensorMap& map, SharedAt from, TileAt at) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
                 :: "l"(&map), "r"(from), "r"(at.column), "r"(at.row), "r"(at.part) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Begins to load `bytes` bytes. You must have made the barrier expect them (`arrive_expecting`).
__device__ __forceinline__ void load_bytes(SharedAt to, const void* from, unsigned bytes, SharedAt barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier) : "memory");
}

// Begins to store `bytes` bytes. It is one of the thread's bulk stores.
__device__ __forceinline__ void store_bytes(void* to, SharedAt from, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(__cvta_generic_to_global(to)), "r"(from), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Lets copies that begin later see what this thread has stored to shared memory: a fence of the async proxy.
__device__ __forceinline__ void fence_for_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Lets bulk loads that begin later see what this thread has seen in global memory: a fence of the async proxy.
__device__ __forceinline__ void fence_for_loads() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// --- shared memory, by threads

__device__ __forceinline__ uint4 load_shared(SharedAt from) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_shared(SharedAt to, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "r"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}

__device__ __forceinline__ void store_shared_float(SharedAt to, float value) {
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(to), "f"(value) : "memory");
}

// Loads what is at this place of shared memory in a block of the cluster, which has stored it before a barrier of the cluster.
__device__ __forceinline__ uint4 load_of_block(SharedAt from, unsigned block) {
    uint4 value;
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [there];\n"
                 "}"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "r"(from), "r"(block) : "memory");
    return value;
}

// Stores four blocks of 8 rows and 8 elements of 16 bits, of each of which a thread has two as a product leaves its sums.
// The 8 threads from 8 * n on give the places of the rows of block n.
__device__ __forceinline__ void store_blocks(SharedAt row, uint4 value) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(row), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}

// --- products (wgmma), by the four warps of a warpgroup

// Lets products see sums that threads have touched. All threads of the warpgroup must call it before such products.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Makes the products since the last call a batch.
__device__ __forceinline__ void end_batch() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all but the last `LEFT` batches have ended.
template <unsigned LEFT> __device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}

// The matrix descriptor of a factor in shared memory. It has rows of the inner dimension, one for each row or column of the
// product. If it is transposed, it has rows for the inner dimension, in tiles of 64 columns and rows that are 8192 bytes
// apart. The bits are those of the PTX manual: the address, two strides, and the swizzle of 128 bytes.
__device__ __forceinline__ unsigned long long matrix_descriptor(SharedAt at, bool transposed) {
    const unsigned long long leading = transposed ? 8192 : 16, stride = 1024;
    return (at & 0x3ffff) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1ull << 62;
}

#define SYMMPOOL_SUMS \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SYMMPOOL_FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SYMMPOOL_SIXTEEN(i) SYMMPOOL_FOUR(i), SYMMPOOL_FOUR(i + 4), SYMMPOOL_FOUR(i + 8), SYMMPOOL_FOUR(i + 12)
#define SYMMPOOL_ALL_SUMS \
    SYMMPOOL_SIXTEEN(0), SYMMPOOL_SIXTEEN(16), SYMMPOOL_SIXTEEN(32), SYMMPOOL_SIXTEEN(48), SYMMPOOL_SIXTEEN(64), \
        SYMMPOOL_SIXTEEN(80), SYMMPOOL_SIXTEEN(96), SYMMPOOL_SIXTEEN(112)
#define SYMMPOOL_MULTIPLY(types, transposed) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256" types " {" SYMMPOOL_SUMS "}, %128, %129, 1, 1, 1" transposed \
                 ";" \
                 : SYMMPOOL_ALL_SUMS : "l"(left), "l"(right))

// Waits until all batches have ended. You must not read the sums before.
__device__ __forceinline__ void await_sums(float (&sums)[SUMS]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : SYMMPOOL_ALL_SUMS :: "memory");
}

// Begins to multiply 64 rows of 32 bytes by 256 columns of as many, and adds the products to the sums.
template <unsigned TYPE, bool TRANSPOSED>
__device__ __forceinline__ void multiply(float (&sums)[SUMS], SharedAt left_at, SharedAt right_at) {
    const unsigned long long left = matrix_descriptor(left_at, false), right = matrix_descriptor(right_at, TRANSPOSED);
    if constexpr (TYPE == MULTIPLIES_E4M3) {
        SYMMPOOL_MULTIPLY("k32.f32.e4m3.e4m3", "");
    } else if constexpr (TYPE == MULTIPLIES_F16 && TRANSPOSED) {
        SYMMPOOL_MULTIPLY("k16.f32.f16.f16", ", 0, 1");
    } else if constexpr (TYPE == MULTIPLIES_F16) {
        SYMMPOOL_MULTIPLY("k16.f32.f16.f16", ", 0, 0");
    } else if constexpr (TRANSPOSED) {
        SYMMPOOL_MULTIPLY("k16.f32.bf16.bf16", ", 0, 1");
    } else {
        SYMMPOOL_MULTIPLY("k16.f32.bf16.bf16", ", 0, 0");
    }
}

#define SYMMPOOL_4 "%0, %1, %2, %3"
#define SYMMPOOL_8 SYMMPOOL_4 ", %4, %5, %6, %7"
#define SYMMPOOL_16 SYMMPOOL_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SYMMPOOL_32 \
    SYMMPOOL_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SYMMPOOL_EIGHT(i) SYMMPOOL_FOUR(i), SYMMPOOL_FOUR(i + 4)
#define SYMMPOOL_MULTIPLY_SMALL(columns, list, factors, types, transposed, ...) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." types " {" list "}, " factors \
                 ", 1, 1, 1, " transposed ", 0;" : __VA_ARGS__ : "l"(left), "l"(right))
#define SYMMPOOL_MULTIPLY_TYPES(columns, list, factors, ...) \
    if constexpr (TYPE == MULTIPLIES_F16 && TRANSPOSED) { \
        SYMMPOOL_MULTIPLY_SMALL(columns, list, factors, "f16.f16", "1", __VA_ARGS__); \
    } else if constexpr (TYPE == MULTIPLIES_F16) { \
        SYMMPOOL_MULTIPLY_SMALL(columns, list, factors, "f16.f16", "0", __VA_ARGS__); \
    } else if constexpr (TRANSPOSED) { \
        SYMMPOOL_MULTIPLY_SMALL(columns, list, factors, "bf16.bf16", "1", __VA_ARGS__); \
    } else { \
        SYMMPOOL_MULTIPLY_SMALL(columns, list, factors, "bf16.bf16", "0", __VA_ARGS__); \
    }

// Begins to multiply 64 rows of 16 elements of 16 bits by COLUMNS columns of as many, and adds the products to the sums. Here
// the left factor may be transposed.
template <unsigned TYPE, bool TRANSPOSED, unsigned COLUMNS>
__device__ __forceinline__ void multiply_small(float (&sums)[SUMS_OF<COLUMNS>], SharedAt left_at, SharedAt right_at) {
    const unsigned long long left = matrix_descriptor(left_at, TRANSPOSED), right = matrix_descriptor(right_at, false);
    if constexpr (COLUMNS == 8) {
        SYMMPOOL_MULTIPLY_TYPES("8", SYMMPOOL_4, "%4, %5", SYMMPOOL_FOUR(0))
    } else if constexpr (COLUMNS == 16) {
        SYMMPOOL_MULTIPLY_TYPES("16", SYMMPOOL_8, "%8, %9", SYMMPOOL_EIGHT(0))
    } else if constexpr (COLUMNS == 32) {
        SYMMPOOL_MULTIPLY_TYPES("32", SYMMPOOL_16, "%16, %17", SYMMPOOL_SIXTEEN(0))
    } else {
        SYMMPOOL_MULTIPLY_TYPES("64", SYMMPOOL_32, "%32, %33", SYMMPOOL_SIXTEEN(0), SYMMPOOL_SIXTEEN(16))
    }
}

// Waits for the sums of `multiply_small`, as `await_sums` does for whole products.
template <unsigned COLUMNS> __device__ __forceinline__ void await_small_sums(float (&sums)[SUMS_OF<COLUMNS>]) {
    if constexpr (COLUMNS == 8) {
        asm volatile("wgmma.wait_group.sync.aligned 0;" : SYMMPOOL_FOUR(0) :: "memory");
    } else if constexpr (COLUMNS == 16) {
        asm volatile("wgmma.wait_group.sync.aligned 0;" : SYMMPOOL_EIGHT(0) :: "memory");
    } else if constexpr (COLUMNS == 32) {
        asm volatile("wgmma.wait_group.sync.aligned 0;" : SYMMPOOL_SIXTEEN(0) :: "memory");
    } else {
        asm volatile("wgmma.wait_group.sync.aligned 0;" : SYMMPOOL_SIXTEEN(0), SYMMPOOL_SIXTEEN(16) :: "memory");
    }
}

#undef SYMMPOOL_SUMS
#undef SYMMPOOL_FOUR
#undef SYMMPOOL_SIXTEEN
#undef SYMMPOOL_ALL_SUMS
#undef SYMMPOOL_MULTIPLY
#undef SYMMPOOL_4
#undef SYMMPOOL_8
#undef SYMMPOOL_16
#undef SYMMPOOL_32
#undef SYMMPOOL_EIGHT
#undef SYMMPOOL_MULTIPLY_SMALL
#undef SYMMPOOL_MULTIPLY_TYPES

#else

__device__ __forceinline__ unsigned block_in_cluster() { return 0; }
__device__ __forceinline__ void cluster_barrier() {}
__device__ __forceinline__ void make_barrier(SharedAt, unsigned) {}
__device__ __forceinline__ void publish_barriers() {}
__device__ __forceinline__ void arrive(SharedAt) {}
__device__ __forceinline__ void arrive_at_block(SharedAt, unsigned) {}
__device__ __forceinline__ void arrive_expecting(SharedAt, unsigned) {}
__device__ __forceinline__ void await_phase(SharedAt, unsigned) {}
__device__ __forceinline__ void load_tile(SharedAt, const TensorMap&, TileAt, SharedAt) {}
__device__ __forceinline__ void load_tile_for_both(SharedAt, const TensorMap&, TileAt, SharedAt) {}
__device__ __forceinline__ void store_tile(const TensorMap&, SharedAt, TileAt) {}
__device__ __forceinline__ void load_bytes(SharedAt, const void*, unsigned, SharedAt) {}
__device__ __forceinline__ void store_bytes(void*, SharedAt, unsigned) {}
__device__ __forceinline__ void fence_for_stores() {}
__device__ __forceinline__ void fence_for_loads() {}
__device__ __forceinline__ uint4 load_shared(SharedAt) { return make_uint4(0, 0, 0, 0); }
__device__ __forceinline__ void store_shared(SharedAt, uint4) {}
__device__ __forceinline__ void store_shared_float(SharedAt, float) {}
__device__ __forceinline__ uint4 load_of_block(SharedAt, unsigned) { return make_uint4(0, 0, 0, 0); }
__device__ __forceinline__ void store_blocks(SharedAt, uint4) {}
__device__ __forceinline__ void begin_products() {}
__device__ __forceinline__ void end_batch() {}
template <unsigned LEFT> __device__ __forceinline__ void await_products() {}
__device__ __forceinline__ void await_sums(float (&)[SUMS]) {}
template <unsigned TYPE, bool TRANSPOSED>
__device__ __forceinline__ void multiply(float (&sums)[SUMS], SharedAt, SharedAt) {
    for (unsigned i = 0; i < SUMS; ++i) {
        sums[i] = 0;
    }
}
template <unsigned TYPE, bool TRANSPOSED, unsigned COLUMNS>
__device__ __forceinline__ void multiply_small(float (&sums)[SUMS_OF<COLUMNS>], SharedAt, SharedAt) {
    for (unsigned i = 0; i < SUMS_OF<COLUMNS>; ++i) {
        sums[i] = 0;
    }
}
template <unsigned COLUMNS> __device__ __forceinline__ void await_small_sums(float (&)[SUMS_OF<COLUMNS>]) {}

#endif

}  // namespace symmpool
