//! The traffic matrix: which rank sends how much to which. Every rank sends every peer its row of the matrix, and with
//! it where its output lies and how much that holds. Rows travel in the LL protocol in every call, whatever the counts
//! are (rule S1), so the two ranks of a pair know the same about it.

#pragma once

#include <all_to_all/traffic_layout.cuh>
#include <symmpool/impl/peer_blocks.cuh>

namespace symmpool {

constexpr u32 MAX_RANKS = 8;
constexpr u64 UNKNOWN = ~0ull;

static_assert(sizeof(Traffic::send) == MAX_RANKS * sizeof(u64), "the host has a count for each rank");

// The words of a row: the counts sent to each rank and those expected from each rank, which are all that inboxes need;
// behind them what direct data needs.
constexpr u32 EXPECTED_WORDS = WORLD;
constexpr u32 COUNT_WORDS = 2 * WORLD;
constexpr u32 PLACE_WORD = COUNT_WORDS;
constexpr u32 CAPACITY_WORD = PLACE_WORD + 1;
// The number of worker blocks and, in the upper half, the bytes of an element.
constexpr u32 GRID_WORD = PLACE_WORD + 2;
static_assert(GRID_WORD + 1 == TRAFFIC_ROW_WORDS, "the control block has space for so many words");
// Stands for what a rank expects whose splits are invalid. It sends nothing.
constexpr u64 INVALID_SPLITS = UNKNOWN - 1;

// Kinds of asynchronous errors.
constexpr u32 OVERFLOW = 1;
constexpr u32 SPLITS = 2;

// The largest offset that fits 32 bits with a sign.
constexpr u32 MAX_NARROW_OFFSET = 0x7fffffff;

__device__ __forceinline__ char* traffic_word_slot(const Session& session, u32 owner, u32 from, u32 word) {
    return traffic_row_slot(session.comm, session.epoch, owner, from) + 16 * word;
}

// Elements that this rank sends to and expects from each rank; each thread of a warp has the counts of one rank.
struct Splits {
    static_assert(WORLD <= MAX_RANKS && MAX_RANKS < 32, "a thread each, and one more");
    u64 count = 0;
    u64 expected = UNKNOWN;

    template <bool DEVICE>
    static __device__ __forceinline__ Splits of(const Traffic& traffic) {
        Splits splits;
        const u32 at = threadIdx.x % 32;
        if (at < WORLD && !DEVICE) {
            splits.count = traffic.send[at];
            splits.expected = traffic.receive[at];
        } else if (at < WORLD && traffic.wide) {
            splits.count = static_cast<const u64*>(traffic.splits)[at];
        } else if (at < WORLD) {
            const long long narrow = static_cast<const int*>(traffic.splits)[at];
            splits.count = static_cast<u64>(narrow);
        }
        if (DEVICE) {
            // Negative numbers are larger than any length here, as they are read as unsigned. Sums of so few cannot overflow.
            const bool much = splits.count > traffic.length;
            const u64 sum = up_to_here(much ? 0 : splits.count);
            const bool bad = __any_sync(~0u, much || sum > traffic.length);
            splits.count = bad ? 0 : splits.count;
            splits.expected = bad ? INVALID_SPLITS : UNKNOWN;
        }
        return splits;
    }

    // The count for a rank, and the sum of those for all ranks before it. Called by whole warps, each of whose threads
    // may ask for another rank.
    __device__ __forceinline__ u64 to(u32 rank) const { return __shfl_sync(~0u, count, rank); }
    __device__ __forceinline__ u64 before(u32 rank) const {
        return __shfl_sync(~0u, up_to_here(count) - count, rank);
    }

private:
    static __device__ __forceinline__ u64 up_to_here(u64 count) {
#pragma unroll
        for (u32 step = 1; step < WORLD; step *= 2) {
            const u64 before = __shfl_up_sync(~0u, count, step);
            count += threadIdx.x % 32 >= step ? before : 0;
        }
        return count;
    }
};

// All rows of the matrix, in shared memory.
struct TrafficMatrix {
    u64 words[WORLD][TRAFFIC_ROW_WORDS];

    __device__ __forceinline__ u64 sent(u32 from, u32 to) const { return words[from][to]; }
    __device__ __forceinline__ u64 expected(u32 from, u32 to) const {
        return words[to][EXPECTED_WORDS + from];
    }
    // Where a sender's part begins in the receiver's output, and how much of it the output holds.
    __device__ __forceinline__ u64 offset(u32 from, u32 to) const {
        u64 before = 0;
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            before += rank < from ? sent(rank, to) : 0;
        }
        return before;
    }
    __device__ __forceinline__ u64 fitting(u32 from, u32 to) const {
        const u64 room = words[to][CAPACITY_WORD], before = offset(from, to), count = sent(from, to);
        const u64 left = before < room ? room - before : 0;
        return count < left ? count : left;
    }
    __device__ __forceinline__ u64 total(u32 to) const { return offset(WORLD, to); }

    static __device__ __forceinline__ u64 grid(const Traffic& traffic) {
        return static_cast<u64>(traffic.size) << 32 | worker_blocks();
    }

    // Fills in this rank's own row. Called by the first warp of a block; its other warps see the row after a barrier.
    __device__ __forceinline__ void fill(const Comm& comm, const Traffic& traffic,
                                         const Splits& splits) {
        u64* row = words[comm.rank];
        const u32 at = threadIdx.x;
        if (at < WORLD) {
            row[at] = splits.count;
            row[EXPECTED_WORDS + at] = splits.expected;
        } else if (at == WORLD) {
            row[PLACE_WORD] = traffic.window;
            row[CAPACITY_WORD] = traffic.capacity;
            row[GRID_WORD] = grid(traffic);
        }
        __syncwarp();
    }

    // Sends the words from PLACE_WORD on. Called by one warp, which need not wait until the row is filled in.
    __device__ __forceinline__ void send_place(const Session& session, const Traffic& traffic) const {
        constexpr u32 EACH = TRAFFIC_ROW_WORDS - PLACE_WORD;
        const u32 rank = session.comm.rank;
        for (u32 i = threadIdx.x % 32; i < WORLD * EACH; i += 32) {
            const u32 peer = i / EACH, word = PLACE_WORD + i % EACH;
            if (peer != rank) {
                const u64 data = word == PLACE_WORD      ? traffic.window
                                 : word == CAPACITY_WORD ? traffic.capacity
                                                         : grid(traffic);
                store_relaxed(traffic_word_slot(session, peer, rank, word), ll_pack(data, session.epoch));
            }
        }
    }

    // Sends the counts. Called by the warp that filled the row in.
    __device__ __forceinline__ void send_counts(const Session& session) const {
        const u32 rank = session.comm.rank;
        for (u32 i = threadIdx.x; i < WORLD * COUNT_WORDS; i += 32) {
            const u32 peer = i / COUNT_WORDS, word = i % COUNT_WORDS;
            if (peer != rank) {
                store_relaxed(traffic_word_slot(session, peer, rank, word),
                              ll_pack(words[rank][word], session.epoch));
            }
        }
    }

    // Waits for the words from FIRST to before LAST of all peers' rows and, with HANDSHAKES, for their handshakes, which
    // it compares. With ACQUIRE, which is for the words from PLACE_WORD on, what the peers' streams did before is
    // visible then and has ended, so that their outputs may be written. Called by all threads of a block, which get the
    // same answer: false if a rank does not come.
    template <u32 FIRST, u32 LAST, bool HANDSHAKES, bool ACQUIRE>
    __device__ __forceinline__ bool await_rows(const Session& session, const CallParams& call) {
        constexpr u32 HANDSHAKE_WORDS = HANDSHAKES ? 4 * WORLD : 0, EACH = LAST - FIRST;
        bool bad = false;
        for (u32 i = threadIdx.x; i < HANDSHAKE_WORDS + WORLD * EACH && !bad; i += blockDim.x) {
            // One look serves both kinds, as threads of a warp look together.
            bool handshake = false;
            if constexpr (HANDSHAKES) {
                handshake = i < HANDSHAKE_WORDS;
            }
            const u32 peer = handshake ? i / 4 : (i - HANDSHAKE_WORDS) / EACH;
            const u32 word = handshake ? i % 4 : FIRST + (i - HANDSHAKE_WORDS) % EACH;
            if (peer == session.comm.rank) {
                continue;
            }
            const char* slot = handshake ? handshake_word(session, peer, word)
                                         : traffic_word_slot(session, session.comm.rank, peer, word);
            uint4 found;
            bad = !ll_await<ACQUIRE>(session, peer, slot, found);
            if (!bad && handshake) {
                compare_handshake_word(session, call, peer, word, found);
            } else if (!handshake) {
                words[peer][word] = ll_data(found);
            }
        }
        return !__syncthreads_or(bad);
    }

    __device__ __forceinline__ bool differs(u32 from, u32 to) const {
        const u64 wanted = expected(from, to);
        return wanted < INVALID_SPLITS && wanted != sent(from, to);
    }

    // Whether every rank is sent what it expects. The answer is the same on all ranks, which read the same rows.
    // Called by all threads of a block, which get the same answer, like the next function.
    __device__ __forceinline__ bool agreed() const { return !__syncthreads_or(disagrees()); }

    // Whether elements have the same size on all ranks, so that counts mean the same bytes. It is not inlined because its
    // caller has no registers to spare.
    __device__ __noinline__ bool equal_element_sizes(const Traffic& traffic) const {
        const u32 rank = threadIdx.x;
        return !__syncthreads_or(rank < WORLD && words[rank][GRID_WORD] >> 32 != traffic.size);
    }

    // Whether one of the pairs at which this thread looks disagrees.
    __device__ __forceinline__ bool disagrees() const {
        bool bad = false;
        for (u32 pair = threadIdx.x; pair < WORLD * WORLD; pair += blockDim.x) {
            bad = bad || differs(pair / WORLD, pair % WORLD);
        }
        return bad;
    }

    // Whether the rank at which this thread looks has an error after which the call goes on. It is asked even where the host
    // knows this rank's counts: it may not know those of another rank.
    __device__ __forceinline__ bool has_async_error() const {
        const u32 rank = threadIdx.x;
        return rank < WORLD &&
               (total(rank) > words[rank][CAPACITY_WORD] || words[rank][EXPECTED_WORDS] == INVALID_SPLITS);
    }
};

// Reports the first pair whose counts differ, the same on every rank. Called by one thread.
__device__ __noinline__ void report_counts(const Session& session, const TrafficMatrix& matrix) {
    const Comm& comm = session.comm;
    if (atomicExch(&comm.local()->failed, 1) != 0) {
        return;
    }
    u32 pair = WORLD * WORLD - 1;
    for (u32 other = pair; other != ~0u; --other) {
        pair = matrix.differs(other / WORLD, other % WORLD) ? other : pair;
    }
    const u32 from = pair / WORLD, to = pair % WORLD;
    FaultRecord* fault = comm.fault;
    fault->kind = COUNTS;
    fault->epoch = session.epoch;
    fault->peer = from == comm.rank ? to : from;
    fault->phase = HANDSHAKE;
    fault->ours[0] = from;
    fault->ours[1] = to;
    fault->ours[2] = matrix.sent(from, to);
    fault->ours[3] = matrix.expected(from, to);
    fence();
    *static_cast<volatile u32*>(&fault->complete) = 1;
}

// Writes the error of the first rank that has one, the same on every rank. Called by one thread.
__device__ __noinline__ void write_first_async_error(const Session& session, const TrafficMatrix& matrix) {
    for (u32 rank = 0; rank < WORLD; ++rank) {
        const u64 needed = matrix.total(rank), room = matrix.words[rank][CAPACITY_WORD];
        const bool invalid = matrix.words[rank][EXPECTED_WORDS] == INVALID_SPLITS;
        if (needed > room || invalid) {
            write_async_error(session, invalid ? SPLITS : OVERFLOW, rank, needed, room);
            return;
        }
    }
}

}  // namespace symmpool
