//! Waits until all chunks of other ranks have arrived that a product's last tiles need: in one block, which leaves SMs to
//! kernels for which other ranks may be waiting. Defines: WORLD, THREADS.

#include <fused/matmul_work.cuh>

using namespace symmpool;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_matmul_wait(const __grid_constant__ Comm comm, const __grid_constant__ CallParams,
                         const __grid_constant__ MatmulWork work) {
    begin_kernel(comm.early);
    Session session(comm);
    session.epoch = static_cast<u32>(work.control->epoch);
    for (u32 i = threadIdx.x; i < (WORLD - 1) * work.chunks; i += blockDim.x) {
        await_chunk(session, work, comm.after(1 + i / work.chunks), i % work.chunks);
    }
}
