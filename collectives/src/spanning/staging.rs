//! Memory for data on its way from host to host: windows, so that the engine inside the host reads it in place.

#![allow(unsafe_code)] // says where shared memory is

use symmpool_allocator::HeapLayout;

use super::notice_board::{BOARD_BYTES, NoticeBoard};
use crate::types::place::Place;

/// Bytes of staging in all, in host memory or on devices. Pages of host memory that no call has used take no memory.
pub(crate) fn staging_bytes(is_on_device: bool, world: u32) -> u64 {
    let behind = match is_on_device {
        false => AREAS * AREA_BYTES + BOARD_BYTES,
        true => ((world as usize + 1) * RECORD_BYTES).next_multiple_of(4096),
    };
    (STAGING + behind) as u64
}
/// Bytes of a call's record on a device, a whole number of cache lines.
pub(super) const RECORD_BYTES: usize = 64;
/// Chunks under way at once: one in each phase.
pub(super) const SLOTS: usize = 3;
/// Bytes that each chunk has.
pub(super) const SLOT_BYTES: usize = 32 << 20;
/// Bytes of each area of calls whose data the leaders exchange.
pub(super) const AREA_BYTES: usize = 12 << 20;
/// Areas of a leader: two for data inside the host and two for data that leaves it, which calls use in turns, and one for what comes.
const AREAS: usize = 5;
/// Calls of up to so many bytes are packed, so that one call inside the host serves all hosts: copies take less time than
/// another call.
pub(super) const PACKED_BYTES: usize = 1 << 20;
/// Bytes of each rank's part of a chunk of a large all-reduce: enough that a message between hosts is a large one, and so few
/// that much of the data is in caches still where the next phase takes it.
pub(super) const PART_BYTES: usize = 2 << 20;
/// Bytes of all chunks, for calls whose phases do not run beside each other.
pub(super) const STAGING: usize = SLOTS * SLOT_BYTES;
/// Parts of a chunk's memory begin at multiples of this.
const ALIGN: usize = 512;

/// The staging of one rank. It is at the same offset on all of its host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Staging {
    layout: HeapLayout,
    offset: u64,
}

impl Staging {
    pub(super) fn new(layout: HeapLayout, offset: u64) -> Self {
        Self { layout, offset }
    }

    /// Layout of the heap that this host's ranks share.
    pub(super) fn layout(&self) -> HeapLayout {
        self.layout
    }

    /// Address in this process of an offset of this rank's slot.
    pub(super) fn address(&self, offset: u64) -> *mut u8 {
        self.layout.address(self.layout.rank, offset) as *mut u8
    }

    /// The leader's areas for a call with that number.
    pub(super) fn areas(&self, number: u64) -> LeaderAreas {
        let area = |nth: u64| self.on_leader(STAGING as u64 + nth * AREA_BYTES as u64);
        let turn = number & 1;
        LeaderAreas { inside: area(turn), leaving: area(2 + turn), arrived: area(4) }
    }

    /// Memory for this rank's record of a call on a device, and for those of all ranks.
    pub(super) fn records(&self) -> (StagingPart, StagingPart) {
        let begin = self.offset + STAGING as u64;
        let part = |skip: usize| StagingPart {
            at: self.address(begin + skip as u64),
            place: Place::Window(begin + skip as u64),
        };
        (part(0), part(RECORD_BYTES))
    }

    /// The host's notice board.
    pub(super) fn notice_board(&self) -> NoticeBoard {
        // SAFETY: the board's bytes are the last of the leader's staging, a window that lives as long as `self`, and nothing else
        // lies there.
        unsafe { NoticeBoard::at(self.on_leader((STAGING + AREAS * AREA_BYTES) as u64)) }
    }

    /// Address in this process of a part of the leader's staging.
    fn on_leader(&self, skip: u64) -> *mut u8 {
        self.layout.address(0, self.offset + skip) as *mut u8
    }

    /// Memory of the chunk with that number, which those three before and after it share.
    pub(super) fn slot(&self, chunk: usize) -> StagedChunk {
        let begin = self.offset + (chunk % SLOTS * SLOT_BYTES) as u64;
        StagedChunk { begin: self.address(begin), offset: begin, used: 0, room: SLOT_BYTES }
    }

    /// All memory, as one chunk's.
    pub(super) fn whole(&self) -> StagedChunk {
        StagedChunk { room: STAGING, ..self.slot(0) }
    }
}

/// Memory of the leader, through which the data of a small call goes. All ranks of its host reach it.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeaderAreas {
    /// Data for ranks of the same host.
    pub(super) inside: *mut u8,
    /// Data for other hosts, one behind the other.
    pub(super) leaving: *mut u8,
    /// Data of other hosts, one behind the other.
    pub(super) arrived: *mut u8,
}

/// A chunk's memory, of which parts are taken one behind the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct StagedChunk {
    begin: *mut u8,
    offset: u64,
    used: usize,
    room: usize,
}

/// A part of a chunk's memory: an address here, and a place for the engine inside the host.
#[derive(Clone, Copy, Debug)]
pub(super) struct StagingPart {
    pub(super) at: *mut u8,
    pub(super) place: Place,
}

impl StagedChunk {
    /// Takes a part. You must not take more than there is, rounded up for each part, in all: only debug builds look. Callers
    /// choose lengths by [`elements_of`].
    pub(super) fn take(&mut self, bytes: usize) -> StagingPart {
        debug_assert!(self.used + bytes <= self.room, "{bytes} bytes behind {}", self.used);
        let part = StagingPart {
            at: self.begin.wrapping_add(self.used),
            place: Place::Window(self.offset + self.used as u64),
        };
        self.used += bytes.next_multiple_of(ALIGN);
        part
    }
}

/// The most elements of a part, where `bytes` hold `parts` parts of elements of `size` bytes. A call takes them by a few calls
/// of [`StagedChunk::take`], each of which is rounded up by less than `ALIGN`: room is set aside for 16 of these. The number is at
/// least 1, which fits as long as `bytes` hold one element of each part besides.
pub(super) fn elements_of(bytes: usize, parts: usize, size: usize) -> usize {
    let room = bytes.saturating_sub(16 * ALIGN) / parts.max(1);
    (room / size.max(1)).max(1)
}
