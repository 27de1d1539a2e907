//! How rows travel in a fused all-reduce: a thread sends its units of a row to peers' inboxes, waits for those of peers, and
//! adds them up, and the residual to them. Defines: those of `fused/norm.cuh`.

#pragma once

#include "fused/norm.cuh"
#include "symmpool/impl/inbox.cuh"

namespace symmpool {

// Sends this thread's units of a step to a peer's inbox, behind `at`.
__device__ __forceinline__ void send_units(const Comm& comm, const Inbox& inbox, const Units& units, u32 peer, u64 at,
                                           u32 step, const Unit (&row)[UNITS]) {
#pragma unroll
    for (u32 nth = 0; nth < UNITS; ++nth) {
        const u32 unit = units.index(step, nth);
#pragma unroll
        for (u32 part = 0; unit < units.count && part < PARTS; ++part) {
            inbox.send(comm, peer, at + PARTS * unit + part, row[nth].parts[part]);
        }
    }
}

__device__ __forceinline__ void prepare(Unit (&row)[UNITS]) {
#pragma unroll
    for (u32 nth = 0; nth < UNITS; ++nth) {
#pragma unroll
        for (u32 part = 0; part < PARTS; ++part) {
            row[nth].parts[part] = Inbox::prepare(row[nth].parts[part]);
        }
    }
}

// Waits for one vector of each peer, one after the other, which takes few registers.
__device__ __forceinline__ bool sum_rank_by_rank(const Session& session, const Inbox& inbox, u64 at, u64 each, uint4& own) {
    using Sum = Reduce<DTYPE, SUM>;
    typename Sum::Vector total;
#pragma unroll 1
    for (u32 rank = 0; rank < WORLD; ++rank) {
        uint4 found = own;
        if (rank != session.comm.rank && !await_vector(session, inbox, rank, at + rank * each, found)) {
            return false;
        }
        if (rank == 0) {
            total = Sum::widen(found);
        } else {
            Sum::accumulate(total, found);
        }
    }
    own = Sum::finish(total, WORLD);
    return true;
}

// Waits for this thread's units of a row of a peer, which is at `at` in the inbox. False if they do not arrive.
__device__ __forceinline__ bool await_units(const Session& session, const Inbox& inbox, const Units& units, u32 peer, u64 at,
                                            u32 step, Unit (&row)[UNITS]) {
    Watch watch;
    while (true) {
        bool missing = false;
#pragma unroll
        for (u32 nth = 0; nth < UNITS; ++nth) {
            const u64 place = at + PARTS * units.some_index(step, nth);
#pragma unroll
            for (u32 part = 0; part < PARTS; ++part) {
                missing |= !inbox.receive(session.comm, place + part, row[nth].parts[part]);
            }
        }
        if (!missing) {
            return true;
        }
        if (watch.expired(session, peer, DATA)) {
            return false;
        }
    }
}

// Waits for the same units of all peers, `each` vectors apart in the inbox from `at` on, and puts the sums of all ranks
// into `row`, which holds this rank's own units. False if they do not arrive.
__device__ __forceinline__ bool sum_units(const Session& session, const Inbox& inbox, const Units& units, u64 at, u64 each,
                                          u32 step, Unit (&row)[UNITS]) {
    const Comm& comm = session.comm;
    if constexpr (WORLD == 1) {
        return true;
    }
    if constexpr (WORLD == 2) {
        Unit found[UNITS];
        const u32 peer = 1 - comm.rank;
        if (!await_units(session, inbox, units, peer, at + peer * each, step, found)) {
            return false;
        }
#pragma unroll
        for (u32 nth = 0; nth < UNITS; ++nth) {
            row[nth] = plus(row[nth], found[nth]);
        }
        return true;
    }
    // A thread waits for as many vectors at once as it has registers for.
    constexpr bool RANK_BY_RANK = WORLD > 8 || (!HELD && PARTS > 1);
    constexpr u32 AT_ONCE = !RANK_BY_RANK && UNITS * PARTS * WORLD <= 8 ? UNITS * PARTS : 1;
#pragma unroll
    for (u32 first = 0; first < UNITS * PARTS; first += AT_ONCE) {
        if constexpr (RANK_BY_RANK) {
            uint4& part = row[first / PARTS].parts[first % PARTS];
            const u32 unit = units.index(step, first / PARTS);
            if (unit < units.count &&
                !sum_rank_by_rank(session, inbox, at + PARTS * unit + first % PARTS, each, part)) {
                return false;
            }
            continue;
        }
        // Vectors of all ranks but this one, in the order of ranks. No load depends on which rank this is, so all are under
        // way together.
        constexpr u32 OTHERS = WORLD > 1 ? WORLD - 1 : 1;
        uint4 others[AT_ONCE][OTHERS];
        Watch watch;
        while (true) {
            u32 missing = WORLD;
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; ++i) {
                const u32 part = (first + i) % PARTS, unit = units.some_index(step, (first + i) / PARTS);
#pragma unroll
                for (u32 other = 0; other < OTHERS; ++other) {
                    const u32 rank = other + (other >= comm.rank);
                    const bool there = inbox.receive(comm, at + rank * each + PARTS * unit + part, others[i][other]);
                    missing = there ? missing : rank;
                }
            }
            if (missing == WORLD) {
                break;
            }
            if (watch.expired(session, missing, DATA)) {
                return false;
            }
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; ++i) {
            uint4& own = row[(first + i) / PARTS].parts[(first + i) % PARTS];
            uint4 all[WORLD];
#pragma unroll
            for (u32 rank = 0; rank < WORLD; ++rank) {
                const uint4 before = others[i][rank < OTHERS ? rank : 0], behind = others[i][rank > 0 ? rank - 1 : 0];
                all[rank] = rank == comm.rank ? own : rank < comm.rank ? before : behind;
            }
            own = Reduce<DTYPE, SUM>::all(all);
        }
    }
    return true;
}

// This thread's units of the residual, which are loaded before they are needed.
struct Residual {
    Unit units[UNITS];

    __device__ __forceinline__ Residual(const NormWork& work, const Units& of, u32 token, u32 step) {
        if (work.residual != nullptr) {
            of.load(work.residual + token * of.bytes(), step, units);
        }
    }

    // Adds the bias and the residual to sums.
    __device__ __forceinline__ void add_to(const NormWork& work, const Units& of, u32 step, Unit (&row)[UNITS]) const {
        if (work.bias != nullptr) {
            Unit bias[UNITS];
            of.load(work.bias, step, bias);
#pragma unroll
            for (u32 nth = 0; nth < UNITS; ++nth) {
                row[nth] = plus(row[nth], bias[nth]);
            }
        }
        if (work.residual != nullptr) {
#pragma unroll
            for (u32 nth = 0; nth < UNITS; ++nth) {
                row[nth] = plus(row[nth], units[nth]);
            }
        }
    }
};

}  // namespace symmpool
