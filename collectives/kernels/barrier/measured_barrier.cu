//! A barrier that measures how long this rank waits for each peer. Defines: WORLD, THREADS, at least a warp for each rank.

#include <symmpool/impl/handshake.cuh>

using namespace symmpool;

static_assert(THREADS >= 32 * WORLD, "a warp for each rank");

// `waits` has a number for each rank, to which the SM's clock cycles are added that passed until that rank came.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_measured_barrier(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call,
                              long long* const __grid_constant__ waits) {
    begin_kernel(comm.early);
    Session session(comm);
    if (session.failed) {
        return;
    }
    // Before the handshake, which takes the threads that send it a fence.
    const long long begin = clock64();
    send_handshake<true>(session, call, threadIdx.x, blockDim.x);
    // A peer has a warp of its own, as threads of one warp may go on together, when the last peer has come.
    const u32 peer = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0 && peer < WORLD && peer != comm.rank) {
        uint4 found;
        if (ll_await(session, peer, handshake_word(session, peer, 0), found)) {
            waits[peer] += clock64() - begin;
        }
    }
    __syncwarp();
    session.advance();
    compare_handshakes(session, call, threadIdx.x, blockDim.x);
    if (must_expire_flags(session)) {
        expire_old_flags(session, UsedBytes());
        expire_escape_marks(session);
    }
    fence();
}
