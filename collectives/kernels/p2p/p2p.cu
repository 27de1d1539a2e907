//! Messages between two ranks, outside calls: no epoch, no entry; who receives compares the length.
//! Defines: WORLD, THREADS, SHOTS.
//!
//! A message is cut into as many lanes as the grid has blocks, which follows from its length alone. A
//! lane's data goes in packets through slots of the receiver's control block. Behind each packet comes a
//! flag with the packet's number and the length of the whole message, which is compared before anything is
//! written to the output; for each packet that was taken the receiver sends an acknowledgement, and the
//! sender fills a slot again only when the packet before in it was acknowledged. So a message is complete
//! on its sender when all of it is in slots, and waits for the receiver only where there is no room.
//!
//! Packets of a lane are counted in 64 bits, in device memory, so that a replayed graph counts on. Flags
//! hold the lower half of a number: every packet overwrites the flag of the packet SLOTS before it and no
//! other, so what a flag held before is never what is waited for, also where the half wraps. Messages of
//! one direction between two ranks are in one kernel's hands at a time, which the host sees to.
//!
//! The call's details are the message's length with the size of its elements, where the words of this file
//! begin in the control block, bytes of a slot, and bytes of a lane. Its `stride` is where the slots begin
//! in the control block, its `root` the peer, and its `teams` the bytes of a packet.

#include <symmpool/copy.cuh>

#define SEND 1
#define RECEIVE 2

using namespace symmpool;

// Packets of a lane that are on their way at most.
constexpr u32 SLOTS = 8;
// Lanes of a message at most: kernels for all peers and both ways hold a third of a device.
constexpr u32 MOST_LANES = 16;
constexpr u32 SHARED_LANES = 24;
constexpr u32 PEERS = WORLD > 1 ? WORLD - 1 : 1;
constexpr u32 ALL_LANES = SHARED_LANES / PEERS < MOST_LANES ? SHARED_LANES / PEERS : MOST_LANES;

// In the record of a failure: the phases of waits, and the kind where lengths differ (cuda/fault.rs).
constexpr u32 SENDING = CHANNEL + CHANNELS;
constexpr u32 RECEIVING = SENDING + 1;
constexpr u32 LENGTHS = 5;

// Of an acknowledgement: the receiver expects something else, and has told what.
constexpr u64 REFUSED = 1ull << 63;

// One lane of a message, as its block sees it on either rank.
struct Lane {
    const Comm& comm;
    const Call& call;
    u32 peer;
    u32 lane;

    __device__ __forceinline__ Lane(const Comm& c, const Call& m)
        : comm(c), call(m), peer(m.root), lane(blockIdx.x) {}

    // The words of this file on a rank: flags, acknowledgements, what a refusal tells, and counts.
    __device__ __forceinline__ char* words(u32 owner) const {
        return comm.of(owner) + call.description[1];
    }
    // Where the flag of a packet comes to.
    __device__ __forceinline__ char* flag(u32 owner, u32 source, u64 number) const {
        const u32 slot = static_cast<u32>(number) % SLOTS;
        return words(owner) + 16 * ((source * ALL_LANES + lane) * SLOTS + slot);
    }
    // How many packets of a lane the receiver has taken, written by it alone.
    __device__ __forceinline__ u64* taken_by(u32 owner, u32 receiver, u32 of_lane) const {
        char* begin = words(owner) + 16 * WORLD * ALL_LANES * SLOTS;
        return reinterpret_cast<u64*>(begin) + receiver * ALL_LANES + of_lane;
    }
    // Of a message that its receiver refused: what was sent, and what was expected.
    __device__ __forceinline__ u64* refusal(u32 owner, u32 receiver) const {
        return taken_by(owner, WORLD, 0) + 2 * receiver;
    }
    // How many packets of this lane there were so far, of which only its own rank knows.
    __device__ __forceinline__ u64* sent() const {
        return refusal(comm.rank, WORLD) + peer * ALL_LANES + lane;
    }
    __device__ __forceinline__ u64* received() const { return sent() + WORLD * ALL_LANES; }

    // The data of a packet on its receiver.
    __device__ __forceinline__ char* slot(u32 owner, u32 source, u64 number) const {
        const u32 nth = source < owner ? source : source - 1;
        const u64 slot = (nth * ALL_LANES + lane) * SLOTS + static_cast<u32>(number) % SLOTS;
        return comm.of(owner) + call.stride + slot * call.description[2];
    }

    // This lane's part of the message.
    __device__ __forceinline__ u64 begin() const {
        const u64 at = lane * call.description[3];
        return at < call.bytes ? at : call.bytes;
    }
    __device__ __forceinline__ u64 end() const {
        const u64 at = (lane + 1) * call.description[3];
        return at < call.bytes ? at : call.bytes;
    }
    // Of the packet that begins there.
    __device__ __forceinline__ u64 length(u64 at) const {
        return call.peer_blocks < end() - at ? call.peer_blocks : end() - at;
    }
};

__device__ __forceinline__ bool failed(const Comm& comm) {
    return *static_cast<volatile u32*>(&comm.local()->failed) != 0;
}

// What a wait does now and then: since when it waits, or NO_MORE (rule S5).
__device__ __noinline__ u64 still_there(const Comm& comm, u64 number, u64 since, u32 peer, u32 phase) {
    if (failed(comm)) {
        return NO_MORE;
    }
    const u64 now = nanoseconds();
    since = since == 0 ? now : since;
    if (now - since < comm.timeout) {
        return since;
    }
    report(comm, static_cast<u32>(number), TIMEOUT, peer, phase, nullptr);
    return NO_MORE;
}

// Lengths of a message differ, on either rank. By one thread.
__device__ __noinline__ void report_lengths(const Comm& comm, u32 sender, u32 receiver, u64 sent,
                                            u64 expected) {
    if (atomicExch(&comm.local()->failed, 1) != 0) {
        return;
    }
    Fault* fault = comm.fault;
    fault->kind = LENGTHS;
    fault->epoch = 0;
    fault->peer = sender == comm.rank ? receiver : sender;
    fault->phase = RECEIVING;
    fault->ours[0] = sender;
    fault->ours[1] = receiver;
    fault->ours[2] = sent;
    fault->ours[3] = expected;
    fence();
    *static_cast<volatile u32*>(&fault->complete) = 1;
}

// Has the sender know that its message is not the one that is expected: all lanes of it, as each may
// wait for room. By one thread.
__device__ __noinline__ void refuse(const Lane& message, u64 sent) {
    const u32 rank = message.comm.rank;
    u64* reported = message.refusal(message.peer, rank);
    reported[0] = sent;
    reported[1] = message.call.description[0];
    fence();
#pragma unroll 1
    for (u32 lane = 0; lane < ALL_LANES; ++lane) {
        store_release(message.taken_by(message.peer, rank, lane), REFUSED);
    }
    report_lengths(message.comm, message.peer, rank, sent, message.call.description[0]);
}

// A message of this rank was refused. By one thread.
__device__ __noinline__ void report_refusal(const Lane& message, u32 receiver) {
    const u64* reported = message.refusal(message.comm.rank, receiver);
    report_lengths(message.comm, message.comm.rank, receiver, reported[0], reported[1]);
}

// Until there is room for a packet. By one thread; false if that takes too long, or never will be.
__device__ __forceinline__ bool await_room(const Lane& message, u64 number, u64& taken) {
    const u64* word = message.taken_by(message.comm.rank, message.peer, message.lane);
    u64 since = 0;
    // What was seen last is enough as a rule: a look takes as long as a packet's first bytes.
    for (u32 looks = 1; taken + SLOTS < number; ++looks) {
        taken = load_acquire(word);
        if (taken & REFUSED) {
            report_refusal(message, message.peer);
            return false;
        }
        if (taken + SLOTS < number && (looks & 255) == 0) {
            since = still_there(message.comm, number, since, message.peer, SENDING);
            if (since == NO_MORE) {
                return false;
            }
        }
    }
    return true;
}

// Until a packet is there, which is then compared. By one thread; false if that takes too long, or its
// message is another one.
__device__ __forceinline__ bool await_chunk(const Lane& message, u64 number) {
    const char* flag = message.flag(message.comm.rank, message.peer, number);
    const u32 wanted = static_cast<u32>(number);
    u64 since = 0;
    uint4 packet = load_acquired(flag);
    for (u32 looks = 1; packet.y != wanted || packet.w != wanted; ++looks) {
        if ((looks & 255) == 0) {
            since = still_there(message.comm, number, since, message.peer, RECEIVING);
            if (since == NO_MORE) {
                return false;
            }
        }
        packet = load_acquired(flag);
    }
    const u64 sent = static_cast<u64>(packet.z) << 32 | packet.x;
    if (sent != message.call.description[0]) {
        refuse(message, sent);
        return false;
    }
    return true;
}

// After what the block has stored into its slot (rule S3). By one thread, behind a barrier.
__device__ __forceinline__ void raise_flag(const Lane& message, u64 number) {
    const u64 length = message.call.description[0];
    const u32 half = static_cast<u32>(number);
    fence();
    store_relaxed(message.flag(message.peer, message.comm.rank, number),
                  make_uint4(static_cast<u32>(length), half, static_cast<u32>(length >> 32), half));
}

// After what the block has read from its slot. By one thread, behind a barrier.
__device__ __forceinline__ void acknowledge(const Lane& message, u64 number) {
    fence();
    store_release(message.taken_by(message.peer, message.comm.rank, message.lane), number);
}

// A lane's packets, one after the other. The thread that raises their flags waits for all that is under
// way, and the other warps go on with the next packet meanwhile.
template <bool SENDS>
__device__ __forceinline__ void run(const Lane& message) {
    const u32 rank = message.comm.rank, peer = message.peer;
    u64* count = SENDS ? message.sent() : message.received();
    u64 number = *count, at = message.begin(), taken = 0;
    const u64 end = message.end();
    const bool signals = threadIdx.x == blockDim.x - 1;
    bool first = true;
    auto signal = [&] { SENDS ? raise_flag(message, number) : acknowledge(message, number); };
    // Also of nothing there is one packet, which is the message.
    do {
        bool bad = false;
        if (threadIdx.x == 0) {
            bad = !(SENDS ? await_room(message, number + 1, taken)
                          : await_chunk(message, number + 1));
        }
        // Behind it the packet before is done with, by all threads.
        if (__syncthreads_or(bad)) {
            return;
        }
        if (signals && !first) {
            signal();
        }
        first = false;
        number += 1;
        const u64 length = message.length(at);
        const Copy copy(SENDS ? Transfer{message.call.input + at, message.slot(peer, rank, number), length}
                              : Transfer{message.slot(rank, peer, number), message.call.output + at, length});
        copy.run(0, copy.units());
        at += length;
    } while (at < end);
    __syncthreads();
    if (signals) {
        signal();
        *count = number;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_p2p(const __grid_constant__ Comm comm, const __grid_constant__ Call call) {
    // Nothing takes places of the device behind a kernel that may wait: another stream may need them for
    // what the message depends on.
    follow();
    if (failed(comm)) {
        return;
    }
    const Lane message(comm, call);
    // What another rank refused is told by the first message after that, whomever it is for.
    const u32 other = threadIdx.x - 32;
    if (blockIdx.x == 0 && other < WORLD && other != comm.rank &&
        (load_acquire(message.taken_by(comm.rank, other, 0)) & REFUSED)) {
        report_refusal(message, other);
    }
    if (SHOTS & SEND) {
        run<true>(message);
    }
    if (SHOTS & RECEIVE) {
        run<false>(message);
    }
}
