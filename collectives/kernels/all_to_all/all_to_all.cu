//! All-to-all with any counts. Defines: WORLD, THREADS, SHOTS.
//!
//! How a pair's data travels follows from its count and the receiver's output, which both ranks
//! know alike: its beginning, or all of it, goes into the receiver's inbox, in one hop; the rest, if any,
//! goes straight into an output that is a window, once the receiver's row has come, which says where; and
//! what goes into other outputs passes through the receiver's scratch in rounds.
//!
//! An output is written from the moment on when its rank's row has come: so that rank's stream is
//! past whatever read what the call before left there. The kernel ends when all data has come that
//! rows promised. Flags carry the call's number, so nothing drifts where there is nothing to send.

#include "all_to_all/inbox_pipeline.cuh"
#include "all_to_all/scratch_pipeline.cuh"

using namespace symmpool;

// Vectors of a rank's own part take a block so much less time than those that leave the device.
constexpr u64 LOCAL_SHARE = 4;

// From here on it pays to keep ranks in step: the links gain what that takes.
constexpr u64 STEP_BYTES = 1 << 20;
// One of so many blocks copies the rank's own part meanwhile, which is as long as a peer's.
constexpr u32 OWN_BLOCKS = WORLD > 1 ? 4 * (WORLD - 1) : 1;

// Whether all pairs exchange about as much, and enough, straight: the same answer on every rank.
__device__ __forceinline__ bool is_even(const Exchange& exchange) {
    const TrafficMatrix& matrix = exchange.matrix;
    const u64 some = matrix.sent(0, WORLD - 1);
    bool other = exchange.bytes(some) < STEP_BYTES;
    for (u32 pair = threadIdx.x; pair < WORLD * WORLD; pair += blockDim.x) {
        const u32 from = pair / WORLD, to = pair % WORLD;
        const u64 count = matrix.sent(from, to);
        const bool alike = exchange.direct(from, to) && count <= some + some / 16 &&
                           some <= count + count / 16;
        other = other || (from != to && !alike) ||
                static_cast<u32>(matrix.words[to][GRID_WORD]) != worker_blocks();
    }
    return !__syncthreads_or(other);
}

// One peer after the other, in an order in which no two ranks send to one, and in step.
__device__ __forceinline__ void push_in_step(const Exchange& exchange) {
    const u32 own = (worker_blocks() + OWN_BLOCKS - 1) / OWN_BLOCKS;
    const u32 pushing = worker_blocks() - own, block = worker_block();
    if (block >= pushing) {
        share(exchange.transfers[0], block - pushing, own);
        return;
    }
    const PeerBlocks peer_blocks(worker_blocks());
#pragma unroll 1
    for (u32 distance = 1; distance < WORLD; ++distance) {
        if (distance > 1) {
            keep_step(exchange.session, peer_blocks, distance);
        }
        // The next step is announced when seven eighths are done.
#pragma unroll 1
        for (u32 from = 0; from < 8; from += 7) {
            shares(exchange.transfers[distance], 8 * block + from, 8 * block + (from == 0 ? 7 : 8),
                   8 * pushing);
            if (from == 0 && distance + 1 < WORLD) {
                announce_step(exchange.session, peer_blocks, distance + 1);
            }
        }
    }
}

// What leaves this rank straight, and its own part, given out to blocks by how long it takes, so
// that all end together whatever the counts. Each peer is served by other blocks at the same time,
// in proportion to what it gets, so that no two ranks turn to one peer first: for counts that differ,
// where steps would be of different length. A block's one of so many turns; stages copy the own part, if there
// are any.
__device__ __forceinline__ void push(const Transfers& transfers, bool uses_scratch, u32 blocks, u32 turn,
                                     u32 turns) {
    u64 total = 0;
#pragma unroll 1
    for (u32 distance = uses_scratch; distance < WORLD; ++distance) {
        total += (distance == 0 ? 1 : LOCAL_SHARE) * Copy(transfers[distance]).units();
    }
    const u64 first = part(total, worker_block(), blocks);
    const u64 length = part(total, worker_block() + 1, blocks) - first;
    const u64 begin = first + part(length, turn, turns), end = first + part(length, turn + 1, turns);
    // A unit belongs to the stretch in which it begins; whole lines of 128 bytes stay together.
    u64 before = 0;
    // The own part comes last.
#pragma unroll 1
    for (u32 next = 1; next <= WORLD - uses_scratch; ++next) {
        const u32 distance = next % WORLD;
        const Copy copy(transfers[distance]);
        const u64 count = copy.units(), share = distance == 0 ? 1 : LOCAL_SHARE;
        auto bound = [&](u64 at) {
            const u64 unit = at <= before ? 0 : ((at - before + share - 1) / share + 7) / 8 * 8;
            return unit < count ? unit : count;
        };
        copy.run(bound(begin), bound(end));
        before += share * count;
    }
}

// After the block's stores so far (rule S3), every peer that gets something straight is told.
__device__ __forceinline__ void raise_direct_flags(const Exchange& exchange) {
    const Session& session = exchange.session;
    const u32 peer = threadIdx.x;
    __syncthreads();
    if (peer < WORLD && exchange.direct(exchange.rank(), peer)) {
        fence();
        store_release(flag_of(session, peer, ARRIVED, exchange.rank(), worker_block()),
                      static_cast<u64>(session.epoch) << 32 | 1);
    }
}

// By one block: until every block of every rank that sends straight to this one has told.
__device__ __forceinline__ void await_direct_flags(const Exchange& exchange) {
    const u32 rank = exchange.rank();
    for (u32 distance = 1; distance < WORLD; ++distance) {
        const u32 peer = exchange.session.comm.after(distance);
        if (exchange.direct(peer, rank)) {
            const u32 blocks = static_cast<u32>(exchange.matrix.words[peer][GRID_WORD]);
            for (u32 block = threadIdx.x; block < blocks; block += blockDim.x) {
                if (!thread_await_flag(exchange.session, ARRIVED, peer, block, 1, RESULT)) {
                    return;
                }
            }
        }
    }
}

// What ranks wrote two calls ago in places that this one does not use; see `forget_old`.
__device__ __noinline__ void expire_unused(const Session& session, const Call& call,
                                           const Traffic& traffic, TrafficMatrix& matrix, Transfers& transfers) {
    const Exchange exchange{session, call, traffic, matrix, transfers};
    const Comm& comm = session.comm;
    u64 blocks = SHOTS & DIRECT ? STAGES : 0;
    for (u32 peer = 0; peer < WORLD; ++peer) {
        if (peer == comm.rank) {
            continue;
        }
        if (exchange.direct(peer, comm.rank)) {
            const u64 theirs = static_cast<u32>(exchange.matrix.words[peer][GRID_WORD]);
            // Grids are equal where ranks keep step.
            blocks = theirs > blocks ? theirs : blocks;
        }
        const EscapedSlot slot(session, comm.rank, peer);
        const u64 used = items_of(in_inbox(traffic, exchange.matrix.sent(peer, comm.rank)));
        const u64 escape_marks = used * (ITEM / MARK_VECTORS), most = EscapedSlot::length(comm) / MARK_VECTORS;
        expire_bytes(session, reinterpret_cast<char*>(slot.escape_marks + escape_marks), 8 * (most - escape_marks));
    }
    UsedBytes used;
    used.flags = blocks * (8 * FLAG_KINDS * WORLD);
    used.traffic_rows = TRAFFIC_ROWS_BYTES / 2;
    expire_old_flags(session, used);
}

// Whether the thread is of the first block's last warp, which tells peers where this rank's output is.
__device__ __forceinline__ bool sends_place() { return threadIdx.x / 32 == blockDim.x / 32 - 1; }

// The whole work of the first block.
__device__ __forceinline__ void run_exchange_leader(const Exchange& exchange) {
    const Session& session = exchange.session;
    const Traffic& traffic = exchange.traffic;
    TrafficMatrix& matrix = exchange.matrix;
    const u32 warp = threadIdx.x / 32, second = blockDim.x > 64 ? 1 : 0;
    if (warp == 0) {
        matrix.send_counts(session);
    }
    if (warp == second) {
        send_handshake<false>(session, exchange.call, threadIdx.x % 32, 32);
    }
    if (sends_place()) {
        matrix.send_place(session, traffic);
    }
    session.advance();
    if (!matrix.await_rows<0, TRAFFIC_ROW_WORDS, true, false>(session, exchange.call)) {
        return;
    }
    // Seldom, so both are asked at once.
    if (__syncthreads_or(matrix.disagrees() || matrix.has_notice())) {
        const bool agreed = matrix.agreed();
        if (threadIdx.x == 0) {
            agreed ? notice(session, matrix) : report_counts(session, matrix);
        }
        if (!agreed) {
            return;
        }
    }
    if (SHOTS & DEVICE_COUNTS) {
        if (threadIdx.x < WORLD) {
            const u64 count = matrix.sent(threadIdx.x, session.comm.rank);
            const u64 offset = matrix.offset(threadIdx.x, session.comm.rank);
            auto put = [&](void* to, u64 value) {
                if (to != nullptr && traffic.wide) {
                    static_cast<u64*>(to)[threadIdx.x] = value;
                } else if (to != nullptr) {
                    // Behind the longest output there can be, whose overflow is told.
                    static_cast<u32*>(to)[threadIdx.x] =
                        value < MAX_NARROW_OFFSET ? static_cast<u32>(value) : MAX_NARROW_OFFSET;
                }
            };
            put(traffic.received, count);
            put(traffic.offsets, offset);
        }
    }
    if (SHOTS & DIRECT) {
        await_direct_flags(exchange);
    }
    if ((session.epoch & 0x3fffffffu) < 2) {
        expire_unused(session, exchange.call, traffic, matrix, exchange.transfers);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_all_to_all(const __grid_constant__ Comm comm, const __grid_constant__ Call call,
                        const __grid_constant__ Traffic traffic) {
    __shared__ TrafficMatrix matrix;
    __shared__ Transfers transfers;
    // Where registers are few, in shared memory.
    __shared__ WorkAssignment shared[2][NEEDS_ROWS ? THREADS / 32 : 1];
    WorkAssignment mine[2];
    WorkAssignment& sends = NEEDS_ROWS ? shared[0][threadIdx.x / 32] : mine[0];
    WorkAssignment& receives = NEEDS_ROWS ? shared[1][threadIdx.x / 32] : mine[1];
    u32 direct_blocks = 0;
    // While the kernel before this one may still run.
    if (!(SHOTS & DEVICE_COUNTS)) {
        if (SHOTS & DIRECT) {
            direct_blocks = count_direct_blocks(comm, traffic, [&](u32 pair) {
                const u32 peer = pair % WORLD;
                return pair < WORLD ? traffic.send[peer] : pair < 2 * WORLD ? traffic.receive[peer] : 0;
            });
        }
        sends = assign_work<true>(comm, traffic, direct_blocks);
        __syncwarp();
    }
    if (!NEEDS_ROWS) {
        receives = assign_work<false>(comm, traffic, direct_blocks);
    }
    begin(comm.early);
    Session session(comm);
    // Before the answer of that load is looked at: counts on the device are a load as well. And who sees
    // where this rank's output is may write it; while nothing else is on its way, a fence is short.
    if (NEEDS_ROWS && is_leader_block() && sends_place()) {
        fence();
    }
    const Splits splits = Splits::of<(SHOTS & DEVICE_COUNTS) != 0>(traffic);
    if ((NEEDS_ROWS || is_leader_block()) && threadIdx.x < 32) {
        matrix.fill(comm, traffic, splits);
    }
    if (session.failed) {
        return;
    }
    const Exchange exchange{session, call, traffic, matrix, transfers};
    if (is_leader_block()) {
        run_exchange_leader(exchange);
        return;
    }
    if (SHOTS & DEVICE_COUNTS) {
        direct_blocks = count_direct_blocks(comm, traffic, [&](u32 pair) { return splits.to(pair); });
        sends = assign_work(comm, traffic, splits, direct_blocks);
        __syncwarp();
    }
    Outgoing outgoing(exchange, sends);
    outgoing.send_next();
    session.advance();
    if (NEEDS_ROWS && !matrix.await_rows<0, COUNT_WORDS, false, false>(session, call)) {
        return;
    }
    const bool more = exchange.has_more();
    bool uneven = false, uses_scratch = false;
    if ((SHOTS & DIRECT) && more) {
        // What peers' memory gets is what they expect.
        if (!matrix.agreed() || !matrix.await_rows<COUNT_WORDS, TRAFFIC_ROW_WORDS, false, true>(session, call) ||
            !matrix.equal_element_sizes(traffic)) {
            return;
        }
        exchange.plan_transfers();
        uses_scratch = exchange.has_scratch_stages();
        // One block copies the own part in a ring.
        uneven = worker_blocks() < 2 || uses_scratch || !(traffic.ring || is_even(exchange));
        if (!uneven) {
            push_in_step(exchange);
        } else if (worker_block() < direct_blocks) {
            push(transfers, uses_scratch, direct_blocks, 0, 1);
        }
    }
    const bool own = !more && exchange.pipelines_own();
    if (NEEDS_ROWS) {
        receives = exchange.incoming(direct_blocks, own);
        __syncwarp();
    } else {
        share(exchange.own(), worker_block(), worker_blocks());
    }
    // What goes straight and what goes through inboxes advance together, in other blocks or in turns: who
    // waits for much in one way needs the links from the beginning. What was stored straight last is on its way still while the last
    // round is taken.
    const bool passed = run_inbox_pipeline(outgoing, receives, [&](u32 turn, u32 turns) {
        if (uneven && direct_blocks == 0) {
            push(transfers, uses_scratch, worker_blocks(), turn, turns);
        } else if (NEEDS_ROWS && turn == 0 && !more && !own) {
            share(exchange.own(), worker_block(), worker_blocks());
        }
    });
    if (!passed || !(SHOTS & DIRECT) || !more) {
        return;
    }
    raise_direct_flags(exchange);
    for (u32 stage = worker_block(); uses_scratch && stage < STAGES; stage += worker_blocks()) {
        if (!run_stage(exchange, stage)) {
            return;
        }
    }
}
