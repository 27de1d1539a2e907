//! Structs that the host and kernels share, made of those in `cuda/layout/params.rs`.
//! SYMMPOOL_BLESS=1 cargo test -p symmpool-collectives --all-features --lib headers writes this file.

#pragma once

#include <symmpool/impl/types.cuh>

namespace symmpool {

// Most stages of the pipeline through scratch, as if for so many blocks: `cuda/layout/control.rs` says why.
constexpr u32 MAX_STAGE_BLOCKS = 87;

// The arguments of an all-to-all. Counts are elements.
struct Traffic {
    // Elements for and from each rank, where the host knows them.
    u64 send[8];
    u64 receive[8];
    // Where these begin in the input and the output, in bytes.
    u64 send_begin[8];
    u64 receive_begin[8];
    // Device memory: the input splits that the device knows; where to write how much came from each rank and where in the
    // output that begins, or null.
    const void* splits;
    void* received;
    void* offsets;
    // Elements of the input, and of the output.
    u64 length;
    u64 capacity;
    // The offset of the output in the slot, or `UNKNOWN` if it is no window.
    u64 window;
    // Parts of at most this many bytes go through inboxes.
    u64 inbox_bytes;
    // Bytes at the beginning of longer parts that go through inboxes.
    u32 head;
    // Bytes of an element.
    u32 size;
    // Whether splits on the device have 64 bits.
    u32 wide;
    // Whether every rank serves its peers one after the other in any case.
    u32 ring;
};
static_assert(sizeof(Traffic) == 328, "the host has another layout");

}  // namespace symmpool
