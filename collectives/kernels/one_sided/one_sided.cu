//! Copies and signals between two ranks, outside calls: no epoch, no entry, nothing compared.
//! Defines: WORLD, THREADS, SHOTS.
//!
//! `input` and `output` are addresses as this rank maps them, one of them in the peer's slot, which
//! is the call's `root`. Its details are a wait's timeout, for the record of a failure, and the
//! channel.
//!
//! Signals are counted in 64 bits, in device memory, so that a replayed graph counts on. The count
//! of a peer's signals is written by that peer alone; the others are this rank's own, and those of
//! one peer and channel are in one kernel's hands at a time, which the host sees to.

#include <symmpool/span.cuh>

#define COPY 1
#define SIGNAL 2
#define WAIT 4

using namespace symmpool;

constexpr int UNROLL = 4;

constexpr u32 RECEIVED = 0;  // signals from the peer
constexpr u32 SENT = 1;      // signals to the peer
constexpr u32 TAKEN = 2;     // signals from the peer that were waited for
constexpr u32 ARRIVED = 3;   // blocks of the running kernel that are done

// One of `owner`'s counts for what it has with `peer`.
__device__ __forceinline__ u64* count(const Comm& comm, u32 owner, u32 kind, u32 peer,
                                      u32 channel) {
    u64* counts = reinterpret_cast<u64*>(comm.of(owner) + comm.channels);
    return counts + (kind * WORLD + peer) * CHANNELS + channel;
}

__device__ __forceinline__ bool failed(const Comm& comm) {
    return *static_cast<volatile u32*>(&comm.local()->failed) != 0;
}

// By all blocks.
__device__ __forceinline__ void copy(const Call& call) {
    const Source source(call.input, call.bytes);
    const Target target(call.output, call.bytes);
    const u64 vectors = source.vectors();
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.x;
    const u64 first = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (u64 at = first; at < vectors; at += UNROLL * step) {
        uint4 some[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            if (at + i * step < vectors) {
                some[i] = source.load(at + i * step);
            }
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            if (at + i * step < vectors) {
                target.store(at + i * step, some[i]);
            }
        }
    }
}

// By the first thread of every block, after the block's stores; the last of them signals. What the
// stream did before, and what all blocks stored, is visible to whoever sees the count (rule S3).
__device__ __forceinline__ void signal(const Comm& comm, u32 peer, u32 channel) {
    fence();
    if (gridDim.x > 1) {
        u64* arrived = count(comm, comm.rank, ARRIVED, peer, channel);
        if (atomicAdd(arrived, 1ull) != gridDim.x - 1) {
            return;
        }
        *arrived = 0;
        fence();
    }
    u64* sent = count(comm, comm.rank, SENT, peer, channel);
    const u64 number = *sent + 1;
    *sent = number;
    store_release(count(comm, peer, RECEIVED, comm.rank, channel), number);
}

// By one thread. Takes a signal, or gives up and takes none (rule S5).
__device__ __forceinline__ void wait(const Comm& comm, const Call& call, u32 peer, u32 channel) {
    const u64* received = count(comm, comm.rank, RECEIVED, peer, channel);
    u64* taken = count(comm, comm.rank, TAKEN, peer, channel);
    const u64 number = *taken + 1;
    u64 since = 0;
    for (u32 looks = 1; load_acquire(received) < number; ++looks) {
        if ((looks & 255) != 0) {
            continue;
        }
        if (failed(comm)) {
            return;
        }
        const u64 now = nanoseconds();
        since = since == 0 ? now : since;
        if (now - since >= comm.timeout) {
            report(comm, static_cast<u32>(number), TIMEOUT, peer, CHANNEL + channel, &call);
            return;
        }
    }
    *taken = number;
    fence();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_one_sided(const __grid_constant__ Comm comm, const __grid_constant__ Call call) {
    if (SHOTS & WAIT) {
        // Nothing takes places of the device behind a wait: another stream may need them for what
        // the signal depends on.
        follow();
    } else {
        begin(comm.early);
    }
    if (failed(comm)) {
        return;
    }
    const u32 peer = call.root, channel = static_cast<u32>(call.description[1]);
    if (SHOTS & COPY) {
        copy(call);
    }
    if (SHOTS & SIGNAL) {
        __syncthreads();
        if (threadIdx.x == 0) {
            signal(comm, peer, channel);
        }
    }
    if (SHOTS & WAIT) {
        if (threadIdx.x == 0) {
            wait(comm, call, peer, channel);
        }
    }
}
