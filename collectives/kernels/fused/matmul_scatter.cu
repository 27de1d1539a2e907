//! A matrix product of which every rank gets a part, added up over all ranks: a matmul and a reduce-scatter in one. It may
//! be a sum of products of this rank.
//!
//! Tiles for other ranks come first and go to this rank's memory. When a chunk of them is whole, a stream that has waited for
//! that copies it to its rank by a copy engine: stores of SMs over NVLink would delay the loads of the product by as long as
//! they take. This rank's own tiles come last. What other ranks have sent for them is added in float32 before they are
//! stored, in the order of ranks from this one on.
//!
//! The handshake is made by a warp of the first block, which then sets the others' flags for what has been sent; only copies to
//! peers wait for it. Tiles for other ranks wait for nobody, so the stream that waits for chunks always goes on. Own tiles wait
//! for chunks, on all SMs. Where kernels of other communicators may need SMs meanwhile, they are a launch of their own, behind
//! `matmul_wait.cu`. Defines: those of `fused/matmul.cuh`.

#include <fused/matmul.cuh>

using namespace symmpool;

// Part 0 is that of the next rank, and part WORLD - 1 this rank's own.
__device__ __forceinline__ bool is_own(const Tile& tile) { return tile.part == WORLD - 1; }

__device__ __forceinline__ u32 rank_of(const Comm& comm, const Tile& tile) {
    return is_own(tile) ? comm.rank : comm.after(tile.part + 1);
}

// Where a tile of a rank's part begins in a left matrix, whose batches have the rows of all ranks, one rank's after the
// other's. Behind a part's last row a tile has rows of another rank, or zeros: they become rows that nobody stores.
__device__ __forceinline__ TileAt left_at(const MatmulWork& work, u32 rank, u32 row) {
    const u32 batch = row / work.batch_rows;
    return {0, rank * work.batch_rows + row - batch * work.batch_rows, batch};
}

__device__ __forceinline__ void load(const Comm& comm, const MatmulWork& work, const SharedMemory& shared, u32 block) {
    Tiles tiles(work, block);
    Tile tile;
    Stage stage;
    while (tiles.next(tile)) {
        const TileAt at = left_at(work, rank_of(comm, tile), tile.row * TILE_ROWS);
        // Products that are added up are as one whose inner dimension has the blocks of all.
        for (u32 nth = 0, first = 0; first < tile.end; ++nth) {
            const GemmProblem& problem = work.problems[nth];
            const u32 begin = tile.begin > first ? tile.begin : first;
            const u32 end = tile.end < problem.end_block ? tile.end : problem.end_block;
            if (begin < end) {
                load_tile_factors({begin - first, end - first}, shared, block, stage, problem.left, at, problem.right,
                                  tile.column * TILE_COLUMNS);
            }
            first = problem.end_block;
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
    // Tiles of which this cluster makes a part for others come last.
    for (u32 nth = 0; tiles.next(tile) && !tile.helps; ++nth, ++freed) {
        const u32 chunk = tile.number / work.chunk_tiles;
        const u64 half = tile.number * static_cast<u64>(TILE_BYTES) + group * (PIECES * PIECE_BYTES);
        if (is_own(tile)) {
#pragma unroll 1
            for (u32 distance = 1; distance < WORLD; ++distance) {
                await_chunk(session, work, session.comm.after(distance), chunk);
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
        char* to = work.outgoing + tile.part * work.part_bytes + half;
#pragma unroll 1
        for (u32 piece = 0; piece < PIECES; ++piece) {
            await_phase(shared.is_written(group, piece), nth);
            if (is_own(tile)) {
                store_rows(work, shared, group, piece, work.problems[0].out, tile, tile.column * TILE_COLUMNS, 1,
                           0);
            } else {
                store_bytes(to + piece * PIECE_BYTES, shared.piece(group, piece), PIECE_BYTES);
            }
            await_bulk_reads<0>();
            arrive(shared.is_free(group, piece));
        }
        if (!is_own(tile)) {
            await_bulk_stores<0>();
            fence();
            atomicAdd(&work.control->finished[rank_of(session.comm, tile)][chunk], 1u);
        }
    }
    await_bulk_stores<0>();
}

// --- two warpgroups multiply

class ScatterGroup : TileProduct {
    // How often each piece has become free in all tiles before this one, and how often pieces were loaded.
    u32 freed_ = 0, loaded_ = 0;

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

public:
    __device__ __forceinline__ ScatterGroup(const MatmulWork& work, const SharedMemory& shared, u32 block, u32 group, u32 thread)
        : TileProduct(work, shared, block, group, thread) {}

    __device__ __forceinline__ void run(const MatmulWork& work) {
        Tiles tiles(work, block_);
        Tile tile;
        const float factor = scale_of(work, work.problems[0]);
#pragma unroll 1
        for (; tiles.next(tile); ++freed_) {
            multiply_tile(tile);
            if (tile.helps) {
                leave_partial(tile);
                continue;
            }
            add_partials(tile);
            if (TYPE == MULTIPLIES_E4M3) {
                scale(factor);
            }
            if (is_own(tile)) {
                if (WORLD > 1) {
                    add_others();
                }
                // Without the branch NVRTC spills registers with four ranks and more, and with it where there are two.
                if (WORLD == 2 || work.factor != 1) {
                    scale(work.factor);
                }
#pragma unroll
                for (u32 piece = 0; piece < PIECES; ++piece) {
                    if (WORLD == 1) {
                        await_phase(shared_.is_free(group_, piece), freed_ + 1);
                    }
                    write_rows(piece);
                }
            } else {
#pragma unroll
                for (u32 piece = 0; piece < PIECES; ++piece) {
                    await_phase(shared_.is_free(group_, piece), freed_ + 1);
                    write_vectors(piece);
                }
            }
        }
    }
};

extern "C" SYMMPOOL_CLUSTER __global__ void __launch_bounds__(THREADS, 1)
    symmpool_matmul_scatter(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call,
                            const __grid_constant__ MatmulWork work) {
    begin_kernel(comm.early);
    Session session(comm);
    begin_call(session, work);
    const SharedMemory shared;
    const u32 block = begin_block(shared), warp = threadIdx.x / 32;
    if (threadIdx.x >= FIRST_GROUP_THREAD) {
        const u32 group = threadIdx.x / GROUP_THREADS - 1;
        ScatterGroup(work, shared, block, group, threadIdx.x % GROUP_THREADS).run(work);
    } else if (threadIdx.x == 32 * LOADING_WARP) {
        load(comm, work, shared, block);
    } else if (threadIdx.x % 32 == 0 && warp >= MOVING_WARPS && warp < ENTERING_WARP) {
        move_pieces(session, work, shared, block, warp - MOVING_WARPS);
    } else if (warp == ENTERING_WARP && blockIdx.x == 0 && work.first_part == 0) {
        enter(session, call, work, threadIdx.x % 32);
    }
    end_block();
}
