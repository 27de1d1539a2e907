//! Broadcast of much data to several peers. Defines: WORLD, THREADS.
//!
//! The links of the root bound a broadcast, so each byte leaves the root once: every peer gets a share of the buffer
//! from the root, and passes it on to all other peers. Both are done in stages, so that a peer passes on one stage
//! while the next one arrives. Data goes straight into outputs that are windows. What is for another output passes
//! through its rank's scratch, of which two halves are used in turn, and is copied from there.
//!
//! Ranks need not have the same kind of memory, nor windows at one offset: every peer says at the beginning where its
//! output is (`call.stride`, an offset from the rank's slot, or NO_WINDOW). It is there by then, as the peer's stream has
//! come to this call. ARRIVED counts the stages of a sender that are in this rank's memory, and FINISHED the turns after
//! which a receiver needs no stage of its scratch that was there before them.

#include <symmpool/collective.cuh>
#include <symmpool/impl/copy.cuh>

using namespace symmpool;

// Kinds of flags for the two halves of the place of an output. No count is compared with them.
constexpr u32 PLACE_LOW = 2;
constexpr u32 PLACE_HIGH = 3;
// Stands for memory that is no window.
constexpr u64 NO_WINDOW = ~0ull;

// A stage has an eighth of what an index has in all, so that little is left to do when the last one has arrived, and
// between so many vectors, unless scratch has less room.
constexpr u64 MIN_STAGE_VECTORS = THREADS;
constexpr u64 MAX_STAGE_VECTORS = 2048;
constexpr int UNROLL = WORLD <= 4 ? 4 : 2;

struct Broadcast {
    const Session& session;
    const Comm& comm;
    const CallParams& call;
    char* const* outputs;  // addresses in every rank, as this one reaches them; nullptr where data passes through scratch
    const PeerBlocks peer_blocks;
    const u64 share;  // vectors of a share, whole lines
    const EvenSplit split;
    u32 each;   // vectors of an index in a stage
    u32 count;  // how many stages there are, the same for all indices on all ranks

    __device__ __forceinline__ Broadcast(const Session& s, const CallParams& c, char* const* places)
        : session(s), comm(s.comm), call(c), outputs(places), peer_blocks(c.peer_blocks),
          share((((c.bytes + 15) / 16 + WORLD - 2) / (WORLD - 1) + 7) / 8 * 8), split(share, c.peer_blocks) {
        const u64 whole = split.longest(), most = comm.scratch_vectors() / 2 / call.peer_blocks / 8 * 8;
        u64 wanted = (whole + 63) / 64 * 8;
        wanted = wanted < MIN_STAGE_VECTORS ? MIN_STAGE_VECTORS : wanted;
        wanted = wanted < MAX_STAGE_VECTORS ? wanted : MAX_STAGE_VECTORS;
        each = static_cast<u32>(wanted < most ? wanted : most);
        count = static_cast<u32>((whole + each - 1) / each);
    }

    __device__ __forceinline__ bool is_root() const { return comm.rank == call.root; }
    __device__ __forceinline__ bool uses_scratch(u32 rank) const { return outputs[rank] == nullptr; }

    // The peer that gets share `number` from the root.
    __device__ __forceinline__ u32 owner(u32 number) const {
        const u32 rank = call.root + 1 + number;
        return rank < WORLD ? rank : rank - WORLD;
    }
    __device__ __forceinline__ u32 share_of(u32 rank) const {
        return rank > call.root ? rank - call.root - 1 : rank + WORLD - call.root - 1;
    }

    // A share in a buffer.
    template <typename Byte>
    __device__ __forceinline__ Span<Byte> in(Byte* begin, u32 number) const {
        const u64 from = 16 * share * number, left = from < call.bytes ? call.bytes - from : 0;
        return Span<Byte>(begin + from, left < 16 * share ? left : 16 * share);
    }

    // The vector of a share at which a stage of an index begins.
    __device__ __forceinline__ u64 begin(u32 index, u32 stage) const {
        return split.begin(index) + static_cast<u64>(stage) * each;
    }

    // Vectors of an index that belong to a stage, in a share that ends after `vectors`.
    __device__ __forceinline__ Range range(u32 index, u32 stage, u64 vectors) const {
        const u64 all = split.begin(index + 1), end = all < vectors ? all : vectors;
        const u64 from = begin(index, stage), to = from + each;
        return {from < end ? from : end, to < end ? to : end};
    }

    // Where the vectors of an index and a stage lie that `sender` stores in `receiver`'s scratch.
    __device__ __forceinline__ char* slot(u32 receiver, u32 sender, u32 index, u32 stage) const {
        const u64 place = static_cast<u64>(stage % 2) * call.peer_blocks + index;
        return comm.scratch_of(receiver, sender) + 16 * place * each;
    }

    // Where this rank stores what a stage has of an index for a receiver: where the share would begin if all of it went
    // there.
    __device__ __forceinline__ char* place(u32 receiver, u32 number, u32 index, u32 stage) const {
        if (uses_scratch(receiver)) {
            return slot(receiver, comm.rank, index, stage) - 16 * begin(index, stage);
        }
        return outputs[receiver] + 16 * share * number;
    }

    template <typename Act>
    __device__ __forceinline__ void each_index(Act act) const {
#pragma unroll 1
        for (u32 index = peer_blocks.first; index < peer_blocks.end; ++index) {
            act(index);
        }
    }

    // The root's part of a stage: a piece of each share for its owner.
    __device__ __forceinline__ void scatter(u32 stage) const {
        each_index([&](u32 index) {
            const Range all = range(index, stage, share);
            char* places[WORLD - 1];
#pragma unroll
            for (u32 number = 0; number < WORLD - 1; ++number) {
                places[number] = place(owner(number), number, index, stage);
            }
#pragma unroll 1
            for (u64 at = all.from + threadIdx.x; at < all.to; at += blockDim.x) {
                uint4 vectors[WORLD - 1];
#pragma unroll
                for (u32 number = 0; number < WORLD - 1; ++number) {
                    const Source from = in(call.input, number);
                    if (at < from.vectors()) {
                        vectors[number] = from.load(at);
                    }
                }
#pragma unroll
                for (u32 number = 0; number < WORLD - 1; ++number) {
                    const u64 length = in(call.input, number).bytes;
                    if (16 * at < length) {
                        Target(places[number], length).store(at, vectors[number]);
                    }
                }
            }
        });
    }

    // A peer's part: what has come of its own share goes to the other peers, and from scratch into the output.
    __device__ __forceinline__ void pass_on(u32 stage) const {
        const u32 number = share_of(comm.rank);
        const Target own = in(call.output, number);
        each_index([&](u32 index) {
            const Range mine = range(index, stage, own.vectors());
            const bool scratch = uses_scratch(comm.rank);
            const Source from = scratch ? Source(slot(comm.rank, call.root, index, stage) - 16 * begin(index, stage),
                                                 16 * share)
                                        : Source(own.begin, own.bytes);
            char* places[WORLD - 1];
#pragma unroll
            for (u32 other = 0; other < WORLD - 1; ++other) {
                const u32 peer = owner(other);
                const bool stays = peer == comm.rank;
                places[other] = !stays ? place(peer, number, index, stage) : scratch ? own.begin : nullptr;
            }
            auto load = [&](u64 at) { return from.load(at); };
            auto store = [&](u64 at, uint4 vector) {
#pragma unroll
                for (u32 other = 0; other < WORLD - 1; ++other) {
                    if (places[other] != nullptr) {
                        Target(places[other], own.bytes).store(at, vector);
                    }
                }
            };
            copy_unrolled<UNROLL>(mine.from + threadIdx.x, mine.to, blockDim.x, load, store);
        });
    }

    // Copies from scratch into the output what the other peers have passed on of a stage.
    __device__ __forceinline__ void collect(u32 stage) const {
#pragma unroll 1
        for (u32 distance = 1; distance < WORLD; ++distance) {
            const u32 peer = comm.after(distance);
            if (peer == call.root) {
                continue;
            }
            const Target place = in(call.output, share_of(peer));
            each_index([&](u32 index) {
                const Range some = range(index, stage, place.vectors());
                const char* arrived = slot(comm.rank, peer, index, stage);
                copy_unrolled<UNROLL>(
                    some.from + threadIdx.x, some.to, blockDim.x,
                    [&](u64 at) { return load_plain(arrived + 16 * (at - some.from)); },
                    [&](u64 at, uint4 vector) { place.store(at, vector); });
            });
        }
    }

    __device__ __forceinline__ bool run_root() const {
#pragma unroll 1
        for (u32 stage = 0; stage < count; ++stage) {
            // This half of the scratch held the stage before the last.
            if (stage >= 2 && !await_flags(session, peer_blocks, FINISHED, stage - 1, RESULT,
                                           [&](u32 peer) { return uses_scratch(peer); })) {
                return false;
            }
            scatter(stage);
            raise_flags(session, peer_blocks, ARRIVED, stage + 1);
        }
        return true;
    }

    __device__ __forceinline__ bool run_peer() const {
        const bool scratch = uses_scratch(comm.rank);
        auto root = [&](u32 peer) { return peer == call.root; };
        auto others = [&](u32 peer) { return peer != call.root; };
#pragma unroll 1
        for (u32 turn = 0; turn <= count; ++turn) {
            if (turn < count) {
                if (!await_flags(session, peer_blocks, ARRIVED, turn + 1, DATA, root)) {
                    return false;
                }
                // In the turn before, receivers have copied what this half of their scratch held.
                if (turn >= 2 && !await_flags(session, peer_blocks, FINISHED, turn, RESULT, [&](u32 peer) {
                        return others(peer) && uses_scratch(peer);
                    })) {
                    return false;
                }
                pass_on(turn);
                raise_flags(session, peer_blocks, ARRIVED, turn + 1);
            }
            if (scratch && turn >= 1) {
                if (!await_flags(session, peer_blocks, ARRIVED, turn, DATA, others)) {
                    return false;
                }
                collect(turn - 1);
            }
            if (scratch && turn < count) {
                raise_flags(session, peer_blocks, FINISHED, turn + 1);
            }
        }
        if (!await_flags(session, peer_blocks, ARRIVED, count, DATA, others)) {
            return false;
        }
        if (scratch) {
            raise_flags(session, peer_blocks, FINISHED, count + 1);
        }
        return true;
    }

    // False where a peer is missing. The next call uses scratch, too, so what this rank has put there must be read. It
    // need not wait for peers whose outputs are windows: flags of a parity are used again in the call after the next,
    // which needs their handshakes.
    __device__ __forceinline__ bool run() const {
        auto through_scratch = [&](u32 peer) { return peer != call.root && uses_scratch(peer); };
        return (is_root() ? run_root() : run_peer()) &&
               await_flags(session, peer_blocks, FINISHED, count + 1, RESULT, through_scratch);
    }
};

// Tells all peers where this rank's output is. No data is ordered by it: as after a handshake, what this rank's stream
// did before is done.
__device__ __forceinline__ void tell_place(const Session& session, PeerBlocks peer_blocks, u64 place) {
#pragma unroll 1
    for (u32 pair = threadIdx.x; pair < peer_blocks.pairs(); pair += blockDim.x) {
        const u32 peer = pair % WORLD, index = peer_blocks.first + pair / WORLD, rank = session.comm.rank;
        if (peer != rank) {
            const u64 epoch = static_cast<u64>(session.epoch) << 32;
            *static_cast<volatile u64*>(flag_of(session, peer, PLACE_LOW, rank, index)) =
                epoch | static_cast<u32>(place);
            *static_cast<volatile u64*>(flag_of(session, peer, PLACE_HIGH, rank, index)) = epoch | place >> 32;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_broadcast_pipeline(const __grid_constant__ DeviceComm comm, const __grid_constant__ DeviceCall call) {
    __shared__ char* outputs[WORLD];
    Collective collective(comm, call, 0, End::ALONE);
    if (!collective) {
        return;
    }
    const Session& session = collective.session();
    const PeerBlocks peer_blocks = collective.peer_blocks();
    tell_place(session, peer_blocks, call.stride);
    // Nothing is written before all ranks are known to make the same call.
    bool bad = !await_handshakes<false>(session, call);
    if (threadIdx.x < WORLD && !bad) {
        const u32 peer = threadIdx.x;
        u64 place = call.stride;
        if (peer != comm.rank) {
            auto half = [&](u32 kind) {
                bad = bad || !thread_await_flag(session, kind, peer, peer_blocks.first, 0, HANDSHAKE);
                return load_acquire(flag_of(session, comm.rank, kind, peer, peer_blocks.first)) & 0xffffffffu;
            };
            place = half(PLACE_LOW);
            place |= half(PLACE_HIGH) << 32;
        }
        outputs[peer] = place == NO_WINDOW ? nullptr : comm.base + peer * comm.stride + place;
    }
    if (!__syncthreads_or(bad)) {
        Broadcast(session, call, outputs).run();
    }
}
