//! Copies and signals between two ranks, outside of calls: no epoch, no handshake, nothing is compared.
//! Defines: WORLD, THREADS, OPERATION (COPY, COPY_AND_SIGNAL, SIGNAL or WAIT).
//!
//! `input` and `output` are addresses as this rank maps them, one of them in the slot of the peer, which is the
//! call's `root`. The first two words of the call's description are the timeout of a wait, for the record of a
//! failure, and the number of the channel.
//!
//! Signals are counted in 64 bits, in device memory, so that a replayed graph counts on. The count of a peer's
//! signals is written by that peer alone, the other counts by this rank alone. The host sees to it that the counts of
//! one peer and channel are used by one kernel at a time.

#include <symmpool/impl/copy.cuh>

using namespace symmpool;

enum class Operation { COPY, COPY_AND_SIGNAL, SIGNAL, WAIT };
constexpr Operation RUN = Operation::OPERATION;

constexpr int UNROLL = 4;

// The counts of a channel.
constexpr u32 RECEIVED = 0;  // signals from the peer
constexpr u32 SENT = 1;      // signals to the peer
constexpr u32 TAKEN = 2;     // signals from the peer that a wait has taken
constexpr u32 ARRIVED = 3;   // blocks of the running kernel that have stored all their data

// One of `owner`'s counts of a channel with `peer`.
__device__ __forceinline__ u64* count(const Comm& comm, u32 owner, u32 kind, u32 peer,
                                      u32 channel) {
    u64* counts = reinterpret_cast<u64*>(comm.of(owner) + comm.channels);
    return counts + (kind * WORLD + peer) * CHANNELS + channel;
}

__device__ __forceinline__ bool failed(const Comm& comm) {
    return *static_cast<volatile u32*>(&comm.local()->failed) != 0;
}

// Called by all threads of all blocks.
__device__ __forceinline__ void copy(const CallParams& call) {
    const Source source(call.input, call.bytes);
    const Target target(call.output, call.bytes);
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.x;
    const u64 first = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    copy_unrolled<UNROLL>(first, source.vectors(), step, [&](u64 at) { return source.load(at); },
                          [&](u64 at, uint4 vector) { target.store(at, vector); });
}

// Called by the first thread of every block, after the block's stores; the last of them signals. What the stream did
// before, and what all blocks stored, is visible to a rank that sees the count (rule S3).
__device__ __forceinline__ void signal(const Comm& comm, u32 peer, u32 channel) {
    if (gridDim.x > 1) {
        fence();
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

// Takes a signal or, when the timeout is over or the peer has departed, records a failure and takes none (rule S5). Called by one thread.
__device__ __forceinline__ void wait(const Comm& comm, const CallParams& call, u32 peer, u32 channel) {
    const u64* received = count(comm, comm.rank, RECEIVED, peer, channel);
    u64* taken = count(comm, comm.rank, TAKEN, peer, channel);
    const u64 number = *taken + 1;
    u64 since = 0;
    for (u32 looks = 1; load_acquire(received) < number; ++looks) {
        if (!is_time_for_clock(looks)) {
            continue;
        }
        if (failed(comm)) {
            return;
        }
        const bool departed = load_acquire(&departure(comm, comm.rank, peer)->when) != 0;
        // Signals that the peer had sent before it departed are there.
        if (departed && load_acquire(received) >= number) {
            break;
        }
        const u64 now = nanoseconds();
        since = since == 0 ? now : since;
        if (departed || now - since >= comm.timeout) {
            if (departed) {
                take_departure(comm, static_cast<u32>(number), peer);
            }
            report(comm, static_cast<u32>(number), departed ? PEER_FAILED : TIMEOUT, peer, CHANNEL + channel, &call);
            return;
        }
    }
    *taken = number;
    fence();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_one_sided(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call) {
    if (RUN == Operation::WAIT) {
        // The stream's next kernel must not start while this one waits: another stream may need the SMs for the work
        // that the signal depends on.
        wait_for_stream();
    } else {
        begin_kernel(comm.early);
    }
    if (failed(comm)) {
        return;
    }
    const u32 peer = call.root, channel = static_cast<u32>(call.description[1]);
    if (RUN == Operation::COPY || RUN == Operation::COPY_AND_SIGNAL) {
        copy(call);
    }
    if (RUN == Operation::SIGNAL || RUN == Operation::COPY_AND_SIGNAL) {
        __syncthreads();
        if (threadIdx.x == 0) {
            signal(comm, peer, channel);
        }
    }
    if (RUN == Operation::WAIT) {
        if (threadIdx.x == 0) {
            wait(comm, call, peer, channel);
        }
    }
}
