//! What kernels are given, laid out as in `symmpool/comm.cuh`, and where things lie in the control block.

use symmpool_allocator::{Error, HeapLayout, Result};

use super::constraints::Algorithm;
use crate::host::call::Call;
use crate::signal::channel::CHANNELS;

/// Teams, or blocks, that may raise flags; more are not launched. Twice what an H200 runs at 512 threads.
pub(super) const MOST_TEAMS: u32 = 1056;
/// Ranks whose vectors a kernel holds in registers at once; more would spill.
pub(super) const MOST_RANKS: u32 = 8;
/// Room of one parity for packets, whose data is half of it: whatever is above some hundred KiB
/// has better ways.
const PACKETS: u64 = 8 << 20;
/// Room of one parity for lines of 128 bytes, of which 120 are data.
const LINES: u64 = 8 << 20;
pub(super) const LINE_PAYLOAD: u64 = 120;
/// Room of one parity for bare vectors, whose marks take a sixteenth of it: for what all peers send at
/// most before it pays to send straight, and twice that for traffic that is uneven.
const BARE: u64 = 32 << 20;
/// Bytes that a warp handles at once there: `ITEM` vectors in `protocol/lamport_escaped.cuh`.
pub(super) const ITEM: u64 = 512;
/// `Local` in `symmpool/comm.cuh`, on cache lines of its own.
const LOCAL: u64 = 256;

/// Counts that a channel has: `received`, `sent`, `taken` and `arrived` in `one_sided/one_sided.cu`.
const CHANNEL_COUNTS: u64 = 4;

/// `Comm` in `symmpool/comm.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Comm {
    pub(super) base: u64,
    pub(super) stride: u64,
    pub(super) control: u64,
    pub(super) places: Control,
    pub(super) timeout: u64,
    pub(super) fault: u64,
    pub(super) rank: u32,
    /// Whether the stream's next kernel may take its places early.
    pub(super) early: u32,
}

/// `Call` in `symmpool/comm.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct CallParams {
    pub(super) details: [u64; 4],
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) bytes: u64,
    pub(super) stride: u64,
    pub(super) root: u32,
    pub(super) teams: u32,
}

impl CallParams {
    /// A call without data.
    pub(super) fn of(call: &Call) -> Self {
        Self { details: *call.words(), input: 0, output: 0, bytes: 0, stride: 0, root: 0, teams: 0 }
    }
}

/// A place that is none, and a count that nobody knows: `UNKNOWN` in `all_to_all/traffic.cuh`.
pub(super) const UNKNOWN: u64 = u64::MAX;

/// What an all-to-all exchanges: `Traffic` in `all_to_all/traffic.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Traffic {
    /// Elements for each rank, where the host knows them.
    pub(super) send: [u64; MOST_RANKS as usize],
    pub(super) receive: [u64; MOST_RANKS as usize],
    /// Where these begin, in bytes.
    pub(super) send_begin: [u64; MOST_RANKS as usize],
    pub(super) receive_begin: [u64; MOST_RANKS as usize],
    /// Addresses on the device: counts, and where to write those that came and their places.
    pub(super) splits: u64,
    pub(super) received: u64,
    pub(super) offsets: u64,
    /// Elements of the input, and those that the output holds.
    pub(super) length: u64,
    pub(super) capacity: u64,
    /// Where the output is in the slot.
    pub(super) window: u64,
    /// Parts of no more go through inboxes,
    pub(super) inbox_bytes: u64,
    /// and so much of longer ones, from their beginning on.
    pub(super) head: u32,
    pub(super) size: u32,
    pub(super) wide: u32,
    pub(super) ring: u32,
}

/// One end of a channel of this rank: operations on one of these run in the order of the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Channel {
    pub(super) sends: bool,
    pub(super) peer: u32,
    pub(super) number: u32,
}

/// Where things lie in the control block: offsets and lengths in the order of `Comm` in `symmpool/comm.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Control {
    pub(super) entry: u64,
    pub(super) flags: u64,
    pub(super) flags_bytes: u64,
    pub(super) packets: u64,
    pub(super) packets_bytes: u64,
    pub(super) lines: u64,
    pub(super) lines_bytes: u64,
    pub(super) sentinel: u64,
    pub(super) sentinel_bytes: u64,
    pub(super) marks: u64,
    pub(super) bare: u64,
    pub(super) bare_bytes: u64,
    pub(super) scratch: u64,
    pub(super) scratch_bytes: u64,
    pub(super) channels: u64,
}

impl Control {
    /// For `world` ranks, with room for `inbox` bytes in each of the three parts of the sentinel
    /// inbox, and for `scratch` bytes.
    pub(super) fn new(world: u32, inbox: u64, scratch: u64) -> Result<Self> {
        if !(1..=MOST_RANKS).contains(&world) {
            return Err(Error::unsupported(format!(
                "a communicator of {world} ranks on devices: kernels serve up to {MOST_RANKS}"
            )));
        }
        for (what, bytes) in [("an inbox", inbox), ("scratch", scratch)] {
            if !(1 << 20..=1 << 32).contains(&bytes) || !bytes.is_multiple_of(1 << 12) {
                return Err(Error::invalid_argument(format!(
                    "{what} of {bytes} bytes on a device: a multiple of 4096 from 1 MiB to 4 GiB \
                     is needed"
                )));
            }
        }
        let ranks = u64::from(world);
        let mut at = 0;
        let mut place = |bytes: u64| {
            let here = at;
            at = (at + bytes).next_multiple_of(4096);
            here
        };
        place(LOCAL);
        // The details of a call, and behind them rows of a traffic matrix, as packets.
        let row = 16 * (2 * ranks + 3);
        let entry = place(2 * 64 * ranks + 2 * row * ranks);
        // And behind them counts of meetings, of every rank and two more: `all_reduce/two_shot_copy.cu`.
        let channels = place(8 * (CHANNEL_COUNTS * ranks * u64::from(CHANNELS) + ranks + 2));
        // `KINDS` flags of eight bytes a team and rank, two parities.
        let flags_bytes = 2 * 4 * 8 * ranks * u64::from(MOST_TEAMS);
        let flags = place(flags_bytes);
        let packets_bytes = 2 * PACKETS;
        let packets = place(packets_bytes);
        let lines_bytes = 2 * LINES;
        let lines = place(lines_bytes);
        let bare_bytes = 2 * BARE;
        let marks = place(bare_bytes / 16);
        let bare = place(bare_bytes);
        let sentinel_bytes = 3 * inbox;
        let sentinel = place(sentinel_bytes);
        let scratch_bytes = scratch;
        let scratch = place(scratch_bytes);
        Ok(Self {
            entry,
            flags,
            flags_bytes,
            packets,
            packets_bytes,
            lines,
            lines_bytes,
            sentinel,
            sentinel_bytes,
            marks,
            bare,
            bare_bytes,
            scratch,
            scratch_bytes,
            channels,
        })
    }

    pub(super) fn comm(&self, layout: &HeapLayout, control: u64, timeout: u64, fault: u64) -> Comm {
        Comm {
            base: layout.base,
            stride: layout.stride,
            control,
            places: *self,
            timeout,
            fault,
            rank: layout.rank,
            early: 0,
        }
    }

    /// Bytes that a sender may leave in a rank's scratch, whole cache lines: `scratch_vectors` in
    /// `symmpool/comm.cuh`.
    pub(super) fn scratch_room(&self, world: u32) -> u64 {
        self.scratch_bytes / u64::from(world.max(2) - 1) / 128 * 128
    }

    /// How long the block is: the scratch is last, and whole pages like all before it.
    pub(super) fn bytes(&self) -> u64 {
        self.scratch + self.scratch_bytes
    }

    /// Vectors that one call may put into the Lamport inbox, or into the LL inbox.
    pub(super) fn inbox_vectors(&self, lamport: bool) -> u64 {
        if lamport { self.sentinel_vectors() } else { self.packet_vectors() }
    }

    /// Bytes of an all-reduce that go in one call through an inbox in two shots: shares and results of all
    /// ranks have room there.
    pub(super) fn two_shot_room(&self, lamport: bool, world: u32) -> u64 {
        let ranks = u64::from(world);
        self.inbox_vectors(lamport) / 2 / ranks * ranks * 16
    }

    /// What one call of an all-reduce moves at most.
    pub(super) fn two_shot_bytes(&self, algorithm: Algorithm, world: u32) -> u64 {
        match algorithm {
            Algorithm::TwoShotLamport => self.two_shot_room(true, world),
            Algorithm::TwoShotLl => self.two_shot_room(false, world),
            _ => u64::MAX,
        }
    }

    /// Vectors of 16 bytes that one call may put into the packet inbox.
    pub(super) fn packet_vectors(&self) -> u64 {
        self.packets_bytes / 2 / 32
    }

    /// Lines that one call may put into their inbox.
    pub(super) fn line_count(&self) -> u64 {
        self.lines_bytes / 2 / 128
    }

    /// Bytes of bare vectors that a pair of ranks has room for: `Slot::length` in `protocol/lamport_escaped.cuh`.
    pub(super) fn bare_slot(&self, world: u32) -> u64 {
        self.bare_bytes / 2 / u64::from(world.max(2) - 1) / ITEM * ITEM
    }

    /// Vectors that one call may put into the sentinel inbox.
    pub(super) fn sentinel_vectors(&self) -> u64 {
        self.sentinel_bytes / 3 / 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_that_kernels_are_compiled_with() {
        let stated = |name: &str| {
            let row = crate::jit::sources::ONE_SHOT.variants[0];
            let axis = row.iter().find(|(axis, _)| *axis == name).expect("the axis");
            axis.1[0].parse::<usize>().expect("a number")
        };
        assert_eq!(stated("COMM_BYTES"), size_of::<Comm>());
        assert_eq!(stated("CALL_BYTES"), size_of::<CallParams>());
        assert_eq!(stated("FAULT_BYTES"), super::super::fault::RECORD_BYTES);
        let row = crate::jit::sources::ALL_TO_ALL.variants[0];
        let traffic = row.iter().find(|(axis, _)| *axis == "TRAFFIC_BYTES").expect("the axis");
        assert_eq!(traffic.1[0].parse(), Ok(size_of::<Traffic>()));
        // All before it are words, in the order of `symmpool/comm.cuh`.
        assert_eq!(std::mem::offset_of!(Comm, places.channels), 17 * 8);
        assert_eq!(std::mem::offset_of!(Comm, timeout), 18 * 8);
    }

    #[test]
    fn nothing_overlaps_and_nonsense_is_refused() {
        for world in 1..=8 {
            let control = Control::new(world, 32 << 20, 192 << 20).expect("valid");
            let ranks = u64::from(world);
            let parts = [
                (0, LOCAL),
                (control.entry, 2 * ranks * (64 + 16 * (2 * ranks + 3))),
                (control.channels, 8 * (4 * ranks * 16 + ranks + 2)),
                (control.flags, 2 * 4 * 8 * ranks * 1056),
                (control.packets, control.packets_bytes),
                (control.lines, control.lines_bytes),
                (control.marks, control.bare_bytes / 16),
                (control.bare, control.bare_bytes),
                (control.sentinel, control.sentinel_bytes),
                (control.scratch, control.scratch_bytes),
            ];
            for pair in parts.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
            }
            assert_eq!(control.flags_bytes, parts[3].1, "all of them are cleared");
            assert!(control.scratch + control.scratch_bytes <= control.bytes());
            assert!(control.sentinel_bytes.is_multiple_of(48));
            assert!(control.packets.is_multiple_of(4096));
            // The second parity begins on a line, too.
            for both in [control.packets_bytes, control.lines_bytes, control.bare_bytes] {
                assert!(both.is_multiple_of(2 * 128));
            }
            // What is below the bare vectors begins as zeros (`CudaEngine::prepare`).
            assert!(control.channels < control.bare && control.bare < control.sentinel);
            // As long as that of `protocol/lamport_escaped.cuh`, which divides all there is.
            let (slot, peers) = (control.bare_slot(world), u64::from(world.max(2) - 1));
            assert!(slot.is_multiple_of(ITEM) && slot * peers <= BARE);
            assert!((slot + ITEM) * peers > BARE);
        }
        assert!(Control::new(0, 32 << 20, 192 << 20).expect_err("no ranks").is_unsupported());
        assert!(Control::new(9, 32 << 20, 192 << 20).expect_err("too many").is_unsupported());
        for room in [0, 4095, (1 << 20) + 1, u64::MAX] {
            assert!(Control::new(2, room, 1 << 20).expect_err("nonsense").is_invalid_argument());
            assert!(Control::new(2, 1 << 20, room).expect_err("nonsense").is_invalid_argument());
        }
    }
}
