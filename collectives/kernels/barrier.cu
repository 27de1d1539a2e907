//! A barrier: the entry of a call that has nothing else. Defines: WORLD, THREADS.

#include "entry.cuh"

using namespace symmpool;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_barrier(const __grid_constant__ Comm comm, const __grid_constant__ Call call) {
    begin();
    Session session(comm);
    if (session.failed) {
        return;
    }
    attend<true>(session, call, Used());
    fence();
}
