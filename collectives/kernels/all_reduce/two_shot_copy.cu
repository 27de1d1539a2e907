//! A stretch of this rank's share of an all-reduce that copy engines carry, reduced: `bytes` of `input`
//! into `output`. What peers copied lies `stride` bytes behind the beginning of their scratch.
//! Defines: WORLD, DTYPE, OP, THREADS.
//!
//! It runs behind this rank's copies into its peers' scratch, within a call that another kernel has
//! entered. So it tells and waits apart from that call's epoch: ranks count these meetings, in device
//! memory, and every one shows every peer that this rank's copies have arrived, and that it needs no
//! more what it reduced before, nor the old contents of where results of this stretch will be.

#include "all_reduce/reduce_share.cuh"

using namespace symmpool;

// Behind the channels' counts: of each peer's meetings, which it writes itself, and this rank's.
struct CopyBarrier {
    u64 arrived[WORLD];
    u64 passed;
    u64 blocks;  // of the running kernel that have read `done`
};

__device__ __forceinline__ CopyBarrier* copy_barrier(const Comm& comm, u32 rank) {
    return reinterpret_cast<CopyBarrier*>(comm.of(rank) + comm.channels + CHANNELS_BYTES);
}

// By all threads of a block; false on all of them if a peer does not come.
__device__ __forceinline__ bool pass_copy_barrier(const Session& session) {
    const Comm& comm = session.comm;
    CopyBarrier* own = copy_barrier(comm, comm.rank);
    const u64 number = *static_cast<volatile u64*>(&own->passed) + 1;
    __syncthreads();
    if (threadIdx.x == blockDim.x - 1 && atomicAdd(&own->blocks, 1ull) == gridDim.x - 1) {
        own->blocks = 0;
        own->passed = number;
    }
    bool bad = false;
    if (threadIdx.x < WORLD && threadIdx.x != comm.rank) {
        const u32 peer = threadIdx.x;
        if (blockIdx.x == 0) {
            fence();
            store_release(&copy_barrier(comm, peer)->arrived[comm.rank], number);
        }
        Watch watch;
        while (!bad && load_acquire(&own->arrived[peer]) < number) {
            bad = watch.expired(session, peer, DATA);
        }
    }
    return !__syncthreads_or(bad);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_two_shot_copy(const __grid_constant__ Comm comm, const __grid_constant__ Call call) {
    // Its epoch is told in errors alone.
    const Session session(comm);
    if (session.failed || !pass_copy_barrier(session)) {
        return;
    }
    const Source input(call.input, call.bytes);
    const Target output(call.output, call.bytes);
    const Range range = Division(input.vectors(), gridDim.x)[blockIdx.x];
    reduce_share<false>(comm, input, output, output, range.from, range.to, call.stride);
}
