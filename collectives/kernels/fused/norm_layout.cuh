//! Structs that the host and kernels share, made of those in `cuda/layout/params.rs`.
//! SYMMPOOL_BLESS=1 cargo test -p symmpool-collectives --all-features --lib headers writes this file.

#pragma once

#include <symmpool/impl/types.cuh>

namespace symmpool {

// The arguments of a fused all-reduce besides those of `CallParams`. Rows follow each other without gaps.
struct NormWork {
    // The residual, or null.
    const char* residual;
    const char* weight;
    // A row, or null.
    const char* bias;
    // The sum with bias and residual.
    char* residual_out;
    // The norm before it is quantised, where outputs are quantised; or null.
    char* norm_out;
    // With `FP8_STATIC` one scale, which is read; else those that are written.
    float* scales;
    // Scales from one row's to the next one's, and from one group's to the next one's.
    u64 scale_row;
    u64 scale_group;
    u32 tokens;
    u32 hidden;
    float epsilon;
    // Added to each weight.
    float weight_bias;
    // Whether scales are rounded up to powers of two.
    u32 powers_of_two;
    u32 unused;
};
static_assert(sizeof(NormWork) == 88, "the host has another layout");

}  // namespace symmpool
