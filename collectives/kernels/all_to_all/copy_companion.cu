//! What processors do while a copy engine carries an all-to-all of equal parts, or an all-gather. Defines: WORLD, THREADS.
//!
//! From the entry on it takes an engine some microseconds to begin. Meanwhile the links carry the
//! beginning of every part, as stores. The rank's own part comes behind that. `input` is where its parts
//! are, `output` where it puts what it sends, in its own slot; a part is `stride` bytes, of which `bytes`
//! go this way. With `root` all peers get the same part, which may be in its place already.

#include <symmpool/companion.cuh>
#include <symmpool/copy.cuh>

using namespace symmpool;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_copy_companion(const __grid_constant__ Comm comm, const __grid_constant__ Call call) {
    const u32 block = blockIdx.x, blocks = gridDim.x;
    if (!await_notification(comm)) {
        return;
    }
    consume_notification(comm);
    const u64 chunk_stride = call.root ? 0 : call.stride;
#pragma unroll 1
    for (u32 distance = 1; distance < WORLD; ++distance) {
        const u32 peer = comm.after(distance);
        const char* from = call.input + peer * chunk_stride;
        share(Transfer{from, comm.at_peer(call.output, peer), call.bytes}, block, blocks);
    }
    const char* own = call.input + comm.rank * chunk_stride;
    if (own != call.output) {
        share(Transfer{own, call.output, call.stride}, block, blocks);
    }
}
