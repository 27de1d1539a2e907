//! A product of matrices of which every rank gets a part, added up over all ranks: a matmul and a reduce-scatter in one.
//!
//! Tiles for other ranks come first and go to this rank's memory. When a chunk of them is whole, a stream that has waited for
//! that copies it to its rank by a copy engine, and the call's epoch behind it: stores of SMs over NVLink would delay the
//! loads of the product by as long as they take. This rank's own tiles come last, and what other ranks have sent for them is
//! added in float32 before they are stored, in the order of ranks from this one on.
//!
//! The handshake is made by a warp of the first block; only copies to peers wait for it. Tiles for other ranks wait for
//! nobody, so streams that wait for chunks always go on. Own tiles wait for chunks, on all SMs. Where kernels of other
//! communicators may need SMs meanwhile, they are a launch of their own, behind `matmul_wait.cu`. Defines: WORLD, THREADS,
//! DTYPE, CLUSTER; RIGHT_BY_ROWS: whether rows of the right matrix in memory are those of the inner dimension (1);
//! OUTPUT_F16: whether the result is F16 (1) or BF16.

#include <fused/matmul.cuh>
#include <symmpool/handshake.cuh>
#include <symmpool/types.cuh>

using namespace symmpool;

constexpr u32 TYPE = DTYPE == BF16 ? MULTIPLIES_BF16 : DTYPE == F16 ? MULTIPLIES_F16 : MULTIPLIES_E4M3;
constexpr u32 BLOCK_ELEMENTS = TYPE == MULTIPLIES_E4M3 ? BLOCK_BYTES : BLOCK_BYTES / 2;
constexpr int OUTPUT = OUTPUT_F16 ? F16 : BF16;

// The rank after so many others; this one after all of them.
__device__ __forceinline__ u32 rank_after(const Comm& comm, u32 distance) {
    return distance == WORLD ? comm.rank : comm.after(distance);
}

// --- one warp loads blocks of both matrices

__device__ __forceinline__ void load(const Comm& comm, const MatmulWork& work, const SharedMemory& shared, u32 block) {
    Tiles tiles(work, block);
    Tile tile;
    Stage stage;
    while (tiles.next(tile)) {
        const u32 row = rank_after(comm, tile.distance) * work.rows + tile.row * TILE_ROWS;
        const u32 column = tile.column * TILE_COLUMNS;
#pragma unroll 1
        for (u32 nth = 0; nth < work.inner_blocks; ++nth, stage.advance()) {
            const u32 inner = nth * BLOCK_ELEMENTS;
            const SharedAt full = shared.is_full(stage.at);
            await_phase(shared.is_empty(stage.at), stage.phase ^ 1);
            arrive_expecting(full, LEFT_BYTES + RIGHT_BYTES);
            load_tile(shared.left(stage.at), work.left, inner, row, full);
            // Each block of a cluster loads its share of the right matrix's block, for both.
            const u32 boxes = RIGHT_BY_ROWS ? TILE_COLUMNS / 64 : 2, share = boxes / CLUSTER;
#pragma unroll
            for (u32 i = 0; i < share; ++i) {
                const u32 box = block * share + i, first = column + box * (TILE_COLUMNS / boxes);
                const SharedAt to = shared.right(stage.at) + box * (RIGHT_BYTES / boxes);
                const u32 x = RIGHT_BY_ROWS ? first : inner, y = RIGHT_BY_ROWS ? inner : first;
                if constexpr (CLUSTER > 1) {
                    load_tile_for_both(to, work.right, x, y, full);
                } else {
                    load_tile(to, work.right, x, y, full);
                }
            }
        }
    }
}

// --- a warp for each group moves pieces

__device__ __forceinline__ void move_pieces(const Session& session, const MatmulWork& work, const SharedMemory& shared,
                                            u32 block, u32 group) {
    Tiles tiles(work, block);
    Tile tile;
    // How often each piece has become free in all tiles before this one.
    u32 freed = 0;
    for (u32 nth = 0; tiles.next(tile); ++nth, ++freed) {
        const bool is_own = tile.distance == WORLD;
        const u64 half = tile.number * static_cast<u64>(TILE_BYTES) + group * (PIECES * PIECE_BYTES);
        if (is_own) {
#pragma unroll 1
            for (u32 distance = 1; distance < WORLD; ++distance) {
                await_chunk(session, work, session.comm.after(distance), tile.chunk);
                fence_for_loads();
                const char* from = work.incoming + (distance - 1) * work.part_bytes + half;
#pragma unroll 1
                for (u32 piece = 0; piece < PIECES; ++piece) {
                    await_phase(shared.is_free(group, piece), freed + distance);
                    arrive_expecting(shared.is_loaded(group, piece), PIECE_BYTES);
                    load_bytes(shared.piece(group, piece), from + piece * PIECE_BYTES, PIECE_BYTES,
                               shared.is_loaded(group, piece));
                }
            }
            freed += WORLD > 1 ? WORLD - 2 : 0;
        }
        char* to = work.outgoing + (tile.distance - 1) * work.part_bytes + half;
#pragma unroll 1
        for (u32 piece = 0; piece < PIECES; ++piece) {
            await_phase(shared.is_written(group, piece), nth);
            if (!is_own) {
                store_bytes(to + piece * PIECE_BYTES, shared.piece(group, piece), PIECE_BYTES);
            } else if (tile.row * TILE_ROWS < work.rows) {
                store_tile(work.out, shared.piece(group, piece), tile.column * TILE_COLUMNS + piece * PIECE_COLUMNS,
                           tile.row * TILE_ROWS + group * (TILE_ROWS / GROUPS));
            }
            await_bulk_reads<0>();
            arrive(shared.is_free(group, piece));
        }
        if (!is_own) {
            await_bulk_stores<0>();
            fence();
            atomicAdd(&work.control->finished[rank_after(session.comm, tile.distance)][tile.chunk], 1u);
        }
    }
    await_bulk_stores<0>();
}

// --- two groups of four warps multiply

class Group {
    const MatmulWork& work_;
    const SharedMemory& shared_;
    u32 group_, thread_;
    Stage stage_;
    // As in `move_pieces`, and how often pieces were loaded.
    u32 freed_ = 0, loaded_ = 0;
    float sums_[SUMS];

    // One thread of the group for each block of the cluster says that the stage may be loaded again.
    __device__ __forceinline__ void leave(u32 stage) const {
        if constexpr (CLUSTER > 1) {
            if (thread_ < CLUSTER) {
                arrive_at_block(shared_.is_empty(stage), thread_);
            }
        } else if (thread_ == 0) {
            arrive(shared_.is_empty(stage));
        }
    }

    __device__ __forceinline__ void wait_for_group() const { barrier_of_warps(1 + group_, GROUP_THREADS, false); }

    __device__ __forceinline__ void multiply_tile() {
        u32 before = 0;
#pragma unroll
        for (u32 i = 0; i < SUMS; ++i) {
            sums_[i] = 0;
        }
#pragma unroll 1
        for (u32 nth = 0; nth < work_.inner_blocks; ++nth) {
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
            if (nth != 0) {
                await_products<1>();
                leave(before);
            }
            before = stage_.at;
            stage_.advance();
        }
        await_products<0>();
        leave(before);
    }

    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (u32 i = 0; i < SUMS; ++i) {
            sums_[i] *= factor;
        }
    }

    // Where this thread's vectors of a piece lie.
    __device__ __forceinline__ SharedAt vectors(u32 piece) const { return shared_.piece(group_, piece) + 16 * thread_; }

    // Adds what other ranks have sent for this tile.
    __device__ __forceinline__ void add_others() {
#pragma unroll 1
        for (u32 distance = 1; distance < WORLD; ++distance, ++loaded_) {
#pragma unroll
            for (u32 piece = 0; piece < PIECES; ++piece) {
                await_phase(shared_.is_loaded(group_, piece), loaded_);
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    float others[8];
                    unpack<OUTPUT>(load_shared(vectors(piece) + i * 16 * GROUP_THREADS), others);
#pragma unroll
                    for (u32 nth = 0; nth < 8; ++nth) {
                        sums_[32 * piece + 8 * i + nth] += others[nth];
                    }
                }
                // The last rank's pieces are written over by this group itself.
                if (distance != WORLD - 1) {
                    wait_for_group();
                    if (thread_ == 0) {
                        arrive(shared_.is_free(group_, piece));
                    }
                }
            }
        }
        wait_for_group();
        freed_ += WORLD > 1 ? WORLD - 2 : 0;
    }

    // Writes a piece of the sums: for another rank as they lie in registers, else row by row.
    template <bool IS_OWN> __device__ __forceinline__ void write_piece(u32 piece) const {
        const u32 warp = thread_ / 32, lane = thread_ % 32, row = 16 * warp + lane % 16;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            float sums[8];
#pragma unroll
            for (u32 nth = 0; nth < 8; ++nth) {
                sums[nth] = sums_[32 * piece + 8 * i + nth];
            }
            const uint4 vector = pack<OUTPUT>(sums);
            if constexpr (IS_OWN) {
                // Blocks of 8 x 8: rows 0 and 8, and the same 8 columns further on; 16-byte pieces of a row are exchanged.
                const u32 columns = 2 * i + lane / 16;
                store_blocks(shared_.piece(group_, piece) + BLOCK_BYTES * row + 16 * (columns ^ (row & 7)), vector);
            } else {
                store_shared(vectors(piece) + i * 16 * GROUP_THREADS, vector);
            }
        }
        fence_for_stores();
        wait_for_group();
        if (thread_ == 0) {
            arrive(shared_.is_written(group_, piece));
        }
    }

public:
    __device__ __forceinline__ Group(const MatmulWork& work, const SharedMemory& shared, u32 group, u32 thread)
        : work_(work), shared_(shared), group_(group), thread_(thread) {}

    __device__ __forceinline__ void run(u32 block) {
        Tiles tiles(work_, block);
        Tile tile;
        const float factor = (work_.left_scale ? *work_.left_scale : 1.0f) * (work_.right_scale ? *work_.right_scale : 1.0f);
#pragma unroll 1
        for (; tiles.next(tile); ++freed_) {
            multiply_tile();
            if (TYPE == MULTIPLIES_E4M3) {
                scale(factor);
            }
            if (tile.distance == WORLD) {
                if (WORLD > 1) {
                    add_others();
                }
                scale(work_.factor);
#pragma unroll
                for (u32 piece = 0; piece < PIECES; ++piece) {
                    if (WORLD == 1) {
                        await_phase(shared_.is_free(group_, piece), freed_ + 1);
                    }
                    write_piece<true>(piece);
                }
            } else {
#pragma unroll
                for (u32 piece = 0; piece < PIECES; ++piece) {
                    await_phase(shared_.is_free(group_, piece), freed_ + 1);
                    write_piece<false>(piece);
                }
            }
        }
    }
};

// --- the handshake, and what waits for it

// Called by a warp of the first block.
__device__ __forceinline__ void enter(const Session& session, const Call& call, const MatmulWork& work, u32 lane) {
    if (!session.failed) {
        send_handshake<true>(session, call, lane, 32);
        compare_handshakes(session, call, lane, 32);
    }
    __syncwarp();
    if (lane == 0) {
        work.control->epoch = session.epoch;
        fence();
        for (u32 stream = 0; stream < SENDING_STREAMS; ++stream) {
            atomicAdd(&work.control->entered[stream], 1u);
        }
    }
}

#if CLUSTER > 1 && __CUDA_ARCH__ >= 900
#define SYMMPOOL_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define SYMMPOOL_CLUSTER
#endif

extern "C" SYMMPOOL_CLUSTER __global__ void __launch_bounds__(THREADS, 1)
    symmpool_matmul_scatter(const __grid_constant__ Comm comm, const __grid_constant__ Call call,
                            const __grid_constant__ MatmulWork work) {
    begin_kernel(comm.early);
    Session session(comm);
    // A launch that makes this rank's own part alone belongs to the call of the one before.
    const bool enters = work.first_part == 0;
    if (enters) {
        session.advance();
    } else {
        session.epoch = static_cast<u32>(work.control->epoch);
    }
    if (enters && blockIdx.x == 0 && must_expire_flags(session)) {
        expire_old_flags(session, UsedBytes());
        expire_escape_marks(session);
    }
    const SharedMemory shared;
    if (threadIdx.x == 0) {
        shared.make_barriers();
    }
    __syncthreads();
    const u32 block = CLUSTER > 1 ? block_in_cluster() : 0, warp = threadIdx.x / 32;
    if constexpr (CLUSTER > 1) {
        cluster_barrier();
    }
    if (threadIdx.x >= GROUP_THREADS) {
        const u32 group = threadIdx.x / GROUP_THREADS - 1;
        Group(work, shared, group, threadIdx.x % GROUP_THREADS).run(block);
    } else if (threadIdx.x == 0) {
        load(comm, work, shared, block);
    } else if (threadIdx.x % 32 == 0 && warp <= GROUPS) {
        move_pieces(session, work, shared, block, warp - 1);
    } else if (enters && warp == 3 && blockIdx.x == 0) {
        enter(session, call, work, threadIdx.x % 32);
    }
    // A block's shared memory stays until the other one of its cluster has arrived at it for the last time.
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_barrier();
    }
}
