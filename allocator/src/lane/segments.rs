//! Physical segments: how large the next one is, where it goes, and which may move.
//!
//! Growth is measured, not guessed: the constants below were chosen on real traces (see
//! docs/decisions/growth-steps.md) so that few segments suffice and little of them stays unused. Sizes follow
//! from the lane's own sequence alone (rule D6).

use super::table::BlockState;
use super::{LaneConfig, LaneKind, WindowPolicy};

/// A symmetric contiguous lane grows by at least half of what it has, within these two limits. Sharing a
/// segment takes a device's driver 0.08 ms for each peer, one segment at a time over all processes of a
/// machine, so commits should have few: 512 MiB, reached in small blocks, are 14 segments instead of the 64
/// of growing by 8 MiB each time. Growing by more at a time leaves more unused in lanes of less than 1 GiB.
const MIN_GROWTH: u64 = 16 << 20;
const STEADY_GROWTH: u64 = 48 << 20;
/// Its growth is cut into segments of at most this: small enough that whole segments become free and can
/// move, large enough that a lane has at most a few hundred, and that a block of 64 MiB is one segment.
const LARGEST_PIECE: u64 = 64 << 20;
/// Growth of a local lane, whose segments no peer maps.
const LOCAL_GROWTH: u64 = 8 << 20;
const LARGEST_LOCAL_PIECE: u64 = 32 << 20;
/// The growth of a large lane, and each of its segments, is at least this fraction (1/128) of the lane.
const FRACTION: u64 = 128;

/// A segment of [`WindowPolicy::PerSegment`] is 1/8 of what the lane has, within these two limits. Segments
/// so grow geometrically, and a large lane has a few dozen. Doubling the lane each time would make fewer, and
/// leave more of the last one unused.
const WINDOW_FRACTION: u64 = 8;
const FIRST_WINDOW: u64 = 16 << 20;
const LARGEST_WINDOW: u64 = 1 << 30;

/// The rule by which a lane grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Growing {
    /// For [`WindowPolicy::Contiguous`] in a symmetric lane, whose segments peers map.
    Shared,
    /// For [`WindowPolicy::Contiguous`] in a local lane.
    Local,
    /// For [`WindowPolicy::PerSegment`] in lanes of either kind.
    Windows,
    /// Grow by the missing bytes alone: for few blocks that stay, each with a size that was chosen for its memory.
    Exact,
}

impl Growing {
    pub(super) fn of(config: &LaneConfig) -> Self {
        match (config.policy, config.kind) {
            _ if config.grows_exactly => Self::Exact,
            (WindowPolicy::PerSegment, _) => Self::Windows,
            (WindowPolicy::Contiguous, LaneKind::Symmetric) => Self::Shared,
            (WindowPolicy::Contiguous, LaneKind::Local) => Self::Local,
        }
    }
}

/// One physical allocation, which is mapped as a whole. Offsets are bytes from the start of the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Serial number in the lane; a moved segment gets a new one.
    pub counter: u64,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Counter of the event that made or moved it.
    pub born: u64,
    /// The segment whose memory this is, if it was moved here.
    pub moved_from: Option<u64>,
}

impl Segment {
    pub(super) fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// A segment that is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewSegment {
    /// Its serial number.
    pub counter: u64,
    /// Where it is mapped.
    pub offset: u64,
    /// Its size.
    pub bytes: u64,
}

/// A free segment to be mapped a second time, at the end of the range. Its old place is retired
/// and unmapped at the next commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Serial number of the segment as it was.
    pub from: u64,
    /// Where it was.
    pub from_offset: u64,
    /// The segment as it will be.
    pub to: NewSegment,
}

/// The segments that one event needs from the driver. All of them are made and moved, or none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Growth {
    /// Segments that move, in order.
    pub moves: Vec<Move>,
    /// Segments that are made, in order, after the moved ones.
    pub new: Vec<NewSegment>,
}

impl Growth {
    pub(super) fn bytes(&self) -> u64 {
        self.moves.iter().map(|m| m.to.bytes).sum::<u64>() + self.new_bytes()
    }

    pub(super) fn new_bytes(&self) -> u64 {
        self.new.iter().map(|segment| segment.bytes).sum()
    }
}

#[derive(Debug, Default)]
pub(super) struct Segments {
    /// Segments in use, by offset.
    live: Vec<Segment>,
    /// Segments that were released or moved away; unmapped at the next commit.
    retired: Vec<Retired>,
    next_counter: u64,
    pub(super) reserved: u64,
    pub(super) peak_reserved: u64,
    pub(super) made: u64,
    pub(super) moved: u64,
    made_bytes: u64,
    moved_bytes: u64,
}

/// A segment that is no longer used and still mapped.
#[derive(Clone, Copy, Debug)]
struct Retired {
    segment: Segment,
    /// The event that released or moved it.
    at: u64,
    /// Whether its memory was moved to another segment.
    moved: bool,
}

impl Segments {
    pub(super) fn live(&self) -> &[Segment] {
        &self.live
    }

    pub(super) fn retired(&self) -> impl Iterator<Item = Segment> + '_ {
        self.retired.iter().map(|retired| retired.segment)
    }

    /// Bytes of physical memory that the lane holds: released segments keep theirs until they
    /// are unmapped.
    pub(super) fn held(&self) -> u64 {
        let released = self.retired.iter().filter(|retired| !retired.moved);
        self.reserved + released.map(|retired| retired.segment.bytes).sum::<u64>()
    }

    /// The serial number of the next segment.
    pub(super) fn next_counter(&self) -> u64 {
        self.next_counter
    }

    /// Bytes to grow by when `need` bytes are missing.
    pub(super) fn step(&self, growing: Growing, need: u64, granularity: u64) -> u64 {
        let part = self.reserved / FRACTION;
        let least = match growing {
            Growing::Shared => (self.reserved / 2).clamp(MIN_GROWTH, STEADY_GROWTH).max(part),
            Growing::Local => LOCAL_GROWTH.max(part),
            Growing::Exact => 0,
            Growing::Windows => {
                (self.reserved / WINDOW_FRACTION).clamp(FIRST_WINDOW, LARGEST_WINDOW)
            }
        };
        need.max(least).next_multiple_of(granularity)
    }

    /// Cuts `bytes` of growth at `offset` into segments.
    pub(super) fn pieces(
        &self,
        growing: Growing,
        mut counter: u64,
        mut offset: u64,
        mut bytes: u64,
        granularity: u64,
    ) -> Vec<NewSegment> {
        let part = (self.reserved + bytes) / FRACTION / granularity * granularity;
        let usual = match growing {
            Growing::Shared | Growing::Exact => LARGEST_PIECE,
            Growing::Local => LARGEST_LOCAL_PIECE,
            Growing::Windows => u64::MAX,
        };
        let largest = usual.max(part).max(granularity);
        let mut pieces = Vec::new();
        while bytes > 0 {
            // A rest of less than half a piece joins the last piece.
            let piece = if bytes < largest.saturating_add(largest / 2) { bytes } else { largest };
            pieces.push(NewSegment { counter, offset, bytes: piece });
            counter += 1;
            offset += piece;
            bytes -= piece;
        }
        pieces
    }

    /// Whether free segments should be moved before new ones are made. They are when growing would take
    /// the lane clearly past the most it ever had in use. Moving costs mappings, so no more bytes are ever
    /// moved than were made; this also ends any moving back and forth.
    pub(super) fn may_move(&self, growth: u64, peak_allocated: u64) -> bool {
        self.reserved + growth > peak_allocated + peak_allocated / 50
            && self.moved_bytes <= self.made_bytes
    }

    pub(super) fn apply(&mut self, growth: &Growth, event: u64) {
        for step in &growth.moves {
            if let Some(at) = self.live.iter().position(|segment| segment.counter == step.from) {
                let segment = self.live.remove(at);
                self.retired.push(Retired { segment, at: event, moved: true });
            }
            self.add(step.to, event, Some(step.from));
            self.moved += 1;
            self.moved_bytes += step.to.bytes;
        }
        for &new in &growth.new {
            self.add(new, event, None);
            self.reserved += new.bytes;
            self.made += 1;
            self.made_bytes += new.bytes;
        }
        self.peak_reserved = self.peak_reserved.max(self.reserved);
    }

    fn add(&mut self, new: NewSegment, event: u64, moved_from: Option<u64>) {
        let NewSegment { counter, offset, bytes } = new;
        let at = self.live.partition_point(|segment| segment.offset < offset);
        self.live.insert(at, Segment { counter, offset, bytes, born: event, moved_from });
        self.next_counter = self.next_counter.max(counter + 1);
    }

    /// Takes segments out of use.
    pub(super) fn retire(&mut self, segments: &[Segment], event: u64) {
        for gone in segments {
            self.live.retain(|segment| segment.counter != gone.counter);
            self.retired.push(Retired { segment: *gone, at: event, moved: false });
            self.reserved -= gone.bytes;
        }
    }

    /// Removes the retired segments and returns them.
    pub(super) fn clear_retired(&mut self) -> Vec<Segment> {
        self.retired.drain(..).map(|retired| retired.segment).collect()
    }

    /// Segments in use and retired ones, by offset, each with the state of its range.
    pub(super) fn extents(&self) -> Vec<(Segment, BlockState)> {
        let live = self.live.iter().map(|&segment| (segment, BlockState::Free));
        let retired = self.retired.iter().map(|retired| (retired.segment, BlockState::Retired));
        let mut all: Vec<_> = live.chain(retired).collect();
        all.sort_by_key(|(segment, _)| segment.offset);
        all
    }

    /// Returns to the segments as they were before `event`: segments retired since are in use again, and
    /// segments made since are returned, youngest first. Counters continue from `next_counter`. The counts
    /// for [`may_move`](Segments::may_move) start over, because ranks may differ in them.
    pub(super) fn revert(&mut self, event: u64, next_counter: u64) -> Vec<Segment> {
        let mut dropped = Vec::new();
        let mut live = Vec::new();
        for segment in self.live.drain(..) {
            let list = if segment.born < event { &mut live } else { &mut dropped };
            list.push(segment);
        }
        for retired in std::mem::take(&mut self.retired) {
            if retired.segment.born >= event {
                dropped.push(retired.segment);
            } else if retired.at >= event {
                live.push(retired.segment);
            } else {
                self.retired.push(retired);
            }
        }
        live.sort_by_key(|segment| segment.offset);
        dropped.sort_by_key(|segment| std::cmp::Reverse(segment.counter));
        self.live = live;
        self.reserved = self.live.iter().map(|segment| segment.bytes).sum();
        self.made_bytes = self.reserved;
        self.moved_bytes = 0;
        self.next_counter = next_counter;
        dropped
    }
}
