//! Dispatch from and to ranks with few tokens, through inboxes. A rank sends at once; when it has the counts, it knows
//! where its own rows and those that arrive belong.
//! Defines: as `experts/dispatch.cu`, which includes it.

#pragma once

#include <experts/arrived.cuh>
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
struct FewRows {
    const Session& session;
    const Routing& routing;
    const ExpertsWork& work;
    InboxRows rows;
    InboxDetails details;
    u32 scales_begin;  // the first of a row's details that has scales
    u32 scale_span;    // bytes of scales in a vector

    __device__ __forceinline__ FewRows(const Session& s, const Routing& r)
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

    __device__ __forceinline__ bool has_many(u32 source) const {
        return !has_few(work, shared.counts.tokens[source]);
    }

    // How many rows of a rank arrive here: never more than it has tokens, nor than the inbox has room for. A handle whose
    // offsets decrease there has none, as in a combine (`Sources`): nobody waits for rows that no offset tells of.
    __device__ __forceinline__ u32 arriving(u32 source) const {
        if (source == session.comm.rank || has_many(source)) {
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
__device__ __forceinline__ void load_own(const FewRows& few, const Share& share, const DispatchPiece& piece,
                                         uint4 (&loaded)[LOADED]) {
    const ExpertsWork& work = few.work;
#if QUANTIZES
    const char* input = work.input + static_cast<u64>(share.from) * few.rows.vectors * TOKEN_VECTORS * 16;
    const u64 first = (static_cast<u64>(piece.row) * few.rows.vectors + piece.at[0]) * TOKEN_VECTORS;
#pragma unroll
    for (u32 i = 0; i < TOKEN_VECTORS; ++i) {
        loaded[i] = piece.live[0] ? load_plain(input + 16 * (first + i)) : make_uint4(0, 0, 0, 0);
    }
#else
    piece.load(work.input + (share.from + piece.row) * work.row_bytes, loaded);
#endif
}

// Calls `store(piece, vectors)` with the pieces of a share's tokens, as they travel, and `store_scales(within, nth,
// vector)` with their scales, whole warps with the same ones. `prepare()`, called by all threads before that, says where
// they go; the first pieces are under way meanwhile.
template <typename Prepare, typename Store, typename StoreScales>
__device__ __forceinline__ void for_own_rows(const FewRows& few, const Share& share, Prepare prepare, Store store,
                                             StoreScales store_scales) {
    const ExpertsWork& work = few.work;
    const u32 count = share.to - share.from;
    const u32 pieces = few.pieces(), end = count * pieces, step = share.parts * WARPS;
    u32 nth = share.part * WARPS + threadIdx.x / 32;
    DispatchPiece next(nth, pieces, few.rows.vectors);
    uint4 loaded[LOADED];
    if (nth < end) {
        load_own(few, share, next, loaded);
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
            next = DispatchPiece(nth + step, pieces, few.rows.vectors);
            load_own(few, share, next, loaded);
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
    const u32 each = few.scale_vectors(), bytes = static_cast<u32>(work.scale_bytes);
    const bool words = (work.scale_bytes | reinterpret_cast<u64>(work.input_scales)) % 4 == 0;
    for (u32 i = threadIdx.x / 32; i < count * each && share.is_first(); i += WARPS) {
        const u32 row = i / each, nth = i - row * each, left = bytes - 16 * nth;
        const char* from = work.input_scales + static_cast<u64>(share.from + row) * bytes + 16 * nth;
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
__device__ __forceinline__ void keep_scales(const FewRows& few, u32 place, const int* places, u32 nth, uint4 vector) {
    const ExpertsWork& work = few.work;
    const u32 bytes = static_cast<u32>(work.scale_bytes), first = nth * few.scale_span;
    const u32 unit = bytes % 4 == 0 ? 4 : 1, units = bytes / unit;
    const u32 word = threadIdx.x % 4, lane = threadIdx.x % 32 / 4;
    const u32 found = word < 2 ? (word == 0 ? vector.x : vector.y) : (word == 2 ? vector.z : vector.w);
    auto store = [&](char* scales, u64 row, u64 stride) {
        for (u32 byte = 4 * word; byte < 4 * word + 4 && byte < few.scale_span && first + byte < bytes; byte += unit) {
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
__device__ __forceinline__ void keep_piece(const FewRows& few, u32 place, const int* places,
                                           const DispatchPiece& piece,
                                           const uint4 (&vectors)[DISPATCH_VECTORS]) {
    const ExpertsWork& work = few.work;
#if BY_EXPERT
    store_by_expert(work, places, piece, vectors);
#else
    piece.store(work.rows + place * work.row_bytes, vectors);
#endif
}

// Keeps what belongs to id `k` of a row: the number of the expert here or -1, the weight, which row of that expert from
// that source it is, the number of the token. `place` is the row's, or NOWHERE.
__device__ __forceinline__ void keep_detail(const FewRows& few, const Share& share, u32 source, u32 place, u32 k,
                                            uint4 detail, int* expert_place) {
    const ExpertsWork& work = few.work;
    const u64 at = static_cast<u64>(place) * work.top_k + k;
    const bool keeps = place != NOWHERE && share.is_first();
#if BY_EXPERT
    const u32 local = few.routing.local;
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
__device__ __forceinline__ const int* places_of(const FewRows& few, u32 within) {
#if BY_EXPERT
    return expert_places + within * few.work.top_k;
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
__device__ __forceinline__ void send_details(const FewRows& few, const Share& share) {
    const ExpertsWork& work = few.work;
    const u32 count = share.to - share.from, first = share.from * work.top_k;
    number_tile(few.routing, share.from, count);
    for (u32 i = threadIdx.x; i < count * work.top_k && !work.known; i += THREADS) {
        const u32 within = i / work.top_k, k = i - within * work.top_k;
        u32 before = 0;
#if BY_EXPERT
        const u32 expert = few.routing.expert(first + i);
        before = expert == NOWHERE ? 0 : place_in_expert(few.routing, share.from, i, expert);
        expert_places[i] = static_cast<int>(before);
#endif
        for (u32 rank = 0; rank < WORLD && share.is_first(); ++rank) {
            const u32 row = shared.places[within][rank];
            if (rank != few.session.comm.rank && row != NOWHERE) {
                const uint4 detail = detail_of(few.routing, share.from + within, first + i, rank, before);
                few.details.send(few.session, rank, row, k, detail);
            }
        }
    }
}

// Sends a share of this rank's tokens to its peers. Called by all threads of a block, which has counted the tokens
// before the share.
__device__ __forceinline__ void send_few(const FewRows& few, const Share& share) {
    const u32 own = few.session.comm.rank;
    for_own_rows(
        few, share, [&]() { send_details(few, share); },
        [&](const DispatchPiece& piece, const uint4 (&vectors)[DISPATCH_VECTORS]) {
            // Ranks alternate from vector to vector, as in `store_row_vector`.
#pragma unroll
            for (u32 i = 0; i < DISPATCH_VECTORS; ++i) {
#pragma unroll
                for (u32 rank = 0; rank < WORLD; ++rank) {
                    const u32 row = shared.places[piece.row][rank];
                    if (rank != own && row != NOWHERE) {
                        EscapedSlot(few.session, rank, own)
                            .send(few.session.epoch, row * few.rows.stride + piece.at[i], vectors[i], piece.live[i]);
                    }
                }
            }
        },
        [&](u32 within, u32 nth, uint4 vector) {
            const u32 rank = threadIdx.x % 32, row = rank < WORLD ? shared.places[within][rank] : NOWHERE;
            if (rank != own && row != NOWHERE) {
                few.details.send(few.session, rank, row, few.scales_begin + nth, vector);
            }
        });
}

// Finds where this rank's own rows of a share belong, and keeps what belongs to these.
__device__ __forceinline__ void keep_details(const FewRows& few, const Share& share) {
    const ExpertsWork& work = few.work;
    const u32 rank = few.session.comm.rank, count = share.to - share.from;
    place_tile(few.routing, share.from, count);
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
        const u32 token = share.from + within;
        const uint4 detail = detail_of(few.routing, token, token * work.top_k + k, rank, before);
        keep_detail(few, share, rank, place, k, detail, expert_place);
    }
    if (BY_EXPERT) {
        __syncthreads();
    }
}

// Puts this rank's own rows of a share where they belong. Called by all threads of a block.
__device__ __forceinline__ void keep_own(const FewRows& few, const Share& share) {
    const u32 rank = few.session.comm.rank;
    for_own_rows(
        few, share, [&]() { keep_details(few, share); },
        [&](const DispatchPiece& piece, const uint4 (&vectors)[DISPATCH_VECTORS]) {
            const u32 place = shared.places[piece.row][rank];
            if (place != NOWHERE) {
                keep_piece(few, place, places_of(few, piece.row), piece, vectors);
            }
        },
        [&](u32 within, u32 nth, uint4 vector) {
            const u32 place = shared.places[within][rank];
            if (place != NOWHERE) {
                keep_scales(few, place, places_of(few, within), nth, vector);
            }
        });
    if (BY_EXPERT) {
        __syncthreads();
    }
}

// --- peers' tokens

// Receives a share of the rows that arrive from ranks with few tokens. Rows for which there is no room are received too.
// Called by all threads of a block, which get the same answer: false if something does not arrive.
__device__ __forceinline__ bool receive_few(const FewRows& few) {
    const ExpertsWork& work = few.work;
    const Session& session = few.session;
    // Where there are few rows, other blocks than those that send receive them: these are ready when they arrive.
    const Share share(arriving.rows(), few.pieces(), worker_blocks() / 2);
    // Where a row of the list belongs; `row` becomes its number among those of the source.
    auto place_of = [&](u32& row, u32& source) {
        source = arriving.rank_of(row);
        const u32 place = shared.sources[source] + row;
        return place < work.capacity ? place : NOWHERE;
    };
#pragma unroll 1
    for (u32 tile = share.from; tile < share.to; tile += TILE) {
        const u32 left = share.to - tile, count = left < TILE ? left : TILE;
        bool bad = false;
        const bool details = BY_EXPERT || (!work.known && share.is_first());
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
            bad = !few.details.receive(session, source, row, k, detail);
            if (!bad) {
                keep_detail(few, share, source, place, k, detail, expert_place);
            }
        }
        if (BY_EXPERT && __syncthreads_or(bad)) {
            return false;
        }
        for_pieces<DISPATCH_VECTORS>(share, count, few.rows.vectors, [&](const DispatchPiece& piece) {
            u32 row = tile + piece.row, source;
            const u32 place = place_of(row, source);
            u32 at[DISPATCH_VECTORS];
#pragma unroll
            for (u32 i = 0; i < DISPATCH_VECTORS; ++i) {
                at[i] = row * few.rows.stride + piece.at[i];
            }
            uint4 found[DISPATCH_VECTORS];
            const EscapedSlot slot(session, session.comm.rank, source);
            if (__any_sync(~0u, bad) || !slot.receive(session, source, at, piece.live, found)) {
                bad = true;
                return;
            }
            if (place != NOWHERE) {
                keep_piece(few, place, places_of(few, piece.row), piece, found);
            }
        });
        const u32 each = few.scale_vectors();
        for (u32 i = threadIdx.x / 32; i < count * each && share.is_first() && !bad; i += WARPS) {
            const u32 within = i / each, nth = i - within * each;
            u32 row = tile + within, source;
            const u32 place = place_of(row, source);
            uint4 vector;
            bad = !few.details.receive(session, source, row, few.scales_begin + nth, vector);
            if (!bad && place != NOWHERE) {
                keep_scales(few, place, places_of(few, within), nth, vector);
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
    const FewRows few(session, routing);
    if (!few.sent().receive(few.session, few.work.inbox_tokens)) {
        return;
    }
    for (u32 source = 0; source < WORLD; ++source) {
        const u32 expected = few.arriving(source);
        if (sent_here[source] > expected && threadIdx.x == 0 && wrong_in_handle == 0) {
            notify_of_handle(few.session, WRONG_ROWS, sent_here[source]);
        }
        discard_rows(few.session, few.rows, source, expected, [](u32) { return false; });
    }
}

// Expires flags of old calls that this one does not overwrite. Called by all threads of the leader block, which knows
// what arrives.
__device__ __noinline__ void expire_unused(const Session& session, const ExpertsWork& work) {
    const Routing routing(work);
    const FewRows few(session, routing);
    UsedBytes used = used_flags_of(few);
    used.ll = few.details.begin + few.details.bytes();
    expire_old_flags(session, used);
    const SentRows sent = few.sent();
    for (u32 source = 0; source < WORLD; ++source) {
        if (work.known) {
            // The first vector of the counts is in use.
            expire_bytes(session, sent.slot(session, session.comm.rank, source) + 32, 32ull * (sent.stride - 1));
        }
        const u32 rows = few.arriving(source);
        few.details.expire(session, source, rows);
        few.rows.expire(session, source, rows);
    }
}

}  // namespace symmpool
