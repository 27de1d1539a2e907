//! All-to-all with any counts. Defines: WORLD, THREADS; DIRECT: whether (1) or not (0) data may go another way than
//! through inboxes; DEVICE_COUNTS: whether counts are on the device.
//!
//! How the data of a pair travels follows from its count and the receiver's output, about which both ranks know the
//! same. Its beginning, or all of it, goes into the receiver's inbox. The rest, if any, goes directly into
//! an output that is a window, after the receiver's row has come, which says where; what is for another
//! output passes through the receiver's scratch in rounds.
//!
//! An output is written only after its rank's row has come: that rank's stream is then past all work that read what the
//! call before left there. The kernel ends when all data has arrived that rows have announced. Flags carry the epoch, so
//! no counts can drift apart where there is nothing to send.

#include "all_to_all/inbox_pipeline.cuh"
#include "all_to_all/scratch_pipeline.cuh"

using namespace symmpool;

// A vector that leaves the device takes a block this many times as long as one of the rank's own part.
constexpr u64 PEER_WEIGHT = 4;

// Parts of at least this many bytes are sent in step: what links gain is more than what keeping step takes.
constexpr u64 STEP_BYTES = 1 << 20;
// One of this many blocks copies the rank's own part meanwhile, which is as long as that of a peer.
constexpr u32 OWN_BLOCKS = WORLD > 1 ? 4 * (WORLD - 1) : 1;

// Whether all pairs exchange about the same amount of data, enough of it, and all of it directly. The answer is the same
// on every rank.
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

// Sends direct data to one peer after the other, in an order in which no two ranks send to one peer, and in step.
__device__ __forceinline__ void push_in_step(const Exchange& exchange) {
    const u32 own = (worker_blocks() + OWN_BLOCKS - 1) / OWN_BLOCKS;
    const u32 pushing = worker_blocks() - own, block = worker_block();
    if (block >= pushing) {
        copy_piece(exchange.transfers[0], block - pushing, own);
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
            copy_pieces(exchange.transfers[distance], 8 * block + from, 8 * block + (from == 0 ? 7 : 8),
                        8 * pushing);
            if (from == 0 && distance + 1 < WORLD) {
                announce_step(exchange.session, peer_blocks, distance + 1);
            }
        }
    }
}

// Sends direct data where counts differ, so that steps would be of different length, and copies this rank's own part,
// unless stages of scratch do. The work is divided among blocks by how long it takes, so that all end together. Peers
// are served by different blocks at the same time, in proportion to what each gets, so that ranks do not all turn to one
// peer first. Does one of `turns` turns of the block's work.
__device__ __forceinline__ void push(const Transfers& transfers, bool uses_scratch, u32 blocks, u32 turn,
                                     u32 turns) {
    u64 total = 0;
#pragma unroll 1
    for (u32 distance = uses_scratch; distance < WORLD; ++distance) {
        total += (distance == 0 ? 1 : PEER_WEIGHT) * Copy(transfers[distance]).units();
    }
    const u64 first = fraction(total, worker_block(), blocks);
    const u64 length = fraction(total, worker_block() + 1, blocks) - first;
    const u64 begin = first + fraction(length, turn, turns), end = first + fraction(length, turn + 1, turns);
    // A unit belongs to the turn in which it begins; whole lines of 128 bytes stay together.
    u64 before = 0;
    // The own part comes last.
#pragma unroll 1
    for (u32 next = 1; next <= WORLD - uses_scratch; ++next) {
        const u32 distance = next % WORLD;
        const Copy copy(transfers[distance]);
        const u64 count = copy.units(), weight = distance == 0 ? 1 : PEER_WEIGHT;
        auto bound = [&](u64 at) {
            const u64 unit = at <= before ? 0 : ((at - before + weight - 1) / weight + 7) / 8 * 8;
            return unit < count ? unit : count;
        };
        copy.run(bound(begin), bound(end));
        before += weight * count;
    }
}

// Raises this block's flag on every peer to which this rank sends data directly, after all that the block has stored so
// far (rule S3).
__device__ __forceinline__ void raise_direct_flags(const Exchange& exchange) {
    const Session& session = exchange.session;
    const u32 peer = threadIdx.x;
    __syncthreads();
    if (peer < WORLD && exchange.direct(exchange.rank(), peer)) {
        store_release(flag_of(session, peer, ARRIVED, exchange.rank(), worker_block()),
                      static_cast<u64>(session.epoch) << 32 | 1);
    }
}

// Waits for every block of every rank that sends data directly to this one. Called by all threads of the leader block.
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

// Expires old flags of this kernel, which also uses rows of the traffic matrix and escape marks.
__device__ __noinline__ void expire_unused(const Session& session, const CallParams& call,
                                           const Traffic& traffic, TrafficMatrix& matrix, Transfers& transfers) {
    const Exchange exchange{session, call, traffic, matrix, transfers};
    const Comm& comm = session.comm;
    u64 blocks = DIRECT ? MAX_STAGE_BLOCKS : 0;
    for (u32 peer = 0; peer < WORLD; ++peer) {
        if (peer == comm.rank) {
            continue;
        }
        if (exchange.direct(peer, comm.rank)) {
            const u64 theirs = static_cast<u32>(exchange.matrix.words[peer][GRID_WORD]);
            // Flags of steps need no more: where ranks keep step, grids are equal.
            blocks = theirs > blocks ? theirs : blocks;
        }
        const EscapedSlot slot(session, comm.rank, peer);
        const u64 used = items_of(in_inbox(traffic, exchange.matrix.sent(peer, comm.rank)));
        const u64 marks = used * (ITEM / MARK_VECTORS), most = EscapedSlot::length(comm) / MARK_VECTORS;
        expire_bytes(session, reinterpret_cast<char*>(slot.escape_marks + marks), 8 * (most - marks));
    }
    UsedBytes used;
    used.flags = blocks * (8 * FLAG_KINDS * WORLD);
    used.traffic_rows = TRAFFIC_ROWS_BYTES / 2;
    expire_old_flags(session, used);
}

// Whether this thread is in the warp of the leader block that sends the peers where this rank's output is: the last.
__device__ __forceinline__ bool sends_place() { return threadIdx.x / 32 == blockDim.x / 32 - 1; }

// All that the leader block does.
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
    // Both are rare, so one vote serves both.
    if (__syncthreads_or(matrix.disagrees() || matrix.has_async_error())) {
        const bool agreed = matrix.agreed();
        if (threadIdx.x == 0) {
            agreed ? write_first_async_error(session, matrix) : report_counts(session, matrix);
        }
        if (!agreed) {
            return;
        }
    }
    if (DEVICE_COUNTS) {
        if (threadIdx.x < WORLD) {
            const u64 count = matrix.sent(threadIdx.x, session.comm.rank);
            const u64 offset = matrix.offset(threadIdx.x, session.comm.rank);
            auto put = [&](void* to, u64 value) {
                if (to != nullptr && traffic.wide) {
                    static_cast<u64*>(to)[threadIdx.x] = value;
                } else if (to != nullptr) {
                    // More than any output holds, so the overflow is reported.
                    static_cast<u32*>(to)[threadIdx.x] =
                        value < MAX_NARROW_OFFSET ? static_cast<u32>(value) : MAX_NARROW_OFFSET;
                }
            };
            put(traffic.received, count);
            put(traffic.offsets, offset);
        }
    }
    if (DIRECT) {
        await_direct_flags(exchange);
    }
    if (must_expire_flags(session)) {
        expire_unused(session, exchange.call, traffic, matrix, exchange.transfers);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_all_to_all(const __grid_constant__ Comm comm, const __grid_constant__ CallParams call,
                        const __grid_constant__ Traffic traffic) {
    __shared__ TrafficMatrix matrix;
    __shared__ Transfers transfers;
    // In shared memory where registers are few.
    __shared__ WorkAssignment shared[2][NEEDS_ROWS ? THREADS / 32 : 1];
    WorkAssignment mine[2];
    WorkAssignment& sends = NEEDS_ROWS ? shared[0][threadIdx.x / 32] : mine[0];
    WorkAssignment& receives = NEEDS_ROWS ? shared[1][threadIdx.x / 32] : mine[1];
    u32 direct_blocks = 0;
    auto assign = [&] {
        if (!DEVICE_COUNTS) {
            if (DIRECT) {
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
    };
    // The kernel before this one may still be running.
    guess_all_blocks();
    assign();
    begin_kernel(comm.early);
    Session session(comm);
    if (SHARES_SMS) {
        __syncthreads();  // all threads have used the guess
    }
    const SmGrant grant(comm);
    if (grant.is_over()) {
        return;
    }
    if (grant.is_narrow()) {
        assign();
    }
    // A peer that sees where this rank's output is may write it, so this fence comes first; it is short while no stores
    // are under way. Counts on the device are loaded here too, before the state that the session loads is looked at.
    if (NEEDS_ROWS && is_leader_block() && sends_place()) {
        fence();
    }
    const Splits splits = Splits::of<(DEVICE_COUNTS != 0)>(traffic);
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
    if (DEVICE_COUNTS) {
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
    if (DIRECT && more) {
        // Only what peers expect may be written into their memory.
        if (!matrix.agreed() || !matrix.await_rows<COUNT_WORDS, TRAFFIC_ROW_WORDS, false, true>(session, call) ||
            !matrix.equal_element_sizes(traffic)) {
            return;
        }
        exchange.plan_transfers();
        uses_scratch = exchange.has_scratch_stages();
        // In a ring, one of the blocks copies the own part.
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
        copy_piece(exchange.own(), worker_block(), worker_blocks());
    }
    // Direct data and data through inboxes advance together, in different blocks or in turns: a peer that waits for much
    // data of either kind needs the links from the beginning. The last direct stores are still under way while the last
    // round is received.
    const bool passed = run_inbox_pipeline(outgoing, receives, [&](u32 turn, u32 turns) {
        if (uneven && direct_blocks == 0) {
            push(transfers, uses_scratch, worker_blocks(), turn, turns);
        } else if (NEEDS_ROWS && turn == 0 && !more && !own) {
            copy_piece(exchange.own(), worker_block(), worker_blocks());
        }
    });
    if (!passed || !DIRECT || !more) {
        return;
    }
    raise_direct_flags(exchange);
    const u32 stages = uses_scratch ? PipelineStage::count(comm) : 0;
    for (u32 stage = worker_block(); stage < stages; stage += worker_blocks()) {
        if (!run_stage(exchange, stage)) {
            return;
        }
    }
}
