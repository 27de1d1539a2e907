//! How a companion kernel, which is a part of a call but runs on another stream, learns that all ranks have entered
//! the call.
//!
//! It is launched after the kernel that does the handshake, which notifies it or fails. Its own wait is bounded as
//! well (rule S5), as nothing promises that both kernels run at the same time. This rank alone uses the two counts,
//! of which only the difference matters.

#pragma once

#include <symmpool/impl/handshake.cuh>

namespace symmpool {

// Tells the companion kernel that all ranks have entered. Called by one thread, after its block has compared the descriptions
// of all peers.
__device__ __forceinline__ void notify_companion(const Comm& comm) {
    u64* reported = &comm.local()->handshakes_reported;
    store_release(reported, *reported + 1);
}

// Waits for that. Called by all threads of a block, which get the same answer: false if the call has failed.
__device__ __forceinline__ bool await_notification(const Comm& comm) {
    bool failed = false;
    if (threadIdx.x == 0) {
        const LocalState* local = comm.local();
        u64 since = 0;
        for (u32 looks = 1;
             load_acquire(&local->handshakes_reported) == local->handshakes_consumed && !failed; ++looks) {
            failed = *static_cast<const volatile u32*>(&local->failed) != 0;
            if (is_time_for_clock(looks)) {
                const u64 now = nanoseconds();
                since = since == 0 ? now : since;
                // Twice the timeout: the handshake, whose record of a failure says more, expires first.
                if ((now - since) / 2 >= comm.timeout) {
                    report(comm, Session::next_epoch(local->epoch), TIMEOUT, comm.rank, COMPANION, nullptr);
                    failed = true;
                }
            }
        }
    }
    return !__syncthreads_or(failed);
}

// Ends the wait: the last block makes the next wait one for the next call. Called by all threads of every block after its wait.
__device__ __forceinline__ void consume_notification(const Comm& comm) {
    LocalState* local = comm.local();
    if (threadIdx.x == 0 && atomicAdd(&local->companion_blocks, 1) == gridDim.x - 1) {
        local->companion_blocks = 0;
        local->handshakes_consumed += 1;
    }
}

}  // namespace symmpool
