//! Replacements of `collectives/kernels/symmpool/impl/ptx_tensor.cuh` for kernels: the same functions on a CPU. Copies and
//! products are done when they begin; one that would wait for ever, or does not fit, ends the process.

#pragma once

#include <symmpool/impl/types.cuh>

namespace symmpool {

// `cuTensorMapEncodeTiled` in `driver.cpp` fills it.
struct alignas(64) TensorMap {
    char* begin;
    unsigned long long columns, rows, parts, pitch, part_pitch;
    unsigned box_columns, box_rows, element, unused[13];
};
static_assert(sizeof(TensorMap) == 128, "");

using SharedAt = char*;

struct TileAt {
    unsigned column, row, part;
};

constexpr unsigned MULTIPLIES_BF16 = 0;
constexpr unsigned MULTIPLIES_F16 = 1;
constexpr unsigned MULTIPLIES_E4M3 = 2;

constexpr unsigned SUMS = 128;
template <unsigned COLUMNS> constexpr unsigned SUMS_OF = COLUMNS / 2;

// --- clusters of blocks, which one thread of the process runs

inline unsigned block_in_cluster() { return blockIdx.x % EMULATED_CLUSTER; }

// Bytes from a place of shared memory to the same of the cluster's next block.
static thread_local long long from_block_to_block;

// The libraries of all kernels have one of each size together, as the linker makes one of what templates are in several.
template <unsigned BYTES> inline SharedAt memory_of_cluster() {
    alignas(1024) static thread_local char all[BYTES];
    return all;
}

template <unsigned BYTES> inline SharedAt shared_memory() {
    constexpr unsigned EACH = (BYTES + 1023) / 1024 * 1024;
    from_block_to_block = EACH;
    return memory_of_cluster<EMULATED_CLUSTER * EACH>() + block_in_cluster() * EACH;
}

// Returns the same place in a block of the cluster.
inline SharedAt at_block(SharedAt at, unsigned block) {
    if (block >= EMULATED_CLUSTER) {
        __builtin_trap();
    }
    emulated::emulated_neighbour(block);
    return at + (static_cast<long long>(block) - block_in_cluster()) * from_block_to_block;
}

inline void cluster_barrier() { emulated::emulated_cluster(); }

// --- barriers in shared memory

struct Barrier {
    unsigned short arrivals, left;
    unsigned phase;
    int bytes;
};

inline Barrier& barrier_at(SharedAt at) { return *reinterpret_cast<Barrier*>(at); }

inline void end_phase_if_over(Barrier& barrier) {
    if (barrier.left == 0 && barrier.bytes == 0) {
        barrier.left = barrier.arrivals;
        ++barrier.phase;
    }
}

inline void make_barrier(SharedAt at, unsigned arrivals) {
    const unsigned short count = static_cast<unsigned short>(arrivals);
    barrier_at(at) = {count, count, 0, 0};
}

inline void publish_barriers() {}

inline void arrive_expecting(SharedAt at, unsigned bytes) {
    emulated::emulated_act();
    Barrier& barrier = barrier_at(at);
    if (barrier.left == 0) {
        __builtin_trap();  // one arrival too many
    }
    barrier.bytes += static_cast<int>(bytes);
    --barrier.left;
    end_phase_if_over(barrier);
}

inline void arrive(SharedAt at) { arrive_expecting(at, 0); }
inline void arrive_at_block(SharedAt at, unsigned block) { arrive(at_block(at, block)); }

inline void await_phase(SharedAt at, unsigned parity) {
    while ((barrier_at(at).phase & 1) == (parity & 1)) {
        emulated::emulated_look();
    }
}

inline void report_bytes(SharedAt at, unsigned bytes) {
    Barrier& barrier = barrier_at(at);
    barrier.bytes -= static_cast<int>(bytes);
    end_phase_if_over(barrier);
}

// --- copies

// Where a tile has the byte of a column of a row.
__attribute__((always_inline)) inline char* swizzled(char* tile, unsigned row, unsigned byte) {
    return tile + 128 * row + ((byte / 16 ^ (row & 7)) * 16 | byte % 16);
}

// Calls `work` with each element's place in the tile and in memory; null where it is outside of the matrix.
template <typename Work> void for_tile(SharedAt tile, const TensorMap& map, TileAt at, Work&& work) {
    if (reinterpret_cast<unsigned long long>(tile) % 1024 != 0 || map.box_columns * map.element != 128) {
        __builtin_trap();
    }
    char* const part = map.begin + at.part * map.part_pitch;
    for (unsigned row = 0; row < map.box_rows; ++row) {
        for (unsigned column = 0; column < map.box_columns; ++column) {
            const bool is_inside = at.part < map.parts && at.row + row < map.rows && at.column + column < map.columns;
            work(swizzled(tile, row, column * map.element),
                 is_inside ? part + (at.row + row) * map.pitch + (at.column + column) * map.element : nullptr);
        }
    }
}

inline void load_tile(SharedAt to, const TensorMap& map, TileAt at, SharedAt barrier) {
    for_tile(to, map, at, [&](char* shared, const char* global) {
        for (unsigned i = 0; i < map.element; ++i) {
            shared[i] = global ? global[i] : 0;
        }
    });
    report_bytes(barrier, map.box_rows * 128);
}

inline void load_tile_for_both(SharedAt to, const TensorMap& map, TileAt at, SharedAt barrier) {
    for (unsigned block = 0; block < 2; ++block) {
        load_tile(at_block(to, block), map, at, at_block(barrier, block));
    }
}

inline void store_tile(const TensorMap& map, SharedAt from, TileAt at) {
    for_tile(from, map, at, [&](const char* shared, char* global) {
        for (unsigned i = 0; i < map.element && global; ++i) {
            global[i] = shared[i];
        }
    });
}

inline void load_bytes(SharedAt to, const void* from, unsigned bytes, SharedAt barrier) {
    __builtin_memcpy(to, from, bytes);
    report_bytes(barrier, bytes);
}

inline void store_bytes(void* to, SharedAt from, unsigned bytes) {
    emulated::emulated_act();
    __builtin_memcpy(to, from, bytes);
}

inline void fence_for_stores() {}
inline void fence_for_loads() {}

// --- shared memory, by threads

inline uint4 load_shared(SharedAt from) {
    uint4 value;
    __builtin_memcpy(&value, from, 16);
    return value;
}

inline uint4 load_of_block(SharedAt from, unsigned block) { return load_shared(at_block(from, block)); }

inline void store_shared(SharedAt to, uint4 value) { __builtin_memcpy(to, &value, 16); }
inline void store_shared_float(SharedAt to, float value) { __builtin_memcpy(to, &value, 4); }

inline void store_blocks(SharedAt row, uint4 value) {
    const unsigned lane = threadIdx.x % 32, values[4] = {value.x, value.y, value.z, value.w};
    for (unsigned block = 0; block < 4; ++block) {
        // The place of the row of which this thread has two elements is another thread's.
        const unsigned long long at = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), 8 * block + lane / 4);
        __builtin_memcpy(reinterpret_cast<char*>(at) + 4 * (lane % 4), &values[block], 4);
    }
}

// --- products

inline void begin_products() {}
inline void end_batch() {}

// A group of four warps multiplies as one: a product has ended when it has for all of them.
template <unsigned LEFT> void await_products() { emulated::emulated_group(8 + threadIdx.x / 128, 128, 0); }

inline void await_sums(float (&)[SUMS]) { await_products<0>(); }
template <unsigned COLUMNS> void await_small_sums(float (&)[SUMS_OF<COLUMNS>]) { await_products<0>(); }

// An element of 32 bytes of a row of a factor, from a place within the first row of a tile on.
template <unsigned TYPE> __attribute__((always_inline)) inline float element_of(SharedAt at, unsigned row, unsigned nth) {
    const unsigned long long place = reinterpret_cast<unsigned long long>(at);
    char* tile = reinterpret_cast<char*>(place & ~127ull);
    const unsigned first = static_cast<unsigned>(place & 127);
    if constexpr (TYPE == MULTIPLIES_E4M3) {
        return e4m3_to_f32(static_cast<unsigned char>(*swizzled(tile, row, first + nth)));
    } else {
        unsigned short bits;
        __builtin_memcpy(&bits, swizzled(tile, row, first + 2 * nth), 2);
        return TYPE == MULTIPLIES_F16 ? f16_to_f32(bits) : __uint_as_float(static_cast<unsigned>(bits) << 16);
    }
}

// A factor's element of a row or column, `nth` of the inner dimension. A transposed tile of 64 columns has a row for each number
// of the inner dimension.
template <unsigned TYPE, bool TRANSPOSED>
__attribute__((always_inline)) inline float factor_of(SharedAt at, unsigned across, unsigned nth) {
    return TRANSPOSED ? element_of<TYPE>(at + across / 64 * 8192, nth, across % 64) : element_of<TYPE>(at, across, nth);
}

// Nearly all time of the kernel is spent here.
template <unsigned TYPE, bool LEFT_TRANSPOSED, bool RIGHT_TRANSPOSED, unsigned COLUMNS>
__attribute__((optimize("O2"))) void multiply_columns(float (&sums)[COLUMNS / 2], SharedAt left, SharedAt right) {
    constexpr unsigned INNER = TYPE == MULTIPLIES_E4M3 ? 32 : 16;
    const unsigned warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    float factors[2][INNER];
    for (unsigned half = 0; half < 2; ++half) {
        for (unsigned nth = 0; nth < INNER; ++nth) {
            factors[half][nth] = factor_of<TYPE, LEFT_TRANSPOSED>(left, 16 * warp + 8 * half + lane / 4, nth);
        }
    }
    for (unsigned j = 0; j < COLUMNS / 8; ++j) {
        for (unsigned second = 0; second < 2; ++second) {
            const unsigned column = 8 * j + 2 * (lane % 4) + second;
            float found[2] = {};
            for (unsigned nth = 0; nth < INNER; ++nth) {
                const float value = factor_of<TYPE, RIGHT_TRANSPOSED>(right, column, nth);
                found[0] += factors[0][nth] * value;
                found[1] += factors[1][nth] * value;
            }
            for (unsigned half = 0; half < 2; ++half) {
                sums[4 * j + 2 * half + second] += found[half];
            }
        }
    }
}

template <unsigned TYPE, bool TRANSPOSED> void multiply(float (&sums)[SUMS], SharedAt left, SharedAt right) {
    multiply_columns<TYPE, false, TRANSPOSED, 2 * SUMS>(sums, left, right);
}

template <unsigned TYPE, bool TRANSPOSED, unsigned COLUMNS>
void multiply_small(float (&sums)[SUMS_OF<COLUMNS>], SharedAt left, SharedAt right) {
    multiply_columns<TYPE, TRANSPOSED, false, COLUMNS>(sums, left, right);
}

}  // namespace symmpool
