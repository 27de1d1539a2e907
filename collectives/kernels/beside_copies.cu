//! What processors do while a copy engine carries an all-to-all of equal parts. Defines: WORLD, THREADS.
//!
//! From the entry on it takes an engine some microseconds to begin. Meanwhile the links carry the
//! beginning of every part, as stores. The rank's own part comes behind that. `input` is where its parts
//! are, `output` where it puts what it sends, in its own slot; a part is `stride` bytes, of which `bytes`
//! go this way.

#include "beside.cuh"
#include "bytes.cuh"

using namespace symmpool;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_beside_copies(const __grid_constant__ Comm comm, const __grid_constant__ Call call) {
    const u32 block = blockIdx.x, blocks = gridDim.x;
    if (!await_entered(comm)) {
        return;
    }
    hear_entered(comm);
#pragma unroll 1
    for (u32 distance = 1; distance < WORLD; ++distance) {
        const u32 peer = comm.after(distance);
        const char* from = call.input + peer * call.stride;
        share(Route{from, comm.at_peer(call.output, peer), call.bytes}, block, blocks);
    }
    share(Route{call.input + comm.rank * call.stride, call.output, call.stride}, block, blocks);
}
