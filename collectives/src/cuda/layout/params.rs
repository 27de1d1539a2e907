//! The parameters of kernels, laid out as in `symmpool/comm.cuh`, and the layout of the control block.

use symmpool_allocator::{Error, HeapLayout, Result};

use super::memory_channels::MemoryFlags;
use crate::call::Call;
use crate::call::matmul::MOST_PRODUCTS;
use crate::signal::channel::CHANNELS;

/// Most peer blocks: the control block has flags for so many. Twice as many as an H200 runs at 512 threads.
pub(in crate::cuda) const MAX_PEER_BLOCKS: u32 = 1056;
/// Ranks whose vectors a kernel holds in registers at once; more would spill.
pub(in crate::cuda) const MAX_RANKS: u32 = 8;
/// Bytes of data in a line of 128 bytes of LL128.
pub(in crate::cuda) const LL128_PAYLOAD: u64 = 120;
/// Bytes of the escaped Lamport inbox that a warp handles at once: `ITEM` vectors in `protocol/lamport_escaped.cuh`.
pub(in crate::cuda) const ITEM: u64 = 512;
/// Bytes of `Local` in `symmpool/comm.cuh`, rounded up to whole cache lines.
pub(in crate::cuda) const LOCAL: u64 = 256;

/// Where `failed` of `Local` lies in a control block.
pub(in crate::cuda) const LOCAL_FAILED: u64 = 4;
/// Where `areas` of `Local` lies in a control block.
pub(in crate::cuda) const LOCAL_AREAS: u64 = 40;
/// What it is where the host knows why: `FAILED_ON_HOST` in `symmpool/comm.cuh`.
pub(in crate::cuda) const FAILED_ON_HOST: u32 = 3;

/// Bytes of `Departure` in `symmpool/comm.cuh`, and where the upper halves of its first two words lie.
pub(in crate::cuda) const DEPARTURE: u64 = 32;
pub(in crate::cuda) const DEPARTURE_WHEN: u64 = 4;
pub(in crate::cuda) const DEPARTURE_REASON: u64 = 12;

/// How many counts a channel has: `received`, `sent`, `taken` and `arrived` in `one_sided/one_sided.cu`.
const CHANNEL_COUNTS: u64 = 4;

/// Least bytes that an index has in a stage of `all_reduce/two_shot_stages.cu`: with less, fewer blocks lose less than
/// flags cost. Not measured yet.
const MIN_STAGE_BYTES: u64 = 16 << 10;
/// As many blocks as `two_shot_push` has at most.
const MAX_STAGE_BLOCKS: u64 = 128;

/// `Comm` in `symmpool/comm.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Comm {
    pub(in crate::cuda) base: u64,
    pub(in crate::cuda) stride: u64,
    pub(in crate::cuda) control: u64,
    pub(in crate::cuda) places: Control,
    pub(in crate::cuda) timeout: u64,
    pub(in crate::cuda) fault: u64,
    pub(in crate::cuda) rank: u32,
    /// Whether the stream's next kernel may start while this one runs (programmatic dependent launch).
    pub(in crate::cuda) early: u16,
    /// The number of the area of memory that the call uses (`engine/areas.rs`).
    pub(in crate::cuda) area: u16,
}

/// `Call` in `symmpool/comm.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct CallParams {
    pub(in crate::cuda) description: [u64; 4],
    pub(in crate::cuda) input: u64,
    pub(in crate::cuda) output: u64,
    pub(in crate::cuda) bytes: u64,
    pub(in crate::cuda) stride: u64,
    pub(in crate::cuda) root: u32,
    pub(in crate::cuda) peer_blocks: u32,
}

impl CallParams {
    /// A call without data.
    pub(in crate::cuda) fn of(call: &Call) -> Self {
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

/// How a plan's call is divided: `PlanWork` in `symmpool/plan.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::cuda) struct PlanWork {
    /// Bytes of a part, and of a chunk of it.
    pub(in crate::cuda) part: u64,
    pub(in crate::cuda) chunk: u64,
    /// Where in each chunk a launch begins, and how many vectors of the longest chunk it has.
    pub(in crate::cuda) begin: u64,
    pub(in crate::cuda) vectors: u64,
    /// Vectors that a peer block has in a stage, at most.
    pub(in crate::cuda) each: u32,
    pub(in crate::cuda) stages: u32,
    /// How many stages have a place in scratch at once.
    pub(in crate::cuda) slots: u32,
    /// Turns from one stage to the next.
    pub(in crate::cuda) interval: u32,
}

/// What a fused all-reduce is given besides [`CallParams`]: `NormWork` in `fused/norm.cuh`, which documents the fields.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct NormWork {
    pub(in crate::cuda) residual: u64,
    pub(in crate::cuda) weight: u64,
    pub(in crate::cuda) bias: u64,
    pub(in crate::cuda) residual_out: u64,
    pub(in crate::cuda) norm_out: u64,
    pub(in crate::cuda) scales: u64,
    pub(in crate::cuda) scale_row: u64,
    pub(in crate::cuda) scale_group: u64,
    pub(in crate::cuda) tokens: u32,
    pub(in crate::cuda) hidden: u32,
    pub(in crate::cuda) epsilon: f32,
    pub(in crate::cuda) weight_bias: f32,
    pub(in crate::cuda) powers_of_two: u32,
    pub(in crate::cuda) unused: u32,
}

/// How the driver describes a matrix for copies of tiles: `CUtensorMap`, of which the driver alone knows the members.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct TensorMap(pub(in crate::cuda) [u64; 16]);

impl TensorMap {
    /// Of no matrix.
    pub(in crate::cuda) const NONE: Self = Self([0; 16]);
}

/// A product of a launch: `MatmulProduct` in `fused/matmul_work.cuh`.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct MatmulProduct {
    pub(in crate::cuda) left: TensorMap,
    pub(in crate::cuda) right: TensorMap,
    pub(in crate::cuda) out: TensorMap,
    pub(in crate::cuda) right_scale: u64,
    pub(in crate::cuda) end_column: u32,
    pub(in crate::cuda) end_block: u32,
}

impl MatmulProduct {
    pub(in crate::cuda) const NONE: Self = Self {
        left: TensorMap::NONE,
        right: TensorMap::NONE,
        out: TensorMap::NONE,
        right_scale: 0,
        end_column: 0,
        end_block: 0,
    };
}

/// What clusters make of a product: `Split` in `fused/matmul_work.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct Split {
    /// Tiles that are made whole, from the first one on, as a cluster counts them.
    pub(in crate::cuda) whole: u32,
    /// Clusters that help with the others, from the first one on; each of the others makes one.
    pub(in crate::cuda) helpers: u32,
    /// Helpers of a tile, or else tiles of a helper: one of them is 1.
    pub(in crate::cuda) per_tile: u32,
    pub(in crate::cuda) per_helper: u32,
    /// Blocks of the inner dimension that a helper makes of a tile.
    pub(in crate::cuda) helper_blocks: u32,
}

/// What a product of tensor cores is given besides [`CallParams`]: `MatmulWork` in `fused/matmul_work.cuh`, which documents
/// the fields.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct MatmulWork {
    pub(in crate::cuda) own: TensorMap,
    pub(in crate::cuda) products: [MatmulProduct; MOST_PRODUCTS],
    pub(in crate::cuda) left_scale: u64,
    pub(in crate::cuda) outgoing: u64,
    pub(in crate::cuda) incoming: u64,
    pub(in crate::cuda) part_bytes: u64,
    pub(in crate::cuda) gathered: u64,
    pub(in crate::cuda) control: u64,
    pub(in crate::cuda) partials: u64,
    pub(in crate::cuda) rows: u32,
    pub(in crate::cuda) batch_rows: u32,
    pub(in crate::cuda) inner_blocks: u32,
    pub(in crate::cuda) tile_rows: u32,
    pub(in crate::cuda) tile_columns: u32,
    pub(in crate::cuda) chunk_tiles: u32,
    pub(in crate::cuda) chunks: u32,
    pub(in crate::cuda) factor: f32,
    pub(in crate::cuda) first_part: u32,
    pub(in crate::cuda) end_part: u32,
    pub(in crate::cuda) split: Split,
}

/// What a product of few rows is given besides [`CallParams`]: `FewRows` in `fused/matmul_few.cu`, which documents the fields.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct FewRows {
    pub(in crate::cuda) left: TensorMap,
    pub(in crate::cuda) right: TensorMap,
    pub(in crate::cuda) rows: u32,
    pub(in crate::cuda) columns: u32,
    pub(in crate::cuda) inner_blocks: u32,
    pub(in crate::cuda) tiles: u32,
    pub(in crate::cuda) receives: u32,
}

/// Stands for memory that is no window, and for a count that is not known: `UNKNOWN` in `all_to_all/traffic.cuh`.
pub(in crate::cuda) const UNKNOWN: u64 = u64::MAX;

/// What an all-to-all exchanges: `Traffic` in `all_to_all/traffic.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Traffic {
    /// Elements for and from each rank, where the host knows them.
    pub(in crate::cuda) send: [u64; MAX_RANKS as usize],
    pub(in crate::cuda) receive: [u64; MAX_RANKS as usize],
    /// Where these begin in the input and the output, in bytes.
    pub(in crate::cuda) send_begin: [u64; MAX_RANKS as usize],
    pub(in crate::cuda) receive_begin: [u64; MAX_RANKS as usize],
    /// Addresses on the device: the input splits, and where to write the output splits and output offsets.
    pub(in crate::cuda) splits: u64,
    pub(in crate::cuda) received: u64,
    pub(in crate::cuda) offsets: u64,
    /// Elements of the input, and of the output.
    pub(in crate::cuda) length: u64,
    pub(in crate::cuda) capacity: u64,
    /// The offset of the output in the slot, or `UNKNOWN`.
    pub(in crate::cuda) window: u64,
    /// Parts of at most so many bytes go through inboxes.
    pub(in crate::cuda) inbox_bytes: u64,
    /// So many bytes at the beginning of longer parts go through inboxes.
    pub(in crate::cuda) head: u32,
    /// Bytes of an element.
    pub(in crate::cuda) size: u32,
    /// Whether splits have 64 bits.
    pub(in crate::cuda) wide: u32,
    /// Whether every rank serves its peers one after the other.
    pub(in crate::cuda) ring: u32,
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

/// The layout of the control block: offsets and lengths in the order of `Comm` in `symmpool/comm.cuh`. The parts for data
/// lie in another block once a communicator's memory has grown.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::cuda) struct Control {
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

impl Control {
    /// For `world` ranks, with parts of these sizes.
    pub(in crate::cuda) fn new(world: u32, footprint: Footprint) -> Result<Self> {
        if !(1..=MAX_RANKS).contains(&world) {
            return Err(Error::unsupported(format!(
                "a communicator of {world} ranks on devices: kernels serve up to {MAX_RANKS}"
            )));
        }
        let ranks = u64::from(world);
        let mut at = 0;
        let mut place = |bytes: u64| {
            let here = at;
            at = (at + bytes).next_multiple_of(4096);
            here
        };
        place(LOCAL);
        // Call descriptions, and behind them rows of a traffic matrix; all travel in the LL protocol. Then come departures.
        let handshake = place(Self::departures(world) + DEPARTURE * ranks);
        // Behind them are the counts of `all_reduce/two_shot_copy.cu`: one for each rank, and two more. Then come the
        // flags of memory operations.
        let channels = place(Self::counts_bytes(world) + MemoryFlags::bytes(world));
        let flags_bytes = Self::flags_bytes(world);
        let flags = place(flags_bytes);
        let words = Self { handshake, channels, flags, flags_bytes, ..Self::default() };
        Ok(words.with_data(at, footprint))
    }

    /// The same with its data in parts of these sizes, from `begin` on, a multiple of 4096. That may lie in another block,
    /// also in front of the control block: places are added to its own modulo 2^64.
    pub(in crate::cuda) fn with_data(&self, begin: u64, footprint: Footprint) -> Self {
        let mut at = begin;
        let mut place = |bytes: u64| {
            let here = at;
            at = at.wrapping_add(bytes.next_multiple_of(4096));
            here
        };
        let ll_bytes = 2 * footprint.ll;
        let ll = place(ll_bytes);
        let ll128_bytes = 2 * footprint.ll128;
        let ll128 = place(ll128_bytes);
        let escaped_bytes = 2 * footprint.escaped;
        let escape_marks = place(escaped_bytes / 16);
        let escaped = place(escaped_bytes);
        let lamport_bytes = 3 * footprint.inbox;
        let lamport = place(lamport_bytes);
        let plan_scratch_bytes = 2 * footprint.plan_scratch;
        let plan_scratch = place(plan_scratch_bytes);
        let scratch_bytes = footprint.scratch;
        let scratch = place(scratch_bytes);
        Self {
            ll,
            ll_bytes,
            ll128,
            ll128_bytes,
            lamport,
            lamport_bytes,
            escape_marks,
            escaped,
            escaped_bytes,
            scratch,
            scratch_bytes,
            plan_scratch,
            plan_scratch_bytes,
            ..*self
        }
    }

    /// What holds flags of epochs in the parts for data: `AreaFlags` in `symmpool/comm.cuh`.
    pub(in crate::cuda) fn area_flags(&self) -> [u64; 6] {
        let marks = self.escaped_bytes / 16;
        [self.ll, self.ll_bytes, self.ll128, self.ll128_bytes, self.escape_marks, marks]
    }

    /// Bytes from the beginning of the parts for data to their end.
    pub(in crate::cuda) fn data_bytes(&self) -> u64 {
        self.data_end().wrapping_sub(self.ll)
    }

    /// Where the departures of ranks lie, from the first handshake on: `departure` in `symmpool/comm.cuh`.
    fn departures(world: u32) -> u64 {
        let ranks = u64::from(world);
        let row = 16 * (2 * ranks + 3);
        2 * 64 * ranks + 2 * row * ranks
    }

    /// Where in a control block the departure of a rank lies.
    pub(in crate::cuda) fn departure_of(&self, world: u32, rank: u32) -> u64 {
        self.handshake + Self::departures(world) + DEPARTURE * u64::from(rank)
    }

    /// Bytes of the counts of channels, and of those behind them.
    fn counts_bytes(world: u32) -> u64 {
        let ranks = u64::from(world);
        8 * (CHANNEL_COUNTS * ranks * u64::from(CHANNELS) + ranks + 2)
    }

    /// Where the flags of memory operations lie.
    pub(in crate::cuda) fn memory_flags(&self, world: u32) -> MemoryFlags {
        MemoryFlags::new(self.channels + Self::counts_bytes(world))
    }

    /// Bytes of the flags of peer blocks: `FLAG_KINDS` flags of eight bytes for each block and rank, in two parities.
    pub(in crate::cuda) fn flags_bytes(world: u32) -> u64 {
        2 * 4 * 8 * u64::from(world) * u64::from(MAX_PEER_BLOCKS)
    }

    /// The layout that kernels are launched with. Where ranks are not all linked directly, lines of 128 bytes may arrive in
    /// parts: there is no room for any then, as kernels of programs ask for (`Ll128Channel` in `symmpool/channels.cuh`).
    pub(in crate::cuda) fn for_links(&self, direct: bool) -> Self {
        Self { ll128_bytes: if direct { self.ll128_bytes } else { 0 }, ..*self }
    }

    pub(in crate::cuda) fn comm(
        &self,
        layout: &HeapLayout,
        control: u64,
        timeout: u64,
        fault: u64,
    ) -> Comm {
        Comm {
            base: layout.base,
            stride: layout.stride,
            control,
            places: *self,
            timeout,
            fault,
            rank: layout.rank,
            early: 0,
            area: 0,
        }
    }

    /// Bytes that a sender may leave in a rank's scratch, in whole cache lines: `scratch_vectors` in
    /// `symmpool/comm.cuh`.
    pub(in crate::cuda) fn scratch_room(&self, world: u32) -> u64 {
        self.scratch_bytes / u64::from(world.max(2) - 1) / 128 * 128
    }

    /// Where the parts for data end, relative to the control block. The scratch is last, and has whole pages like all before
    /// it.
    pub(in crate::cuda) fn data_end(&self) -> u64 {
        self.scratch.wrapping_add(self.scratch_bytes)
    }

    /// Vectors that one call may put into the Lamport inbox, or into the LL inbox.
    pub(in crate::cuda) fn inbox_vectors(&self, lamport: bool) -> u64 {
        if lamport { self.lamport_vectors() } else { self.ll_vectors() }
    }

    /// Bytes of a two-shot all-reduce that one launch can take through an inbox, which must hold the inputs
    /// and the results of all ranks' shares, or of all peers' shares if it is compact.
    pub(in crate::cuda) fn two_shot_room(&self, lamport: bool, world: u32, compact: bool) -> u64 {
        let ranks = u64::from(world);
        let slots = if compact { ranks.max(2) - 1 } else { ranks };
        self.inbox_vectors(lamport) / 2 / slots * ranks * 16
    }

    /// How many peer blocks a call in stages has: as many as scratch has room for. An index has room for two stages of
    /// inputs there, and with `results` for two of results.
    pub(in crate::cuda) fn stage_blocks(&self, world: u32, results: bool) -> u32 {
        let stage = self.scratch_room(world) / if results { 4 } else { 2 };
        (stage / MIN_STAGE_BYTES).clamp(1, MAX_STAGE_BLOCKS) as u32
    }

    /// Vectors of 16 bytes of data that one call may put into the LL inbox.
    pub(in crate::cuda) fn ll_vectors(&self) -> u64 {
        self.ll_bytes / 2 / 32
    }

    /// Lines that one call may put into the LL128 inbox.
    pub(in crate::cuda) fn ll128_lines(&self) -> u64 {
        self.ll128_bytes / 2 / 128
    }

    /// Bytes that a sender may put into a rank's escaped Lamport inbox: `EscapedSlot::length` in
    /// `protocol/lamport_escaped.cuh`.
    pub(in crate::cuda) fn escaped_slot(&self, world: u32) -> u64 {
        self.escaped_bytes / 2 / u64::from(world.max(2) - 1) / ITEM * ITEM
    }

    /// Vectors that one call may put into the Lamport inbox.
    pub(in crate::cuda) fn lamport_vectors(&self) -> u64 {
        self.lamport_bytes / 3 / 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jit::Kernel;
    use crate::jit::sources::{ALL_TO_ALL, MATMUL_FEW, MATMUL_SCATTER, NORM_ONE_SHOT, ONE_SHOT};

    #[test]
    fn layouts_are_those_that_kernels_are_compiled_with() {
        let stated = |kernel: &Kernel<'_>, name: &str| {
            let axis = kernel.variants[0].iter().find(|(axis, _)| *axis == name).expect("the axis");
            axis.1[0].parse::<usize>().expect("a number")
        };
        assert_eq!(stated(&ONE_SHOT, "COMM_BYTES"), size_of::<Comm>());
        assert_eq!(stated(&ONE_SHOT, "CALL_BYTES"), size_of::<CallParams>());
        assert_eq!(stated(&ONE_SHOT, "FAULT_BYTES"), crate::cuda::layout::fault::RECORD_BYTES);
        assert_eq!(stated(&ALL_TO_ALL, "TRAFFIC_BYTES"), size_of::<Traffic>());
        assert_eq!(stated(&NORM_ONE_SHOT, "NORM_WORK_BYTES"), size_of::<NormWork>());
        assert_eq!(stated(&MATMUL_SCATTER, "MATMUL_WORK_BYTES"), size_of::<MatmulWork>());
        assert_eq!(stated(&MATMUL_FEW, "FEW_ROWS_BYTES"), size_of::<FewRows>());
        // All fields before it are words, in the order of `symmpool/comm.cuh`.
        assert_eq!(std::mem::offset_of!(Comm, places.channels), 17 * 8);
        assert_eq!(std::mem::offset_of!(Comm, timeout), 20 * 8);
    }

    #[test]
    fn lines_have_room_only_between_ranks_that_are_linked_directly() {
        let control = Control::new(2, Footprint::ample(4 << 20, 1 << 20)).expect("valid");
        assert!(control.for_links(true).ll128_lines() > 0);
        assert_eq!(control.for_links(false).ll128_lines(), 0);
        assert_eq!(control.for_links(false).lamport, control.lamport, "nothing else moves");
    }

    #[test]
    fn data_that_moves_keeps_its_parts_and_nothing_else_moves() {
        let small = Footprint::at_first(4);
        let before = Control::new(4, small).expect("valid");
        let grown = before.with_data(7 << 30, Footprint::ample(32 << 20, 160 << 20));
        let moved = |control: &Control| {
            [control.ll, control.ll128, control.escaped, control.lamport, control.plan_scratch]
        };
        assert!(moved(&grown).iter().all(|place| *place >= 7 << 30), "{grown:?}");
        assert_eq!(grown.ll, 7 << 30);
        assert_eq!(grown.data_end(), (7 << 30) + grown.data_bytes());
        let words = |control: &Control| [control.handshake, control.flags, control.channels];
        assert_eq!(words(&before), words(&grown));
        // Also in front of the control block.
        let before_it = before.with_data((4_u64 << 20).wrapping_neg(), small);
        assert_eq!(before_it.data_bytes(), before.data_bytes());
        assert_eq!(before_it.scratch.wrapping_sub(before_it.ll), before.scratch - before.ll);
        // In the same place with the same sizes it is the same layout.
        let again = before.with_data(before.ll, small);
        assert_eq!(format!("{again:?}"), format!("{before:?}"));
    }

    #[test]
    fn nothing_overlaps_and_nonsense_is_refused() {
        for world in 1..=8 {
            let footprint = Footprint::ample(32 << 20, 192 << 20);
            let control = Control::new(world, footprint).expect("valid");
            let ranks = u64::from(world);
            let parts = [
                (0, LOCAL),
                (control.handshake, 2 * ranks * (64 + 16 * (2 * ranks + 3)) + 32 * ranks),
                (control.channels, 8 * (4 * ranks * 16 + ranks + 2) + 16 + 8 * 32 * ranks),
                (control.flags, 2 * 4 * 8 * ranks * 1056),
                (control.ll, control.ll_bytes),
                (control.ll128, control.ll128_bytes),
                (control.escape_marks, control.escaped_bytes / 16),
                (control.escaped, control.escaped_bytes),
                (control.lamport, control.lamport_bytes),
                (control.plan_scratch, control.plan_scratch_bytes),
                (control.scratch, control.scratch_bytes),
            ];
            for pair in parts.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
            }
            assert_eq!(control.flags_bytes, parts[3].1, "all flags are cleared");
            assert!(control.scratch + control.scratch_bytes <= control.data_end());
            assert!(control.lamport_bytes.is_multiple_of(48));
            assert!(control.ll.is_multiple_of(4096));
            // The second parity begins on a whole line as well.
            for both in [control.ll_bytes, control.ll128_bytes, control.escaped_bytes] {
                assert!(both.is_multiple_of(2 * 128));
            }
            // All that lies below the escaped inbox is filled with zeros (`CudaEngine::prepare`).
            assert!(control.channels < control.escaped && control.escaped < control.lamport);
            // As long as that of `protocol/lamport_escaped.cuh`, which divides the inbox among the peers.
            let (slot, peers) = (control.escaped_slot(world), u64::from(world.max(2) - 1));
            assert!(slot.is_multiple_of(ITEM) && slot * peers <= footprint.escaped);
            assert!((slot + ITEM) * peers > footprint.escaped);
        }
        let footprint = Footprint::ample(32 << 20, 192 << 20);
        assert!(Control::new(0, footprint).expect_err("no ranks").is_unsupported());
        assert!(Control::new(9, footprint).expect_err("too many").is_unsupported());
    }
}
