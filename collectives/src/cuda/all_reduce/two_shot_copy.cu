//! Reduces a part of this rank's share of an all-reduce, or of its part of a reduce-scatter, whose data copy engines carry:
//! `bytes` of `input` into `output`. What the peers copied lies `stride` bytes after the beginning of their parts of the
//! scratch, or in `output`. Defines: WORLD, DTYPE, OP, THREADS.
//!
//! It runs within a call whose handshake another kernel has done, and behind this rank's copies into its peers' scratch.
//! Its stream may have waited for the peers' copies already. Else the kernel has a barrier of its own, whose passages all
//! ranks count in device memory, independently of the epoch. A rank that arrives there says to every peer that its copies
//! have arrived, that it does not need any more what it reduced before, and that it does not need the old contents of
//! where this part's results will be.

#include "all_reduce/reduce_share.cuh"

using namespace symmpool;

// Where peers' data is, and what has to be waited for: the call's root. `Copied` in
// `cuda/ops/copy_engine/reduce_arrived.rs` is the same.
enum Copied : u32 {
    AWAITS_BARRIER,  // in scratch, when all ranks have come to the barrier
    IN_SCRATCH,
    IN_OUTPUT,  // the data of the only peer, which this rank has copied there itself
};

// It lies behind the counts of the channels.
struct CopyBarrier {
    u64 arrived[WORLD];  // how often each peer has arrived, written by that peer
    u64 passed;          // how often this rank has passed the barrier
    u64 blocks;          // blocks of the running kernel that have read `passed`
};

__device__ __forceinline__ CopyBarrier* copy_barrier(const Comm& comm, u32 rank) {
    return reinterpret_cast<CopyBarrier*>(comm.of(rank) + comm.channels + CHANNELS_BYTES);
}

// Called by all threads of a block, which get the same answer: false if a peer does not arrive.
__device__ __forceinline__ bool pass_copy_barrier(const Session& session) {
    const Comm& comm = session.comm;
    CopyBarrier* own = copy_barrier(comm, comm.rank);
    const u64 number = *static_cast<volatile u64*>(&own->passed) + 1;
    __syncthreads();
    if (threadIdx.x == blockDim.x - 1 && atomicAdd(&own->blocks, 1ull) == grid_blocks() - 1) {
        own->blocks = 0;
        own->passed = number;
    }
    bool bad = false;
    if (threadIdx.x < WORLD && threadIdx.x != comm.rank) {
        const u32 peer = threadIdx.x;
        if (blockIdx.x == 0) {
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
    symmpool_two_shot_copy(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call) {
    // Its epoch is used only for the record of a failure.
    const Session session(comm);
    const SmGrant grant(comm);
    if (grant.is_over() || session.failed || (call.root == AWAITS_BARRIER && !pass_copy_barrier(session))) {
        return;
    }
    const Source input(call.input, call.bytes);
    const Target output(call.output, call.bytes);
    const EvenSplit split(input.vectors(), grid_blocks());
    const Range range = split[blockIdx.x];
    if (WORLD == 2 && call.root == IN_OUTPUT) {
        const Source theirs(call.output, call.bytes);
        reduce_share<false>(
            comm, input, output, range, [&](u32, u64 at) { return theirs.load(at); }, [](u64, uint4) {});
    } else {
        reduce_share<false>(comm, input, output, output, range, call.stride);
    }
}
