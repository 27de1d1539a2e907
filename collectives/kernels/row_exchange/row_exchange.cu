//! The steps of a row exchange on a device, around its all-to-alls: rows with a destination rank each are packed in the
//! order of ranks, and rows that come back are put where they were.
//! Defines: WORLD, THREADS, STEP (COUNT, PACK, FIT or UNPACK).
//!
//! Every block has a range of the rows, the same in COUNT and PACK: the first counts the rows for each rank, the
//! second adds up the counts of the blocks before and moves the rows. So the place of a row follows from the
//! destinations alone (rule S7), and no block waits for another.

#include <symmpool/partition.cuh>

using namespace symmpool;

enum class Step { COUNT, PACK, FIT, UNPACK };
constexpr Step RUN = Step::STEP;

// The arguments of these kernels: `RowWork` in `row_exchange.rs`.
struct RowWork {
    const void* destinations;
    const char* input;
    char* output;
    char* packed;              // rows in the order of ranks, then of their numbers, on both ways
    int* order;                // the number in the input of each packed row
    long long* splits;         // how many packed rows each rank gets; all -1 if a destination is no rank
    long long* index_splits;   // the same; all 0 if a destination is no rank
    const u64* returned;       // how many rows each rank sent back
    const u64* returned_at;    // where these begin in `packed`
    u32* tallies;              // the results of COUNT, TALLIES for each block
    const long long* counts;   // how many rows came from each rank
    const long long* offsets;  // where these begin
    u32* position;             // for each row of the input, its packed row counted from 1, or 0 if it has none
    u64* state;                // where each rank's packed rows begin; behind them the receiver's capacity
    u64 given;                 // rows that have destinations; in UNPACK, rows of the output
    u64 rows;                  // most rows that an input can have
    u64 row_bytes;
    u64 capacity;
    u32 wide;                  // whether destinations have 64 bits
    u32 unused;
};

static_assert(sizeof(RowWork) == ROW_WORK_BYTES, "layouts differ");

constexpr u32 NOWHERE = WORLD;      // the destination -1: the row is not sent
constexpr u32 NO_RANK = WORLD + 1;  // a destination that is wrong
// The tallies of a block: its rows for each rank, and the first of its rows whose destination is no rank.
constexpr u32 TALLIES = WORLD + 1;
constexpr u32 NONE = ~0u;
constexpr u32 WARPS = THREADS / 32;
constexpr int UNROLL = 4;

__device__ __forceinline__ long long destination(const RowWork& work, u64 row) {
    return work.wide ? static_cast<const long long*>(work.destinations)[row]
                     : static_cast<const int*>(work.destinations)[row];
}

// A rank, NOWHERE or NO_RANK.
__device__ __forceinline__ u32 destination_rank(const RowWork& work, u64 row) {
    if (row >= work.given) {
        return NOWHERE;
    }
    const long long to = destination(work, row);
    return to >= 0 && to < WORLD ? static_cast<u32>(to) : to == -1 ? NOWHERE : NO_RANK;
}

// This block's range of so many rows.
__device__ __forceinline__ Range own_rows(u64 rows) { return Split(rows, gridDim.x, 1)[blockIdx.x]; }

// Adds up the threads' counts of a block, and finds the least of `lowest`, in any order as these are integers. `sums`
// and `least` are in shared memory, and hold 0 and NONE before. Called by all threads of the block.
__device__ __forceinline__ void combine(const u32 (&own)[WORLD], u32 lowest, u32* sums,
                                        u32* least) {
#pragma unroll
    for (u32 rank = 0; rank < WORLD; ++rank) {
        const u32 sum = __reduce_add_sync(~0u, own[rank]);
        if (threadIdx.x % 32 == 0) {
            atomicAdd(&sums[rank], sum);
        }
    }
    lowest = __reduce_min_sync(~0u, lowest);
    if (threadIdx.x % 32 == 0) {
        atomicMin(least, lowest);
    }
}

__device__ __forceinline__ void count(const RowWork& work) {
    __shared__ u32 tallies[TALLIES];
    if (threadIdx.x < TALLIES) {
        tallies[threadIdx.x] = threadIdx.x < WORLD ? 0 : NONE;
    }
    __syncthreads();
    u32 own[WORLD] = {};
    u32 bad = NONE;
    const Range range = own_rows(work.rows);
    for (u64 row = range.from + threadIdx.x; row < range.to; row += THREADS) {
        const u32 to = destination_rank(work, row);
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            own[rank] += to == rank;
        }
        bad = to == NO_RANK && bad == NONE ? static_cast<u32>(row) : bad;
    }
    combine(own, bad, tallies, &tallies[WORLD]);
    __syncthreads();
    if (threadIdx.x < TALLIES) {
        work.tallies[blockIdx.x * TALLIES + threadIdx.x] = tallies[threadIdx.x];
    }
}

// Reports to the host which row has a wrong destination. All ranks learn that there is one in the call after the next,
// which carries the rows.
__device__ __noinline__ void note_bad(const Comm& comm, u32 row, long long to) {
    volatile Fault* fault = comm.fault;
    const long long least = -0x80000000ll, most = 0x7fffffffll;
    fault->bad_row = row;
    fault->bad_destination = static_cast<int>(to < least ? least : to > most ? most : to);
    fault->bad_epoch = Session::following(Session::following(comm.local()->epoch));
    fence();
}

// Moves the rows of a tile, from number `first` on, to their packed places; with BACK, from these, and rows that have
// none are filled with zeros. `places` counts packed rows from 1; 0 is none. Called by all threads of a block. `Unit`
// divides the bytes of a row and all addresses.
template <typename Unit, bool BACK>
__device__ __forceinline__ void move(const RowWork& work, u64 first, u32 rows, const u32* places) {
    const u32 units = static_cast<u32>(work.row_bytes / sizeof(Unit));
    const u64 all = static_cast<u64>(rows) * units;
    char* rows_at = BACK ? work.output : const_cast<char*>(work.input);
    // The rows of a tile are divided among the threads together, so long as 32 bits count their units.
    const u32 together = all <= 0xf0000000u ? rows : 1;
    for (u32 begin = 0; begin < rows; begin += together) {
        const u32 items = together * units;
        for (u32 item = threadIdx.x; item < items; item += THREADS * UNROLL) {
            Unit some[UNROLL];
            char* to[UNROLL];
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                const u32 at = item + i * THREADS;
                to[i] = nullptr;
                if (at < items) {
                    const u32 row = begin + at / units;
                    const u64 within = static_cast<u64>(at % units) * sizeof(Unit);
                    char* own = rows_at + (first + row) * work.row_bytes + within;
                    const u32 place = places[row];
                    char* packed = work.packed + (place - 1ull) * work.row_bytes + within;
                    const char* from = BACK ? packed : own;
                    some[i] = place != 0 ? *reinterpret_cast<const Unit*>(from) : Unit{};
                    to[i] = BACK ? own : place != 0 ? packed : nullptr;
                }
            }
#pragma unroll
            for (int i = 0; i < UNROLL; ++i) {
                if (to[i] != nullptr) {
                    *reinterpret_cast<Unit*>(to[i]) = some[i];
                }
            }
        }
    }
}

template <bool BACK>
__device__ __forceinline__ void move_aligned(const RowWork& work, u64 first, u32 rows,
                                             const u32* places) {
    const u64 bits = reinterpret_cast<u64>(BACK ? work.output : work.input) |
                     reinterpret_cast<u64>(work.packed) | work.row_bytes;
    if (bits % 16 == 0) {
        move<uint4, BACK>(work, first, rows, places);
    } else if (bits % 4 == 0) {
        move<u32, BACK>(work, first, rows, places);
    } else {
        move<unsigned char, BACK>(work, first, rows, places);
    }
}

__device__ __forceinline__ void pack(const Comm& comm, const RowWork& work) {
    __shared__ u32 all[WORLD], next[WORLD], bad;
    __shared__ u32 warps[WARPS][WORLD];
    __shared__ u32 places[THREADS];
    if (threadIdx.x < WORLD) {
        all[threadIdx.x] = 0;
        next[threadIdx.x] = 0;
    } else if (threadIdx.x == WORLD) {
        bad = NONE;
    }
    __syncthreads();
    u32 sums[WORLD] = {}, before[WORLD] = {};
    u32 first_bad = NONE;
    for (u32 block = threadIdx.x; block < gridDim.x; block += THREADS) {
        const u32* tallies = work.tallies + block * TALLIES;
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            sums[rank] += tallies[rank];
            before[rank] += block < blockIdx.x ? tallies[rank] : 0;
        }
        first_bad = tallies[WORLD] < first_bad ? tallies[WORLD] : first_bad;
    }
    combine(sums, first_bad, all, &bad);
    combine(before, first_bad, next, &bad);
    __syncthreads();
    const bool refused = bad != NONE;
    if (threadIdx.x < WORLD) {
        const u32 rank = threadIdx.x;
        u32 begin = 0;
        for (u32 other = 0; other < rank; ++other) {
            begin += all[other];
        }
        next[rank] += begin;
        if (blockIdx.x == 0) {
            work.splits[rank] = refused ? -1 : static_cast<long long>(all[rank]);
            work.index_splits[rank] = refused ? 0 : all[rank];
            work.state[rank] = begin;
        }
    } else if (threadIdx.x == WORLD && blockIdx.x == 0) {
        work.state[WORLD] = work.capacity;
        if (refused) {
            note_bad(comm, bad, destination(work, bad));
        }
    }
    __syncthreads();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Range range = own_rows(work.rows);
    const u64 end = range.to;
    for (u64 tile = range.from; tile < end; tile += THREADS) {
        const u64 row = tile + threadIdx.x;
        const u32 to = row < end && !refused ? destination_rank(work, row) : NOWHERE;
        u32 within = 0;
#pragma unroll
        for (u32 rank = 0; rank < WORLD; ++rank) {
            const u32 same = __ballot_sync(~0u, to == rank);
            within = to == rank ? __popc(same & ((1u << lane) - 1)) : within;
            if (lane == 0) {
                warps[warp][rank] = __popc(same);
            }
        }
        __syncthreads();
        u32 found = 0;
        if (to < WORLD) {
            found = next[to] + within + 1;
            for (u32 other = 0; other < warp; ++other) {
                found += warps[other][to];
            }
            work.order[found - 1] = static_cast<int>(row);
        }
        places[threadIdx.x] = found;
        if (row < end) {
            work.position[row] = found;
        }
        __syncthreads();
        if (threadIdx.x < WORLD) {
            for (u32 other = 0; other < WARPS; ++other) {
                next[threadIdx.x] += warps[other][threadIdx.x];
            }
        }
        if (!refused) {
            const u32 rows = static_cast<u32>(end - tile < THREADS ? end - tile : THREADS);
            move_aligned<false>(work, tile, rows, places);
        }
        __syncthreads();
    }
}

// How many of the rows that came from each rank fit into the output: those go back.
__device__ __forceinline__ void fit_splits(const RowWork& work) {
    if (threadIdx.x < WORLD) {
        const long long room = static_cast<long long>(work.state[WORLD]);
        const long long before = work.offsets[threadIdx.x], count = work.counts[threadIdx.x];
        const long long left = before < room ? room - before : 0;
        work.splits[threadIdx.x] = count < left ? count : left;
    }
}

// Puts rows that came back where they were, and zeros where a row was not sent.
__device__ __forceinline__ void unpack(const RowWork& work) {
    __shared__ u64 begins[WORLD], came[WORLD], came_at[WORLD];
    __shared__ u32 places[THREADS];
    if (threadIdx.x < WORLD) {
        begins[threadIdx.x] = work.state[threadIdx.x];
        came[threadIdx.x] = work.returned[threadIdx.x];
        came_at[threadIdx.x] = work.returned_at[threadIdx.x];
    }
    __syncthreads();
    const Range range = own_rows(work.given);
    const u64 end = range.to;
    for (u64 tile = range.from; tile < end; tile += THREADS) {
        const u64 row = tile + threadIdx.x;
        const u32 packed = row < end ? work.position[row] : 0;
        u32 found = 0;
        if (packed != 0) {
            u32 to = 0;
            for (u32 rank = 1; rank < WORLD; ++rank) {
                to = packed - 1 >= begins[rank] ? rank : to;
            }
            const u64 within = packed - 1 - begins[to], at = came_at[to] + within;
            found = within < came[to] && at < work.rows ? static_cast<u32>(at + 1) : 0;
        }
        places[threadIdx.x] = found;
        __syncthreads();
        const u32 rows = static_cast<u32>(end - tile < THREADS ? end - tile : THREADS);
        move_aligned<true>(work, tile, rows, places);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    symmpool_row_exchange(const __grid_constant__ Comm comm, const __grid_constant__ RowWork work) {
    begin_kernel(comm.early);
    if (*static_cast<volatile u32*>(&comm.local()->failed) != 0) {
        return;
    }
    if (RUN == Step::COUNT) {
        count(work);
    } else if (RUN == Step::PACK) {
        pack(comm, work);
    } else if (RUN == Step::FIT) {
        fit_splits(work);
    } else {
        unpack(work);
    }
}
