//! Copies of any number of bytes, from any address to any address, with vectors that are aligned where they are
//! written.

#pragma once

#include <symmpool/impl/partition.cuh>

namespace symmpool {

// Gives `store` what `load` finds at the indices from `first` to below `end`, `step` apart; UNROLL loads are under
// way at once. Called by threads with a `first` of their own.
template <int UNROLL, typename Load, typename Store>
__device__ __forceinline__ void copy_unrolled(u64 first, u64 end, u64 step, Load load, Store store) {
#pragma unroll 1
    for (u64 at = first; at < end; at += UNROLL * step) {
        decltype(load(at)) values[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            if (at + i * step < end) {
                values[i] = load(at + i * step);
            }
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            if (at + i * step < end) {
                store(at + i * step, values[i]);
            }
        }
    }
}

// The sixteen bytes of two vectors that begin `shift` bytes after the first one's begin; `shift` is below 16.
__device__ __forceinline__ uint4 from_pair(uint4 low, uint4 high, u32 shift) {
    const u32 words = shift / 4, bits = shift % 4 * 8;
    auto pick = [&](u32 a, u32 b, u32 c, u32 d) {
        return words == 0 ? a : words == 1 ? b : words == 2 ? c : d;
    };
    const u32 w0 = pick(low.x, low.y, low.z, low.w);
    const u32 w1 = pick(low.y, low.z, low.w, high.x);
    const u32 w2 = pick(low.z, low.w, high.x, high.y);
    const u32 w3 = pick(low.w, high.x, high.y, high.z);
    const u32 w4 = pick(high.x, high.y, high.z, high.w);
    return make_uint4(__funnelshift_r(w0, w1, bits), __funnelshift_r(w1, w2, bits),
                      __funnelshift_r(w2, w3, bits), __funnelshift_r(w3, w4, bits));
}

// The sixteen bytes that begin `shift` bytes after `aligned`, a multiple of 16. A vector of which no byte is needed
// is not read, as it may lie in memory that is not mapped.
__device__ __forceinline__ uint4 load_shifted(const char* aligned, u32 shift) {
    const uint4 low = load_plain(aligned);
    return shift == 0 ? low : from_pair(low, load_plain(aligned + 16), shift);
}

// A copy that is to be made.
struct Transfer {
    const char* from;
    char* to;
    u64 bytes;
};

// A transfer in units, which can be divided among blocks. All units but the last are vectors; the first begins a
// line of 128 bytes of the destination. The last unit is the bytes at both ends that fill no line or no vector.
struct Copy {
    static constexpr int UNROLL = 4;

    const char* from;
    char* to;
    u64 bytes;
    u32 head;
    u64 vectors;

    __device__ __forceinline__ explicit Copy(const Transfer& transfer)
        : from(transfer.from), to(transfer.to), bytes(transfer.bytes) {
        // Stores that straddle lines take links for longer.
        const u32 before = (128 - static_cast<u32>(reinterpret_cast<u64>(to)) % 128) % 128;
        head = before < bytes ? before : static_cast<u32>(bytes);
        vectors = (bytes - head) / 16;
    }

    __device__ __forceinline__ u64 units() const { return bytes == 0 ? 0 : vectors + 1; }

    // Copies the units from `first` to before `last`. Called by all threads of one block.
    __device__ __forceinline__ void run(u64 first, u64 last) const;

    __device__ __forceinline__ void run_inline(u64 first, u64 last) const {
        visit(first, last, [](char* at, uint4 vector) { store_plain(at, vector); },
              [](char* at, char byte) { *at = byte; });
    }

    // Visits the units from `first` to before `last`: `store_vector` and `store_byte` store what belongs at an address of
    // the destination. Called by all threads of one block.
    template <typename StoreVector, typename StoreByte>
    __device__ __forceinline__ void visit(u64 first, u64 last, StoreVector store_vector, StoreByte store_byte) const {
        const u32 shift = static_cast<u32>(reinterpret_cast<u64>(from + head) % 16);
        const u64 end = last < vectors ? last : vectors;
        shift == 0 ? visit_vectors<false>(first, end, 0, store_vector)
                   : visit_vectors<true>(first, end, shift, store_vector);
        if (last > vectors) {
            const u64 behind = head + 16 * vectors;
            const u32 ends = head + static_cast<u32>(bytes - behind);
            for (u32 i = threadIdx.x; i < ends; i += blockDim.x) {
                const u64 at = i < head ? i : behind + (i - head);
                store_byte(to + at, from[at]);
            }
        }
    }

private:
    template <bool SHIFTED, typename Store>
    __device__ __forceinline__ void visit_vectors(u64 first, u64 end, u32 shift, Store store) const {
        const char* source = from + head - shift;
        char* target = to + head;
        copy_unrolled<UNROLL>(first + threadIdx.x, end, blockDim.x, [&](u64 at) {
            return SHIFTED ? load_shifted(source + 16 * at, shift) : load_plain(source + 16 * at);
        }, [&](u64 at, uint4 vector) { store(target + 16 * at, vector); });
    }
};

// A function that is not inlined, so that its code is in the image once for all callers: a kernel that is longer
// than the instruction cache begins slowly. All its arguments are passed in registers.
__device__ __noinline__ void copy_units(const char* from, char* to, u64 bytes, u64 first, u64 last) {
    Copy(Transfer{from, to, bytes}).run_inline(first, last);
}

__device__ __forceinline__ void Copy::run(u64 first, u64 last) const {
    if (first < last) {
        copy_units(from, to, bytes, first, last);
    }
}

// Makes the pieces from `first` to before `last` of a transfer that is cut into `pieces`. Called by all threads of
// one block.
__device__ __forceinline__ void copy_pieces(const Transfer& transfer, u32 first, u32 last, u32 pieces) {
    const Copy copy(transfer);
    const EvenSplit split(copy.units(), pieces);
    copy.run(split.begin(first), split.begin(last));
}

// Makes one piece of a transfer that is cut into `pieces`.
__device__ __forceinline__ void copy_piece(const Transfer& transfer, u32 piece, u32 pieces) {
    copy_pieces(transfer, piece, piece + 1, pieces);
}

}  // namespace symmpool
