//! Structs that the host and kernels share, made of those in `call/experts/layout.rs`.
//! SYMMPOOL_BLESS=1 cargo test -p symmpool-collectives --all-features --lib headers writes this file.

#pragma once

#include <symmpool/impl/types.cuh>

namespace symmpool {

// The arguments of dispatch and combine; addresses are those of this rank.
struct ExpertsWork {
    // Memory that the caller gave.
    const char* input;
    const char* input_scales;
    const void* ids;
    const float* weights;
    char* output;
    char* output_scales;
    // Parts of the handle.
    int* head;
    int* source_offsets;
    int* bases;
    int* source_tokens;
    int* expert_counts;
    int* expert_offsets;
    int* positions;
    int* chunks;
    int* places;
    float* kept_weights;
    int* kept_tokens;
    // Parts of the buffer's symmetric memory.
    char* rows;
    char* row_scales;
    int* row_ids;
    float* row_weights;
    int* row_tokens;
    int* row_places;
    int* chunk_begins;
    float* combine_weights;
    char* combined;
    // Where a dispatch tells the host how many rows it received, or 0.
    u32* sizes;
    // Bytes of a row that travels, and of its scales.
    u64 row_bytes;
    u64 scale_bytes;
    // Rows that a rank can receive, and rows by expert that `output` has room for.
    u64 capacity;
    u64 output_capacity;
    // Rows that the input of a combine has.
    u64 input_rows;
    // The rows of each expert's part of `output`; 0 if rows of experts lie one after the other.
    u64 expert_rows;
    u32 max_tokens;
    u32 tokens;
    u32 top_k;
    u32 experts;
    // The number of each expert's first row is a multiple of this.
    u32 alignment;
    // Whether ids have 64 bits.
    u32 wide;
    // Whether the routing is that of the handle.
    u32 known;
    // How tokens are quantised: `ExpertQuantization`.
    u32 quantize;
    // How many peer blocks there are on every rank.
    u32 peer_blocks;
    // Whether weights are sent ahead of a combine.
    u32 sends_weights;
    // A rank with at most this many tokens sends them through inboxes in a dispatch, and gets its rows back through them
    // in a combine. The two calls have numbers of their own.
    u32 inbox_tokens;
    // The number that a dispatch writes to `sizes` when it has told all.
    u32 sizes_number;
    // Whether the handle may be of a dispatch whose rows lie otherwise.
    u32 any_layout;
    u32 unused;
};
static_assert(sizeof(ExpertsWork) == 320, "the host has another layout");

}  // namespace symmpool
