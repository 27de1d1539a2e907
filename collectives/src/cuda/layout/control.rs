//! The layout of the control block, and what its parts have room for. `ControlLayout` is that layout; `CommFields::control` is the block's
//! offset.
//!
//! Four parts are inboxes, into which peers write small data that shows by itself that it has arrived. Each area has all four:
//!
//! | inbox | places | who uses it |
//! | --- | --- | --- |
//! | LL | `ll`, in two parities | `one_shot_ll`, `two_shot_ll`, small all-gathers, broadcasts and reduce-scatters, plans in LL, counts of experts, kernels of programs |
//! | LL128 | `ll128`, in two parities | `one_shot_ll128`, kernels of programs |
//! | Lamport | `lamport`, in thirds; `inbox` in `Footprint` | all-reduces and reduce-scatters of floats, norms, matmuls of few rows |
//! | escaped Lamport | `escaped` and `escape_marks`, in two parities | all-to-alls, all-gathers, broadcasts, experts, kernels of programs |

use symmpool_allocator::{Error, HeapLayout, Result};

use super::memory_channels::MemoryFlags;
use super::params::{
    AreaFlags, CommFields, ControlLayout, DEPARTURE, Footprint, ITEM, LOCAL, MAX_PEER_BLOCKS,
    MAX_RANKS,
};
use crate::signal::channel::CHANNELS;

/// How many counts a channel has: `received`, `sent`, `taken` and `arrived` in `one_sided/one_sided.cu`.
const CHANNEL_COUNTS: u64 = 4;

/// Least bytes that a peer block has in a stage of `all_reduce/two_shot_pipeline.cu`: with less, fewer blocks lose less than
/// flags cost. Not measured yet.
const MIN_STAGE_BYTES: u64 = 16 << 10;
/// Most peer blocks of a call: a communicator has as many worker blocks on 132 SMs beside messages, which leave two thirds
/// ([`share_sms`](crate::share_sms)). So a block has one index there, beside other communicators and alone. Measured on two
/// H200s, a reduce-scatter of 64 MiB on torch's memory, alone, beside a communicator that rests and after messages: 127, 131
/// and 134 us with 84 peer blocks, 124, 129 and 141 us with 96. Stages of a pair's data are at most as many
/// (`all_to_all/scratch_pipeline.cuh`), as others would run behind these: an all-gather of 64 MiB takes 1.35 times as long as alone
/// with 96 stages, and 1.04 times with 84. Alone it takes 2% longer with 84.
pub(in crate::cuda) const MAX_STAGE_BLOCKS: u32 = 87;

impl ControlLayout {
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

    /// Returns this layout with its data in parts of these sizes, from `begin` on, a multiple of 4096. That may lie
    /// in another block, also in front of the control block: places are added to its own modulo 2^64.
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

    /// Returns the memory for data that holds flags of epochs.
    pub(in crate::cuda) fn area_flags(&self) -> AreaFlags {
        let Self { ll, ll_bytes, ll128, ll128_bytes, escape_marks, escaped_bytes, .. } = *self;
        let escape_mark_bytes = escaped_bytes / 16;
        AreaFlags { ll, ll_bytes, ll128, ll128_bytes, escape_marks, escape_mark_bytes }
    }

    /// Bytes from the beginning of the parts for data to their end.
    pub(in crate::cuda) fn data_bytes(&self) -> u64 {
        self.data_end().wrapping_sub(self.ll)
    }

    /// Where the departures of ranks lie, from the first handshake on: `departure` in `symmpool/impl/comm.cuh`.
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
    /// parts: there is no room for any then, as kernels of programs ask for (`Ll128Channel` in `symmpool/ll128_channel.cuh`).
    pub(in crate::cuda) fn for_links(&self, direct: bool) -> Self {
        Self { ll128_bytes: if direct { self.ll128_bytes } else { 0 }, ..*self }
    }

    pub(in crate::cuda) fn comm(
        &self,
        layout: &HeapLayout,
        control: u64,
        timeout: u64,
        fault: u64,
    ) -> CommFields {
        CommFields {
            base: layout.base,
            stride: layout.stride,
            control,
            places: *self,
            timeout,
            fault,
            rank: layout.rank,
            early: 0,
            area: 0,
            sm_lock: 0,
            member: 0,
            sm_tag: 0,
            narrow_blocks: 0,
        }
    }

    /// Bytes that a sender may leave in a rank's scratch, in whole cache lines: `scratch_vectors` in
    /// `symmpool/impl/comm.cuh`.
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
        (stage / MIN_STAGE_BYTES).clamp(1, MAX_STAGE_BLOCKS.into()) as u32
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
    /// `symmpool/impl/lamport_escaped.cuh`, which counts vectors.
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

    #[test]
    fn lines_have_room_only_between_ranks_that_are_linked_directly() {
        let control = ControlLayout::new(2, Footprint::ample(4 << 20, 1 << 20)).expect("valid");
        assert!(control.for_links(true).ll128_lines() > 0);
        assert_eq!(control.for_links(false).ll128_lines(), 0);
        assert_eq!(control.for_links(false).lamport, control.lamport, "nothing else moves");
    }

    #[test]
    fn data_that_moves_keeps_its_parts_and_nothing_else_moves() {
        let small = Footprint::at_first(4);
        let before = ControlLayout::new(4, small).expect("valid");
        let grown = before.with_data(7 << 30, Footprint::ample(32 << 20, 160 << 20));
        let moved = |control: &ControlLayout| {
            [control.ll, control.ll128, control.escaped, control.lamport, control.plan_scratch]
        };
        assert!(moved(&grown).iter().all(|place| *place >= 7 << 30), "{grown:?}");
        assert_eq!(grown.ll, 7 << 30);
        assert_eq!(grown.data_end(), (7 << 30) + grown.data_bytes());
        let words = |control: &ControlLayout| [control.handshake, control.flags, control.channels];
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
            let control = ControlLayout::new(world, footprint).expect("valid");
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
            // The slot is as long as that of `symmpool/impl/lamport_escaped.cuh`, which divides the inbox among the peers.
            let (slot, peers) = (control.escaped_slot(world), u64::from(world.max(2) - 1));
            assert!(slot.is_multiple_of(ITEM) && slot * peers <= footprint.escaped);
            assert!((slot + ITEM) * peers > footprint.escaped);
        }
        let footprint = Footprint::ample(32 << 20, 192 << 20);
        assert!(ControlLayout::new(0, footprint).expect_err("no ranks").is_unsupported());
        assert!(ControlLayout::new(9, footprint).expect_err("too many").is_unsupported());
    }
}
