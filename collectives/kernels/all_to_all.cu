//! All-to-all with any counts. Defines: WORLD, THREADS, SHOTS.
//!
//! How a pair's data travels follows from its count and the receiver's output, which both ranks
//! know alike: little goes as packets into the receiver's inbox, in one hop; more goes straight into
//! an output that is a window, once the receiver's row has come, which says where; and what goes into
//! other outputs passes through the receiver's scratch in rounds.
//!
//! An output is written from the moment on when its rank's row has come: so that rank's stream is
//! past whatever read what the call before left there. The kernel ends when all data has come that
//! rows promised. Flags carry the call's number, so nothing drifts where there is nothing to send.

#include "exchange.cuh"
#include "inbox.cuh"
#include "stages.cuh"

using namespace symmpool;

// Vectors of a rank's own part take a block so much less time than those that leave the device.
constexpr u64 LOCAL_SHARE = 4;

// Where a pair's packets are in the receiver's inbox.
__device__ __forceinline__ u64 slot_vectors(const Comm& comm) {
    return comm.packets_bytes / 2 / 32 / WORLD;
}

__device__ __forceinline__ void send_packets(const Exchange& exchange, const Packets& inbox) {
    const Comm& comm = exchange.session.comm;
    const u64 slot = slot_vectors(comm);
    const char* begins[WORLD];
    u32 lengths[WORLD];
    u32 most = 0;
#pragma unroll
    for (u32 distance = 1; distance < WORLD; ++distance) {
        const u32 peer = comm.after(distance);
        const u64 length = exchange.bytes(exchange.sends(peer));
        begins[distance] = exchange.input(peer);
        lengths[distance] =
            length <= exchange.traffic.packet_bytes ? static_cast<u32>(length) : 0;
        most = lengths[distance] > most ? lengths[distance] : most;
    }
    const u32 vectors = (most + 15) / 16;
    for (u32 at = data_thread(); at < vectors; at += data_threads()) {
        uint4 all[WORLD];
#pragma unroll
        for (u32 distance = 1; distance < WORLD; ++distance) {
            if (16 * at < lengths[distance]) {
                all[distance] = load_any(Source(begins[distance], lengths[distance]), at);
            }
        }
#pragma unroll
        for (u32 distance = 1; distance < WORLD; ++distance) {
            if (16 * at < lengths[distance]) {
                inbox.send(comm, comm.after(distance), comm.rank * slot + at, all[distance]);
            }
        }
    }
}

__device__ __forceinline__ void receive_packets(const Exchange& exchange, const Packets& inbox) {
    const Session& session = exchange.session;
    const Comm& comm = session.comm;
    const u64 slot = slot_vectors(comm);
    char* begins[WORLD];
    u32 lengths[WORLD];
    u32 most = 0;
#pragma unroll
    for (u32 distance = 1; distance < WORLD; ++distance) {
        const u32 peer = comm.after(distance);
        const bool packets =
            exchange.bytes(exchange.receives(peer)) <= exchange.traffic.packet_bytes;
        const Target target = exchange.output(peer);
        begins[distance] = target.begin;
        lengths[distance] = packets ? static_cast<u32>(target.bytes) : 0;
        most = lengths[distance] > most ? lengths[distance] : most;
    }
    const u32 vectors = (most + 15) / 16;
    for (u32 at = data_thread(); at < vectors; at += data_threads()) {
        u32 missing = 0;
#pragma unroll
        for (u32 distance = 1; distance < WORLD; ++distance) {
            missing |= 16 * at < lengths[distance] ? 1u << distance : 0;
        }
        Watch watch;
        while (true) {
            uint4 all[WORLD];
            u32 there = 0;
#pragma unroll
            for (u32 distance = 1; distance < WORLD; ++distance) {
                if (missing >> distance & 1) {
                    const u64 from = comm.after(distance) * slot + at;
                    there |= inbox.receive(comm, from, all[distance]) ? 1u << distance : 0;
                }
            }
#pragma unroll
            for (u32 distance = 1; distance < WORLD; ++distance) {
                if (there >> distance & 1) {
                    Target(begins[distance], lengths[distance]).store(at, all[distance]);
                }
            }
            missing &= ~there;
            if (missing == 0) {
                break;
            }
            if (watch.expired(session, comm.after(__ffs(missing) - 1), DATA)) {
                return;
            }
        }
    }
}

// From here on it pays to keep ranks in step: the links gain what that takes.
constexpr u64 STEP_BYTES = 1 << 20;
// One of so many blocks copies the rank's own part meanwhile.
constexpr u32 OWN_BLOCKS = 12;

// Whether all pairs exchange about as much, and enough, straight: the same answer on every rank.
__device__ __forceinline__ bool even(const Exchange& exchange) {
    const Table& table = exchange.table;
    const u64 some = table.sent(0, WORLD - 1);
    bool other = WORLD < 3 || exchange.bytes(some) < STEP_BYTES || data_blocks() < 2;
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

// A block's share of a copy that so many blocks make, the `nth` of them.
__device__ __forceinline__ void share(const Copy& copy, u32 nth, u32 blocks) {
    const u64 units = copy.units();
    auto bound = [&](u64 block) {
        const u64 unit = (units * block / blocks + 7) / 8 * 8;
        return unit < units ? unit : units;
    };
    copy.run(bound(nth), bound(nth + 1));
}

// One peer after the other, in an order in which no two ranks send to one, and in step.
__device__ __forceinline__ void push_in_step(const Exchange& exchange) {
    const Comm& comm = exchange.session.comm;
    const u32 own = (data_blocks() + OWN_BLOCKS - 1) / OWN_BLOCKS;
    const u32 pushing = data_blocks() - own, block = data_block();
    if (block >= pushing) {
        share(exchange.own(), block - pushing, own);
        return;
    }
    for (u32 distance = 1; distance < WORLD; ++distance) {
        if (distance > 1) {
            keep_step(exchange.session, distance);
        }
        share(exchange.push(comm.after(distance)), block, pushing);
    }
}

// What leaves this rank straight, and its own part, given out to blocks by how long it takes, so
// that all end together whatever the counts. Each peer is served by other blocks at the same time,
// in proportion to what it gets, so that no two ranks turn to one peer first: for counts that differ,
// where steps would be of different length.
__device__ __forceinline__ void push(const Exchange& exchange) {
    const Comm& comm = exchange.session.comm;
    u64* units = exchange.table.units;
    if (SHOTS & STRAIGHT) {
        if (threadIdx.x > 0 && threadIdx.x < WORLD) {
            units[threadIdx.x] = exchange.push(comm.after(threadIdx.x)).units();
        }
        __syncthreads();
    }
    const Copy own = exchange.own();
    u64 total = own.units();
    if (SHOTS & STRAIGHT) {
        for (u32 distance = 1; distance < WORLD; ++distance) {
            total += LOCAL_SHARE * units[distance];
        }
    }
    const u64 begin = total * data_block() / data_blocks();
    const u64 end = total * (data_block() + 1) / data_blocks();
    // A unit belongs to the block in whose stretch it begins; whole lines of 128 bytes stay together.
    u64 before = 0;
    auto bound = [&](u64 at, u64 count, u64 share) {
        const u64 unit = at <= before ? 0 : ((at - before + share - 1) / share + 7) / 8 * 8;
        return unit < count ? unit : count;
    };
    if (SHOTS & STRAIGHT) {
        for (u32 distance = 1; distance < WORLD; ++distance) {
            const u64 count = units[distance];
            const u64 from = bound(begin, count, LOCAL_SHARE), to = bound(end, count, LOCAL_SHARE);
            if (from < to) {
                exchange.push(comm.after(distance)).run(from, to);
            }
            before += LOCAL_SHARE * count;
        }
    }
    own.run(bound(begin, own.units(), 1), bound(end, own.units(), 1));
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
                                           const Traffic& traffic, Table& table) {
    const Exchange exchange{session, call, traffic, table};
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
        const u64 sent = exchange.by_packets(peer, comm.rank)
            ? (exchange.bytes(exchange.table.sent(peer, comm.rank)) + 15) / 16 : 0;
        char* inbox = comm.own() + comm.packets + session.parity() * (comm.packets_bytes / 2);
        const u64 slot = slot_vectors(comm), old = session.epoch - 2;
        for (u64 at = 2 * sent + threadIdx.x; at < 2 * slot; at += blockDim.x) {
            store_plain(inbox + 32 * peer * slot + 16 * at,
                        make_uint4(0, static_cast<u32>(old), static_cast<u32>(old),
                                   static_cast<u32>(old)));
        }
    }
    Used used;
    used.packets = comm.packets_bytes / 2;
    used.flags = blocks * (8 * KINDS * WORLD);
    used.rows = ROWS_BYTES / 2;
    forget_old(session, used);
}

// The whole work of the first block.
__device__ __forceinline__ void attend_exchange(const Exchange& exchange) {
    const Session& session = exchange.session;
    const Traffic& traffic = exchange.traffic;
    Table& table = exchange.table;
    table.fill<(SHOTS & DEVICE) != 0>(session.comm, traffic);
    enter<ROWS>(session, exchange.call);
    table.show(session);
    session.advance();
    compare(session, exchange.call);
    if (!table.await(session)) {
        return;
    }
    if (!table.agreed()) {
        if (threadIdx.x == 0) {
            report_counts(session, table);
        }
        return;
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
    // Not only where counts are on the device: another rank's may be.
    bool amiss = false;
    if (threadIdx.x < WORLD) {
        amiss = table.total(threadIdx.x) > table.words[threadIdx.x][ROOM] ||
                (table.words[threadIdx.x][GRID] & NONSENSE) != 0;
    }
    if (__syncthreads_or(amiss) && threadIdx.x == 0) {
        notice(session, table);
    }
    if (SHOTS & STRAIGHT) {
        await_pushed(exchange);
    }
    if ((session.epoch & 0x3fffffffu) < 2) {
        forget_unused(session, exchange.call, traffic, table);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    symmpool_all_to_all(const __grid_constant__ Comm comm, const __grid_constant__ Call call,
                        const __grid_constant__ Traffic traffic) {
    begin();
    __shared__ Table table;
    Session session(comm);
    if (session.failed) {
        return;
    }
    const Exchange exchange{session, call, traffic, table};
    if (attends()) {
        attend_exchange(exchange);
        return;
    }
    if (ROWS) {
        table.fill<(SHOTS & DEVICE) != 0>(comm, traffic);
    }
    const Packets inbox(session, 0);
    send_packets(exchange, inbox);
    session.advance();
    if (ROWS && (!table.await(session) || !table.agreed())) {
        return;
    }
    if ((SHOTS & STRAIGHT) && even(exchange)) {
        push_in_step(exchange);
    } else {
        push(exchange);
    }
    if (SHOTS & STRAIGHT) {
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
    }
    receive_packets(exchange, inbox);
}
