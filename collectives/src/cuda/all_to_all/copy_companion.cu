//! The SMs' work while a copy engine carries an all-to-all of equal parts, or an all-gather. Defines: WORLD, THREADS.
//!
//! After the handshake a copy engine needs some microseconds to begin. Meanwhile this companion kernel sends the
//! beginning of every part by stores, and then copies the rank's own part. `input` is where the rank's parts are, and
//! `output` the place in its own slot that corresponds to the places it writes on the peers. A part has `stride` bytes,
//! of which `bytes` go this way. With `root` all peers get the same part, which may be in its place already on this rank.

#include <symmpool/impl/companion.cuh>
#include <symmpool/impl/copy.cuh>

using namespace symmpool;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_copy_companion(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call) {
    const u32 block = blockIdx.x, blocks = gridDim.x;
    if (!await_notification(comm)) {
        return;
    }
    consume_notification(comm);
    const u64 part_stride = call.root ? 0 : call.stride;
#pragma unroll 1
    for (u32 distance = 1; distance < WORLD; ++distance) {
        const u32 peer = comm.after(distance);
        const char* from = call.input + peer * part_stride;
        copy_piece(Transfer{from, comm.at_peer(call.output, peer), call.bytes}, block, blocks);
    }
    const char* own = call.input + comm.rank * part_stride;
    if (own != call.output) {
        copy_piece(Transfer{own, call.output, call.stride}, block, blocks);
    }
}
