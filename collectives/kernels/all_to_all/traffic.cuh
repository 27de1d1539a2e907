//! Who sends how much to whom: every rank shows every peer its row of the traffic matrix, with
//! where its output lies and how much that holds. Rows travel as packets in every call, whatever
//! the counts (rule S1), so what a rank knows of a pair both of its ranks know alike.

#pragma once

#include <symmpool/peer_blocks.cuh>

namespace symmpool {

constexpr u32 MAX_RANKS = 8;
constexpr u64 UNKNOWN = ~0ull;

// What a call exchanges; counts are elements. `Traffic` in cuda/params.rs.
struct Traffic {
    u64 send[MAX_RANKS];     // splits that the host knows,
    u64 receive[MAX_RANKS];
    u64 send_begin[MAX_RANKS];     // and where they begin, in bytes,
    u64 receive_begin[MAX_RANKS];
    const void* splits;       // or where the device has them
    void* received;           // where it writes what came from each rank, if anywhere,
    void* offsets;            // and where in the output that begins
    u64 length;               // of the input
    u64 capacity;             // of the output
    u64 window;               // where the output is in the slot; UNKNOWN if it is no window
    u64 inbox_bytes;          // parts of no more than this go through inboxes,
    u32 head;                 // and so much of longer ones, from their beginning on
    u32 size;                 // bytes of an element
    u32 wide;                 // whether splits on the device have 64 bits
    u32 ring;                 // whether what goes straight goes to one peer after the other anyway
};

static_assert(sizeof(Traffic) == TRAFFIC_BYTES, "layouts differ");

// Words of a row: counts sent to each rank, counts expected of each rank, which are all that inboxes
// need, and where and how more may come.
constexpr u32 EXPECTED_WORDS = WORLD;
constexpr u32 COUNT_WORDS = 2 * WORLD;
constexpr u32 PLACE_WORD = COUNT_WORDS;
constexpr u32 CAPACITY_WORD = PLACE_WORD + 1;
constexpr u32 GRID_WORD = PLACE_WORD + 2;  // data blocks of the rank's grid and, in the upper half, bytes of an element
static_assert(GRID_WORD + 1 == TRAFFIC_ROW_WORDS, "rows have as many words as they have room");
// Expected by a rank whose splits made no sense, and which sends nothing.
constexpr u64 INVALID_SPLITS = UNKNOWN - 1;

// Notices.
constexpr u32 OVERFLOW = 1;
constexpr u32 SPLITS = 2;

// The most that an offset of 32 bits can say.
constexpr u32 MAX_NARROW_OFFSET = 0x7fffffff;

__device__ __forceinline__ char* traffic_word_slot(const Session& session, u32 owner, u32 from, u32 word) {
    return traffic_row_slot(session.comm, session.epoch, owner, from) + 16 * word;
}

// What this rank sends and expects, as a warp's threads know it: each of one rank.
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
            // Negative ones are larger than any length. Sums of so few cannot overflow.
            const bool much = splits.count > traffic.length;
            const u64 sum = up_to_here(much ? 0 : splits.count);
            const bool bad = __any_sync(~0u, much || sum > traffic.length);
            splits.count = bad ? 0 : splits.count;
            splits.expected = bad ? INVALID_SPLITS : UNKNOWN;
        }
        return splits;
    }

    // For a rank, and for all before it. By whole warps; each thread asks for what it likes.
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

// All rows, in shared memory.
struct TrafficMatrix {
    u64 words[WORLD][TRAFFIC_ROW_WORDS];

    __device__ __forceinline__ u64 sent(u32 from, u32 to) const { return words[from][to]; }
    __device__ __forceinline__ u64 expected(u32 from, u32 to) const {
        return words[to][EXPECTED_WORDS + from];
    }
    // Where in the receiver's output a sender's part begins, and how much of it that holds.
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

    // This rank's own. By the first warp; the others of a block see it behind a barrier.
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

    // Where this rank's output is, and how much it holds: by a warp, which need not wait for the row.
    __device__ __forceinline__ void send_place(const Session& session, const Traffic& traffic) const {
        constexpr u32 EACH = TRAFFIC_ROW_WORDS - PLACE_WORD;
        const u32 rank = session.comm.rank;
        for (u32 i = threadIdx.x % 32; i < WORLD * EACH; i += 32) {
            const u32 peer = i / EACH, word = PLACE_WORD + i % EACH;
            if (peer != rank) {
                const u64 data = word == PLACE_WORD  ? traffic.window
                                 : word == CAPACITY_WORD ? traffic.capacity
                                                : grid(traffic);
                store_relaxed(traffic_word_slot(session, peer, rank, word),
                              make_uint4(static_cast<u32>(data), session.epoch,
                                         static_cast<u32>(data >> 32), session.epoch));
            }
        }
    }

    // The counts of the own row. By the warp that filled it.
    __device__ __forceinline__ void send_counts(const Session& session) const {
        const u32 rank = session.comm.rank;
        for (u32 i = threadIdx.x; i < WORLD * COUNT_WORDS; i += 32) {
            const u32 peer = i / COUNT_WORDS, word = i % COUNT_WORDS;
            if (peer != rank) {
                const u64 data = words[rank][word];
                store_relaxed(traffic_word_slot(session, peer, rank, word),
                              make_uint4(static_cast<u32>(data), session.epoch,
                                         static_cast<u32>(data >> 32), session.epoch));
            }
        }
    }

    // Words `[FIRST, LAST)` of the peers' rows and, with ENTRIES, their entries, which are compared.
    // With ACQUIRE, of words behind the fence, what the peers' streams did before is visible then, and
    // what they have ended is past: their outputs may be written. By all threads of a block; false on
    // all of them if a rank does not come.
    template <u32 FIRST, u32 LAST, bool ENTRIES, bool ACQUIRE>
    __device__ __forceinline__ bool await_rows(const Session& session, const Call& call) {
        constexpr u32 ENTERED = ENTRIES ? 4 * WORLD : 0, EACH = LAST - FIRST;
        bool bad = false;
        for (u32 i = threadIdx.x; i < ENTERED + WORLD * EACH && !bad; i += blockDim.x) {
            // One look serves both kinds, as threads of a warp look together.
            bool entry = false;
            if constexpr (ENTRIES) {
                entry = i < ENTERED;
            }
            const u32 peer = entry ? i / 4 : (i - ENTERED) / EACH;
            const u32 word = entry ? i % 4 : FIRST + (i - ENTERED) % EACH;
            if (peer == session.comm.rank) {
                continue;
            }
            const char* slot = entry ? handshake_word(session, peer, word)
                                     : traffic_word_slot(session, session.comm.rank, peer, word);
            uint4 packet;
            bad = !await_packet<ACQUIRE>(session, peer, slot, packet);
            if (!bad && entry) {
                compare_handshake_word(session, call, peer, word, packet);
            } else if (!entry) {
                words[peer][word] = static_cast<u64>(packet.z) << 32 | packet.x;
            }
        }
        return !__syncthreads_or(bad);
    }

    __device__ __forceinline__ bool differs(u32 from, u32 to) const {
        const u64 wanted = expected(from, to);
        return wanted < INVALID_SPLITS && wanted != sent(from, to);
    }

    // Whether every rank is sent what it expects: the same answer on all ranks, as all read the
    // same rows, and in all threads of a block.
    __device__ __forceinline__ bool agreed() const { return !__syncthreads_or(disagrees()); }

    // Whether elements are as long on all ranks, so that counts mean the same bytes: the same answer on all
    // ranks, and in all threads of a block. A function of its own, as its caller has no register to spare.
    __device__ __noinline__ bool equal_element_sizes(const Traffic& traffic) const {
        const u32 rank = threadIdx.x;
        return !__syncthreads_or(rank < WORLD && words[rank][GRID_WORD] >> 32 != traffic.size);
    }

    // As far as this thread looks.
    __device__ __forceinline__ bool disagrees() const {
        bool bad = false;
        for (u32 pair = threadIdx.x; pair < WORLD * WORLD; pair += blockDim.x) {
            bad = bad || differs(pair / WORLD, pair % WORLD);
        }
        return bad;
    }

    // Whether something is not as a rank wished, of the rank that this thread looks at. Not only
    // where counts are on the device: another rank's may be.
    __device__ __forceinline__ bool has_notice() const {
        const u32 rank = threadIdx.x;
        return rank < WORLD &&
               (total(rank) > words[rank][CAPACITY_WORD] || words[rank][EXPECTED_WORDS] == INVALID_SPLITS);
    }
};

// Of the first pair that differs, as on every rank. By one thread.
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
    Fault* fault = comm.fault;
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

// Tells the host of the first rank for which something did not go as wished, on every rank alike.
// By one thread.
__device__ __noinline__ void notice(const Session& session, const TrafficMatrix& matrix) {
    volatile Notice* at = &session.comm.fault->notice;
    for (u32 rank = 0; rank < WORLD; ++rank) {
        const u64 needed = matrix.total(rank), room = matrix.words[rank][CAPACITY_WORD];
        const bool nonsense = matrix.words[rank][EXPECTED_WORDS] == INVALID_SPLITS;
        if (needed <= room && !nonsense) {
            continue;
        }
        at->kind = nonsense ? SPLITS : OVERFLOW;
        at->epoch = session.epoch;
        at->rank = rank;
        at->needed = needed;
        at->room = room;
        fence();
        at->calls = at->calls + 1;
        return;
    }
}

}  // namespace symmpool
