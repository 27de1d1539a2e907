//! Mixture of experts: tokens go to the ranks of their experts (dispatch), and what these make of them comes back and
//! is summed (combine).
//!
//! A token goes to a rank once, however many of its experts are there. Every rank computes by counting where its rows
//! lie in each peer's memory, so rows are written where they belong at once: by source rank, and of one source in the
//! order of its tokens. Combine sends as many rows back and adds the rows of a token up in the order of ranks, in
//! `f32`, so results have the same bits in every run (rule S7).
//!
//! This file has the shape of a buffer and what calls are given; `layout.rs` where things lie in its memory, and the
//! arguments of kernels. `host/ops/experts.rs` and `cuda/ops/experts.rs` run the calls.

mod layout;

use std::fmt;

use symmpool_allocator::{Error, Result};

pub use self::layout::HandleParts;
pub(crate) use self::layout::{ExpertsWork, RegionParts};

use crate::{DType, Place};

/// Most experts of all ranks together: kernels count tokens of each in shared memory.
pub(crate) const MAX_EXPERTS: u32 = 1024;
/// Most experts of a token.
pub(crate) const MAX_TOP_K: u32 = 32;
/// Most tokens of a rank in a call.
const MAX_TOKENS: usize = 1 << 20;
/// Consecutive channels that have a scale together in quantised rows.
pub(crate) const SCALE_GROUP: usize = 128;

/// Shape of a buffer for experts. It is the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Channels of a token.
    pub hidden: usize,
    /// Experts of all ranks together, which all have equally many: expert `e` is on rank `e / (experts / world)`.
    pub experts: u32,
    /// Experts that each token names.
    pub top_k: u32,
    /// The most tokens that a rank has in a call.
    pub max_tokens: usize,
    /// The type of what experts return, and of tokens that are not quantised: `f32`, `f16` or `bf16`.
    pub dtype: DType,
    /// The most tokens that a rank can receive; `world * max_tokens` if there is no number.
    pub capacity: Option<usize>,
}

/// How dispatch makes 8-bit floats (`f8e4m3`) of tokens: each group of 128 channels has a scale, the largest magnitude
/// of the group, but at least 1e-4, divided by 448, the largest number of the type. An element becomes
/// `element * (1 / scale)`: in `f32`, each operation rounded by itself, and then to the nearest `f8e4m3`. A NaN does not
/// count for the magnitude, and stays NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum ExpertQuantization {
    /// Tokens travel as they are.
    #[default]
    None = 0,
    /// Scales are `f32`.
    Fp8 = 1,
    /// Scales are `f32`, rounded up to powers of two.
    Fp8PowerOfTwo = 2,
    /// Scales are powers of two as well, of which the exponent alone is stored, in a byte (`ue8m0`).
    Fp8Ue8m0 = 3,
}

impl ExpertQuantization {
    /// All ways, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::None, Self::Fp8, Self::Fp8PowerOfTwo, Self::Fp8Ue8m0];

    /// Bytes of the scale of a group.
    pub fn scale_bytes(self) -> usize {
        match self {
            Self::None => 0,
            Self::Fp8 | Self::Fp8PowerOfTwo => 4,
            Self::Fp8Ue8m0 => 1,
        }
    }
}

/// How received rows lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertLayout {
    /// A row for each received token, by source rank, and of one source in the order of its tokens. The rows are in the
    /// buffer's own memory.
    ByRank,
    /// A row for each received token and expert of it that this rank has: by expert, then by source rank, then by
    /// token. The first row of each expert is at a multiple of `alignment`. Rows are written to `output`, and their
    /// scales to `scales`, which have room for `capacity` rows.
    ByExpert {
        /// Where rows are written.
        output: *mut u8,
        /// Where the scales of rows are written, if there are any.
        scales: *mut u8,
        /// How many rows these have room for.
        capacity: usize,
        /// Divisor of the number of each expert's first row.
        alignment: u32,
    },
    /// Rows by expert in parts of their own: `output` is `[experts, rows, hidden]`, and `scales` are `[experts, n,
    /// rows]`, where each scale has 4 bytes, or else a byte.
    Packed {
        /// Where rows are written.
        output: *mut u8,
        /// Where the scales of rows are written, if there are any.
        scales: *mut u8,
        /// How many rows of each expert there is room for.
        rows: usize,
    },
}

/// How the rows of a call travel and lie, which is the same on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ExpertMode {
    pub(crate) by_expert: bool,
    /// Whether the routing is that of the handle.
    pub(crate) known: bool,
    /// Whether a combine is given weights.
    pub(crate) weights: bool,
    /// Whether rows are quantised when they travel.
    pub(crate) quantized: bool,
    /// How dispatch quantises them, if it does: ranks cannot tell all ways apart by the scales.
    pub(crate) quantize: ExpertQuantization,
    /// How many calls follow that belong to this one; less than 4.
    pub(crate) more: u32,
    /// Bytes of the scales of a row; less than 2^16.
    pub(crate) scale_bytes: u32,
    /// The code of the [`DType`] of scales, 0 without any.
    pub(crate) scale_dtype: u8,
}

impl ExpertMode {
    pub(crate) fn bits(self) -> u32 {
        let flags = [self.by_expert, self.known, self.weights, self.quantized];
        let flags = (0..).zip(flags).map(|(bit, flag)| u32::from(flag) << bit).sum::<u32>();
        let scales = (self.scale_bytes & 0xffff) << 4 | u32::from(self.scale_dtype) << 22;
        flags | scales | (self.more & 3) << 20 | (self.quantize as u32) << 30
    }

    pub(crate) fn of_bits(bits: u32) -> Self {
        let flag = |bit: u32| bits >> bit & 1 != 0;
        Self {
            by_expert: flag(0),
            known: flag(1),
            weights: flag(2),
            quantized: flag(3),
            scale_bytes: bits >> 4 & 0xffff,
            more: bits >> 20 & 3,
            scale_dtype: (bits >> 22) as u8,
            quantize: ExpertQuantization::ALL[(bits >> 30) as usize],
        }
    }
}

impl fmt::Display for ExpertMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.by_expert { "rows by expert" } else { "rows by rank" })?;
        if self.quantized {
            f.write_str(match self.quantize {
                ExpertQuantization::None => ", quantised before",
                ExpertQuantization::Fp8 => ", quantised",
                ExpertQuantization::Fp8PowerOfTwo => ", quantised with powers of two as scales",
                ExpertQuantization::Fp8Ue8m0 => ", quantised with exponents as scales",
            })?;
        }
        if self.scale_bytes > 0 {
            let dtype = DType::from_code(self.scale_dtype).map_or("?", DType::name);
            write!(f, ", {} bytes of {dtype} scales a row", self.scale_bytes)?;
        }
        if self.known {
            f.write_str(", the routing of a handle")?;
        }
        if self.weights {
            f.write_str(", weights given")?;
        }
        match self.more {
            0 => {}
            1 => f.write_str(", one call of weights behind it")?,
            more => write!(f, ", {more} calls of weights behind it")?,
        }
        Ok(())
    }
}

/// Arguments of a dispatch, by address.
#[derive(Clone, Copy, Debug)]
pub struct DispatchAt {
    /// Rows of `hidden` elements of the buffer's type, or of `f8e4m3` if `quantized`.
    pub input: *const u8,
    /// Whether rows are quantised already.
    pub quantized: bool,
    /// Scales that travel with rows which are quantised already, and their bytes for each row.
    pub scales: *const u8,
    /// Bytes of the scales of a row, a multiple of 4 or less than 4 times the groups of a row.
    pub scale_bytes: usize,
    /// The type of these scales, which ranks compare: the bytes travel as they are. Those that dispatch makes are `f32`,
    /// and `u8` where an exponent alone is stored.
    pub scale_dtype: DType,
    /// How many tokens there are.
    pub tokens: usize,
    /// For each token its `top_k` experts, `i32` or `i64`; -1 stands for none. Null where `known`.
    pub ids: *const u8,
    /// The type of the ids.
    pub ids_dtype: DType,
    /// For each of these its weight, or null.
    pub weights: *const f32,
    /// How tokens are quantised.
    pub quantize: ExpertQuantization,
    /// How received rows lie.
    pub layout: ExpertLayout,
    /// Whether the handle is one of an earlier dispatch, whose routing is used again. Ids and weights are not sent.
    pub known: bool,
    /// How many calls follow that belong to this one, such as one that sends weights: less than 4. Ranks compare it, so
    /// that those which make other calls find that out in the first one.
    pub more: u32,
}

/// How many rows a rank received in a dispatch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReceivedSizes {
    /// Tokens that it received and has room for: a row each if rows lie by rank.
    pub rows: usize,
    /// Rows by expert, padding between experts included; 0 if rows lie by rank.
    pub rows_by_expert: usize,
    /// Rows for each expert of the rank, without padding, also those that had no room.
    pub expert_counts: Vec<usize>,
}

/// Arguments of a combine, by address.
#[derive(Clone, Copy, Debug)]
pub struct CombineAt {
    /// Rows of experts, as they lay after the dispatch.
    pub input: *const u8,
    /// How many rows the input has. A handle that names others is an error, and none of them is read. `usize::MAX` where
    /// the caller answers for the handle.
    pub input_rows: usize,
    /// Where the sums are written, `[tokens, hidden]`.
    pub output: *mut u8,
    /// The tokens of this rank in the dispatch.
    pub tokens: usize,
    /// For rows by expert: the weights by which rows are multiplied, `[tokens, top_k]`; null for those that the
    /// dispatch was given, or 1 if it was given none.
    pub weights: *const f32,
    /// Whether rows lie by expert.
    pub by_expert: bool,
    /// Number of calls that follow, as in [`DispatchAt`].
    pub more: u32,
}

impl ExpertShape {
    /// Bytes of a row that is not quantised.
    pub(crate) fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.size()
    }

    /// Groups of channels that have a scale each.
    pub(crate) fn groups(&self) -> usize {
        self.hidden.div_ceil(SCALE_GROUP)
    }

    /// The most bytes of the scales of a row: an `f32` for each group.
    pub fn most_scale_bytes(&self) -> usize {
        4 * self.groups()
    }

    /// Bytes of the scales that travel with a row: those that dispatch makes, or else `given`.
    pub fn scale_bytes(&self, quantize: ExpertQuantization, given: usize) -> usize {
        match quantize {
            ExpertQuantization::None => given,
            quantize => self.groups() * quantize.scale_bytes(),
        }
    }

    /// The type of these scales, or else `given`.
    pub(crate) fn scale_dtype(quantize: ExpertQuantization, given: DType) -> DType {
        match quantize {
            ExpertQuantization::None => given,
            ExpertQuantization::Fp8 | ExpertQuantization::Fp8PowerOfTwo => DType::F32,
            ExpertQuantization::Fp8Ue8m0 => DType::U8,
        }
    }

    /// The most tokens that a rank can receive.
    pub(crate) fn received(&self, world: u32) -> usize {
        self.capacity.unwrap_or(self.max_tokens * world as usize)
    }

    /// Experts of a rank.
    pub(crate) fn local_experts(&self, world: u32) -> u32 {
        self.experts / world
    }

    /// Returns this shape, or an error if it is not possible.
    pub(crate) fn checked(self, rank: u32, world: u32) -> Result<Self> {
        let Self { hidden, experts, top_k, max_tokens, dtype, capacity } = self;
        let refuse = |why: String| {
            Err(Error::invalid_argument(format!("a buffer for experts on rank {rank}: {why}")))
        };
        if !matches!(dtype, DType::F32 | DType::F16 | DType::Bf16) {
            return refuse(format!(
                "elements of {}: combine sums f32, f16 and bf16; tokens are quantised by dispatch",
                dtype.name()
            ));
        }
        let most_hidden = 1 << 20;
        if hidden == 0 || hidden > most_hidden || !(hidden * dtype.size()).is_multiple_of(16) {
            return refuse(format!(
                "hidden={hidden}: a row has a multiple of 16 bytes, and at most {most_hidden} elements"
            ));
        }
        if experts == 0 || experts > MAX_EXPERTS || !experts.is_multiple_of(world) {
            return refuse(format!(
                "experts={experts}: there are 1 to {MAX_EXPERTS} of them, equally many on each of {world} ranks"
            ));
        }
        if top_k == 0 || top_k > MAX_TOP_K {
            return refuse(format!("top_k={top_k}: a token has 1 to {MAX_TOP_K} experts"));
        }
        if max_tokens == 0 || max_tokens > MAX_TOKENS {
            return refuse(format!("max_tokens={max_tokens}: a rank has 1 to {MAX_TOKENS} tokens"));
        }
        let most = max_tokens * world as usize;
        if capacity.is_some_and(|capacity| capacity == 0 || capacity > most) {
            return refuse(format!(
                "capacity={}: a rank receives 1 to {most} tokens of {world} ranks",
                capacity.unwrap_or(0)
            ));
        }
        Ok(self)
    }
}

/// A dispatch or a combine, as the engines get it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertCall {
    pub(crate) shape: ExpertShape,
    pub(crate) mode: ExpertMode,
    /// The most SMs that a kernel takes.
    pub(crate) num_sms: Option<u32>,
    pub(crate) work: ExpertsWork,
    /// Where the buffer's symmetric memory lies.
    pub(crate) region: Place,
}
