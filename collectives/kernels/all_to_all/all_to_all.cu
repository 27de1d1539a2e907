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
__device__ __forceinline__ bool even(const Exchange& exchange) {
    const Table& table = exchange.table;
    const u64 some = table.sent(0, WORLD - 1);
    bool other = exchange.bytes(some) < STEP_BYTES;
    for (u32 pair = threadIdx.x; pair < WORLD * WORLD; pair += blockDim.x) {
        const u32 from = pair / WORLD, to = pair % WORLD;
        const u64 count = table.sent(from, to);
        const bool alike = exchange.straight(from, to) && count <= some + some / 16 &&
                           some <= count + count / 16;
        other = other || (from != to && !alike) ||
                static_cast<u32>(table.words[to][GRID]) != data_blocks();
    }
    return !__syncthreads_or(other);
}

// One peer after the other, in an order in which no two ranks send to one, and in step.
__device__ __forceinline__ void push_in_step(const Exchange& exchange) {
    const u32 own = (data_blocks() + OWN_BLOCKS - 1) / OWN_BLOCKS;
    const u32 pushing = data_blocks() - own, block = data_block();
    if (block >= pushing) {
        share(exchange.routes[0], block - pushing, own);
        return;
    }
    const Teams teams(data_blocks());
#pragma unroll 1
    for (u32 distance = 1; distance < WORLD; ++distance) {
        if (distance > 1) {
            keep_step(exchange.session, teams, distance);
        }
        // The next step is announced when seven eighths are done.
#pragma unroll 1
        for (u32 from = 0; from < 8; from += 7) {
            shares(exchange.routes[distance], 8 * block + from, 8 * block + (from == 0 ? 7 : 8),
                   8 * pushing);
            if (from == 0 && distance + 1 < WORLD) {
                announce_step(exchange.session, teams, distance + 1);
            }
        }
    }
}

// What leaves this rank straight, and its own part, given out to blocks by how long it takes, so
// that all end together whatever the counts. Each peer is served by other blocks at the same time,
// in proportion to what it gets, so that no two ranks turn to one peer first: for counts that differ,
// where steps would be of different length. A block's one of so many turns; stages copy the own part, if there
// are any.
__device__ __forceinline__ void push(const Routes& routes, bool staged, u32 blocks, u32 turn,
                                     u32 turns) {
    u64 total = 0;
#pragma unroll 1
    for (u32 distance = staged; distance < WORLD; ++distance) {
        total += (distance == 0 ? 1 : LOCAL_SHARE) * Copy(routes[distance]).units();
    }
    const u64 first = part(total, data_block(), blocks);
    const u64 length = part(total, data_block() + 1, blocks) - first;
    const u64 begin = first + part(length, turn, turns), end = first + part(length, turn + 1, turns);
    // A unit belongs to the stretch in which it begins; whole lines of 128 bytes stay together.
    u64 before = 0;
    // The own part comes last.
#pragma unroll 1
    for (u32 next = 1; next <= WORLD - staged; ++next) {
        const u32 distance = next % WORLD;
        const Copy copy(routes[distance]);
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
__device__ __forceinline__ void raise_pushed(const Exchange& exchange) {
    const Session& session = exchange.session;
    const u32 peer = threadIdx.x;
    __syncthreads();
    if (peer < WORLD && exchange.straight(exchange.rank(), peer)) {
        fence();
        store_release(flag_of(session, peer, ARRIVED, exchange.rank(), data_block()),
                      static_cast<u64>(session.epoch) << 32 | 1);
    }
}

// By one block: until every block of every rank that sends straight to this one has told.
__device__ __forceinline__ void await_pushed(const Exchange& exchange) {
    const u32 rank = exchange.rank();
    for (u32 distance = 1; distance < WORLD; ++distance) {
        const u32 peer = exchange.session.comm.after(distance);
        if (exchange.straight(peer, rank)) {
            const u32 blocks = static_cast<u32>(exchange.table.words[peer][GRID]);
            for (u32 block = threadIdx.x; block < blocks; block += blockDim.x) {
                if (!await_raised(exchange.session, ARRIVED, peer, block, 1, RESULT)) {
                    return;
                }
            }
        }
    }
}

// What ranks wrote two calls ago in places that this one does not use; see `forget_old`.
__device__ __noinline__ void forget_unused(const Session& session, const Call& call,
                                           const Traffic& traffic, Table& table, Routes& routes) {
    const Exchange exchange{session, call, traffic, table, routes};
    const Comm& comm = session.comm;
    u64 blocks = SHOTS & STRAIGHT ? STAGES : 0;
    for (u32 peer = 0; peer < WORLD; ++peer) {
        if (peer == comm.rank) {
            continue;
        }
        if (exchange.straight(peer, comm.rank)) {
            const u64 theirs = static_cast<u32>(exchange.table.words[peer][GRID]);
            // Grids are equal where ranks keep step.
            blocks = theirs > blocks ? theirs : blocks;
        }
        const Slot slot(session, comm.rank, peer);
        const u64 used = items_of(in_inbox(traffic, exchange.table.sent(peer, comm.rank)));
        const u64 marks = used * (ITEM / LINE_VECTORS), most = Slot::length(comm) / LINE_VECTORS;
        forget_bytes(session, reinterpret_cast<char*>(slot.marks + marks), 8 * (most - marks));
    }
    Used used;
    used.flags = blocks * (8 * KINDS * WORLD);
    used.rows = ROWS_BYTES / 2;
    forget_old(session, used);
}

// Whether the thread is of the first block's last warp, which tells peers where this rank's output is.
__device__ __forceinline__ bool shows_place() { return threadIdx.x / 32 == blockDim.x / 32 - 1; }

// The whole work of the first block.
__device__ __forceinline__ void attend_exchange(const Exchange& exchange) {
    const Session& session = exchange.session;
    const Traffic& traffic = exchange.traffic;
    Table& table = exchange.table;
    const u32 warp = threadIdx.x / 32, second = blockDim.x > 64 ? 1 : 0;
    if (warp == 0) {
        table.show_counts(session);
    }
    if (warp == second) {
        enter<false>(session, exchange.call, threadIdx.x % 32, 32);
    }
    if (shows_place()) {
        table.show_place(session, traffic);
    }
    session.advance();
    if (!table.await<0, ROW_WORDS, true, false>(session, exchange.call)) {
        return;
    }
    // Seldom, so both are asked at once.
    if (__syncthreads_or(table.disagrees() || table.amiss())) {
        const bool agreed = table.agreed();
        if (threadIdx.x == 0) {
            agreed ? notice(session, table) : report_counts(session, table);
        }
        if (!agreed) {
            return;
        }
    }
    if (SHOTS & DEVICE) {
        if (threadIdx.x < WORLD) {
            const u64 count = table.sent(threadIdx.x, session.comm.rank);
            const u64 offset = table.offset(threadIdx.x, session.comm.rank);
            auto put = [&](void* to, u64 value) {
                if (to != nullptr && traffic.wide) {
                    static_cast<u64*>(to)[threadIdx.x] = value;
                } else if (to != nullptr) {
                    // Behind the longest output there can be, whose overflow is told.
                    static_cast<u32*>(to)[threadIdx.x] =
                        value < NARROWEST ? static_cast<u32>(value) : NARROWEST;
                }
            };
            put(traffic.received, count);
            put(traffic.offsets, offset);
        }
    }
    if (SHOTS & STRAIGHT) {
        await_pushed(exchange);
    }
    if ((session.epoch & 0x3fffffffu) < 2) {
        forget_unused(session, exchange.call, traffic, table, exchange.routes);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_all_to_all(const __grid_constant__ Comm comm, const __grid_constant__ Call call,
                        const __grid_constant__ Traffic traffic) {
    __shared__ Table table;
    __shared__ Routes routes;
    // Where registers are few, in shared memory.
    __shared__ Lot shared[2][ROWS ? THREADS / 32 : 1];
    Lot mine[2];
    Lot& sends = ROWS ? shared[0][threadIdx.x / 32] : mine[0];
    Lot& receives = ROWS ? shared[1][threadIdx.x / 32] : mine[1];
    u32 apart = 0;
    // While the kernel before this one may still run.
    if (!(SHOTS & DEVICE)) {
        if (SHOTS & STRAIGHT) {
            apart = blocks_apart(comm, traffic, [&](u32 pair) {
                const u32 peer = pair % WORLD;
                return pair < WORLD ? traffic.send[peer] : pair < 2 * WORLD ? traffic.receive[peer] : 0;
            });
        }
        sends = lot_of<true>(comm, traffic, apart);
        __syncwarp();
    }
    if (!ROWS) {
        receives = lot_of<false>(comm, traffic, apart);
    }
    begin(comm.early);
    Session session(comm);
    // Before the answer of that load is looked at: counts on the device are a load as well. And who sees
    // where this rank's output is may write it; while nothing else is on its way, a fence is short.
    if (ROWS && attends() && shows_place()) {
        fence();
    }
    const Splits splits = Splits::of<(SHOTS & DEVICE) != 0>(traffic);
    if ((ROWS || attends()) && threadIdx.x < 32) {
        table.fill(comm, traffic, splits);
    }
    if (session.failed) {
        return;
    }
    const Exchange exchange{session, call, traffic, table, routes};
    if (attends()) {
        attend_exchange(exchange);
        return;
    }
    if (SHOTS & DEVICE) {
        apart = blocks_apart(comm, traffic, [&](u32 pair) { return splits.to(pair); });
        sends = lot_of(comm, traffic, splits, apart);
        __syncwarp();
    }
    Outgoing outgoing(exchange, sends);
    outgoing.send_next();
    session.advance();
    if (ROWS && !table.await<0, COUNTED, false, false>(session, call)) {
        return;
    }
    const bool more = exchange.has_more();
    bool uneven = false, staged = false;
    if ((SHOTS & STRAIGHT) && more) {
        // What peers' memory gets is what they expect.
        if (!table.agreed() || !table.await<COUNTED, ROW_WORDS, false, true>(session, call) ||
            !table.one_size(traffic)) {
            return;
        }
        exchange.plan_routes();
        staged = exchange.has_stages();
        // One block copies the own part in a ring.
        uneven = data_blocks() < 2 || staged || !(traffic.ring || even(exchange));
        if (!uneven) {
            push_in_step(exchange);
        } else if (data_block() < apart) {
            push(routes, staged, apart, 0, 1);
        }
    }
    const bool own = !more && exchange.takes_own();
    if (ROWS) {
        receives = exchange.incoming(apart, own);
        __syncwarp();
    } else {
        share(exchange.own(), data_block(), data_blocks());
    }
    // What goes straight and what goes through inboxes advance together, in other blocks or in turns: who
    // waits for much in one way needs the links from the beginning. What was stored straight last is on its way still while the last
    // round is taken.
    const bool passed = pass(outgoing, receives, [&](u32 turn, u32 turns) {
        if (uneven && apart == 0) {
            push(routes, staged, data_blocks(), turn, turns);
        } else if (ROWS && turn == 0 && !more && !own) {
            share(exchange.own(), data_block(), data_blocks());
        }
    });
    if (!passed || !(SHOTS & STRAIGHT) || !more) {
        return;
    }
    raise_pushed(exchange);
    for (u32 stage = data_block(); staged && stage < STAGES; stage += data_blocks()) {
        if (!run_stage(exchange, stage)) {
            return;
        }
    }
}
