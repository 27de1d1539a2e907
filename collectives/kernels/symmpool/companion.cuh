//! How a kernel on another stream learns that all ranks have entered the call which it is a part of.
//!
//! It is launched behind the entry's kernel, which tells it or fails; its own wait is bounded too (rule
//! S5), as nothing promises that both run at once. The two counts are this rank's alone, and only their
//! difference matters.

#pragma once

#include <symmpool/handshake.cuh>

namespace symmpool {

// By one thread, when its block has seen every peer's entry.
__device__ __forceinline__ void notify_companion(const Comm& comm) {
    u64* handshakes_reported = &comm.local()->handshakes_reported;
    store_release(handshakes_reported, *handshakes_reported + 1);
}

// By all threads of a block; false if the call has failed.
__device__ __forceinline__ bool await_notification(const Comm& comm) {
    bool failed = false;
    if (threadIdx.x == 0) {
        const Local* local = comm.local();
        u64 since = 0;
        for (u32 looks = 1; load_acquire(&local->handshakes_reported) == local->handshakes_consumed && !failed; ++looks) {
            failed = *static_cast<const volatile u32*>(&local->failed) != 0;
            if ((looks & 255) == 0) {
                const u64 now = nanoseconds();
                since = since == 0 ? now : since;
                // The entry has its time first.
                if ((now - since) / 2 >= comm.timeout) {
                    report(comm, Session::following(local->epoch), TIMEOUT, comm.rank, COMPANION, nullptr);
                    failed = true;
                }
            }
        }
    }
    return !__syncthreads_or(failed);
}

// By all threads of every block that has waited. The last one makes the next wait one for the next call.
__device__ __forceinline__ void consume_notification(const Comm& comm) {
    Local* local = comm.local();
    if (threadIdx.x == 0 && atomicAdd(&local->companion_blocks, 1) == gridDim.x - 1) {
        local->companion_blocks = 0;
        local->handshakes_consumed += 1;
    }
}

}  // namespace symmpool
