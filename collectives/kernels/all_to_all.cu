//! All-to-all with any counts. Defines: WORLD, THREADS, SHOTS.
//!
//! How a pair's data travels follows from its count and the receiver's output, which both ranks
//! know alike: its beginning goes as lines into the receiver's inbox, in one hop; the rest, if any, goes
//! straight into an output that is a window, once the receiver's row has come, which says where; and
//! what goes into other outputs passes through the receiver's scratch in rounds.
//!
//! An output is written from the moment on when its rank's row has come: so that rank's stream is
//! past whatever read what the call before left there. The kernel ends when all data has come that
//! rows promised. Flags carry the call's number, so nothing drifts where there is nothing to send.

#include "exchange.cuh"
#include "stages.cuh"

using namespace symmpool;

// Vectors of a rank's own part take a block so much less time than those that leave the device.
constexpr u64 LOCAL_SHARE = 4;

// Lines that a pair has in the receiver's inbox.
__device__ __forceinline__ u64 slot_lines(const Comm& comm) {
    return comm.lines_bytes / 2 / LINE / WORLD;
}

__device__ __forceinline__ char* line_from(const Session& session, u32 owner, u32 from, u64 line) {
    const Comm& comm = session.comm;
    char* inbox = comm.of(owner) + comm.lines + session.parity() * (comm.lines_bytes / 2);
    return inbox + LINE * (from * slot_lines(comm) + line);
}

// Goes through so many lines of every peer. A warp serves one peer at a time, so that its first lines
// take little to find.
template <typename Serve>
__device__ __forceinline__ bool each_line(const Comm& comm, u32 lines, Serve serve) {
    constexpr u32 PEERS = WORLD > 1 ? WORLD - 1 : 1, AT_ONCE = 32 / PARTS;
    if constexpr (WORLD > 1) {
        const u32 items = (lines + AT_ONCE - 1) / AT_ONCE * PEERS;
        for (u32 item = data_thread() / 32; item < items; item += data_threads() / 32) {
            const u32 line = item / PEERS * AT_ONCE + threadIdx.x % 32 / PARTS;
            if (!serve(comm.after(1 + item % PEERS), line, threadIdx.x % PARTS)) {
                return false;
            }
        }
    }
    return true;
}

__device__ __forceinline__ void send_lines(const Exchange& exchange) {
    const Session& session = exchange.session;
    const u32 rank = exchange.rank();
    const u32 most = exchange.most_lines(exchange.plan.send_lines);
    each_line(session.comm, most, [&](u32 peer, u32 line, u32 part) {
        const u64 length = exchange.in_lines(exchange.sends(peer));
        if (u64{line} * PAYLOAD < length) {
            const uint4 piece = load_piece(exchange.input(peer) + u64{line} * PAYLOAD + 16 * part,
                                           piece_bytes(length, line, part));
            store_relaxed(line_from(session, peer, rank, line) + 16 * part,
                          with_flags(piece, part, session.epoch));
        }
        return true;
    });
}

__device__ __forceinline__ bool receive_lines(const Exchange& exchange) {
    const Session& session = exchange.session;
    const u32 rank = exchange.rank();
    const u32 most = exchange.most_lines(exchange.plan.receive_lines);
    return each_line(session.comm, most, [&](u32 peer, u32 line, u32 part) {
        // What the output has no room for is left where it is.
        const Target target = exchange.output(peer);
        const u64 sent = exchange.in_lines(exchange.receives(peer));
        const u64 length = sent < target.bytes ? sent : target.bytes;
        const bool live = u64{line} * PAYLOAD < length;
        const char* from = line_from(session, rank, peer, line) + 16 * part;
        uint4 piece = make_uint4(0, 0, 0, 0);
        Watch watch;
        // Warps stay together.
        while (true) {
            bool missing = false;
            if (live) {
                piece = load_relaxed(from);
                missing = !has_flags(piece, part, session.epoch);
            }
            if (!__any_sync(~0u, missing)) {
                break;
            }
            if (__any_sync(~0u, watch.expired(session, peer, DATA))) {
                return false;
            }
        }
        if (live) {
            store_piece(target.begin + u64{line} * PAYLOAD + 16 * part,
                        piece_bytes(length, line, part), piece);
        }
        return true;
    });
}

// From here on it pays to keep ranks in step: the links gain what that takes.
constexpr u64 STEP_BYTES = 1 << 20;
// One of so many blocks copies the rank's own part meanwhile, which is as long as a peer's.
constexpr u32 OWN_BLOCKS = WORLD > 1 ? 4 * (WORLD - 1) : 1;

// Whether all pairs exchange about as much, and enough, straight: the same answer on every rank.
__device__ __forceinline__ bool even(const Exchange& exchange) {
    const Table& table = exchange.table;
    const u64 some = table.sent(0, WORLD - 1);
    bool other = exchange.bytes(some) < STEP_BYTES || data_blocks() < 2;
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

// `nth` of `parts` equal parts of a number ends where the one after begins.
__device__ __forceinline__ u64 part(u64 whole, u32 nth, u32 parts) {
    // Division of 64 bits takes ten times as long.
    const u64 product = whole * nth;
    return product >> 32 == 0 ? static_cast<u32>(product) / parts : product / parts;
}

// A block's share of a copy that so many blocks make, the `nth` of them.
__device__ __forceinline__ void share(const Route& route, u32 nth, u32 blocks) {
    const Copy copy(route);
    const u64 units = copy.units();
    auto bound = [&](u32 block) {
        const u64 unit = (part(units, block, blocks) + 7) / 8 * 8;
        return unit < units ? unit : units;
    };
    copy.run(bound(nth), bound(nth + 1));
}

// One peer after the other, in an order in which no two ranks send to one, and in step.
__device__ __forceinline__ void push_in_step(const Exchange& exchange) {
    const Plan& plan = exchange.plan;
    const u32 own = (data_blocks() + OWN_BLOCKS - 1) / OWN_BLOCKS;
    const u32 pushing = data_blocks() - own, block = data_block();
    if (block >= pushing) {
        share(plan.routes[0], block - pushing, own);
        return;
    }
#pragma unroll 1
    for (u32 distance = 1; distance < WORLD; ++distance) {
        if (distance > 1) {
            keep_step(exchange.session, distance);
        }
        share(plan.routes[distance], block, pushing);
    }
}

// What leaves this rank straight, and its own part, given out to blocks by how long it takes, so
// that all end together whatever the counts. Each peer is served by other blocks at the same time,
// in proportion to what it gets, so that no two ranks turn to one peer first: for counts that differ,
// where steps would be of different length.
__device__ __forceinline__ void push(const Exchange& exchange) {
    const Plan& plan = exchange.plan;
    u64 total = 0;
#pragma unroll 1
    for (u32 distance = 0; distance < WORLD; ++distance) {
        total += (distance == 0 ? 1 : LOCAL_SHARE) * Copy(plan.routes[distance]).units();
    }
    const u64 begin = part(total, data_block(), data_blocks());
    const u64 end = part(total, data_block() + 1, data_blocks());
    // A unit belongs to the block in whose stretch it begins; whole lines of 128 bytes stay together.
    u64 before = 0;
    // The own part comes last.
#pragma unroll 1
    for (u32 turn = 1; turn <= WORLD; ++turn) {
        const u32 distance = turn % WORLD;
        const Copy copy(plan.routes[distance]);
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
                                           const Traffic& traffic, Table& table, Plan& plan) {
    const Exchange exchange{session, call, traffic, table, plan};
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
        const u64 lines = lines_of(exchange.in_lines(exchange.table.sent(peer, comm.rank)));
        forget_bytes(session, line_from(session, comm.rank, peer, lines),
                     LINE * (slot_lines(comm) - lines));
    }
    Used used;
    used.lines = comm.lines_bytes / 2;
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
    if (shows_place()) {
        table.show<COUNTED, ROW_WORDS>(session, threadIdx.x % 32, 32);
    }
    table.show<0, COUNTED>(session, threadIdx.x, blockDim.x);
    enter<false>(session, exchange.call);
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
                    static_cast<u32*>(to)[threadIdx.x] = static_cast<u32>(value);
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
        forget_unused(session, exchange.call, traffic, table, exchange.plan);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_all_to_all(const __grid_constant__ Comm comm, const __grid_constant__ Call call,
                        const __grid_constant__ Traffic traffic) {
    begin();
    __shared__ Table table;
    __shared__ Plan plan;
    Session session(comm);
    // Before the answer of that load is looked at: counts on the device are a load as well. And who sees
    // where this rank's output is may write it; while nothing else is on its way, a fence is short.
    if (ROWS && attends() && shows_place()) {
        fence();
    }
    if (ROWS || attends()) {
        table.fill<(SHOTS & DEVICE) != 0>(comm, traffic);
    }
    if (session.failed) {
        return;
    }
    const Exchange exchange{session, call, traffic, table, plan};
    if (attends()) {
        attend_exchange(exchange);
        return;
    }
    exchange.plan_sends();
    send_lines(exchange);
    session.advance();
    if (ROWS && (!table.await<0, COUNTED, false, false>(session, call) || !table.agreed())) {
        return;
    }
    if (!exchange.plan_receives()) {
        share(plan.routes[0], data_block(), data_blocks());
    } else if (SHOTS & STRAIGHT) {
        if (!table.await<COUNTED, ROW_WORDS, false, true>(session, call)) {
            return;
        }
        exchange.plan_routes();
        if (even(exchange)) {
            push_in_step(exchange);
        } else {
            push(exchange);
        }
        // Meanwhile what was stored is on its way still.
        if (!receive_lines(exchange)) {
            return;
        }
        raise_pushed(exchange);
        bool staged = false;
        for (u32 peer = 0; peer < WORLD; ++peer) {
            staged = staged || exchange.staged(comm.rank, peer) || exchange.staged(peer, comm.rank);
        }
        for (u32 stage = data_block(); staged && stage < STAGES; stage += data_blocks()) {
            if (!run_stage(exchange, stage)) {
                return;
            }
        }
        return;
    }
    receive_lines(exchange);
}
