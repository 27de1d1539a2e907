//! Products of the rows of all ranks, which copy engines bring meanwhile: an all-gather and matmuls in one.
//!
//! A stream sends this rank's rows to all others in chunks, once a warp of the first block has made the handshake; the warp then
//! sets the others' flags for what has been sent. Tiles of this rank's own rows come first and wait for nobody. Those of another
//! rank's rows wait for their chunk, on all SMs: the nearest rank before this one first, which sends to this one first. Where
//! kernels of other communicators may need SMs meanwhile, a second launch makes them, behind `matmul_wait.cu`.
//!
//! The tiles of all right matrices lie side by side, so that a part's are made one after the other. Defines: those of
//! `fused/matmul.cuh`.

#include <fused/matmul.cuh>

using namespace symmpool;

static_assert(WORLD * MAX_CHUNKS <= 64, "chunks that have arrived are bits of a word");

// Part 0 is this rank's own, and part 1 that of the rank before it.
__device__ __forceinline__ u32 rank_of(const Comm& comm, u32 part) {
    return part == 0 ? comm.rank : comm.after(WORLD - part);
}

// A right matrix, and the column of it where a tile begins.
struct Place {
    const GemmProblem& problem;
    u32 column;

    __device__ __forceinline__ Place(const MatmulWork& work, const Tile& tile) : Place(work, tile, find(work, tile)) {}

private:
    static __device__ __forceinline__ u32 find(const MatmulWork& work, const Tile& tile) {
        u32 nth = 0;
        while (tile.column >= work.problems[nth].end_column) {
            ++nth;
        }
        return nth;
    }

    __device__ __forceinline__ Place(const MatmulWork& work, const Tile& tile, u32 nth)
        : problem(work.problems[nth]),
          column((tile.column - (nth == 0 ? 0 : work.problems[nth - 1].end_column)) * TILE_COLUMNS) {}
};

__device__ __forceinline__ void load(const Session& session, const MatmulWork& work, const SharedMemory& shared, u32 block) {
    Tiles tiles(work, block);
    Tile tile;
    Stage stage;
    u64 arrived = 0;
    while (tiles.next(tile)) {
        const u32 row = tile.row * TILE_ROWS, chunk = tile.row / work.chunk_tiles;
        const u32 rank = rank_of(session.comm, tile.part);
        const u64 bit = 1ull << (tile.part * MAX_CHUNKS + chunk);
        // Behind a part's last rows there may be tiles of the cluster's other blocks.
        if (tile.part != 0 && (arrived & bit) == 0 && row < work.rows) {
            await_chunk(session, work, rank, chunk);
            fence_for_loads();
            arrived |= bit;
        }
        const Place place(work, tile);
        const TileAt at = {0, row, tile.part == 0 ? 0 : rank};
        load_tile_factors({tile.begin, tile.end}, shared, block, stage,
                          tile.part == 0 ? work.own : place.problem.left, at, place.problem.right, place.column);
    }
}

// A warp for each group stores pieces.
__device__ __forceinline__ void store_pieces(const Comm& comm, const MatmulWork& work, const SharedMemory& shared, u32 block,
                                             u32 group) {
    Tiles tiles(work, block);
    Tile tile;
    // Tiles of which this cluster makes a part for others come last.
    for (u32 nth = 0; tiles.next(tile) && !tile.helps; ++nth) {
        const Place place(work, tile);
#pragma unroll 1
        for (u32 piece = 0; piece < PIECES; ++piece) {
            await_phase(shared.is_written(group, piece), nth);
            store_rows(work, shared, group, piece, place.problem.out, tile, place.column, WORLD,
                       rank_of(comm, tile.part));
            await_bulk_reads<0>();
            arrive(shared.is_free(group, piece));
        }
    }
    await_bulk_stores<0>();
}

class GatherGroup : TileProduct {
public:
    __device__ __forceinline__ GatherGroup(const MatmulWork& work, const SharedMemory& shared, u32 block, u32 group, u32 thread)
        : TileProduct(work, shared, block, group, thread) {}

    __device__ __forceinline__ void run(const MatmulWork& work) {
        Tiles tiles(work, block_);
        Tile tile;
#pragma unroll 1
        for (u32 nth = 0; tiles.next(tile); ++nth) {
            const float factor = scale_of(work, Place(work, tile).problem);
            multiply_tile(tile);
            if (tile.helps) {
                leave_partial(tile);
                continue;
            }
            add_partials(tile);
            if (TYPE == MULTIPLIES_E4M3) {
                scale(factor);
            }
#pragma unroll
            for (u32 piece = 0; piece < PIECES; ++piece) {
                // In the first tile pieces are free from the beginning.
                await_phase(shared_.is_free(group_, piece), nth + 1);
                write_rows(piece);
            }
        }
    }
};

// Stores bytes of a rank's rows, from the place `at` among them on, to where they are wanted, batch by batch.
__device__ __forceinline__ void store_gathered(const MatmulWork& work, u32 rank, u64 at, SharedAt from, u32 bytes) {
    if (work.batch_rows == work.rows) {
        store_bytes(work.gathered + rank * work.part_bytes + at, from, bytes);
        return;
    }
    const u64 batch_bytes = work.part_bytes / work.rows * work.batch_rows;
#pragma unroll 1
    for (u32 done = 0; done < bytes;) {
        const u64 batch = (at + done) / batch_bytes, within = at + done - batch * batch_bytes;
        const u64 left = batch_bytes - within;
        const u32 now = left < bytes - done ? static_cast<u32>(left) : bytes - done;
        store_bytes(work.gathered + (batch * WORLD + rank) * batch_bytes + within, from + done, now);
        done += now;
    }
}

// Copies rows, as they arrive, to where they are wanted: a share of them, by one thread of each block that is not busy with
// other ranks. A copy within the device that a stream makes would be a kernel, and this one leaves no registers for another.
__device__ __forceinline__ void copy_rows(const Session& session, const MatmulWork& work, const SharedMemory& shared,
                                          u32 share, u32 shares) {
    const u64 chunk_bytes = work.chunk_tiles * TILE_ROWS * (work.part_bytes / work.rows);
    u32 nth = 0;
#pragma unroll 1
    for (u32 part = work.first_part; part < work.end_part; ++part) {
        const u32 rank = rank_of(session.comm, part);
        const char* from = part == 0 ? work.outgoing : work.incoming + rank * work.part_bytes;
#pragma unroll 1
        for (u32 chunk = 0; chunk < work.chunks; ++chunk) {
            if (part != 0) {
                await_chunk(session, work, rank, chunk);
                fence_for_loads();
            }
            const u64 begin = chunk * chunk_bytes;
            const u64 end = work.part_bytes - begin < chunk_bytes ? work.part_bytes : begin + chunk_bytes;
#pragma unroll 1
            for (u64 at = begin + share * BUFFER_BYTES; at < end; at += shares * BUFFER_BYTES, ++nth) {
                const u32 bytes = end - at < BUFFER_BYTES ? static_cast<u32>(end - at) : BUFFER_BYTES;
                const u32 buffer = nth % BUFFERS;
                // The buffer's former bytes have left it: they were stored before those that the other one holds.
                await_bulk_reads<BUFFERS - 1>();
                arrive_expecting(shared.is_filled(buffer), bytes);
                load_bytes(shared.buffer(buffer), from + at, bytes, shared.is_filled(buffer));
                await_phase(shared.is_filled(buffer), nth / BUFFERS);
                store_gathered(work, rank, at, shared.buffer(buffer), bytes);
            }
        }
    }
    await_bulk_stores<0>();
}

extern "C" SYMMPOOL_CLUSTER __global__ void __launch_bounds__(THREADS, 1)
    symmpool_matmul_gather(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call,
                           const __grid_constant__ MatmulWork work) {
    begin_kernel(comm.early);
    Session session(comm);
    begin_call(session, work);
    const SharedMemory shared;
    const u32 block = begin_block(shared), warp = threadIdx.x / 32;
    if (threadIdx.x >= FIRST_GROUP_THREAD) {
        const u32 group = threadIdx.x / GROUP_THREADS - 1;
        GatherGroup(work, shared, block, group, threadIdx.x % GROUP_THREADS).run(work);
    } else if (threadIdx.x == 32 * LOADING_WARP) {
        load(session, work, shared, block);
    } else if (threadIdx.x % 32 == 0 && warp >= MOVING_WARPS && warp < ENTERING_WARP) {
        store_pieces(comm, work, shared, block, warp - MOVING_WARPS);
    } else if (warp == ENTERING_WARP) {
        const u32 busy = gridDim.x > 1 ? 1 : 0;
        if (blockIdx.x == 0 && work.first_part == 0) {
            enter(session, call, work, threadIdx.x % 32);
        }
        if (work.gathered != nullptr && threadIdx.x % 32 == 0 && blockIdx.x >= busy) {
            copy_rows(session, work, shared, blockIdx.x - busy, gridDim.x - busy);
        }
    }
    end_block();
}
