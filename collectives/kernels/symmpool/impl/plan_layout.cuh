//! Structs that the host and kernels share, made of those in `cuda/layout/params.rs`.
//! SYMMPOOL_BLESS=1 cargo test -p symmpool-collectives --all-features --lib headers writes this file.

#pragma once

#include <symmpool/impl/types.cuh>

namespace symmpool {

// How the data of a plan's call is divided. The host computes the same on every rank (`cuda/ops/plan.rs`).
struct PlanWork {
    // Bytes of a part of the input or output.
    u64 part;
    // Bytes of a chunk of a part; the last ones may have fewer, or none.
    u64 chunk;
    // Where in each chunk this launch begins, in bytes.
    u64 begin;
    // Vectors of the longest chunk in this launch.
    u64 vectors;
    // Vectors that a peer block has in a stage, at most.
    u32 each;
    u32 stages;
    // How many stages have a place in scratch at once.
    u32 slots;
    // Turns from one stage to the next.
    u32 interval;
};
static_assert(sizeof(PlanWork) == 48, "the host has another layout");

}  // namespace symmpool
