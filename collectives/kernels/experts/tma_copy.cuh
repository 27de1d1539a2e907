//! Copies by TMA, the unit of an SM that copies between global and shared memory ("bulk" in PTX). One thread gives it
//! pieces. No other thread or register is needed, so few SMs keep a link busy, and compute meanwhile.

#pragma once

#include <symmpool/impl/peer_blocks.cuh>

namespace symmpool {

// Bytes of a piece, and pieces in shared memory: about as many bytes as an SM sends while a load and a store take place.
constexpr u32 BULK_BYTES = 4096;
constexpr u32 BULK_PIECES = 10;
// Pieces whose loads are under way; of the others the stores are.
constexpr u32 BULK_LOADS = 5;
constexpr u32 BULK_STORES = BULK_PIECES - BULK_LOADS;

// Copies that one thread of a block makes; in shared memory.
struct BulkPieces {
    alignas(128) char bytes[BULK_PIECES][BULK_BYTES];
    u64 mbarriers[BULK_PIECES];
    char* to[BULK_PIECES];
    u32 lengths[BULK_PIECES];
};

// The thread that copies, and raises the flags of peer blocks for what it has copied.
class BulkSender {
    const Session& session_;
    PeerBlocks peer_blocks_;
    BulkPieces& pieces_;
    u32 kind_;
    // Pieces whose loads and whose stores have begun, and their places; how often all places were stored, odd or even.
    u32 loaded_ = 0, stored_ = 0, load_at_ = 0, store_at_ = 0, phase_ = 0;
    // The count to which flags are raised when this many pieces are stored; 0 if none waits.
    u32 due_ = 0, due_at_ = 0;

public:
    __device__ __forceinline__ BulkSender(const Session& session, PeerBlocks peer_blocks, u32 kind, BulkPieces& pieces)
        : session_(session), peer_blocks_(peer_blocks), pieces_(pieces), kind_(kind) {
        for (u32 at = 0; at < BULK_PIECES; ++at) {
            make_mbarrier(&pieces.mbarriers[at]);
        }
    }

    // Begins to copy `length` bytes. `length` and both addresses must be multiples of 16.
    __device__ __forceinline__ void copy(char* to, const char* from, u64 length) {
#pragma unroll 1
        for (u64 done = 0; done < length; done += BULK_BYTES) {
            if (loaded_ - stored_ == BULK_LOADS) {
                store_next();
            }
            // The store of what this place had before has read it: it is behind the last ones.
            await_bulk_reads<BULK_STORES>();
            const u32 bytes = length - done < BULK_BYTES ? static_cast<u32>(length - done) : BULK_BYTES;
            pieces_.to[load_at_] = to + done;
            pieces_.lengths[load_at_] = bytes;
            bulk_load(pieces_.bytes[load_at_], from + done, bytes, &pieces_.mbarriers[load_at_]);
            load_at_ = load_at_ + 1 == BULK_PIECES ? 0 : load_at_ + 1;
            ++loaded_;
        }
    }

    // Raises flags to `count`, 1 or more, when all copies so far have ended: while later ones are under way, if there are.
    __device__ __forceinline__ void raise(u32 count) {
        if (due_ != 0) {
            store_all();
        }
        due_ = count;
        due_at_ = loaded_;
    }

    // Waits until all copies have ended, and raises flags that are due.
    __device__ __forceinline__ void finish() {
        if (due_ != 0) {
            store_all();
            raise_due<0>();
        }
    }

private:
    __device__ __forceinline__ void store_next() {
        await_mbarrier(&pieces_.mbarriers[store_at_], phase_);
        bulk_store(pieces_.to[store_at_], pieces_.bytes[store_at_], pieces_.lengths[store_at_]);
        phase_ += store_at_ + 1 == BULK_PIECES;
        store_at_ = store_at_ + 1 == BULK_PIECES ? 0 : store_at_ + 1;
        ++stored_;
        if (due_ != 0 && stored_ - due_at_ == BULK_STORES) {
            raise_due<BULK_STORES>();
        }
    }

    __device__ __forceinline__ void store_all() {
        while (stored_ != loaded_) {
            store_next();
        }
    }

    // Raises flags when all stores but the last `LATER` have ended.
    template <u32 LATER> __device__ __forceinline__ void raise_due() {
        await_bulk_stores<LATER>();
        fence();
        raise_flags_after_fence(session_, peer_blocks_, kind_, due_);
        due_ = 0;
    }
};

}  // namespace symmpool
