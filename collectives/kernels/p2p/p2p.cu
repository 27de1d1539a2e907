//! Point-to-point messages between two ranks, outside of calls: no epoch, no handshake; the receiver compares payloads.
//! Defines: WORLD, THREADS, OPERATION (SEND or RECEIVE).
//!
//! A message is cut into as many stripes as the grid has blocks, which follows from its length alone, and a stripe into
//! chunks, which pass through slots of the receiver's control block. After each chunk comes a flag with the chunk's
//! number and the payload of the whole message (its length, and the type of its elements), which is compared before the
//! chunk is written to the output. A message that its own rank refuses is empty, and of a type that no other has. For each
//! chunk that it has taken the receiver sends an acknowledgement, and the sender fills a slot again only when the
//! chunk before in it was acknowledged. So a message is complete on its sender when all of it is in slots, and waits
//! for the receiver only where there are no free slots.
//!
//! The chunks of a stripe are counted in 64 bits, in device memory, so that a replayed graph counts on. Flags hold the
//! lower half of a number: every chunk overwrites the flag of the chunk SLOTS before it and no other, so what
//! a flag held before is never what is waited for, also where the half wraps. The host sees to it that
//! messages of one direction between two ranks are in one kernel's hands at a time.
//!
//! Where payloads differ, the receiver fails, and departs from all ranks: their waits for its messages, its signals and its
//! calls end. It marks no handshake as failed: which call is under way it cannot know. A call of its own that is under way
//! does so when it misses something (`symmpool/impl/comm.cuh`). So none waits for a rank that has failed, and none misses what that rank
//! had finished before.
//!
//! The words of the call's description are the message's payload, where the
//! words of this file begin in the control block, the bytes of a slot, and the bytes of a stripe. The call's `stride` is
//! where the slots begin in the control block, its `root` the peer, and its `peer_blocks` the bytes of a chunk.

#include <symmpool/impl/copy.cuh>

using namespace symmpool;

enum class Operation { SEND, RECEIVE };

// Most chunks of a stripe that are under way.
constexpr u32 SLOTS = 4;
// Most stripes of a message. The kernels for all peers and both directions together take a third of a device.
constexpr u32 MAX_STRIPES = 16;
constexpr u32 SHARED_STRIPES = 24;
constexpr u32 PEERS = WORLD > 1 ? WORLD - 1 : 1;
constexpr u32 ALL_STRIPES = SHARED_STRIPES / PEERS < MAX_STRIPES ? SHARED_STRIPES / PEERS : MAX_STRIPES;

// In the record of a failure: the phases of waits (`cuda/layout/fault.rs`).
constexpr u32 SENDING = CHANNEL + CHANNELS;
constexpr u32 RECEIVING = SENDING + 1;

// A stripe of a message, as its block sees it on either rank.
struct Stripe {
    const Comm& comm;
    const CallParams& call;
    u32 peer;
    u32 stripe;

    __device__ __forceinline__ Stripe(const Comm& c, const CallParams& m)
        : comm(c), call(m), peer(m.root), stripe(blockIdx.x) {}

    // The words of this file on a rank: flags, acknowledgements and counts.
    __device__ __forceinline__ char* words(u32 owner) const {
        return comm.of(owner) + call.description[1];
    }
    // Where the flag of a chunk arrives.
    __device__ __forceinline__ char* flag(u32 owner, u32 source, u64 number) const {
        const u32 slot = static_cast<u32>(number) % SLOTS;
        return words(owner) + 16 * ((source * ALL_STRIPES + stripe) * SLOTS + slot);
    }
    // How many chunks of a stripe the receiver has acknowledged, written by the receiver alone.
    __device__ __forceinline__ u64* taken_by(u32 owner, u32 receiver, u32 of_stripe) const {
        char* begin = words(owner) + 16 * WORLD * ALL_STRIPES * SLOTS;
        return reinterpret_cast<u64*>(begin) + receiver * ALL_STRIPES + of_stripe;
    }
    // How many chunks of this stripe this rank has sent to the peer, and received from it. No other rank reads these.
    __device__ __forceinline__ u64* sent() const {
        return taken_by(comm.rank, WORLD, 0) + peer * ALL_STRIPES + stripe;
    }
    __device__ __forceinline__ u64* received() const { return sent() + WORLD * ALL_STRIPES; }

    // Where the data of a chunk arrives.
    __device__ __forceinline__ char* slot(u32 owner, u32 source, u64 number) const {
        const u32 nth = source < owner ? source : source - 1;
        const u64 slot = (nth * ALL_STRIPES + stripe) * SLOTS + static_cast<u32>(number) % SLOTS;
        return comm.of(owner) + call.stride + slot * call.description[2];
    }

    // Where in the message this stripe begins and ends.
    __device__ __forceinline__ u64 begin() const {
        const u64 at = stripe * call.description[3];
        return at < call.bytes ? at : call.bytes;
    }
    __device__ __forceinline__ u64 end() const {
        const u64 at = (stripe + 1) * call.description[3];
        return at < call.bytes ? at : call.bytes;
    }
    // The length of the chunk that begins at `at`.
    __device__ __forceinline__ u64 length(u64 at) const {
        return call.peer_blocks < end() - at ? call.peer_blocks : end() - at;
    }
};

__device__ __forceinline__ bool failed(const Comm& comm) {
    return *static_cast<volatile u32*>(&comm.local()->failed) != 0;
}

// Whether a rank has departed, perhaps as it refused a message of another one.
__device__ __forceinline__ bool has_departed(const Comm& comm, u32 from) {
    return load_acquire(&departure(comm, comm.rank, from)->when) != 0;
}

// Fails, as a rank has departed.
__device__ __noinline__ void record_departed(const Comm& comm, u32 from) {
    take_departure(comm, 0, from);
    report(comm, 0, PEER_FAILED, from, RECEIVING, nullptr);
}

// Called now and then by a wait. Returns since when it waits, or STOP_WAITING (rule S5).
__device__ __noinline__ u64 still_there(const Stripe& stripe, u64 number, u64 since, u32 phase) {
    const Comm& comm = stripe.comm;
    if (failed(comm)) {
        return STOP_WAITING;
    }
#pragma unroll 1
    for (u32 rank = 0; rank < WORLD; ++rank) {
        if (rank != comm.rank && has_departed(comm, rank)) {
            record_departed(comm, rank);
            return STOP_WAITING;
        }
    }
    const u64 now = nanoseconds();
    since = since == 0 ? now : since;
    if (now - since < comm.timeout) {
        return since;
    }
    report(comm, static_cast<u32>(number), TIMEOUT, stripe.peer, phase, nullptr);
    return STOP_WAITING;
}

// Refuses the peer's message, which is not the expected one, fails, and departs from all ranks. Called by one thread.
__device__ __noinline__ void refuse(const Stripe& stripe, u64 sent) {
    const Comm& comm = stripe.comm;
    if (atomicExch(&comm.local()->failed, 1) != 0) {
        return;
    }
    // Calls that begin from here on do nothing on this rank: they find that it has failed. The call behind this one may be
    // beginning. It is over too, as all later ones are.
    const u32 epoch = *static_cast<volatile u32*>(&comm.local()->epoch);
    const u64 expected = stripe.call.description[0];
    const u64 reason = static_cast<u64>(REFUSED_MESSAGE | MESSAGE_FOLLOWS | comm.rank << 8 | stripe.peer) << 32;
    FaultRecord* fault = comm.fault;
    fault->kind = PAYLOADS;
    fault->epoch = 0;
    fault->peer = comm.rank;
    fault->phase = RECEIVING;
    fault->ours[0] = stripe.peer;
    fault->ours[1] = comm.rank;
    fault->ours[2] = sent;
    fault->ours[3] = expected;
    fault->theirs[0] = reason;
#pragma unroll 1
    for (u32 peer = 0; peer < WORLD; ++peer) {
        if (peer != comm.rank) {
            Departure* there = departure(comm, peer, comm.rank);
            there->reason = reason;
            there->sent = sent;
            there->expected = expected;
            fence();
            store_release(&there->when, 1ull << 32 | epoch);
        }
    }
    fence();
    *static_cast<volatile u32*>(&fault->complete) = 1;
}

// Waits until the slot of a chunk is free; false if that takes too long, or a message was refused. Called by one
// thread. `taken` is how many chunks are known to be acknowledged.
__device__ __forceinline__ bool await_slot(const Stripe& stripe, u64 number, u64& taken) {
    const u64* word = stripe.taken_by(stripe.comm.rank, stripe.peer, stripe.stripe);
    u64 since = 0;
    // The count that was seen last is usually enough; a look takes as long as the first bytes of a chunk.
    for (u32 looks = 1; taken + SLOTS < number; ++looks) {
        taken = load_acquire(word);
        if (taken + SLOTS < number && is_time_for_clock(looks)) {
            since = still_there(stripe, number, since, SENDING);
            if (since == STOP_WAITING) {
                return false;
            }
        }
    }
    return true;
}

// Waits for a chunk, and compares the payload of its message; false if that takes too long or payloads differ. Called by
// one thread.
__device__ __forceinline__ bool await_chunk(const Stripe& stripe, u64 number) {
    const char* flag = stripe.flag(stripe.comm.rank, stripe.peer, number);
    const u32 wanted = static_cast<u32>(number);
    u64 since = 0;
    uint4 word = load_acquire_vector(flag);
    for (u32 looks = 1; word.y != wanted || word.w != wanted; ++looks) {
        if (is_time_for_clock(looks)) {
            since = still_there(stripe, number, since, RECEIVING);
            if (since == STOP_WAITING) {
                return false;
            }
        }
        word = load_acquire_vector(flag);
    }
    const u64 sent = static_cast<u64>(word.z) << 32 | word.x;
    if (sent != stripe.call.description[0]) {
        refuse(stripe, sent);
        return false;
    }
    return true;
}

// Raises the flag of a chunk after all that the block has stored into its slot (rule S3). Called by one thread, after a
// barrier of the block.
__device__ __forceinline__ void raise_flag(const Stripe& stripe, u64 number) {
    const u64 payload = stripe.call.description[0];
    const u32 half = static_cast<u32>(number);
    fence();
    store_relaxed(stripe.flag(stripe.peer, stripe.comm.rank, number),
                  make_uint4(static_cast<u32>(payload), half, static_cast<u32>(payload >> 32), half));
}

// Acknowledges a chunk after all that the block has read from its slot. Called by one thread, after a barrier of the
// block.
__device__ __forceinline__ void acknowledge(const Stripe& stripe, u64 number) {
    store_release(stripe.taken_by(stripe.peer, stripe.comm.rank, stripe.stripe), number);
}

// Moves the chunks of a stripe, one after the other. The thread that raises flags waits for all stores that are under
// way, and the other warps go on with the next chunk meanwhile.
template <bool SENDS>
__device__ __forceinline__ void run(const Stripe& stripe) {
    const u32 rank = stripe.comm.rank, peer = stripe.peer;
    u64* count = SENDS ? stripe.sent() : stripe.received();
    u64 number = *count, at = stripe.begin(), taken = 0;
    const u64 end = stripe.end();
    const bool signals = threadIdx.x == blockDim.x - 1;
    bool first = true;
    auto signal = [&] { SENDS ? raise_flag(stripe, number) : acknowledge(stripe, number); };
    // An empty message has a chunk as well.
    do {
        bool bad = false;
        if (threadIdx.x == 0) {
            bad = !(SENDS ? await_slot(stripe, number + 1, taken) : await_chunk(stripe, number + 1));
        }
        // All threads have finished the chunk before when they come here.
        if (__syncthreads_or(bad)) {
            return;
        }
        if (signals && !first) {
            signal();
        }
        first = false;
        number += 1;
        const u64 length = stripe.length(at);
        const Copy copy(SENDS ? Transfer{stripe.call.input + at, stripe.slot(peer, rank, number), length}
                              : Transfer{stripe.slot(rank, peer, number), stripe.call.output + at, length});
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
    symmpool_p2p(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call) {
    // The stream's next kernel must not start while this one waits: another stream may need the SMs for the work that
    // the message depends on.
    wait_for_stream();
    if (failed(comm)) {
        return;
    }
    const Stripe stripe(comm, call);
    // That any rank has departed is reported by the next message of this rank, to whichever peer.
    const u32 other = threadIdx.x - 32;
    if (blockIdx.x == 0 && other < WORLD && other != comm.rank && has_departed(comm, other)) {
        record_departed(comm, other);
    }
    run<Operation::OPERATION == Operation::SEND>(stripe);
}
