//! Structs that the host and kernels share, made of those in `cuda/layout/params.rs` and `cuda/layout/fault.rs`.
//! SYMMPOOL_BLESS=1 cargo test -p symmpool-collectives --all-features --lib headers writes this file.

#pragma once

#include <symmpool/impl/types.cuh>

namespace symmpool {

// An error that the host reads although the call went on: that of the last call that had one.
struct AsyncError {
    // How many calls have written such an error.
    u64 calls;
    u32 kind;
    u32 epoch;
    u32 rank;
    u32 unused;
    // Elements that the rank was sent; a token, for `NO_EXPERT`; a part of a handle, for `WRONG_HANDLE`.
    u64 needed;
    // Elements that its output holds; an id, for `NO_EXPERT`; what was found, for `WRONG_HANDLE`.
    u64 room;
};
static_assert(sizeof(AsyncError) == 40, "the host has another layout");

// The record in pinned host memory in which the host reads what went wrong (rule S5). It is written at most once, except
// for the asynchronous error.
struct FaultRecord {
    u32 complete;
    u32 kind;
    // The epoch of the call; for a wait on a channel, the low half of the signal's number.
    u32 epoch;
    u32 peer;
    u32 phase;
    // For `MISMATCH`, this rank's call description. For `COUNTS`, a pair of ranks and its two counts; for `PAYLOADS`, a pair
    // and its two payloads. For `TIMEOUT` on a channel or by a memory operation, the timeout in nanoseconds.
    u64 ours[4];
    // For `MISMATCH`, the peer's call description. For `PEER_FAILED`, the reason in its failed handshake, and two payloads
    // if a message was refused.
    u64 theirs[4];
    AsyncError async_error;
};
static_assert(sizeof(FaultRecord) == 128, "the host has another layout");

// Message that a rank leaves at each peer when it makes no further call, and no failed handshake says so: it refused a
// message, or failed on the host behind a call's handshake. `when` comes last. The host writes it too
// (`CudaEngine::depart`), by halves of words.
struct Departure {
    // 0 while the rank takes part. Else 1 << 32 | the epoch of the last call that it has begun, in which it may still be
    // found; or 1 << 32 alone if it is absent from every call.
    u64 when;
    // In the upper half, as in a failed handshake.
    u64 reason;
    // With `MESSAGE_FOLLOWS`, the payload that was sent, and the one that was expected.
    u64 sent;
    u64 expected;
};
static_assert(sizeof(Departure) == 32, "the host has another layout");

// The parts of an area's memory that hold flags of epochs: offsets from the control block, and bytes of all parities
// together.
struct AreaFlags {
    u64 ll;
    u64 ll_bytes;
    u64 ll128;
    u64 ll128_bytes;
    u64 escape_marks;
    u64 escape_mark_bytes;
};
static_assert(sizeof(AreaFlags) == 48, "the host has another layout");

// The beginning of a control block, which only its own rank accesses. The first 16 bytes are read by one load, by every
// block of every call.
struct LocalState {
    // The epoch of the last call.
    u32 epoch;
    // 0, or later calls do nothing: 1 where a kernel failed, whose record says why; `FAILED_ON_HOST` where the host knows.
    u32 failed;
    // State of each area's Lamport inbox: the third that the next call there uses, in the lowest two bits, and how many
    // vectors the call before there used of its third.
    u32 lamport[2];
    // Blocks of the running call that have read the four words above.
    u32 blocks_arrived;
    // Blocks of the companion kernel that have waited. This word and the next two belong to `symmpool/impl/companion.cuh`.
    u32 companion_blocks;
    u64 handshakes_reported;
    u64 handshakes_consumed;
    // Flags that calls in the other area expire. The host writes both when the memory grows, and else none.
    AreaFlags areas[2];
};
static_assert(sizeof(LocalState) == 136, "the host has another layout");

// The lock of a device's SMs, which communicators of a process share (`symmpool/impl/sm_grant.cuh`). Kernels alone write it.
struct SmLock {
    u64 word;
    // Blocks that have ended of each member's narrow kernel.
    u32 ended_blocks[40];
};
static_assert(sizeof(SmLock) == 168, "the host has another layout");

// The communicator, as a kernel is given it.
struct CommFields {
    // The address of slot 0.
    char* base;
    // Bytes from one slot to the next.
    u64 stride;
    // The offset of the control block in every slot.
    u64 control;
    // Offsets from the control block, and the lengths of all parities together, in bytes. Those for data are the call's
    // area, which may lie in another block in front of this one: offsets are added modulo 2^64.
    u64 handshake;
    u64 flags;
    u64 flags_bytes;
    u64 ll;
    u64 ll_bytes;
    u64 ll128;
    u64 ll128_bytes;
    u64 lamport;
    u64 lamport_bytes;
    u64 escape_marks;
    u64 escaped;
    u64 escaped_bytes;
    u64 scratch;
    u64 scratch_bytes;
    u64 channels;
    // Scratch of kernels that are made of plans, in two parities.
    u64 plan_scratch;
    u64 plan_scratch_bytes;
    // Nanoseconds.
    u64 timeout;
    FaultRecord* fault;
    u32 rank;
    // Whether the stream's next kernel may start while this one runs (programmatic dependent launch).
    unsigned short early;
    // The number of the area of memory that the call uses (`engine/areas.rs`).
    unsigned short area;
    // The lock of the device's SMs, and the communicator's place and tag there.
    SmLock* sm_lock;
    unsigned short member;
    unsigned short sm_tag;
    // Blocks of a kernel that work while the lock is another communicator's.
    u32 narrow_blocks;
};
static_assert(sizeof(CommFields) == 200, "the host has another layout");

// The arguments of a call. Kernels outside of calls, and those beside copy engines, use fields otherwise, as their files say:
// `p2p.cu`, `one_sided.cu`, `two_shot_copy.cu`, `copy_companion.cu`, `broadcast_pipeline.cu`, `two_shot_pipeline.cu`.
struct CallParams {
    // Words that ranks compare in the handshake (rule S6).
    u64 description[4];
    const char* input;
    char* output;
    // Bytes of the whole buffer, or of each rank's chunk.
    u64 bytes;
    // Bytes from one rank's chunk to the next.
    u64 stride;
    u32 root;
    // How many peer blocks there are, for kernels that use `symmpool/impl/peer_blocks.cuh`.
    u32 peer_blocks;
};
static_assert(sizeof(CallParams) == 72, "the host has another layout");

}  // namespace symmpool
