//! A barrier: the handshake of a call that has nothing else. Defines: WORLD, THREADS; NOTIFY_COMPANION: whether (1) or
//! not (0) a companion kernel is notified that all ranks have entered.

#include <symmpool/impl/companion.cuh>

using namespace symmpool;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_barrier(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call) {
    begin_kernel(comm.early);
    Session session(comm);
    if (session.failed) {
        return;
    }
    run_leader_block<true>(session, call, UsedBytes());
    fence();
    if (NOTIFY_COMPANION) {
        __syncthreads();
        if (threadIdx.x == 0 && *static_cast<volatile u32*>(&comm.local()->failed) == 0) {
            notify_companion(comm);
        }
    }
}
