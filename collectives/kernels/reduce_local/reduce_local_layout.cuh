//! Structs that the host and kernels share, made of those in `cuda/layout/params.rs`.
//! SYMMPOOL_BLESS=1 cargo test -p symmpool-collectives --all-features --lib headers writes this file.

#pragma once

#include <symmpool/impl/types.cuh>

namespace symmpool {

// The arguments of a reduction of one device's arrays besides those of `CallParams`.
struct LocalReduceWork {
    // Addresses of the arrays, in the order in which they are reduced.
    u64 inputs[128];
    // Number of the arrays.
    u32 count;
    // The number that averages are divided by.
    u32 divisor;
};
static_assert(sizeof(LocalReduceWork) == 1032, "the host has another layout");

}  // namespace symmpool
