//! Structs that kernels are given, or share with the host, and where those lie in a control block. The headers
//! `*_layout.cuh` of kernels are made of these structs.

use std::mem::offset_of;

use crate::call::CallDescription;
use crate::call::matmul::MAX_PROBLEMS;
use crate::types::kernel_struct::kernel_structs;

/// Most peer blocks: the control block has flags for as many. Twice as many as an H200 runs at 512 threads.
pub(in crate::cuda) const MAX_PEER_BLOCKS: u32 = 1056;
/// Ranks whose vectors a kernel holds in registers at once; more would spill.
pub(in crate::cuda) const MAX_RANKS: u32 = 8;
/// Bytes of data in a line of 128 bytes of LL128.
pub(in crate::cuda) const LL128_PAYLOAD: u64 = 120;
/// Bytes of the escaped Lamport inbox that a warp handles at once. `ITEM` in `symmpool/impl/lamport_escaped.cuh` is the same in
/// vectors: 32 of 16 bytes.
pub(in crate::cuda) const ITEM: u64 = 512;
/// Areas of memory for data: `AREAS` in `symmpool/impl/comm.cuh`.
const AREAS: usize = 2;
/// Communicators of a process that may share a device's SMs by turns: [`SmLock`] has a mark for each.
pub(in crate::cuda) const SM_LOCK_MEMBERS: usize = 40;
/// Bytes of [`LocalState`], rounded up to whole cache lines.
pub(in crate::cuda) const LOCAL: u64 = size_of::<LocalState>().next_multiple_of(128) as u64;
/// Where `failed` of [`LocalState`] lies in a control block.
pub(in crate::cuda) const LOCAL_FAILED: u64 = offset_of!(LocalState, failed) as u64;
/// Where `areas` of [`LocalState`] lies in a control block.
pub(in crate::cuda) const LOCAL_AREAS: u64 = offset_of!(LocalState, areas) as u64;
/// Value of `failed` where the host knows why: `FAILED_ON_HOST` in `symmpool/impl/comm.cuh`.
pub(in crate::cuda) const FAILED_ON_HOST: u32 = 3;

/// Bytes of [`Departure`], and where the upper halves of its first two words lie.
pub(in crate::cuda) const DEPARTURE: u64 = size_of::<Departure>() as u64;
pub(in crate::cuda) const DEPARTURE_WHEN: u64 = offset_of!(Departure, when) as u64 + 4;
pub(in crate::cuda) const DEPARTURE_REASON: u64 = offset_of!(Departure, reason) as u64 + 4;

/// Stands for memory that is no window, and for a count that is not known: `UNKNOWN` in `all_to_all/traffic.cuh`.
pub(in crate::cuda) const UNKNOWN: u64 = u64::MAX;

/// The most arrays of a reduction of one device's arrays: arguments of a kernel have at most 4 KiB.
pub(crate) const MAX_LOCAL_INPUTS: usize = 128;

kernel_structs! {
    /// Message that a rank leaves at each peer when it makes no further call, and no failed handshake says so: it refused a
    /// message, or failed on the host behind a call's handshake. `when` comes last. The host writes it too
    /// (`CudaEngine::depart`), by halves of words.
    pub(super) struct Departure as "Departure" {
        /// 0 while the rank takes part. Else 1 << 32 | the epoch of the last call that it has begun, in which it may still be
        /// found; or 1 << 32 alone if it is absent from every call.
        when: u64,
        /// In the upper half, as in a failed handshake.
        reason: u64,
        /// With `MESSAGE_FOLLOWS`, the payload that was sent, and the one that was expected.
        sent: u64,
        expected: u64,
    }

    /// The parts of an area's memory that hold flags of epochs: offsets from the control block, and bytes of all parities
    /// together.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::cuda) struct AreaFlags as "AreaFlags" {
        pub(super) ll: u64,
        pub(super) ll_bytes: u64,
        pub(super) ll128: u64,
        pub(super) ll128_bytes: u64,
        pub(super) escape_marks: u64,
        pub(super) escape_mark_bytes: u64,
    }

    /// The beginning of a control block, which only its own rank accesses. The first 16 bytes are read by one load, by every
    /// block of every call.
    pub(super) struct LocalState as "LocalState" {
        /// The epoch of the last call.
        epoch: u32,
        /// 0, or later calls do nothing: 1 where a kernel failed, whose record says why; `FAILED_ON_HOST` where the host knows.
        failed: u32,
        /// State of each area's Lamport inbox: the third that the next call there uses, in the lowest two bits, and how many
        /// vectors the call before there used of its third.
        lamport: [u32; AREAS],
        /// Blocks of the running call that have read the four words above.
        blocks_arrived: u32,
        /// Blocks of the companion kernel that have waited. This word and the next two belong to `symmpool/impl/companion.cuh`.
        companion_blocks: u32,
        handshakes_reported: u64,
        handshakes_consumed: u64,
        /// Flags that calls in the other area expire. The host writes both when the memory grows, and else none.
        areas: [AreaFlags; AREAS],
    }

    /// The lock of a device's SMs, which communicators of a process share (`symmpool/impl/sm_grant.cuh`). Kernels alone write it.
    pub(in crate::cuda) struct SmLock as "SmLock" {
        word: u64,
        /// Blocks that have ended of each member's narrow kernel.
        ended_blocks: [u32; SM_LOCK_MEMBERS],
    }

    /// The layout of a control block: offsets from it, and the lengths of all parities together, in bytes. The parts for data
    /// are the call's area. Once a communicator's memory has grown they may lie in another block, also in front of this one:
    /// offsets are added modulo 2^64.
    #[derive(Clone, Copy, Debug, Default)]
    pub(in crate::cuda) struct ControlLayout as "" {
        pub(in crate::cuda) handshake: u64,
        pub(in crate::cuda) flags: u64,
        pub(in crate::cuda) flags_bytes: u64,
        pub(in crate::cuda) ll: u64,
        pub(in crate::cuda) ll_bytes: u64,
        pub(in crate::cuda) ll128: u64,
        pub(in crate::cuda) ll128_bytes: u64,
        pub(in crate::cuda) lamport: u64,
        pub(in crate::cuda) lamport_bytes: u64,
        pub(in crate::cuda) escape_marks: u64,
        pub(in crate::cuda) escaped: u64,
        pub(in crate::cuda) escaped_bytes: u64,
        pub(in crate::cuda) scratch: u64,
        pub(in crate::cuda) scratch_bytes: u64,
        pub(in crate::cuda) channels: u64,
        /// Scratch of kernels that are made of plans, in two parities.
        pub(in crate::cuda) plan_scratch: u64,
        pub(in crate::cuda) plan_scratch_bytes: u64,
    }

    /// The communicator, as a kernel is given it.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::cuda) struct CommFields as "CommFields" {
        /// The address of slot 0.
        pub(in crate::cuda) base: u64 as "char*",
        /// Bytes from one slot to the next.
        pub(in crate::cuda) stride: u64,
        /// The offset of the control block in every slot.
        pub(in crate::cuda) control: u64,
        /// Offsets from the control block, and the lengths of all parities together, in bytes. Those for data are the call's
        /// area, which may lie in another block in front of this one: offsets are added modulo 2^64.
        pub(in crate::cuda) places: ControlLayout,
        /// Nanoseconds.
        pub(in crate::cuda) timeout: u64,
        pub(in crate::cuda) fault: u64 as "FaultRecord*",
        pub(in crate::cuda) rank: u32,
        /// Whether the stream's next kernel may start while this one runs (programmatic dependent launch).
        pub(in crate::cuda) early: u16,
        /// The number of the area of memory that the call uses (`engine/areas.rs`).
        pub(in crate::cuda) area: u16,
        /// The lock of the device's SMs, and the communicator's place and tag there.
        pub(in crate::cuda) sm_lock: u64 as "SmLock*",
        pub(in crate::cuda) member: u16,
        pub(in crate::cuda) sm_tag: u16,
        /// Blocks of a kernel that work while the lock is another communicator's.
        pub(in crate::cuda) narrow_blocks: u32,
    }

    /// The arguments of a call. Kernels outside of calls, and those beside copy engines, use fields otherwise, as their files say:
    /// `p2p.cu`, `one_sided.cu`, `two_shot_copy.cu`, `copy_companion.cu`, `broadcast_pipeline.cu`, `two_shot_pipeline.cu`.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::cuda) struct CallParams as "CallParams" {
        /// Words that ranks compare in the handshake (rule S6).
        pub(in crate::cuda) description: [u64; 4],
        pub(in crate::cuda) input: u64 as "const char*",
        pub(in crate::cuda) output: u64 as "char*",
        /// Bytes of the whole buffer, or of each rank's chunk.
        pub(in crate::cuda) bytes: u64,
        /// Bytes from one rank's chunk to the next.
        pub(in crate::cuda) stride: u64,
        pub(in crate::cuda) root: u32,
        /// How many peer blocks there are, for kernels that use `symmpool/impl/peer_blocks.cuh`.
        pub(in crate::cuda) peer_blocks: u32,
    }

    /// How the data of a plan's call is divided. The host computes the same on every rank (`cuda/ops/plan.rs`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub(in crate::cuda) struct PlanWork as "PlanWork" {
        /// Bytes of a part of the input or output.
        pub(in crate::cuda) part: u64,
        /// Bytes of a chunk of a part; the last ones may have fewer, or none.
        pub(in crate::cuda) chunk: u64,
        /// Where in each chunk this launch begins, in bytes.
        pub(in crate::cuda) begin: u64,
        /// Vectors of the longest chunk in this launch.
        pub(in crate::cuda) vectors: u64,
        /// Vectors that a peer block has in a stage, at most.
        pub(in crate::cuda) each: u32,
        pub(in crate::cuda) stages: u32,
        /// How many stages have a place in scratch at once.
        pub(in crate::cuda) slots: u32,
        /// Turns from one stage to the next.
        pub(in crate::cuda) interval: u32,
    }

    /// The arguments of a reduction of one device's arrays besides those of `CallParams`.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::cuda) struct LocalReduceWork as "LocalReduceWork" {
        /// Addresses of the arrays, in the order in which they are reduced.
        pub(in crate::cuda) inputs: [u64; MAX_LOCAL_INPUTS],
        /// Number of the arrays.
        pub(in crate::cuda) count: u32,
        /// The number that averages are divided by.
        pub(in crate::cuda) divisor: u32,
    }

    /// The arguments of a fused all-reduce besides those of `CallParams`. Rows follow each other without gaps.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::cuda) struct NormWork as "NormWork" {
        /// The residual, or null.
        pub(in crate::cuda) residual: u64 as "const char*",
        pub(in crate::cuda) weight: u64 as "const char*",
        /// A row, or null.
        pub(in crate::cuda) bias: u64 as "const char*",
        /// The sum with bias and residual.
        pub(in crate::cuda) residual_out: u64 as "char*",
        /// The norm before it is quantised, where outputs are quantised; or null.
        pub(in crate::cuda) norm_out: u64 as "char*",
        /// With `FP8_STATIC` one scale, which is read; else those that are written.
        pub(in crate::cuda) scales: u64 as "float*",
        /// Scales from one row's to the next one's, and from one group's to the next one's.
        pub(in crate::cuda) scale_row: u64,
        pub(in crate::cuda) scale_group: u64,
        pub(in crate::cuda) tokens: u32,
        pub(in crate::cuda) hidden: u32,
        pub(in crate::cuda) epsilon: f32,
        /// Added to each weight.
        pub(in crate::cuda) weight_bias: f32,
        /// Whether scales are rounded up to powers of two.
        pub(in crate::cuda) powers_of_two: u32,
        pub(in crate::cuda) unused: u32,
    }

    /// A product of a launch. With gathered rows all have the same left matrix and inner dimension, and their tiles lie side by
    /// side. Where products are added up, the blocks of their inner dimensions lie one after the other, and `out` and the factor
    /// of the sum are those of the first one.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::cuda) struct GemmProblem as "GemmProblem" {
        /// The rows of all ranks: by ranks where they are gathered, else by batches.
        pub(in crate::cuda) left: TensorMap,
        pub(in crate::cuda) right: TensorMap,
        /// The rows that a part has in each batch, once for each rank that has some there.
        pub(in crate::cuda) out: TensorMap,
        /// A factor of the sums, on the device, or null.
        pub(in crate::cuda) right_scale: u64 as "const float*",
        /// The column behind the last of its tiles.
        pub(in crate::cuda) end_column: u32,
        /// The block behind the last of its inner dimension.
        pub(in crate::cuda) end_block: u32,
    }

    /// How clusters divide tiles; `cuda/ops/gemm/stream_k.rs` says how these are chosen. Here a cluster's tiles of one place count
    /// once.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(in crate::cuda) struct StreamK as "StreamK" {
        /// Tiles that are made whole, from the first one on.
        pub(in crate::cuda) whole: u32,
        /// Clusters that help with the others, from the first one on; each of the others makes one.
        pub(in crate::cuda) helpers: u32,
        /// Helpers of a tile, or else tiles of a helper: one of them is 1.
        pub(in crate::cuda) per_tile: u32,
        pub(in crate::cuda) per_helper: u32,
        /// Blocks of the inner dimension that a helper makes of a tile.
        pub(in crate::cuda) helper_blocks: u32,
    }

    /// The arguments of a product of tensor cores besides those of `CallParams`.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::cuda) struct MatmulWork as "MatmulWork" {
        /// This rank's part of the left matrix, where it is sent to the others.
        pub(in crate::cuda) own: TensorMap,
        pub(in crate::cuda) problems: [GemmProblem; MAX_PROBLEMS],
        /// A factor of the sums, as `right_scale`.
        pub(in crate::cuda) left_scale: u64 as "const float*",
        /// Parts that other ranks get and that they send: products for the ranks after this one, the next one's first, and of
        /// them, in the same order; or this rank's rows, and all ranks' rows.
        pub(in crate::cuda) outgoing: u64 as "char*",
        pub(in crate::cuda) incoming: u64 as "const char*",
        /// Bytes from one of these parts to the next.
        pub(in crate::cuda) part_bytes: u64,
        /// Where all ranks' rows are copied to, as they are in results, or null.
        pub(in crate::cuda) gathered: u64 as "char*",
        pub(in crate::cuda) control: u64 as "MatmulControl*",
        /// Sums of tiles that blocks leave for others.
        pub(in crate::cuda) partials: u64 as "float*",
        /// Rows of a part.
        pub(in crate::cuda) rows: u32,
        /// Rows of a part in each batch: all, or a multiple of a tile's.
        pub(in crate::cuda) batch_rows: u32,
        /// Blocks of the inner dimension, or of all of them.
        pub(in crate::cuda) inner_blocks: u32,
        /// Rows of a part's tiles, a multiple of `CLUSTER`.
        pub(in crate::cuda) tile_rows: u32,
        /// Columns of the tiles of all products.
        pub(in crate::cuda) tile_columns: u32,
        /// Tiles of a chunk where products are sent; rows of tiles where rows are. A multiple of `CLUSTER`.
        pub(in crate::cuda) chunk_tiles: u32,
        /// Chunks of a part.
        pub(in crate::cuda) chunks: u32,
        /// A factor of the sum of all ranks.
        pub(in crate::cuda) factor: f32,
        /// The parts that a launch makes, in the order of the kernel.
        pub(in crate::cuda) first_part: u32,
        pub(in crate::cuda) end_part: u32,
        pub(in crate::cuda) split: StreamK,
    }

    /// The arguments of a product of few rows besides those of `CallParams`, whose output is the sum.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::cuda) struct MatmulSmallMWork as "MatmulSmallMWork" {
        pub(in crate::cuda) left: TensorMap,
        pub(in crate::cuda) right: TensorMap,
        pub(in crate::cuda) rows: u32,
        /// Columns of the product, a multiple of 8.
        pub(in crate::cuda) columns: u32,
        /// Blocks of the inner dimension.
        pub(in crate::cuda) inner_blocks: u32,
        /// Tiles of 128 columns.
        pub(in crate::cuda) tiles: u32,
        /// Whether this launch adds up what all ranks send.
        pub(in crate::cuda) receives: u32,
    }

    /// The arguments of an all-to-all. Counts are elements.
    #[derive(Clone, Copy, Debug)]
    pub(in crate::cuda) struct Traffic as "Traffic" {
        /// Elements for and from each rank, where the host knows them.
        pub(in crate::cuda) send: [u64; MAX_RANKS as usize],
        pub(in crate::cuda) receive: [u64; MAX_RANKS as usize],
        /// Where these begin in the input and the output, in bytes.
        pub(in crate::cuda) send_begin: [u64; MAX_RANKS as usize],
        pub(in crate::cuda) receive_begin: [u64; MAX_RANKS as usize],
        /// Device memory: the input splits that the device knows; where to write how much came from each rank and where in the
        /// output that begins, or null.
        pub(in crate::cuda) splits: u64 as "const void*",
        pub(in crate::cuda) received: u64 as "void*",
        pub(in crate::cuda) offsets: u64 as "void*",
        /// Elements of the input, and of the output.
        pub(in crate::cuda) length: u64,
        pub(in crate::cuda) capacity: u64,
        /// The offset of the output in the slot, or `UNKNOWN` if it is no window.
        pub(in crate::cuda) window: u64,
        /// Parts of at most this many bytes go through inboxes.
        pub(in crate::cuda) inbox_bytes: u64,
        /// Bytes at the beginning of longer parts that go through inboxes.
        pub(in crate::cuda) head: u32,
        /// Bytes of an element.
        pub(in crate::cuda) size: u32,
        /// Whether splits on the device have 64 bits.
        pub(in crate::cuda) wide: u32,
        /// Whether every rank serves its peers one after the other in any case.
        pub(in crate::cuda) ring: u32,
    }
}

impl AreaFlags {
    /// Where in this struct each place lies, in bytes, and the place.
    pub(in crate::cuda) fn places(&self) -> [(u64, u64); 3] {
        [
            (offset_of!(Self, ll) as u64, self.ll),
            (offset_of!(Self, ll128) as u64, self.ll128),
            (offset_of!(Self, escape_marks) as u64, self.escape_marks),
        ]
    }

    /// Where in this struct each length lies, in bytes, and the length.
    pub(in crate::cuda) fn lengths(&self) -> [(u64, u64); 3] {
        [
            (offset_of!(Self, ll_bytes) as u64, self.ll_bytes),
            (offset_of!(Self, ll128_bytes) as u64, self.ll128_bytes),
            (offset_of!(Self, escape_mark_bytes) as u64, self.escape_mark_bytes),
        ]
    }
}

impl CallParams {
    /// A call without data.
    pub(in crate::cuda) fn of(call: &CallDescription) -> Self {
        Self {
            description: *call.words(),
            input: 0,
            output: 0,
            bytes: 0,
            stride: 0,
            root: 0,
            peer_blocks: 0,
        }
    }
}

/// How the driver describes a matrix for copies of tiles: `CUtensorMap`, of which the driver alone knows the members.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct TensorMap(pub(in crate::cuda) [u64; 16]);

impl TensorMap {
    /// Map of no matrix.
    pub(in crate::cuda) const NONE: Self = Self([0; 16]);
}

#[cfg(test)]
impl crate::types::kernel_struct::KernelType for TensorMap {
    fn declaration(name: &str) -> String {
        format!("TensorMap {name}")
    }
}

impl GemmProblem {
    pub(in crate::cuda) const NONE: Self = Self {
        left: TensorMap::NONE,
        right: TensorMap::NONE,
        out: TensorMap::NONE,
        right_scale: 0,
        end_column: 0,
        end_block: 0,
    };
}

/// This rank's end of a channel. Operations on one end run in the order of the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cuda) struct ChannelEnd {
    /// The address of the set that the channel is of; 0 for the communicator's own.
    pub(in crate::cuda) set: u64,
    pub(in crate::cuda) sends: bool,
    pub(in crate::cuda) peer: u32,
    pub(in crate::cuda) number: u32,
}

/// Bytes of the parts of a communicator's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// The LL inbox in each parity, of which half are data.
    pub(in crate::cuda) ll: u64,
    /// The LL128 inbox in each parity, whose lines of 128 bytes have 120 bytes of data.
    pub(in crate::cuda) ll128: u64,
    /// The escaped Lamport inbox in each parity; its escape marks take a sixteenth more.
    pub(in crate::cuda) escaped: u64,
    /// Each of the three parts of the Lamport inbox.
    pub(in crate::cuda) inbox: u64,
    pub(in crate::cuda) scratch: u64,
    /// The scratch of kernels that are made of plans, in each parity.
    pub(in crate::cuda) plan_scratch: u64,
    /// The slots of point-to-point messages from all ranks together.
    pub(in crate::cuda) staging: u64,
}

impl Footprint {
    /// Parts of a communicator that is not made.
    pub(crate) const NONE: Self =
        Self { ll: 0, ll128: 0, escaped: 0, inbox: 0, scratch: 0, plan_scratch: 0, staging: 0 };
}
