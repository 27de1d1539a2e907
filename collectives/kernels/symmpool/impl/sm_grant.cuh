//! The grant of blocks to a kernel, where communicators of a process share the device's SMs.
//!
//! A kernel keeps its SMs while it waits for a peer. Ranks may begin with kernels of different communicators, so all of these
//! must find SMs at the same time. Each is launched with a wide grid, which has most SMs. One kernel at a time works with all
//! of that: the one that finds the SM lock free. Any other one works with its first blocks meanwhile, its narrow grid, and
//! the blocks behind end at once. No kernel waits for the lock, so ranks need no common order.
//!
//! The first block that asks writes the answer into the lock's word, where it stays until the last block of the kernel has
//! ended: all blocks get the same. A communicator has one such kernel at a time. Defines: SHARES_SMS (0 where it is missing).

#pragma once

#include <symmpool/impl/comm_layout.cuh>
#include <symmpool/impl/vector.cuh>

#ifndef SHARES_SMS
#define SHARES_SMS 0
#endif

namespace symmpool {

#if SHARES_SMS
// A member is a communicator that shares the lock. The lowest bits of the lock's word are 0, or a product: the tag of the member
// whose kernel is wide, times the blocks of that kernel which have not ended. Tags are primes, each larger than any number of
// blocks, so the product tells whose it is. The bits above hold a mark for each member whose kernel is narrow.
constexpr u32 NARROW_MARKS = 24;
constexpr u64 WIDE_BLOCKS = (1ull << NARROW_MARKS) - 1;
static_assert(sizeof(SmLock::ended_blocks) / 4 + NARROW_MARKS == 64, "each member has a mark");

__device__ __forceinline__ u64 narrow_mark(const CommFields& comm) { return 1ull << (NARROW_MARKS + comm.member); }

// Goes on asking after the lock's word was `found` and not 0. Called by one thread of each block.
__device__ __noinline__ u32 ask_again(const CommFields& comm, u64 found) {
    const u64 wide = static_cast<u64>(comm.sm_tag) * gridDim.x;
    for (u64 next, expected;; found = expected) {
        const u32 held = static_cast<u32>(found & WIDE_BLOCKS);
        if ((found & narrow_mark(comm)) != 0) {
            return comm.narrow_blocks;
        }
        if (held != 0 && held % comm.sm_tag == 0) {
            return gridDim.x;
        }
        next = found | (held == 0 ? wide : narrow_mark(comm));
        expected = atomicCAS(&comm.sm_lock->word, found, next);
        if (expected == found) {
            return held == 0 ? gridDim.x : comm.narrow_blocks;
        }
    }
}

// Blocks of the grid that work. Called by one thread of each block. Nearly always the lock is free, or this kernel's own, so
// that takes one look, while the block's other loads are under way.
__device__ __forceinline__ u32 ask_for_blocks(const CommFields& comm) {
    const u64 found = atomicCAS(&comm.sm_lock->word, 0ull, static_cast<u64>(comm.sm_tag) * gridDim.x);
    const u32 held = static_cast<u32>(found);
    // No mark is there, and what is held is a multiple of the tag, also 0.
    return found <= WIDE_BLOCKS && held % comm.sm_tag == 0 ? gridDim.x : ask_again(comm, found);
}

// Called by the last thread of each block, with the answer that it got. Nothing waits for these operations.
__device__ __forceinline__ void end_block(const CommFields& comm, bool is_narrow) {
    SmLock* lock = comm.sm_lock;
    if (!is_narrow) {
        atomicAdd(&lock->word, 0 - static_cast<u64>(comm.sm_tag));
    } else if (atomicInc(&lock->ended_blocks[comm.member], gridDim.x - 1) == gridDim.x - 1) {
        atomicAdd(&lock->word, 0 - narrow_mark(comm));
    }
}

__device__ __forceinline__ u32& granted_blocks() {
    __shared__ u32 blocks;
    return blocks;
}

__device__ __forceinline__ u32& ended_threads() {
    __shared__ u32 threads;
    return threads;
}

// Blocks of the grid that work. Known while the block has a grant, or has guessed.
__device__ __forceinline__ u32 grid_blocks() { return granted_blocks(); }

// Guesses that the grant will have all blocks, for what can be made before. Called by all threads.
__device__ __forceinline__ void guess_all_blocks() {
    if (threadIdx.x == 0) {
        granted_blocks() = gridDim.x;
    }
    __syncthreads();
}
#else
__device__ __forceinline__ u32 grid_blocks() { return gridDim.x; }
__device__ __forceinline__ void guess_all_blocks() {}
#endif

// A block's grant, from its beginning until its last thread ends. Made by all threads of every block, behind `begin_kernel`.
class SmGrant {
public:
#if SHARES_SMS
    __device__ __forceinline__ explicit SmGrant(const CommFields& comm) : comm_(comm) {
        if (threadIdx.x == 0) {
            ended_threads() = 0;
            granted_blocks() = ask_for_blocks(comm);
        }
        __syncthreads();
    }

    // Threads of a block end at different places, where they cannot meet.
    __device__ __forceinline__ ~SmGrant() {
        const u32 active = __activemask();
        if (threadIdx.x % 32 == __ffs(active) - 1) {
            const u32 threads = __popc(active);
            if (atomicAdd(&ended_threads(), threads) + threads == blockDim.x) {
                end_block(comm_, is_narrow());
            }
        }
    }

    // Whether this block has nothing to do, and must end.
    __device__ __forceinline__ bool is_over() const { return blockIdx.x >= granted_blocks(); }

    // Whether the blocks behind the narrow grid have nothing to do.
    __device__ __forceinline__ bool is_narrow() const { return granted_blocks() < gridDim.x; }
#else
    __device__ __forceinline__ explicit SmGrant(const CommFields&) {}

    __device__ __forceinline__ bool is_over() const { return false; }
    __device__ __forceinline__ bool is_narrow() const { return false; }
#endif

    SmGrant(const SmGrant&) = delete;
    SmGrant& operator=(const SmGrant&) = delete;

#if SHARES_SMS
private:
    const CommFields& comm_;
#endif
};

}  // namespace symmpool
