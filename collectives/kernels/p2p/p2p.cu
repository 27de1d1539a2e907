//! Point-to-point messages between two ranks, outside of calls: no epoch, no handshake; the receiver compares payloads.
//! Defines: WORLD, THREADS, OPERATION (SEND or RECEIVE).
//!
//! A message is cut into as many lanes as the grid has blocks, which follows from its length alone, and a lane into
//! chunks, which pass through slots of the receiver's control block. After each chunk comes a flag with the chunk's
//! number and the payload of the whole message (its length, and the type of its elements), which is compared before the
//! chunk is written to the output. A message that its own rank refuses is empty, and of a type that no other has. For each
//! chunk that it has taken the receiver sends an acknowledgement, and the sender fills a slot again only when the
//! chunk before in it was acknowledged. So a message is complete on its sender when all of it is in slots, and waits
//! for the receiver only where there are no free slots.
//!
//! The chunks of a lane are counted in 64 bits, in device memory, so that a replayed graph counts on. Flags hold the
//! lower half of a number: every chunk overwrites the flag of the chunk SLOTS before it and no other, so what
//! a flag held before is never what is waited for, also where the half wraps. The host sees to it that
//! messages of one direction between two ranks are in one kernel's hands at a time.
//!
//! Where payloads differ, the receiver fails, and reports that to all ranks: to their waits for messages by words of this
//! file, and to their calls by withdrawing its handshake. So none waits for a rank that has failed.
//!
//! The words of the call's description are the message's payload, where the
//! words of this file begin in the control block, the bytes of a slot, and the bytes of a lane. The call's `stride` is
//! where the slots begin in the control block, its `root` the peer, and its `peer_blocks` the bytes of a chunk.

#include <symmpool/copy.cuh>

using namespace symmpool;

enum class Operation { SEND, RECEIVE };

// Most chunks of a lane that are under way.
constexpr u32 SLOTS = 4;
// Most lanes of a message. The kernels for all peers and both directions together take a third of a device.
constexpr u32 MOST_LANES = 16;
constexpr u32 SHARED_LANES = 24;
constexpr u32 PEERS = WORLD > 1 ? WORLD - 1 : 1;
constexpr u32 ALL_LANES = SHARED_LANES / PEERS < MOST_LANES ? SHARED_LANES / PEERS : MOST_LANES;

// In the record of a failure: the phases of waits, and the kind where payloads differ (`cuda/fault.rs`).
constexpr u32 SENDING = CHANNEL + CHANNELS;
constexpr u32 RECEIVING = SENDING + 1;
constexpr u32 PAYLOADS = 5;
// In a withdrawn handshake, in place of the rank that was waited for: a message was refused. Its sender is the lowest
// byte, and its receiver the next one. With MESSAGE_FOLLOWS, the next two words are what was sent and what was expected.
constexpr u32 REFUSED_MESSAGE = 1u << 31;

// The words of a refused message: its sender, what was sent, what was expected, and whether the others are there.
struct Refusal {
    u64 sender;
    u64 sent;
    u64 expected;
    u64 complete;
};

// A lane of a message, as its block sees it on either rank.
struct Lane {
    const Comm& comm;
    const Call& call;
    u32 peer;
    u32 lane;

    __device__ __forceinline__ Lane(const Comm& c, const Call& m)
        : comm(c), call(m), peer(m.root), lane(blockIdx.x) {}

    // The words of this file on a rank: flags, acknowledgements, refusals and counts.
    __device__ __forceinline__ char* words(u32 owner) const {
        return comm.of(owner) + call.description[1];
    }
    // Where the flag of a chunk arrives.
    __device__ __forceinline__ char* flag(u32 owner, u32 source, u64 number) const {
        const u32 slot = static_cast<u32>(number) % SLOTS;
        return words(owner) + 16 * ((source * ALL_LANES + lane) * SLOTS + slot);
    }
    // How many chunks of a lane the receiver has acknowledged, written by the receiver alone.
    __device__ __forceinline__ u64* taken_by(u32 owner, u32 receiver, u32 of_lane) const {
        char* begin = words(owner) + 16 * WORLD * ALL_LANES * SLOTS;
        return reinterpret_cast<u64*>(begin) + receiver * ALL_LANES + of_lane;
    }
    // The message that the receiver has refused, whoever sent it.
    __device__ __forceinline__ Refusal* refusal(u32 owner, u32 receiver) const {
        return reinterpret_cast<Refusal*>(taken_by(owner, WORLD, 0)) + receiver;
    }
    // How many chunks of this lane this rank has sent to the peer, and received from it. No other rank reads these.
    __device__ __forceinline__ u64* sent() const {
        return reinterpret_cast<u64*>(refusal(comm.rank, WORLD)) + peer * ALL_LANES + lane;
    }
    __device__ __forceinline__ u64* received() const { return sent() + WORLD * ALL_LANES; }

    // Where the data of a chunk arrives.
    __device__ __forceinline__ char* slot(u32 owner, u32 source, u64 number) const {
        const u32 nth = source < owner ? source : source - 1;
        const u64 slot = (nth * ALL_LANES + lane) * SLOTS + static_cast<u32>(number) % SLOTS;
        return comm.of(owner) + call.stride + slot * call.description[2];
    }

    // Where in the message this lane begins and ends.
    __device__ __forceinline__ u64 begin() const {
        const u64 at = lane * call.description[3];
        return at < call.bytes ? at : call.bytes;
    }
    __device__ __forceinline__ u64 end() const {
        const u64 at = (lane + 1) * call.description[3];
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

// Records that the two payloads of a message differ, except for `complete`. Called by one thread, which has found that
// nothing failed before.
__device__ __forceinline__ void describe(const Comm& comm, u32 receiver, const Refusal& refusal) {
    Fault* fault = comm.fault;
    fault->kind = PAYLOADS;
    fault->epoch = 0;
    fault->peer = receiver;
    fault->phase = RECEIVING;
    fault->ours[0] = refusal.sender;
    fault->ours[1] = receiver;
    fault->ours[2] = refusal.sent;
    fault->ours[3] = refusal.expected;
    fault->theirs[0] = (REFUSED_MESSAGE | MESSAGE_FOLLOWS | receiver << 8 | refusal.sender) << 32;
    fault->theirs[1] = refusal.sent;
    fault->theirs[2] = refusal.expected;
}

__device__ __forceinline__ void complete(const Comm& comm) {
    fence();
    *static_cast<volatile u32*>(&comm.fault->complete) = 1;
}

// Whether a rank has refused a message, also one of other ranks.
__device__ __forceinline__ bool has_refused(const Lane& lane, u32 receiver) {
    return load_acquire(&lane.refusal(lane.comm.rank, receiver)->complete) != 0;
}

// Fails, as a rank has refused a message.
__device__ __noinline__ void record_refused(const Lane& lane, u32 receiver) {
    if (atomicExch(&lane.comm.local()->failed, 1) == 0) {
        describe(lane.comm, receiver, *lane.refusal(lane.comm.rank, receiver));
        complete(lane.comm);
    }
}

// Called now and then by a wait. Returns since when it waits, or GIVE_UP (rule S5).
__device__ __noinline__ u64 still_there(const Lane& lane, u64 number, u64 since, u32 phase) {
    const Comm& comm = lane.comm;
    if (failed(comm)) {
        return GIVE_UP;
    }
#pragma unroll 1
    for (u32 rank = 0; rank < WORLD; ++rank) {
        if (rank != comm.rank && has_refused(lane, rank)) {
            record_refused(lane, rank);
            return GIVE_UP;
        }
    }
    const u64 now = nanoseconds();
    since = since == 0 ? now : since;
    if (now - since < comm.timeout) {
        return since;
    }
    report(comm, static_cast<u32>(number), TIMEOUT, lane.peer, phase, nullptr);
    return GIVE_UP;
}

// Withdraws this rank's handshake of a call from the other ranks, with what the record says of a message. Peers look at
// the first word, which comes last.
__device__ __noinline__ void withdraw_for_message(const Comm& comm, u32 epoch) {
    const volatile u64* words = comm.fault->theirs;
#pragma unroll 1
    for (u32 peer = 0; peer < WORLD; ++peer) {
        if (peer == comm.rank) {
            continue;
        }
        char* handshake = handshake_slot(comm, epoch, peer, comm.rank);
        char* row = traffic_row_slot(comm, epoch, peer, comm.rank);
#pragma unroll 1
        for (u32 word = 4 + TRAFFIC_ROW_WORDS; word-- > 0;) {
            const u64 says = words[word < 4 ? word : 0];
            if (word == 0) {
                fence();
            }
            store_relaxed(word < 4 ? handshake + 16 * word : row + 16 * (word - 4),
                          make_uint4(static_cast<u32>(says), 0, static_cast<u32>(says >> 32), withdrawal(epoch)));
        }
    }
}

// Refuses the peer's message, which is not the expected one, and fails. All ranks learn that, whatever they wait for.
// Called by one thread.
__device__ __noinline__ void refuse(const Lane& lane, u64 sent) {
    const Comm& comm = lane.comm;
    if (atomicExch(&comm.local()->failed, 1) != 0) {
        return;
    }
    const Refusal refusal = {lane.peer, sent, lane.call.description[0], 1};
#pragma unroll 1
    for (u32 peer = 0; peer < WORLD; ++peer) {
        if (peer != comm.rank) {
            Refusal* there = lane.refusal(peer, comm.rank);
            there->sender = refusal.sender;
            there->sent = refusal.sent;
            there->expected = refusal.expected;
            fence();
            store_release(&there->complete, 1);
        }
    }
    // The call of that epoch may be under way. Those that come later do nothing on this rank: they find that it has failed.
    const u32 epoch = *static_cast<volatile u32*>(&comm.local()->epoch);
    describe(comm, comm.rank, refusal);
    withdraw_for_message(comm, epoch);
    withdraw_for_message(comm, Session::following(epoch));
    complete(comm);
}

// Waits until the slot of a chunk is free; false if that takes too long, or a message was refused. Called by one
// thread. `taken` is how many chunks are known to be acknowledged.
__device__ __forceinline__ bool await_slot(const Lane& lane, u64 number, u64& taken) {
    const u64* word = lane.taken_by(lane.comm.rank, lane.peer, lane.lane);
    u64 since = 0;
    // What was seen last is usually enough; a look takes as long as the first bytes of a chunk.
    for (u32 looks = 1; taken + SLOTS < number; ++looks) {
        taken = load_acquire(word);
        if (taken + SLOTS < number && is_time_for_clock(looks)) {
            since = still_there(lane, number, since, SENDING);
            if (since == GIVE_UP) {
                return false;
            }
        }
    }
    return true;
}

// Waits for a chunk, and compares the payload of its message; false if that takes too long or payloads differ. Called by
// one thread.
__device__ __forceinline__ bool await_chunk(const Lane& lane, u64 number) {
    const char* flag = lane.flag(lane.comm.rank, lane.peer, number);
    const u32 wanted = static_cast<u32>(number);
    u64 since = 0;
    uint4 word = load_acquire_vector(flag);
    for (u32 looks = 1; word.y != wanted || word.w != wanted; ++looks) {
        if (is_time_for_clock(looks)) {
            since = still_there(lane, number, since, RECEIVING);
            if (since == GIVE_UP) {
                return false;
            }
        }
        word = load_acquire_vector(flag);
    }
    const u64 sent = static_cast<u64>(word.z) << 32 | word.x;
    if (sent != lane.call.description[0]) {
        refuse(lane, sent);
        return false;
    }
    return true;
}

// Raises the flag of a chunk after all that the block has stored into its slot (rule S3). Called by one thread, after a
// barrier of the block.
__device__ __forceinline__ void raise_flag(const Lane& lane, u64 number) {
    const u64 payload = lane.call.description[0];
    const u32 half = static_cast<u32>(number);
    fence();
    store_relaxed(lane.flag(lane.peer, lane.comm.rank, number),
                  make_uint4(static_cast<u32>(payload), half, static_cast<u32>(payload >> 32), half));
}

// Acknowledges a chunk after all that the block has read from its slot. Called by one thread, after a barrier of the
// block.
__device__ __forceinline__ void acknowledge(const Lane& lane, u64 number) {
    store_release(lane.taken_by(lane.peer, lane.comm.rank, lane.lane), number);
}

// Moves the chunks of a lane, one after the other. The thread that raises flags waits for all stores that are under
// way, and the other warps go on with the next chunk meanwhile.
template <bool SENDS>
__device__ __forceinline__ void run(const Lane& lane) {
    const u32 rank = lane.comm.rank, peer = lane.peer;
    u64* count = SENDS ? lane.sent() : lane.received();
    u64 number = *count, at = lane.begin(), taken = 0;
    const u64 end = lane.end();
    const bool signals = threadIdx.x == blockDim.x - 1;
    bool first = true;
    auto signal = [&] { SENDS ? raise_flag(lane, number) : acknowledge(lane, number); };
    // An empty message has a chunk as well.
    do {
        bool bad = false;
        if (threadIdx.x == 0) {
            bad = !(SENDS ? await_slot(lane, number + 1, taken) : await_chunk(lane, number + 1));
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
        const u64 length = lane.length(at);
        const Copy copy(SENDS ? Transfer{lane.call.input + at, lane.slot(peer, rank, number), length}
                              : Transfer{lane.slot(rank, peer, number), lane.call.output + at, length});
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
    // The stream's next kernel must not start while this one waits: another stream may need the SMs for the work that
    // the message depends on.
    wait_for_stream();
    if (failed(comm)) {
        return;
    }
    const Lane lane(comm, call);
    // What any rank has refused is reported by the next message of this rank, to whichever peer.
    const u32 other = threadIdx.x - 32;
    if (blockIdx.x == 0 && other < WORLD && other != comm.rank && has_refused(lane, other)) {
        record_refused(lane, other);
    }
    run<Operation::OPERATION == Operation::SEND>(lane);
}
