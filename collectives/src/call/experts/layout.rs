//! Where things lie in the memory of a buffer for experts and in a handle, and the arguments of kernels.

use super::ExpertShape;
use crate::types::bump_layout::BumpLayout;
use crate::types::kernel_struct::kernel_structs;

/// Most chunks into which kernels cut a rank's tokens: `MAX_CHUNKS` in `experts/params.cuh`.
const MAX_CHUNKS: u32 = 2048;

/// Where things lie in the symmetric memory of a buffer, which peers write: offsets in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionParts {
    /// Received rows, and of each its scales, the numbers of its experts on this rank (`i32`, -1 for those elsewhere),
    /// their weights (`f32`), its number on its source (`i32`), and for each expert how many rows of the same source
    /// go to that expert before it (`i32`).
    pub(crate) rows: u64,
    pub(crate) scales: u64,
    pub(crate) ids: u64,
    pub(crate) weights: u64,
    pub(crate) tokens: u64,
    pub(crate) places: u64,
    /// The row, counted from the source's first one, at which each chunk of each source begins (`i32`).
    pub(crate) chunks: u64,
    /// Weights that a combine is given, for each received row.
    pub(crate) combine_weights: u64,
    /// Rows that come back, from each peer in the order of its distance.
    pub(crate) combined: u64,
    pub(crate) bytes: u64,
}

impl RegionParts {
    pub(crate) fn new(shape: &ExpertShape, world: u32) -> Self {
        Self::with_areas(shape, world, 0)
    }

    /// Parts with so many areas for rows that come back, or with one for each peer where that is more.
    pub(crate) fn with_areas(shape: &ExpertShape, world: u32, areas: usize) -> Self {
        let (ranks, capacity) = (u64::from(world), shape.received(world) as u64);
        let areas = (areas as u64).max(ranks - 1);
        let (top_k, row) = (u64::from(shape.top_k), shape.row_bytes() as u64);
        let mut parts = BumpLayout(0);
        let rows = parts.take(capacity, row);
        let scales = parts.take(capacity, shape.most_scale_bytes() as u64);
        let ids = parts.take(capacity * top_k, 4);
        let weights = parts.take(capacity * top_k, 4);
        let tokens = parts.take(capacity, 4);
        let places = parts.take(capacity * top_k, 4);
        let chunks = parts.take(ranks * u64::from(MAX_CHUNKS + 1), 4);
        let combine_weights = parts.take(capacity * top_k, 4);
        let combined = parts.take(areas * shape.max_tokens as u64, row);
        let bytes = parts.0;
        Self {
            rows,
            scales,
            ids,
            weights,
            tokens,
            places,
            chunks,
            combine_weights,
            combined,
            bytes,
        }
    }
}

/// Where things lie in a handle, which says how the tokens of a dispatch were routed: offsets in bytes. All numbers are
/// `i32`, but for weights.
#[derive(Clone, Copy, Debug)]
pub struct HandleParts {
    /// How many rows were received, then how many tokens this rank had, then how many rows by expert there are,
    /// padding included, then which layout the rows have (`HandleParts::layout_word`).
    pub head: usize,
    /// Where the rows of each source begin, and behind them the end: `world + 1` numbers.
    pub source_offsets: usize,
    /// Where the rows of this rank begin on each rank.
    pub bases: usize,
    /// How many tokens each rank had.
    pub source_tokens: usize,
    /// How many rows each expert of this rank was sent.
    pub expert_counts: usize,
    /// Where rows of each expert begin if they lie by expert, and behind them the end: one number more than experts.
    pub expert_offsets: usize,
    /// For each token and rank, which row of those that this rank sends there it is; -1 for none: `[max_tokens, world]`.
    pub positions: usize,
    /// The row, counted from the source's first one, at which each chunk of each source begins.
    pub chunks: usize,
    /// For each received row and expert of it, its row by expert; -1 for none: `[capacity, top_k]`.
    pub places: usize,
    /// For each received row and expert of it, its weight (`f32`).
    pub weights: usize,
    /// The source's number of each received row.
    pub tokens: usize,
    /// Bytes of a handle.
    pub bytes: usize,
}

impl HandleParts {
    /// The number by which a handle says how the rows of its dispatch lie. No other memory is likely to have it.
    pub(crate) fn layout_word(by_expert: bool) -> i32 {
        // `experts/params.cuh` has the same words.
        0x5e1d_ab00 + i32::from(by_expert)
    }

    pub(crate) fn new(shape: &ExpertShape, world: u32) -> Self {
        let (ranks, capacity) = (u64::from(world), shape.received(world) as u64);
        let (top_k, local) = (u64::from(shape.top_k), u64::from(shape.local_experts(world)));
        let mut parts = BumpLayout(0);
        let mut take = |count: u64| parts.take(count, 4) as usize;
        let head = take(16);
        let source_offsets = take(ranks + 1);
        let bases = take(ranks);
        let source_tokens = take(ranks);
        let expert_counts = take(local);
        let expert_offsets = take(local + 1);
        let positions = take(shape.max_tokens as u64 * ranks);
        let chunks = take(ranks * u64::from(MAX_CHUNKS + 1));
        let places = take(capacity * top_k);
        let weights = take(capacity * top_k);
        let tokens = take(capacity);
        let bytes = parts.0 as usize;
        Self {
            head,
            source_offsets,
            bases,
            source_tokens,
            expert_counts,
            expert_offsets,
            positions,
            chunks,
            places,
            weights,
            tokens,
            bytes,
        }
    }
}

kernel_structs! {
    /// The arguments of dispatch and combine; addresses are those of this rank.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct ExpertsWork as "ExpertsWork" {
        /// Memory that the caller gave.
        pub(crate) input: u64 as "const char*",
        pub(crate) input_scales: u64 as "const char*",
        pub(crate) ids: u64 as "const void*",
        pub(crate) weights: u64 as "const float*",
        pub(crate) output: u64 as "char*",
        pub(crate) output_scales: u64 as "char*",
        /// Parts of the handle.
        pub(crate) head: u64 as "int*",
        pub(crate) source_offsets: u64 as "int*",
        pub(crate) bases: u64 as "int*",
        pub(crate) source_tokens: u64 as "int*",
        pub(crate) expert_counts: u64 as "int*",
        pub(crate) expert_offsets: u64 as "int*",
        pub(crate) positions: u64 as "int*",
        pub(crate) chunks: u64 as "int*",
        pub(crate) places: u64 as "int*",
        pub(crate) kept_weights: u64 as "float*",
        pub(crate) kept_tokens: u64 as "int*",
        /// Parts of the buffer's symmetric memory.
        pub(crate) rows: u64 as "char*",
        pub(crate) row_scales: u64 as "char*",
        pub(crate) row_ids: u64 as "int*",
        pub(crate) row_weights: u64 as "float*",
        pub(crate) row_tokens: u64 as "int*",
        pub(crate) row_places: u64 as "int*",
        pub(crate) chunk_begins: u64 as "int*",
        pub(crate) combine_weights: u64 as "float*",
        pub(crate) combined: u64 as "char*",
        /// Where a dispatch tells the host how many rows it received, or 0.
        pub(crate) sizes: u64 as "u32*",
        /// Bytes of a row that travels, and of its scales.
        pub(crate) row_bytes: u64,
        pub(crate) scale_bytes: u64,
        /// Rows that a rank can receive, and rows by expert that `output` has room for.
        pub(crate) capacity: u64,
        pub(crate) output_capacity: u64,
        /// Rows that the input of a combine has.
        pub(crate) input_rows: u64,
        /// The rows of each expert's part of `output`; 0 if rows of experts lie one after the other.
        pub(crate) expert_rows: u64,
        pub(crate) max_tokens: u32,
        pub(crate) tokens: u32,
        pub(crate) top_k: u32,
        pub(crate) experts: u32,
        /// The number of each expert's first row is a multiple of this.
        pub(crate) alignment: u32,
        /// Whether ids have 64 bits.
        pub(crate) wide: u32,
        /// Whether the routing is that of the handle.
        pub(crate) known: u32,
        /// How tokens are quantised: `ExpertQuantization`.
        pub(crate) quantize: u32,
        /// How many peer blocks there are on every rank.
        pub(crate) peer_blocks: u32,
        /// Whether weights are sent ahead of a combine.
        pub(crate) sends_weights: u32,
        /// A rank with at most this many tokens sends them through inboxes in a dispatch, and gets its rows back through them
        /// in a combine. The two calls have numbers of their own.
        pub(crate) inbox_tokens: u32,
        /// The number that a dispatch writes to `sizes` when it has told all.
        pub(crate) sizes_number: u32,
        /// Whether the handle may be of a dispatch whose rows lie otherwise.
        pub(crate) any_layout: u32,
        pub(crate) unused: u32,
    }
}

impl ExpertsWork {
    /// Arguments with the addresses of a buffer and a handle only.
    pub(crate) fn new(shape: &ExpertShape, world: u32, region_at: u64, handle_at: u64) -> Self {
        let (region, handle) = (RegionParts::new(shape, world), HandleParts::new(shape, world));
        let kept = |part: usize| handle_at + part as u64;
        Self {
            input: 0,
            input_scales: 0,
            ids: 0,
            weights: 0,
            output: 0,
            output_scales: 0,
            head: kept(handle.head),
            source_offsets: kept(handle.source_offsets),
            bases: kept(handle.bases),
            source_tokens: kept(handle.source_tokens),
            expert_counts: kept(handle.expert_counts),
            expert_offsets: kept(handle.expert_offsets),
            positions: kept(handle.positions),
            chunks: kept(handle.chunks),
            places: kept(handle.places),
            kept_weights: kept(handle.weights),
            kept_tokens: kept(handle.tokens),
            rows: region_at + region.rows,
            row_scales: region_at + region.scales,
            row_ids: region_at + region.ids,
            row_weights: region_at + region.weights,
            row_tokens: region_at + region.tokens,
            row_places: region_at + region.places,
            chunk_begins: region_at + region.chunks,
            combine_weights: region_at + region.combine_weights,
            combined: region_at + region.combined,
            sizes: 0,
            row_bytes: shape.row_bytes() as u64,
            scale_bytes: 0,
            capacity: shape.received(world) as u64,
            output_capacity: 0,
            input_rows: 0,
            expert_rows: 0,
            max_tokens: shape.max_tokens as u32,
            tokens: 0,
            top_k: shape.top_k,
            experts: shape.experts,
            alignment: 1,
            wide: 0,
            known: 0,
            quantize: 0,
            peer_blocks: 1,
            sends_weights: 0,
            inbox_tokens: 0,
            sizes_number: 0,
            any_layout: 0,
            unused: 0,
        }
    }
}
