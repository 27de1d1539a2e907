//! A matrix product in tiles, with parts for or of different ranks: what its kernels have in common.
//!
//! A left matrix has a part of its rows for each rank, or of each. The parts' products are made in tiles of 128 x 256
//! elements, by clusters of CLUSTER blocks, which make tiles with the same columns at once and load the right matrix's for
//! each other. Of a block, one warp loads, two warpgroups (groups, below) multiply, each a half of the tile's rows, and a warp
//! for each group moves what becomes of the sums. If tiles fill no whole wave of clusters, several clusters make the last ones,
//! each a part of the inner dimension (`StreamK`). Defines: WORLD, THREADS, DTYPE, CLUSTER; RIGHT_BY_ROWS: whether rows of a
//! right matrix in memory are those of the inner dimension (1); OUTPUT_F16: whether results are F16 (1) or BF16.

#pragma once

#include <fused/matmul_tiles.cuh>
#include <symmpool/impl/handshake.cuh>

namespace symmpool {

// --- one warp loads blocks of both matrices

// Loads blocks of what a tile is made of: rows from the place `left_at` of the left matrix on, and columns of the right one
// from `column` on.
__device__ __forceinline__ void load_tile_factors(Blocks blocks, const SharedMemory& shared, u32 block, Stage& stage,
                                                  const TensorMap& left, TileAt left_at, const TensorMap& right,
                                                  u32 column) {
#pragma unroll 1
    for (u32 nth = blocks.begin; nth < blocks.end; ++nth, stage.advance()) {
        const u32 inner = nth * BLOCK_ELEMENTS;
        const SharedAt full = shared.is_full(stage.at);
        await_phase(shared.is_empty(stage.at), stage.phase ^ 1);
        arrive_expecting(full, LEFT_BYTES + RIGHT_BYTES);
        load_tile(shared.left(stage.at), left, {inner, left_at.row, left_at.part}, full);
        // Each block of a cluster loads its share of the right matrix's block, for both.
        const u32 boxes = RIGHT_BY_ROWS ? TILE_COLUMNS / 64 : 2, share = boxes / CLUSTER;
#pragma unroll
        for (u32 i = 0; i < share; ++i) {
            const u32 box = block * share + i, first = column + box * (TILE_COLUMNS / boxes);
            const SharedAt to = shared.right(stage.at) + box * (RIGHT_BYTES / boxes);
            const TileAt at = RIGHT_BY_ROWS ? TileAt{first, inner, 0} : TileAt{inner, first, 0};
            load_tile_for_both(to, right, at, full);
        }
    }
}

// --- two warpgroups multiply

// Product that a group makes of its half of a tile.
class TileProduct {
    const MatmulWork& work_;
    Stage stage_;

    // One thread of the group for each block of the cluster says that the stage may be loaded again.
    __device__ __forceinline__ void leave(u32 stage) const {
        if (thread_ < CLUSTER) {
            arrive_at_block(shared_.is_empty(stage), thread_);
        }
    }

    // Where this thread's sums of a tile lie that a helper has left.
    __device__ __forceinline__ uint4* partial(u32 nth) const {
        return reinterpret_cast<uint4*>(work_.partials) + (nth * GROUPS + group_) * (SUMS / 4 * GROUP_THREADS) + thread_;
    }

    __device__ __forceinline__ uint4 packed(u32 piece, u32 nth) const {
        float sums[8];
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            sums[i] = sums_[32 * piece + 8 * nth + i];
        }
        return pack<OUTPUT>(sums);
    }

    __device__ __forceinline__ void end_piece(u32 piece) const {
        fence_for_stores();
        wait_for_group();
        if (thread_ == 0) {
            arrive(shared_.is_written(group_, piece));
        }
    }

protected:
    const SharedMemory& shared_;
    u32 block_, group_, thread_;
    float sums_[SUMS];

    __device__ __forceinline__ TileProduct(const MatmulWork& work, const SharedMemory& shared, u32 block, u32 group,
                                           u32 thread)
        : work_(work), shared_(shared), block_(block), group_(group), thread_(thread) {}

    __device__ __forceinline__ void wait_for_group() const { barrier_of_warps(1 + group_, GROUP_THREADS, false); }

    __device__ __forceinline__ void multiply_tile(const Tile& tile) {
        u32 before = 0;
#pragma unroll
        for (u32 i = 0; i < SUMS; ++i) {
            sums_[i] = 0;
        }
#pragma unroll 1
        for (u32 nth = tile.begin; nth < tile.end; ++nth) {
            await_phase(shared_.is_full(stage_.at), stage_.phase);
            const SharedAt left = shared_.left(stage_.at) + group_ * (LEFT_BYTES / GROUPS);
            const SharedAt right = shared_.right(stage_.at);
            begin_products();
#pragma unroll
            for (u32 step = 0; step < BLOCK_BYTES / STEP_BYTES; ++step) {
                // A transposed block has 128 bytes for each of the inner dimension's rows.
                const u32 further = RIGHT_BY_ROWS ? STEP_BYTES / 2 * BLOCK_BYTES : STEP_BYTES;
                multiply<TYPE, RIGHT_BY_ROWS>(sums_, left + step * STEP_BYTES, right + step * further);
            }
            end_batch();
            // The batch before has ended when only this one is left.
            if (nth != tile.begin) {
                await_products<1>();
                leave(before);
            }
            before = stage_.at;
            stage_.advance();
        }
        await_sums(sums_);
        leave(before);
    }

    // Leaves the sums in memory for the cluster that makes the rest of the tile.
    __device__ __forceinline__ void leave_partial(const Tile& tile) const {
        const u32 nth = tile.partial * CLUSTER + block_;
        uint4* to = partial(nth);
#pragma unroll
        for (u32 i = 0; i < SUMS / 4; ++i) {
            const float* four = sums_ + 4 * i;
            store_relaxed(to + i * GROUP_THREADS, make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]),
                                                             __float_as_uint(four[2]), __float_as_uint(four[3])));
        }
        fence();
        wait_for_group();
        if (thread_ == 0) {
            store_release(&work_.control->partial[nth][group_], 1);
        }
    }

    // Adds the sums that helpers have left. They come before this cluster in the grid, so they run already, and they wait
    // for nobody that waits for this one. What they wait for has a bound (rule S5), behind which they leave sums all the same.
    __device__ __forceinline__ void add_partials(const Tile& tile) {
#pragma unroll 1
        for (u32 each = 0; each < tile.partials; ++each) {
            const u32 nth = (tile.partial + each) * CLUSTER + block_;
            u64* made = &work_.control->partial[nth][group_];
            if (thread_ == 0) {
                while (load_acquire(made) == 0) {
                }
                *made = 0;
            }
            wait_for_group();
            const uint4* from = partial(nth);
#pragma unroll
            for (u32 i = 0; i < SUMS / 4; ++i) {
                const uint4 found = load_relaxed(from + i * GROUP_THREADS);
                sums_[4 * i] += __uint_as_float(found.x);
                sums_[4 * i + 1] += __uint_as_float(found.y);
                sums_[4 * i + 2] += __uint_as_float(found.z);
                sums_[4 * i + 3] += __uint_as_float(found.w);
            }
        }
    }

    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (u32 i = 0; i < SUMS; ++i) {
            sums_[i] *= factor;
        }
    }

    // Where this thread's vectors of a piece lie, if they are in the order of threads.
    __device__ __forceinline__ SharedAt vectors(u32 piece) const { return shared_.piece(group_, piece) + 16 * thread_; }

    // Writes a piece of the sums as they lie in registers.
    __device__ __forceinline__ void write_vectors(u32 piece) const {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            store_shared(vectors(piece) + i * 16 * GROUP_THREADS, packed(piece, i));
        }
        end_piece(piece);
    }

    // Writes a piece of the sums row by row.
    __device__ __forceinline__ void write_rows(u32 piece) const {
        const u32 warp = thread_ / 32, lane = thread_ % 32, row = 16 * warp + lane % 16;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            // Blocks of 8 x 8: rows 0 and 8, and the same 8 columns further on; 16-byte pieces of a row are exchanged.
            const u32 columns = 2 * i + lane / 16;
            store_blocks(shared_.piece(group_, piece) + BLOCK_BYTES * row + 16 * (columns ^ (row & 7)), packed(piece, i));
        }
        end_piece(piece);
    }
};

// The factor of a product's sums. Call this before you make them, as loads take a while.
__device__ __forceinline__ float scale_of(const MatmulWork& work, const GemmProblem& problem) {
    if constexpr (TYPE != MULTIPLIES_E4M3) {
        return 1;
    }
    return (work.left_scale ? *work.left_scale : 1.0f) * (problem.right_scale ? *problem.right_scale : 1.0f);
}

// A warp stores a piece that is written row by row, if it has any rows of the part. A result has rows of each of `ranks`
// ranks in every batch, and the part is that of one of them.
__device__ __forceinline__ void store_rows(const MatmulWork& work, const SharedMemory& shared, u32 group, u32 piece,
                                           const TensorMap& out, const Tile& tile, u32 column, u32 ranks, u32 rank) {
    const u32 row = tile.row * TILE_ROWS + group * (TILE_ROWS / GROUPS);
    if (row < work.rows) {
        const u32 batch = row / work.batch_rows;
        store_tile(out, shared.piece(group, piece),
                   {column + piece * PIECE_COLUMNS, row - batch * work.batch_rows, batch * ranks + rank});
    }
}

// --- the beginning and the end of a kernel

// Begins a call; a launch that makes the rest of one belongs to the call of the launch before.
__device__ __forceinline__ void begin_call(Session& session, const MatmulWork& work) {
    if (work.first_part != 0) {
        session.epoch = static_cast<u32>(work.control->epoch);
        return;
    }
    session.advance();
    if (blockIdx.x == 0 && must_expire_flags(session)) {
        expire_old_flags(session, UsedBytes());
        expire_escape_marks(session);
    }
}

// Sets all other ranks' flags for the chunks that they have got, as the stream sends them. Called by one thread. Copying a word behind each
// chunk would keep the copy engine from the next one for as long as 3 MB take.
__device__ __forceinline__ void announce_chunks(const Session& session, const MatmulWork& work) {
#pragma unroll 1
    for (u32 distance = 1; distance < WORLD; ++distance) {
        const u32 peer = session.comm.after(distance);
#pragma unroll 1
        for (u32 chunk = 0; chunk < work.chunks; ++chunk) {
            u64* sent = &work.control->sent[peer][chunk];
            Watch watch;
            while (load_acquire(sent) == 0) {
                // If the call fails before everything is sent, nobody waits for the rest.
                if (watch.expired(session, peer, DATA)) {
                    return;
                }
            }
            *sent = 0;
            store_release(session.comm.at_peer(&work.control->arrived[session.comm.rank][chunk], peer), session.epoch);
        }
    }
}

// The handshake, for which the stream waits that sends, and what follows what it sends. Called by a warp of the first block.
__device__ __forceinline__ void enter(const Session& session, const CallParams& call, const MatmulWork& work, u32 lane) {
    if (!session.failed) {
        // Peers set these flags when they have this rank's handshake. Those of a call long ago would be taken for this one's
        // where epochs repeat.
        for (u32 flag = lane; flag < WORLD * MAX_CHUNKS; flag += 32) {
            work.control->arrived[flag / MAX_CHUNKS][flag % MAX_CHUNKS] = 0;
        }
        __syncwarp();
        send_handshake<true>(session, call, lane, 32);
        compare_handshakes(session, call, lane, 32);
    }
    __syncwarp();
    if (lane == 0) {
        work.control->epoch = session.epoch;
        fence();
        atomicAdd(&work.control->entered, 1u);
        announce_chunks(session, work);
    }
}

// Makes the barriers of a block, and returns its place in its cluster.
__device__ __forceinline__ u32 begin_block(const SharedMemory& shared) {
    if (threadIdx.x == 0) {
        shared.make_barriers();
    }
    __syncthreads();
    cluster_barrier();
    return block_in_cluster();
}

// A block's shared memory stays until the other one of its cluster has arrived at it for the last time.
__device__ __forceinline__ void end_block() {
    __syncwarp();
    cluster_barrier();
}

// Which warps do what.
constexpr u32 LOADING_WARP = 0, MOVING_WARPS = 1, ENTERING_WARP = MOVING_WARPS + GROUPS;
constexpr u32 FIRST_GROUP_THREAD = GROUP_THREADS;

}  // namespace symmpool
