//! A matrix product with few rows, added up over all ranks: a matmul and an all-reduce in one.
//!
//! What takes time is to load the right matrix, of which each cluster of blocks has tiles of 128 columns; each of its blocks
//! has a part of the inner dimension. Tensor cores multiply 64 rows at least, and here these are columns of the right matrix: the
//! rows of the left one, filled up to TOKENS, are the product's columns.
//!
//! Of a block, one warp loads and two warpgroups multiply, each for a half of a tile's columns. Blocks of a cluster leave their
//! sums in shared memory, where each reads all of a part of the columns. What a thread has then is vectors of 8
//! columns of a row. They are rounded, and go to the inboxes of all peers, as in `all_reduce/one_shot.cu`; and when those of
//! all peers have arrived, they are added up in the order of ranks, so all ranks get the same bits. The handshake is made by a
//! warp of the first block, for which no data waits.
//!
//! Where kernels of other communicators may need SMs, another launch waits and adds up
//! (`fused/matmul_small_m_received.cu`). Defines: WORLD, THREADS, DTYPE (BF16 or F16), OP, PROTOCOL (LAMPORT), BLOCKS (1);
//! CLUSTER: 2, 4 or 8; TOKENS: 8, 16, 32 or 64; RIGHT_BY_ROWS: whether rows of the right matrix in memory are those of the
//! inner dimension (1).

#include <fused/small_m_sums.cuh>
#include <fused/matmul_layout.cuh>
#include <fused/stages.cuh>

using namespace symmpool;

constexpr u32 TYPE = DTYPE == BF16 ? MULTIPLIES_BF16 : MULTIPLIES_F16;
constexpr u32 ALL_GROUPS = GROUPS * GROUP_THREADS;
constexpr u32 TILE_COLUMNS = 128;
constexpr u32 BLOCK_ELEMENTS = BLOCK_BYTES / 2;
constexpr u32 STAGES = 8;
constexpr u32 LEFT_BYTES = TOKENS * BLOCK_BYTES, RIGHT_BYTES = TILE_COLUMNS * BLOCK_BYTES;
// A row of sums in shared memory has some numbers more, so that threads of a warp store to different banks.
constexpr u32 PITCH = TILE_COLUMNS + 4;
constexpr u32 SUMS_AT = STAGES * (LEFT_BYTES + RIGHT_BYTES);
constexpr u32 BARRIERS_AT = SUMS_AT + TOKENS * PITCH * 4;
constexpr u32 SHARED_BYTES = BARRIERS_AT + 2 * STAGES * BARRIER_BYTES;
// The columns of which a block adds up the sums, and how many vectors a thread has of them at most.
constexpr u32 OWN_COLUMNS = TILE_COLUMNS / CLUSTER, OWN_VECTORS = OWN_COLUMNS / 8;
constexpr u32 HELD = (TOKENS * OWN_VECTORS + ALL_GROUPS - 1) / ALL_GROUPS;
constexpr u32 LOADING_WARP = 0, ENTERING_WARP = 1, FIRST_RESETTING_WARP = 2, FIRST_GROUP_WARP = 4;
constexpr u32 RESETTING_THREADS = 32 * (FIRST_GROUP_WARP - FIRST_RESETTING_WARP);

using Stage = StageOf<STAGES>;

// Shared memory of a block, by purpose.
class SmallMSharedMemory {
    SharedAt begin_;

    __device__ __forceinline__ SharedAt barrier(u32 nth) const { return begin_ + BARRIERS_AT + nth * BARRIER_BYTES; }

public:
    __device__ __forceinline__ SmallMSharedMemory() : begin_(shared_memory<SHARED_BYTES>()) {}

    __device__ __forceinline__ SharedAt left(u32 stage) const {
        return begin_ + STAGES * RIGHT_BYTES + stage * LEFT_BYTES;
    }
    __device__ __forceinline__ SharedAt right(u32 stage) const { return begin_ + stage * RIGHT_BYTES; }
    // A sum of a row, of a column of the tile.
    __device__ __forceinline__ SharedAt sum(u32 row, u32 column) const {
        return begin_ + SUMS_AT + 4 * (row * PITCH + column);
    }
    // A stage's blocks are there; and both groups have multiplied them.
    __device__ __forceinline__ SharedAt is_full(u32 stage) const { return barrier(stage); }
    __device__ __forceinline__ SharedAt is_empty(u32 stage) const { return barrier(STAGES + stage); }

    __device__ __forceinline__ void make_barriers() const {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            make_barrier(is_full(stage), 1);
            make_barrier(is_empty(stage), GROUPS);
        }
        publish_barriers();
    }
};

// --- one thread loads

__device__ __forceinline__ void load_tile_factors(const MatmulSmallMWork& work, const SmallMSharedMemory& shared, Blocks blocks,
                                                  u32 column, Stage& stage) {
#pragma unroll 1
    for (u32 nth = blocks.begin; nth < blocks.end; ++nth, stage.advance()) {
        const u32 inner = nth * BLOCK_ELEMENTS;
        const SharedAt full = shared.is_full(stage.at), right = shared.right(stage.at);
        await_phase(shared.is_empty(stage.at), stage.phase ^ 1);
        arrive_expecting(full, LEFT_BYTES + RIGHT_BYTES);
        if constexpr (RIGHT_BY_ROWS) {
            load_tile(right, work.right, {column, inner, 0}, full);
            load_tile(right + RIGHT_BYTES / GROUPS, work.right, {column + TILE_COLUMNS / GROUPS, inner, 0}, full);
        } else {
            load_tile(right, work.right, {inner, column, 0}, full);
        }
        load_tile(shared.left(stage.at), work.left, {inner, 0, 0}, full);
    }
}

// --- two warpgroups multiply

// Leaves a group's sums of blocks of the inner dimension in shared memory.
__device__ __forceinline__ void multiply_tile(const SmallMSharedMemory& shared, Blocks blocks, u32 group, u32 thread,
                                              Stage& stage) {
    float sums[SUMS_OF<TOKENS>];
#pragma unroll
    for (u32 i = 0; i < SUMS_OF<TOKENS>; ++i) {
        sums[i] = 0;
    }
    u32 before = 0;
    auto leave = [&](u32 which) {
        if (thread == 0) {
            arrive(shared.is_empty(which));
        }
    };
#pragma unroll 1
    for (u32 nth = blocks.begin; nth < blocks.end; ++nth) {
        await_phase(shared.is_full(stage.at), stage.phase);
        const SharedAt right = shared.right(stage.at) + group * (RIGHT_BYTES / GROUPS), left = shared.left(stage.at);
        begin_products();
#pragma unroll
        for (u32 step = 0; step < BLOCK_BYTES / STEP_BYTES; ++step) {
            // A transposed block has 128 bytes for each of the inner dimension's rows.
            const u32 further = RIGHT_BY_ROWS ? STEP_BYTES / 2 * BLOCK_BYTES : STEP_BYTES;
            multiply_small<TYPE, RIGHT_BY_ROWS, TOKENS>(sums, right + step * further, left + step * STEP_BYTES);
        }
        end_batch();
        // The batch before has ended when only this one is left.
        if (nth != blocks.begin) {
            await_products<1>();
            leave(before);
        }
        before = stage.at;
        stage.advance();
    }
    await_small_sums<TOKENS>(sums);
    if (blocks.begin < blocks.end) {
        leave(before);
    }
    const u32 warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (u32 i = 0; i < SUMS_OF<TOKENS>; ++i) {
        const u32 row = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        const u32 column = group * (TILE_COLUMNS / GROUPS) + 16 * warp + 8 * (i / 2 % 2) + lane / 4;
        store_shared_float(shared.sum(row, column), sums[i]);
    }
}

// The vectors of a tile that a thread of the groups of a block of a cluster has.
struct Vectors {
    const MatmulSmallMWork& work;
    u32 tile, block, thread;

    // Calls `visit` with each vector's row, its first column in the tile, and its number among those of the product.
    template <typename Visit> __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
        for (u32 i = 0; i < HELD; ++i) {
            const u32 nth = thread + i * ALL_GROUPS, row = nth / OWN_VECTORS;
            const u32 in_tile = OWN_COLUMNS * block + nth % OWN_VECTORS * 8, column = TILE_COLUMNS * tile + in_tile;
            if (row < work.rows && column < work.columns) {
                visit(row, in_tile, (static_cast<u64>(row) * work.columns + column) / 8);
            }
        }
    }
};

// The sums of a vector of all blocks of the cluster, in their order.
__device__ __forceinline__ uint4 add_blocks(const SmallMSharedMemory& shared, u32 row, u32 column) {
    float sums[8] = {};
#pragma unroll
    for (u32 block = 0; block < CLUSTER; ++block) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const uint4 four = load_of_block(shared.sum(row, column + 4 * half), block);
            sums[4 * half] += __uint_as_float(four.x);
            sums[4 * half + 1] += __uint_as_float(four.y);
            sums[4 * half + 2] += __uint_as_float(four.z);
            sums[4 * half + 3] += __uint_as_float(four.w);
        }
    }
    return pack<DTYPE>(sums);
}

// --- the call

// Behind it all threads that add up sums see those of all blocks of the cluster, or these may be written over.
__device__ __forceinline__ void meet() {
    __syncwarp();
    cluster_barrier();
}

// Takes part in the cluster's barriers, for warps that do nothing else there: such a barrier is one of all its threads.
__device__ __forceinline__ void let_meet() {
    __syncwarp();
    cluster_barrier();
    cluster_barrier();
}

extern "C" SYMMPOOL_CLUSTER __global__ void __launch_bounds__(THREADS, 1)
    symmpool_matmul_small_m(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call,
                        const __grid_constant__ MatmulSmallMWork work) {
    begin_kernel(comm.early);
    Session session(comm);
    const u64 each = call.bytes / 16;
    const Inbox inbox(session, WORLD > 1 ? INBOX_SLOTS * each : 0);
    session.advance();
    if (blockIdx.x == 0 && must_expire_flags(session)) {
        expire_old_flags(session, inbox.used());
        expire_escape_marks(session);
    }
    const SmallMSharedMemory shared;
    if (threadIdx.x == 0) {
        shared.make_barriers();
    }
    __syncthreads();
    const u32 block = block_in_cluster(), clusters = gridDim.x / CLUSTER;
    const Blocks blocks{work.inner_blocks * block / CLUSTER, work.inner_blocks * (block + 1) / CLUSTER};
    const u32 warp = threadIdx.x / 32, first = blockIdx.x / CLUSTER;
    if (warp < FIRST_GROUP_WARP) {
        const bool enters = warp == ENTERING_WARP && blockIdx.x == 0 && !session.failed;
        if (enters) {
            send_handshake<false>(session, call, threadIdx.x % 32, 32);
        }
        Stage stage;
        for (u32 tile = first; tile < work.tiles; tile += clusters) {
            if (threadIdx.x == 32 * LOADING_WARP) {
                load_tile_factors(work, shared, blocks, tile * TILE_COLUMNS, stage);
            }
            let_meet();
        }
        // Work that takes time comes behind all barriers of the cluster.
        if (enters) {
            compare_handshakes(session, call, threadIdx.x % 32, 32);
        } else if (warp >= FIRST_RESETTING_WARP && !session.failed) {
            const u32 thread = threadIdx.x - 32 * FIRST_RESETTING_WARP;
            inbox.reset_stale(blockIdx.x * RESETTING_THREADS + thread, gridDim.x * RESETTING_THREADS);
        }
        return;
    }
    const u32 thread = threadIdx.x - 32 * FIRST_GROUP_WARP;
    Stage stage;
#pragma unroll 1
    for (u32 tile = first; tile < work.tiles; tile += clusters) {
        multiply_tile(shared, blocks, thread / GROUP_THREADS, thread % GROUP_THREADS, stage);
        meet();
        Vectors{work, tile, block, thread}.each([&](u32 row, u32 column, u64 at) {
            const uint4 own = Inbox::prepare(add_blocks(shared, row, column));
#pragma unroll
            for (u32 distance = 1; distance < WORLD && !session.failed; ++distance) {
                inbox.send(comm, comm.after(distance), slot_at_peer(comm, distance) * each + at, own);
            }
            // The sum of all takes its place.
            store_plain(output_at(call, at), own);
        });
        meet();
    }
    if (!work.receives || session.failed) {
        return;
    }
    bool arrived = true;
#pragma unroll 1
    for (u32 tile = first; tile < work.tiles; tile += clusters) {
        Vectors{work, tile, block, thread}.each([&](u32, u32, u64 at) {
            arrived = arrived && add_ranks(session, inbox, call, at, each);
        });
    }
}
