//! An all-to-all of any bits, without flags: vectors that look like the empty pattern are marked.
#include <symmpool/device.cuh>

using namespace symmpool;

extern "C" __global__ void my_all_to_all(const __grid_constant__ DeviceComm comm,
                                         const __grid_constant__ DeviceCall call) {
    auto input = [&](u32 rank) { return Source(call.input + rank * call.bytes, call.bytes); };
    auto output = [&](u32 rank) { return Target(call.output + rank * call.bytes, call.bytes); };
    const u64 vectors = input(0).vectors();
    Collective collective(comm, call, 0, End::ALONE, 0, WORLD * vectors);
    if (!collective) {
        return;
    }
    for_each_vector(vectors, [&](u64 at) {
        const bool inside = at < vectors;
        uint4 vector = make_uint4(0, 0, 0, 0);
        for (u32 distance = 1; distance < WORLD; ++distance) {
            const u32 peer = comm.after(distance);
            if (inside) {
                vector = input(peer).load(at);
            }
            LamportChannel(collective, peer, vectors).send(at, vector);
        }
        if (inside) {
            output(comm.rank).store(at, input(comm.rank).load(at));
        }
        for (u32 distance = 1; distance < WORLD; ++distance) {
            const u32 peer = comm.after(WORLD - distance);
            if (!LamportChannel(collective, peer, vectors).receive(at, vector)) {
                return false;
            }
            if (inside) {
                output(peer).store(at, vector);
            }
        }
        return true;
    });
}
