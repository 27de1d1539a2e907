//! Parts of which kernels of plans are made: `plan/cuda.rs` writes a kernel for each rank's program of a plan.
//! Defines: WORLD, DTYPE, OP, THREADS.
//!
//! Peer blocks divide every chunk alike into slices, one for each block, and each runs the whole program on its slices:
//! operations are element by element, so slices do not depend on each other. A thread has the same vectors of every slice, so
//! what one operation writes the next one finds without a barrier. Slices that are long go through the program in stages.
//!
//! The program is in levels, and in turn `t` a block runs level `l` of stage `(t - l) / interval`. A wait at level `l` is
//! for a signal at a lower level of the same stage, which is in an earlier turn. So all waits are for earlier turns, and
//! blocks cannot wait for each other in a circle, whatever ranks do at a level.
//!
//! Each signal of a program has a flag of its own, whose count is the number of stages. Chunks of scratch have a few
//! slots, which stages use in turn. A rank says to all when it needs a stage's slot no more, and nobody writes to it
//! before all ranks have said so. Scratch has two halves for the two parities of calls, and nobody is more than one call
//! ahead, so calls need no such care.
//!
//! In the LL protocol data shows by itself that it has arrived. There are no flags, no stages and no barriers: every
//! thread runs the program on vectors of its own.

#pragma once

#include <symmpool/impl/copy.cuh>
#include <symmpool/impl/peer_blocks.cuh>
#include <symmpool/impl/plan_layout.cuh>
#include <symmpool/reduce.cuh>

namespace symmpool {

// --- waits

// The rank to name when a wait for `peer` has timed out: a rank that has not even made the call, as the peer may wait for
// that one itself; or the peer.
__device__ __noinline__ u32 missing_rank(const Session& session, u32 peer) {
    for (u32 rank = 0; rank < WORLD; ++rank) {
        if (rank != session.comm.rank && !ll_arrived(load_relaxed(handshake_word(session, rank, 0)), session.epoch)) {
            return rank;
        }
    }
    return peer;
}

// Bounds a wait, as `Watch` does (rule S5).
struct PlanWatch {
    u64 since = 0;
    u32 looks = 0;

    __device__ __forceinline__ bool expired(const Session& session, u32 peer) {
        if (!is_time_for_clock(++looks)) {
            return false;
        }
        since = still_waiting(session.comm, session.epoch, since, missing_rank(session, peer), DATA);
        return since == STOP_WAITING;
    }
};

// --- operations on slices. All are called by all threads of a block.

// The first vector from `first` on that belongs to this thread. Blocks have a power of two of threads.
__device__ __forceinline__ u64 own_vector_from(u64 first) {
    const u64 at = (first & ~static_cast<u64>(blockDim.x - 1)) + threadIdx.x;
    return at < first ? at + blockDim.x : at;
}

__device__ __forceinline__ bool is_aligned(const void* at) { return reinterpret_cast<u64>(at) % 16 == 0; }

// Copies the last bytes of a slice, which fill no vector.
__device__ __forceinline__ void copy_rest(const char* from, char* to, u64 bytes) {
    const u32 rest = static_cast<u32>(bytes % 16);
    if (rest != 0 && threadIdx.x == (bytes / 16 & (blockDim.x - 1))) {
        store_partial(to + bytes - rest, rest, load_partial(from + bytes - rest, rest));
    }
}

__device__ __noinline__ void copy_slice(const char* from, char* to, u64 bytes) {
    if (from == to || bytes == 0) {
        return;
    }
    if (is_aligned(from) && is_aligned(to)) {
        copy_unrolled<4>(threadIdx.x, bytes / 16, blockDim.x, [&](u64 at) { return load_plain(from + 16 * at); },
                         [&](u64 at, uint4 vector) { store_plain(to + 16 * at, vector); });
        copy_rest(from, to, bytes);
        return;
    }
    // Threads have other vectors here than in other operations, so barriers order them.
    __syncthreads();
    const Copy copy(Transfer{from, to, bytes});
    copy.run_inline(0, copy.units());
    __syncthreads();
}

// Makes two copies at once, so that links and memory are busy at the same time. Neither reads what the other writes.
__device__ __noinline__ void copy_slices(const char* from, char* to, u64 bytes, const char* from2, char* to2,
                                         u64 bytes2) {
    const bool aligned = is_aligned(from) && is_aligned(to) && is_aligned(from2) && is_aligned(to2);
    if (!aligned || from == to || from2 == to2) {
        copy_slice(from, to, bytes);
        copy_slice(from2, to2, bytes2);
        return;
    }
    constexpr int UNROLL = 4;
    const u64 end = bytes / 16, end2 = bytes2 / 16;
#pragma unroll 1
    for (u64 first = threadIdx.x; first < end || first < end2; first += UNROLL * blockDim.x) {
        uint4 values[UNROLL], values2[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const u64 at = first + i * blockDim.x;
            if (at < end) {
                values[i] = load_plain(from + 16 * at);
            }
            if (at < end2) {
                values2[i] = load_plain(from2 + 16 * at);
            }
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const u64 at = first + i * blockDim.x;
            if (at < end) {
                store_plain(to + 16 * at, values[i]);
            }
            if (at < end2) {
                store_plain(to2 + 16 * at, values2[i]);
            }
        }
    }
    copy_rest(from, to, bytes);
    copy_rest(from2, to2, bytes2);
}

template <u32 N>
struct Targets {
    char* at[N];
};

// Copies a slice to several places, which do not overlap: it is loaded once, and all links and memory are busy at the
// same time. One of the places may be where the slice lies.
template <u32 N>
__device__ __noinline__ void copy_slice_to_all(const char* from, Targets<N> to, u64 bytes) {
    bool aligned = is_aligned(from);
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        aligned = aligned && is_aligned(to.at[i]);
    }
    if (!aligned) {
#pragma unroll 1
        for (u32 i = 0; i < N; ++i) {
            copy_slice(from, to.at[i], bytes);
        }
        return;
    }
    copy_unrolled<4>(threadIdx.x, bytes / 16, blockDim.x, [&](u64 at) { return load_plain(from + 16 * at); },
                     [&](u64 at, uint4 vector) {
#pragma unroll
                         for (u32 i = 0; i < N; ++i) {
                             if (to.at[i] != from) {
                                 store_plain(to.at[i] + 16 * at, vector);
                             }
                         }
                     });
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        copy_rest(from, to.at[i], bytes);
    }
}

// Reduces vectors in the order in which they are given. Averages are divided by `divisor`.
template <int D, int O, u32 N>
__device__ __forceinline__ uint4 reduce_vectors(const uint4 (&vectors)[N], int divisor) {
    using R = Reduce<D, O>;
    typename R::Vector total = R::widen(vectors[0]);
#pragma unroll
    for (u32 i = 1; i < N; ++i) {
        R::accumulate(total, vectors[i]);
    }
    return R::finish(total, divisor);
}

template <u32 N>
struct ReducedSlices {
    const char* at[N];
};

// Reduces slices that are not aligned, and the last bytes of others, from vector `whole` on.
template <int D, int O, bool ALSO, u32 N>
__device__ __noinline__ void reduce_rest(ReducedSlices<N> from, u64 whole, u64 bytes, int divisor, char* to, char* also) {
#pragma unroll 1
    for (u64 at = own_vector_from(whole); 16 * at < bytes; at += blockDim.x) {
        uint4 all[N];
#pragma unroll
        for (u32 nth = 0; nth < N; ++nth) {
            all[nth] = Source(from.at[nth], bytes).load(at);
        }
        const uint4 result = reduce_vectors<D, O, N>(all, divisor);
        if (ALSO) {
            Target(also, bytes).store(at, result);
        }
        Target(to, bytes).store(at, result);
    }
}

// Reduces slices into `to` and, with ALSO, stores the result at `also` too. A destination may be one of the sources.
template <int D, int O, bool ALSO, u32 N>
__device__ __forceinline__ void reduce_slices(const ReducedSlices<N>& from, u64 bytes, int divisor, char* to, char* also) {
    // All loads are made before the first value is used.
    constexpr int HELD = N < 8 ? 8 / N : 1;
    bool aligned = is_aligned(to) && (!ALSO || is_aligned(also));
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        aligned = aligned && is_aligned(from.at[i]);
    }
    const u64 whole = aligned ? bytes / 16 : 0;
#pragma unroll 1
    for (u64 first = threadIdx.x; first < whole; first += HELD * blockDim.x) {
        uint4 all[HELD][N], results[HELD];
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const u64 at = first + i * blockDim.x;
#pragma unroll
            for (u32 nth = 0; nth < N; ++nth) {
                if (at < whole) {
                    all[i][nth] = load_plain(from.at[nth] + 16 * at);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            results[i] = reduce_vectors<D, O, N>(all[i], divisor);
        }
        // The peer's stores come first, as they take longer.
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const u64 at = first + i * blockDim.x;
            if (ALSO && at < whole) {
                store_plain(also + 16 * at, results[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const u64 at = first + i * blockDim.x;
            if (at < whole) {
                store_plain(to + 16 * at, results[i]);
            }
        }
    }
    if (16 * whole < bytes) {
        reduce_rest<D, O, ALSO>(from, whole, bytes, divisor, to, also);
    }
}

// Calls `reduce_slices` out of line, for programs that reduce often: a kernel that is longer than the instruction cache
// begins slowly.
template <int D, int O, bool ALSO, u32 N>
__device__ __noinline__ void reduce_slices_out_of_line(ReducedSlices<N> from, u64 bytes, int divisor, char* to, char* also) {
    reduce_slices<D, O, ALSO>(from, bytes, divisor, to, also);
}

// --- the LL protocol


// Where a vector comes from in the LL protocol: this rank's memory, or what a peer sends to its inbox.
struct LlSource {
    const char* plain;
    const char* inbox;  // null for a source in memory
    u32 peer;
    u64 bytes;

    __device__ __forceinline__ bool has(u64 at) const { return 16 * at < bytes; }
};

// Loads vector `at` of each source that is long enough, when those that peers send have arrived. False if one does not.
template <u32 N>
__device__ __forceinline__ bool collect_ll(const Session& session, const LlSource (&from)[N], u64 at,
                                           uint4 (&vectors)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        vectors[i] = make_uint4(0, 0, 0, 0);
        if (from[i].inbox == nullptr && from[i].has(at)) {
            vectors[i] = Source(from[i].plain, from[i].bytes).load(at);
        }
    }
    PlanWatch watch;
    while (true) {
        u32 missing = WORLD;
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            if (from[i].inbox != nullptr && from[i].has(at)) {
                const uint4 low = load_relaxed(from[i].inbox + 32 * at), high = load_relaxed(from[i].inbox + 32 * at + 16);
                vectors[i] = make_uint4(low.x, low.z, high.x, high.z);
                missing = ll_arrived(low, session.epoch) && ll_arrived(high, session.epoch) ? missing : from[i].peer;
            }
        }
        if (missing == WORLD) {
            return true;
        }
        if (watch.expired(session, missing)) {
            return false;
        }
    }
}

// --- a program's slices, flags and turns

// A slice in one stage.
struct Slice {
    u64 from;   // bytes from the beginning of a chunk
    u64 bytes;  // at most: chunks may end before
    u64 scratch_offset;  // bytes from the beginning of scratch to the slice of its first chunk, in this stage's slot
};

// One call of a program. FLAGS is the number of flags that a rank raises on one peer at most, and one more that says which
// slots are free. SLOTS is the number of chunks of scratch, and LL_SLOTS that of chunks in the LL inbox.
template <u32 FLAGS, u32 SLOTS, u32 LL_SLOTS>
struct PlanRun {
    const Session& session;
    const Comm& comm;
    const CallParams& call;
    const PlanWork& work;
    const u32 count;  // peer blocks; in the LL protocol, worker blocks
    const PeerBlocks blocks;
    const EvenSplit split;

    __device__ __forceinline__ PlanRun(const Session& s, const CallParams& c, const PlanWork& w)
        : session(s), comm(s.comm), call(c), work(w), count(c.peer_blocks), blocks(count), split(w.vectors, count) {}

    static __device__ __forceinline__ UsedBytes used(const CallParams& call, const PlanWork& work) {
        UsedBytes used;
        used.flags = call.peer_blocks * (8 * FLAGS * WORLD);
        used.ll = 32 * LL_SLOTS * work.vectors;
        return used;
    }

    // --- where chunks lie

    // The communicator's rank that is a rank of the program: broadcasts are written for root 0.
    __device__ __forceinline__ u32 rank_of(u32 rank) const {
        const u32 rotated = rank + call.root;
        return rotated < WORLD ? rotated : rotated - WORLD;
    }

    // Bytes that the slice has of chunk `index` of a part.
    __device__ __forceinline__ u64 bytes(const Slice& slice, u32 index) const {
        const u64 from = index * work.chunk, left = from < work.part ? work.part - from : 0;
        const u64 chunk = left < work.chunk ? left : work.chunk;
        const u64 rest = slice.from < chunk ? chunk - slice.from : 0;
        return rest < slice.bytes ? rest : slice.bytes;
    }

    __device__ __forceinline__ u64 offset(const Slice& slice, u32 part, u32 index) const {
        return part * work.part + index * work.chunk + slice.from;
    }
    __device__ __forceinline__ const char* input(const Slice& slice, u32 part, u32 index) const {
        return call.input + offset(slice, part, index);
    }
    __device__ __forceinline__ char* output(const Slice& slice, u32 part, u32 index) const {
        return call.output + offset(slice, part, index);
    }
    __device__ __forceinline__ char* scratch(const Slice& slice, u32 rank, u32 slot) const {
        const u64 half = session.parity() * (comm.plan_scratch_bytes / 2);
        return comm.of(rank) + comm.plan_scratch + half + slice.scratch_offset + 16 * (static_cast<u64>(slot) * count) * work.each;
    }
    __device__ __forceinline__ char* inbox(const Slice& slice, u32 rank, u32 slot) const {
        const u64 half = session.parity() * (comm.ll_bytes / 2);
        return comm.of(rank) + comm.ll + half + 32 * (slot * work.vectors) + 2 * (slice.from - work.begin);
    }

    // Does `act` for the slices of this block, one after the other.
    template <typename Act>
    __device__ __forceinline__ void each(u32 stage, Act act) const {
#pragma unroll 1
        for (u32 index = blocks.first; index < blocks.end; ++index) {
            act(slice(index, stage));
        }
    }

    __device__ __forceinline__ Slice slice(u32 index, u32 stage) const {
        const Range all = split[index];
        u64 from = all.from + static_cast<u64>(stage) * work.each, to = from + work.each;
        from = from < all.to ? from : all.to;
        to = to < all.to ? to : all.to;
        const u64 slot = work.slots > 1 ? stage % work.slots : 0;
        return {work.begin + 16 * from, 16 * (to - from), 16 * (slot * SLOTS * count + index) * work.each};
    }

    // --- flags

    // Flags lie in the order of indices, so that those that a call uses are at the beginning of the region.
    __device__ __forceinline__ u64* flag(u32 owner, u32 from, u32 number, u32 index) const {
        char* flags = comm.of(owner) + comm.flags + session.parity() * (comm.flags_bytes / 2);
        return reinterpret_cast<u64*>(flags) + (static_cast<u64>(index) * FLAGS + number) * WORLD + from;
    }

    // Whether this turn runs a level of some stage, and of which.
    __device__ __forceinline__ bool runs(u32 turn, u32 level, u32& stage) const {
        if (turn < level) {
            return false;
        }
        stage = turn - level;
        if (work.interval > 1) {
            const u32 since = stage;
            stage = since / work.interval;
            if (stage * work.interval != since) {
                return false;
            }
        }
        return stage < work.stages;
    }

    // Raises COUNT flags of a stage, of which `flag_at` gives the peer and the number, and with `frees` says to all
    // peers that the stage's slot is free on this rank. Called by all threads of the block.
    template <u32 COUNT, typename FlagAt>
    __device__ __forceinline__ void raise(u32 stage, bool frees, FlagAt flag_at) const {
        const u32 each = COUNT + (frees ? WORLD - 1 : 0), all = each * (blocks.end - blocks.first);
        __syncthreads();
#pragma unroll 1
        for (u32 i = threadIdx.x; i < all; i += blockDim.x) {
            const u32 nth = i % each, index = blocks.first + i / each;
            u32 peer = comm.after(nth + 1 - COUNT), number = FLAGS - 1;
            if constexpr (COUNT > 0) {
                if (nth < COUNT) {
                    const u32 packed = flag_at(nth);
                    peer = rank_of(packed >> 12), number = packed & 4095;
                }
            }
            store_release(flag(peer, comm.rank, number, index), static_cast<u64>(session.epoch) << 32 | (stage + 1));
        }
    }

    // Waits until peers have raised COUNT flags of a stage. Called by all threads of the block, which get the same
    // answer: false if one takes too long or its rank has failed in the call.
    template <u32 COUNT, typename FlagAt>
    __device__ __forceinline__ bool await(u32 stage, FlagAt flag_at) const {
        return await_flags_of<COUNT>(stage + 1, [&](u32 nth) {
            const u32 packed = flag_at(nth);
            return rank_of(packed >> 12) << 12 | (packed & 4095);
        });
    }

    // Waits until the stage's slot is free on all ranks.
    __device__ __forceinline__ bool await_slot(u32 stage) const {
        if constexpr (WORLD > 1) {
            if (stage >= work.slots) {
                return await_flags_of<WORLD - 1>(stage - work.slots + 1,
                                                 [&](u32 nth) { return comm.after(nth + 1) << 12 | (FLAGS - 1); });
            }
        }
        return true;
    }

private:
    template <u32 COUNT, typename FlagAt>
    __device__ __forceinline__ bool await_flags_of(u32 least, FlagAt flag_at) const {
        const u32 all = COUNT * (blocks.end - blocks.first);
        bool bad = false;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < all && !bad; i += blockDim.x) {
            const u32 packed = flag_at(i % COUNT), peer = packed >> 12;
            const u64* own = flag(comm.rank, peer, packed & 4095, blocks.first + i / COUNT);
            const bool left = has_failed_handshake(handshake_word(session, peer, 0), session.epoch);
            PlanWatch watch;
            for (u64 value = load_acquire(own); !bad && (static_cast<u32>(value >> 32) != session.epoch ||
                                                         static_cast<u32>(value) < least);
                 value = load_acquire(own)) {
                bad = watch.expired(session, peer);
            }
            // The peer's memory may be used for something else once it has failed.
            if (left && !bad) {
                report(comm, session.epoch, PEER_FAILED, peer, DATA, nullptr);
                bad = true;
            }
        }
        return !__syncthreads_or(bad);
    }
};

// The `nth` of flags, of which each word has four.
template <typename... Words>
__device__ __forceinline__ u32 nth_flag(u32 nth, Words... words) {
    const u64 all[] = {words...};
    u64 word = all[0];
#pragma unroll
    for (u32 i = 1; i < sizeof...(words); ++i) {
        word = nth / 4 == i ? all[i] : word;
    }
    return static_cast<u32>(word >> (16 * (nth % 4))) & 0xffff;
}

}  // namespace symmpool
