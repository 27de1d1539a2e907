//! Dispatch from and to ranks with few tokens, through inboxes. A rank sends at once; when it has the counts, it knows
//! where its own rows and those that arrive belong.
//! Defines: as `experts/dispatch.cu`, which includes it.

#pragma once

#include <experts/recv_rows.cuh>
#include <experts/handle.cuh>

namespace symmpool {

// Items of a piece: a quantised one has several vectors of tokens under way for each.
constexpr u32 DISPATCH_VECTORS = QUANTIZES ? 1 : 2;

#if BY_EXPERT
// For each row of a tile and id of it: of this rank's own rows first its place among those of the expert that come from
// this rank; then its place among all rows of experts, or -1.
__shared__ int expert_places[TILE * MAX_TOP_K];
#endif

__shared__ InboxList arriving;  // rows that arrive from ranks with few tokens

// How rows of few tokens travel.
struct LowLatencyDispatch {
    const Session& session;
    const Routing& routing;
    const ExpertsWork& work;
    InboxRows rows;
    InboxDetails details;
    u32 scales_begin;  // the first of a row's details that has scales
    u32 scale_span;    // bytes of scales in a vector

    __device__ __forceinline__ LowLatencyDispatch(const Session& s, const Routing& r)
        : session(s), routing(r), work(r.work), rows(work.row_bytes) {
        scales_begin = work.known ? 0 : work.top_k;
#if QUANTIZES
        // A vector has the scales of an item.
        scale_span = work.quantize == UE8M0 ? ITEM / 8 : 4 * (ITEM / 8);
#else
        scale_span = 16;
#endif
        details.begin = CountVectors::bytes_of(routing.local);
        details.rows = work.inbox_tokens;
        details.each = scales_begin + scale_vectors();
    }

    __device__ __forceinline__ u32 scale_vectors() const {
        return (static_cast<u32>(work.scale_bytes) + scale_span - 1) / scale_span;
    }
    __device__ __forceinline__ u32 pieces() const { return Piece<DISPATCH_VECTORS>::count(rows.vectors); }

    // Where ranks say how many rows they send by a handle: where else the first vector of their counts is.
    __device__ __forceinline__ SentRows sent() const { return SentRows{CountVectors(routing.local).vectors}; }

    __device__ __forceinline__ bool skips_inboxes(u32 source) const {
        return !is_low_latency(work, shared.counts.tokens[source]);
    }

    // How many rows of a rank arrive here: never more than it has tokens, nor than the inbox has room for. A handle whose
    // offsets decrease there has none, as in a combine (`CombineSources`): nobody waits for rows that no offset tells of.
    __device__ __forceinline__ u32 arriving(u32 source) const {
        if (source == session.comm.rank || skips_inboxes(source)) {
            return 0;
        }
        const u32 tokens = shared.counts.tokens[source];
        const u32 most = tokens < work.inbox_tokens ? tokens : work.inbox_tokens;
        if (!work.known) {
            const u32 rows = shared.counts.rows[source][session.comm.rank];
            return rows < most ? rows : most;
        }
        const u32 begin = shared.sources[source], end = shared.sources[source + 1];
        const u32 rows = begin < end ? end - begin : 0;
        return rows < most ? rows : most;
    }
};

// --- what rows consist of

using DispatchPiece = Piece<DISPATCH_VECTORS>;

#if QUANTIZES
constexpr u32 LOADED = TOKEN_VECTORS;
#else
constexpr u32 LOADED = DISPATCH_VECTORS;
#endif

// Loads what a piece of a share's tokens is made of.
__device__ __forceinline__ void load_own(const LowLatencyDispatch& low_latency, const BlockRows& own_rows,
                                         const DispatchPiece& piece, uint4 (&loaded)[LOADED]) {
    const ExpertsWork& work = low_latency.work;
#if QUANTIZES
    const char* input = work.input + static_cast<u64>(own_rows.from) * low_latency.rows.vectors * TOKEN_VECTORS * 16;
    const u64 first = (static_cast<u64>(piece.row) * low_latency.rows.vectors + piece.at[0]) * TOKEN_VECTORS;
#pragma unroll
    for (u32 i = 0; i < TOKEN_VECTORS; ++i) {
        loaded[i] = piece.live[0] ? load_plain(input + 16 * (first + i)) : make_uint4(0, 0, 0, 0);
    }
#else
    piece.load(work.input + (own_rows.from + piece.row) * work.row_bytes, loaded);
#endif
}

// Calls `store(piece, vectors)` with the pieces of a share's tokens, as they travel, and `store_scales(within, nth,
// vector)` with their scales, whole warps with the same ones. `prepare()`, called by all threads before that, says where
// they go; the first pieces are under way meanwhile.
template <typename Prepare, typename Store, typename StoreScales>
__device__ __forceinline__ void for_own_rows(const LowLatencyDispatch& low_latency, const BlockRows& own_rows,
                                             Prepare prepare, Store store,
                                             StoreScales store_scales) {
    const ExpertsWork& work = low_latency.work;
    const u32 count = own_rows.to - own_rows.from;
    const u32 pieces = low_latency.pieces(), end = count * pieces, step = own_rows.parts * WARPS;
    u32 nth = own_rows.part * WARPS + threadIdx.x / 32;
    DispatchPiece next(nth, pieces, low_latency.rows.vectors);
    uint4 loaded[LOADED];
    if (nth < end) {
        load_own(low_latency, own_rows, next, loaded);
    }
    prepare();
#pragma unroll 1
    for (; nth < end; nth += step) {
        const DispatchPiece piece = next;
        uint4 found[LOADED];
#pragma unroll
        for (u32 i = 0; i < LOADED; ++i) {
            found[i] = loaded[i];
        }
        if (nth + step < end) {
            next = DispatchPiece(nth + step, pieces, low_latency.rows.vectors);
            load_own(low_latency, own_rows, next, loaded);
        }
#if QUANTIZES
        float scale;
        const uint4 vectors[] = {quantize(found, work.quantize, scale)};
        store(piece, vectors);
        u32 words[4];
#pragma unroll
        for (u32 group = 0; group < 4; ++group) {
            words[group] = __float_as_uint(__shfl_sync(~0u, scale, 8 * group));
        }
        if (work.quantize == UE8M0) {
            words[0] = words[0] >> 23 | words[1] >> 23 << 8 | words[2] >> 23 << 16 | words[3] >> 23 << 24;
        }
        store_scales(piece.row, piece.at[0] / ITEM, make_uint4(words[0], words[1], words[2], words[3]));
#else
        store(piece, found);
#endif
    }
#if !QUANTIZES
    const u32 each = low_latency.scale_vectors(), bytes = static_cast<u32>(work.scale_bytes);
    const bool words = (work.scale_bytes | reinterpret_cast<u64>(work.input_scales)) % 4 == 0;
    for (u32 i = threadIdx.x / 32; i < count * each && own_rows.is_first(); i += WARPS) {
        const u32 row = i / each, nth = i - row * each, left = bytes - 16 * nth;
        const char* from = work.input_scales + static_cast<u64>(own_rows.from + row) * bytes + 16 * nth;
        u32 found[4] = {};
#pragma unroll
        for (u32 word = 0; word < 4; ++word) {
            if (words && 4 * word < left) {
                found[word] = *reinterpret_cast<const u32*>(from + 4 * word);
            }
#pragma unroll 1
            for (u32 byte = 0; byte < 4 && 4 * word + byte < left && !words; ++byte) {
                found[word] |= static_cast<u32>(static_cast<unsigned char>(from[4 * word + byte])) << 8 * byte;
            }
        }
        store_scales(row, nth, make_uint4(found[0], found[1], found[2], found[3]));
    }
#endif
}

// Stores a vector of scales of a row where it belongs. `places` are those of its experts, if rows lie by expert. Called
// by all threads of a warp: each stores one word of the vector, by expert at some of the places, which are far apart.
__device__ __forceinline__ void keep_scales(const LowLatencyDispatch& low_latency, u32 place, const int* places, u32 nth,
                                            uint4 vector) {
    const ExpertsWork& work = low_latency.work;
    const u32 bytes = static_cast<u32>(work.scale_bytes), first = nth * low_latency.scale_span;
    const u32 unit = bytes % 4 == 0 ? 4 : 1, units = bytes / unit;
    const u32 word = threadIdx.x % 4, lane = threadIdx.x % 32 / 4;
    const u32 found = word < 2 ? (word == 0 ? vector.x : vector.y) : (word == 2 ? vector.z : vector.w);
    auto store = [&](char* scales, u64 row, u64 stride) {
        for (u32 byte = 4 * word; byte < 4 * word + 4 && byte < low_latency.scale_span && first + byte < bytes; byte += unit) {
            const u32 value = found >> 8 * (byte % 4);
            const u64 to = row + (first + byte) / unit * stride;
            if (unit == 4) {
                reinterpret_cast<u32*>(scales)[to] = value;
            } else {
                scales[to] = static_cast<char>(value);
            }
        }
    };
#if BY_EXPERT
    for (u32 k = lane; k < work.top_k; k += 8) {
        if (places[k] >= 0) {
            const ScaleRow row(work, static_cast<u32>(places[k]), units);
            store(work.output_scales, row.begin, row.stride);
        }
    }
#else
    if (lane == 0) {
        store(work.row_scales, static_cast<u64>(place) * units, 1);
    }
#endif
}

// Stores a piece of a row where it belongs.
__device__ __forceinline__ void keep_piece(const LowLatencyDispatch& low_latency, u32 place, const int* places,
                                           const DispatchPiece& piece,
                                           const uint4 (&vectors)[DISPATCH_VECTORS]) {
    const ExpertsWork& work = low_latency.work;
#if BY_EXPERT
    store_by_expert(work, places, piece, vectors);
#else
    piece.store(work.rows + place * work.row_bytes, vectors);
#endif
}

// Keeps what belongs to id `k` of a row: the number of the expert here or -1, the weight, which row of that expert from
// that source it is, the number of the token. `place` is the row's, or NOWHERE.
__device__ __forceinline__ void keep_detail(const LowLatencyDispatch& low_latency, const BlockRows& own_rows, u32 source,
                                            u32 place, u32 k,
                                            uint4 detail, int* expert_place) {
    const ExpertsWork& work = low_latency.work;
    const u64 at = static_cast<u64>(place) * work.top_k + k;
    const bool keeps = place != NOWHERE && own_rows.is_first();
#if BY_EXPERT
    const u32 local = low_latency.routing.local;
    const bool has_place = place != NOWHERE && detail.x < local;
    *expert_place = has_place ? place_for_expert(work, local, source, detail.x, detail.z) : -1;
    if (keeps) {
        work.places[at] = *expert_place;
        work.kept_weights[at] = __uint_as_float(detail.y);
    }
#else
    if (keeps) {
        work.row_ids[at] = static_cast<int>(detail.x);
        work.row_weights[at] = __uint_as_float(detail.y);
    }
#endif
    if (keeps && k == 0) {
        work.kept_tokens[place] = static_cast<int>(detail.w);
    }
}

// The places by expert of a row of a tile; no address if rows lie by rank.
__device__ __forceinline__ const int* places_of(const LowLatencyDispatch& low_latency, u32 within) {
#if BY_EXPERT
    return expert_places + within * low_latency.work.top_k;
#else
    return nullptr;
#endif
}

#if BY_EXPERT
// The place by expert for id `k` of a row, where the handle has it.
__device__ __forceinline__ int known_place(const ExpertsWork& work, u32 place, u32 k) {
    const int found = place == NOWHERE ? -1 : work.places[static_cast<u64>(place) * work.top_k + k];
    return index_or_none(found, work.output_capacity);
}
#endif

// --- this rank's tokens

// Details of an id of a token for a rank, as `keep_detail` takes them.
__device__ __forceinline__ uint4 detail_of(const Routing& routing, u32 token, u32 item, u32 rank, u32 before) {
    const ExpertsWork& work = routing.work;
    const u32 expert = routing.expert(item), owner = expert == NOWHERE ? NOWHERE : expert / routing.local;
    const float weight = owner != rank ? 0.0f : work.weights == nullptr ? 1.0f : work.weights[item];
    return make_uint4(owner == rank ? expert - rank * routing.local : ~0u, __float_as_uint(weight), before, token);
}

// Numbers the rows of a share's tokens, and tells peers what belongs to these.
__device__ __forceinline__ void send_details(const LowLatencyDispatch& low_latency, const BlockRows& own_rows) {
    const ExpertsWork& work = low_latency.work;
    const u32 count = own_rows.to - own_rows.from, first = own_rows.from * work.top_k;
    number_tile(low_latency.routing, own_rows.from, count);
    for (u32 i = threadIdx.x; i < count * work.top_k && !work.known; i += THREADS) {
        const u32 within = i / work.top_k, k = i - within * work.top_k;
        u32 before = 0;
#if BY_EXPERT
        const u32 expert = low_latency.routing.expert(first + i);
        before = expert == NOWHERE ? 0 : place_in_expert(low_latency.routing, own_rows.from, i, expert);
        expert_places[i] = static_cast<int>(before);
#endif
        for (u32 rank = 0; rank < WORLD && own_rows.is_first(); ++rank) {
            const u32 row = shared.places[within][rank];
            if (rank != low_latency.session.comm.rank && row != NOWHERE) {
                const uint4 detail = detail_of(low_latency.routing, own_rows.from + within, first + i, rank, before);
                low_latency.details.send(low_latency.session, rank, row, k, detail);
            }
        }
    }
}

// Sends a share of this rank's tokens to its peers. Called by all threads of a block, which has counted the tokens
// before this share.
__device__ __forceinline__ void send_low_latency(const LowLatencyDispatch& low_latency, const BlockRows& own_rows) {
    const u32 own = low_latency.session.comm.rank;
    for_own_rows(
        low_latency, own_rows, [&]() { send_details(low_latency, own_rows); },
        [&](const DispatchPiece& piece, const uint4 (&vectors)[DISPATCH_VECTORS]) {
            // Ranks alternate from vector to vector, as in `store_row_vector`.
#pragma unroll
            for (u32 i = 0; i < DISPATCH_VECTORS; ++i) {
#pragma unroll
                for (u32 rank = 0; rank < WORLD; ++rank) {
                    const u32 row = shared.places[piece.row][rank];
                    if (rank != own && row != NOWHERE) {
                        EscapedSlot(low_latency.session, rank, own)
                            .send(low_latency.session.epoch, row * low_latency.rows.stride + piece.at[i], vectors[i],
                                  piece.live[i]);
                    }
                }
            }
        },
        [&](u32 within, u32 nth, uint4 vector) {
            const u32 rank = threadIdx.x % 32, row = rank < WORLD ? shared.places[within][rank] : NOWHERE;
            if (rank != own && row != NOWHERE) {
                low_latency.details.send(low_latency.session, rank, row, low_latency.scales_begin + nth, vector);
            }
        });
}

// Finds where this rank's own rows of a share belong, and keeps what belongs to these.
__device__ __forceinline__ void keep_details(const LowLatencyDispatch& low_latency, const BlockRows& own_rows) {
    const ExpertsWork& work = low_latency.work;
    const u32 rank = low_latency.session.comm.rank, count = own_rows.to - own_rows.from;
    place_tile(low_latency.routing, own_rows.from, count);
    for (u32 i = threadIdx.x; i < count * work.top_k && (BY_EXPERT || !work.known); i += THREADS) {
        const u32 within = i / work.top_k, k = i - within * work.top_k, place = shared.places[within][rank];
        int* expert_place = nullptr;
        u32 before = 0;
#if BY_EXPERT
        expert_place = &expert_places[i];
        before = static_cast<u32>(*expert_place);
        if (work.known) {
            *expert_place = known_place(work, place, k);
            continue;
        }
#endif
        const u32 token = own_rows.from + within;
        const uint4 detail = detail_of(low_latency.routing, token, token * work.top_k + k, rank, before);
        keep_detail(low_latency, own_rows, rank, place, k, detail, expert_place);
    }
    if (BY_EXPERT) {
        __syncthreads();
    }
}

// Puts this rank's own rows of a share where they belong. Called by all threads of a block.
__device__ __forceinline__ void keep_own(const LowLatencyDispatch& low_latency, const BlockRows& own_rows) {
    const u32 rank = low_latency.session.comm.rank;
    for_own_rows(
        low_latency, own_rows, [&]() { keep_details(low_latency, own_rows); },
        [&](const DispatchPiece& piece, const uint4 (&vectors)[DISPATCH_VECTORS]) {
            const u32 place = shared.places[piece.row][rank];
            if (place != NOWHERE) {
                keep_piece(low_latency, place, places_of(low_latency, piece.row), piece, vectors);
            }
        },
        [&](u32 within, u32 nth, uint4 vector) {
            const u32 place = shared.places[within][rank];
            if (place != NOWHERE) {
                keep_scales(low_latency, place, places_of(low_latency, within), nth, vector);
            }
        });
    if (BY_EXPERT) {
        __syncthreads();
    }
}

// --- peers' tokens

// Receives a share of the rows that arrive from ranks with few tokens. Rows for which there is no room are received too.
// Called by all threads of a block, which get the same answer: false if something does not arrive.
__device__ __forceinline__ bool receive_low_latency(const LowLatencyDispatch& low_latency) {
    const ExpertsWork& work = low_latency.work;
    const Session& session = low_latency.session;
    // Where there are few rows, other blocks than those that send receive them: these are ready when they arrive.
    const BlockRows own_rows(arriving.rows(), low_latency.pieces(), worker_blocks() / 2);
    // Where a row of the list belongs; `row` becomes its number among those of the source.
    auto place_of = [&](u32& row, u32& source) {
        source = arriving.rank_of(row);
        const u32 place = shared.sources[source] + row;
        return place < work.capacity ? place : NOWHERE;
    };
#pragma unroll 1
    for (u32 tile = own_rows.from; tile < own_rows.to; tile += TILE) {
        const u32 left = own_rows.to - tile, count = left < TILE ? left : TILE;
        bool bad = false;
        const bool details = BY_EXPERT || (!work.known && own_rows.is_first());
        for (u32 i = threadIdx.x; i < count * work.top_k && details && !bad; i += THREADS) {
            const u32 within = i / work.top_k, k = i - within * work.top_k;
            u32 row = tile + within, source;
            const u32 place = place_of(row, source);
            int* expert_place = nullptr;
#if BY_EXPERT
            expert_place = &expert_places[i];
            if (work.known) {
                *expert_place = known_place(work, place, k);
                continue;
            }
#endif
            uint4 detail;
            bad = !low_latency.details.receive(session, source, row, k, detail);
            if (!bad) {
                keep_detail(low_latency, own_rows, source, place, k, detail, expert_place);
            }
        }
        if (BY_EXPERT && __syncthreads_or(bad)) {
            return false;
        }
        for_pieces<DISPATCH_VECTORS>(own_rows, count, low_latency.rows.vectors, [&](const DispatchPiece& piece) {
            u32 row = tile + piece.row, source;
            const u32 place = place_of(row, source);
            u32 at[DISPATCH_VECTORS];
#pragma unroll
            for (u32 i = 0; i < DISPATCH_VECTORS; ++i) {
                at[i] = row * low_latency.rows.stride + piece.at[i];
            }
            uint4 found[DISPATCH_VECTORS];
            const EscapedSlot slot(session, session.comm.rank, source);
            if (__any_sync(~0u, bad) || !slot.receive(session, source, at, piece.live, found)) {
                bad = true;
                return;
            }
            if (place != NOWHERE) {
                keep_piece(low_latency, place, places_of(low_latency, piece.row), piece, found);
            }
        });
        const u32 each = low_latency.scale_vectors();
        for (u32 i = threadIdx.x / 32; i < count * each && own_rows.is_first() && !bad; i += WARPS) {
            const u32 within = i / each, nth = i - within * each;
            u32 row = tile + within, source;
            const u32 place = place_of(row, source);
            uint4 vector;
            bad = !low_latency.details.receive(session, source, row, low_latency.scales_begin + nth, vector);
            if (!bad && place != NOWHERE) {
                keep_scales(low_latency, place, places_of(low_latency, within), nth, vector);
            }
        }
        if (__syncthreads_or(bad)) {
            return false;
        }
    }
    return true;
}

// Takes rows out of the inbox that ranks send by a handle and that this rank's handle does not know of. Called by all
// threads of the leader block, which knows what arrives.
__device__ __forceinline__ void discard_unexpected(const Session& session, const ExpertsWork& work) {
    const Routing routing(work);
    const LowLatencyDispatch low_latency(session, routing);
    if (!low_latency.sent().receive(low_latency.session, low_latency.work.inbox_tokens)) {
        return;
    }
    for (u32 source = 0; source < WORLD; ++source) {
        const u32 expected = low_latency.arriving(source);
        if (sent_here[source] > expected && threadIdx.x == 0 && wrong_in_handle == 0) {
            notify_of_handle(low_latency.session, WRONG_ROWS, sent_here[source]);
        }
        discard_rows(low_latency.session, low_latency.rows, source, expected, [](u32) { return false; });
    }
}

// Expires flags of old calls that this one does not overwrite. Called by all threads of the leader block, which knows
// what arrives.
__device__ __noinline__ void expire_unused(const Session& session, const ExpertsWork& work) {
    const Routing routing(work);
    const LowLatencyDispatch low_latency(session, routing);
    UsedBytes used = used_flags_of(low_latency);
    used.ll = low_latency.details.begin + low_latency.details.bytes();
    expire_old_flags(session, used);
    const SentRows sent = low_latency.sent();
    for (u32 source = 0; source < WORLD; ++source) {
        if (work.known) {
            // The first vector of the counts is in use.
            expire_bytes(session, sent.slot(session, session.comm.rank, source) + 32, 32ull * (sent.stride - 1));
        }
        const u32 rows = low_latency.arriving(source);
        low_latency.details.expire(session, source, rows);
        low_latency.rows.expire(session, source, rows);
    }
}

}  // namespace symmpool
