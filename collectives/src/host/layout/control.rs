//! The control block: a range of every rank's heap, at the same offset, in which ranks signal each other.
//!
//! | part | per | written by | read by |
//! | --- | --- | --- | --- |
//! | abort flag | block | any peer, once | owner |
//! | abort records | source rank | that source, once | owner |
//! | handshake slots | parity, source | that source | owner |
//! | step slots | parity, source | that source | owner |
//! | channel slots | source, channel | that source | owner |
//! | plan slots | source, channel | that source | owner |
//! | rows | parity | owner | peers |
//! | packets sent | source rank | that source | owner |
//! | packets taken | receiving rank | that receiver | owner |
//! | message records | other rank | that other rank | owner |
//! | packets | source rank, turn | that source | owner |
//! | scratch | parity | owner | peers |
//!
//! The block up to the packets is all zero when the communicator is made, and is never cleared, because a peer may
//! signal before the owner has made its communicator. Packets and scratch need not be zero: nobody reads a part of them that
//! was not written before. This file turns (rank, part, index) into addresses and does nothing else.

#![allow(unsafe_code)] // addresses of atomics in shared memory

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use symmpool_allocator::{Error, HeapLayout, Result};

use super::abort::AbortRecord;
use crate::CommunicatorMemory;
use crate::host::wait::fault::{WaitFailure, WaitFault};
use crate::signal::channel::CHANNELS;
use crate::signal::{Native, SignalSlot};

/// The alignment of every part, and of the block itself.
pub(in crate::host) const ALIGN: u64 = 128;
/// The most ranks of a communicator: more than one host has use for. The bound is for the traffic matrix, which grows with
/// the square of the ranks.
pub(in crate::host) const MAX_WORLD: u32 = 1024;

/// How many packets of point-to-point messages a rank has room for, for each peer that sends to it.
pub(in crate::host) const PACKETS: u64 = 4;
/// The most bytes of a packet.
const PACKET_BYTES: u64 = 64 << 10;
/// The most bytes of all packets that a rank has room for.
const ALL_PACKETS: u64 = 1 << 20;

type SlotBytes = SignalSlot<Native>;
pub(in crate::host) const SLOT: u64 = size_of::<SlotBytes>() as u64;

/// Head of a packet, in front of its data.
#[repr(C)]
pub(in crate::host) struct PacketHeader {
    /// The number of the message, from 1 on.
    pub(in crate::host) message: AtomicU64,
    /// Payload of the whole message.
    pub(in crate::host) payload: AtomicU64,
}

/// Report of another rank on messages between it and the owner that were not made. Most never need it.
#[repr(C, align(128))]
pub(in crate::host) struct MessageRecord {
    /// The last message to the owner that its sender has declined.
    pub(in crate::host) unsent: AtomicU64,
    /// The first and the last of the owner's messages in a row that their receiver declined.
    pub(in crate::host) first_untaken: AtomicU64,
    pub(in crate::host) last_untaken: AtomicU64,
    /// The last of the owner's messages that arrived and was not taken, what it held, and what was expected. The number
    /// is 0 while the others are written.
    pub(in crate::host) declined: AtomicU64,
    pub(in crate::host) sent: AtomicU64,
    pub(in crate::host) expected: AtomicU64,
}

/// A packet of a point-to-point message. Its data is raw memory: counts order who may access it.
pub(in crate::host) struct Packet<'a> {
    pub(in crate::host) header: &'a PacketHeader,
    pub(in crate::host) data: *mut u8,
    /// The most bytes of data.
    pub(in crate::host) room: usize,
}

/// Where the parts of the block lie, for a number of ranks and a size of scratch.
#[derive(Clone, Copy, Debug)]
struct BlockLayout {
    aborts: u64,
    handshakes: u64,
    steps: u64,
    channels: u64,
    plans: u64,
    rows: u64,
    row_bytes: u64,
    sent: u64,
    taken: u64,
    message_records: u64,
    packets: u64,
    packet_bytes: u64,
    scratch: u64,
    end: u64,
}

impl BlockLayout {
    fn new(world: u32, scratch_bytes: u64) -> Result<Self> {
        if world == 0 || world > MAX_WORLD {
            return Err(Error::invalid_argument(format!(
                "a communicator of {world} ranks; 1 to {MAX_WORLD} are possible"
            )));
        }
        let world = u64::from(world);
        if !scratch_bytes.is_multiple_of(2 * ALIGN)
            || !(2 * ALIGN..=1 << 40).contains(&scratch_bytes)
        {
            return Err(Error::invalid_argument(format!(
                "scratch of {scratch_bytes} bytes; a positive multiple of {} is needed",
                2 * ALIGN
            )));
        }
        let aborts = ALIGN;
        let handshakes = (aborts + world * size_of::<AbortRecord>() as u64).next_multiple_of(ALIGN);
        let steps = handshakes + 2 * world * SLOT;
        let channels = steps + 2 * world * SLOT;
        let plans = channels + u64::from(CHANNELS) * world * SLOT;
        let rows = plans + u64::from(CHANNELS) * world * SLOT;
        // A row holds what a rank sends to each rank, what it expects from each, and where its input and output lie.
        let row_bytes = ((2 * world + 2) * 8).next_multiple_of(ALIGN);
        let sent = rows + 2 * row_bytes;
        let taken = sent + world * SLOT;
        let message_records = taken + world * SLOT;
        let packets = message_records + world * size_of::<MessageRecord>() as u64;
        // Every peer has the same number of packets. The header of a packet has a cache line of its own.
        let peers = world - 1;
        let room = (scratch_bytes / 2).min(ALL_PACKETS) / peers.max(1) / PACKETS / ALIGN * ALIGN;
        let packet_bytes = room.clamp(ALIGN, PACKET_BYTES);
        let scratch = packets + peers * PACKETS * (ALIGN + packet_bytes);
        let end = scratch + 2 * scratch_bytes;
        Ok(Self {
            aborts,
            handshakes,
            steps,
            channels,
            plans,
            rows,
            row_bytes,
            sent,
            taken,
            message_records,
            packets,
            packet_bytes,
            scratch,
            end,
        })
    }
}

/// Address arithmetic over every rank's control block.
#[derive(Clone, Copy, Debug)]
pub(in crate::host) struct ControlBlock {
    /// Address of rank 0's block.
    base: u64,
    stride: u64,
    layout: BlockLayout,
    scratch_bytes: u64,
}

impl ControlBlock {
    /// How the bytes of the block divide.
    pub(in crate::host) fn memory(&self, total: u64) -> CommunicatorMemory {
        let staging = self.layout.scratch - self.layout.packets;
        let scratch = 2 * self.scratch_bytes;
        CommunicatorMemory { scratch, staging, ..CommunicatorMemory::default() }.of(total)
    }

    /// The bytes that a control block needs.
    pub(in crate::host) fn required(world: u32, scratch_bytes: u64) -> Result<u64> {
        Ok(BlockLayout::new(world, scratch_bytes)?.end)
    }

    /// How many bytes at the beginning of the block must be zero.
    pub(in crate::host) fn zeroed(world: u32, scratch_bytes: u64) -> Result<u64> {
        Ok(BlockLayout::new(world, scratch_bytes)?.packets)
    }

    /// # Safety
    ///
    /// For as long as the value or a copy of it is used, `offset .. offset + bytes` of every slot
    /// of the heap is mapped, readable and writable, began all zero, and is used by nothing but
    /// the control blocks of this one communicator.
    pub(in crate::host) unsafe fn new(
        layout: &HeapLayout,
        offset: u64,
        bytes: u64,
        scratch_bytes: u64,
    ) -> Result<Self> {
        let parts = BlockLayout::new(layout.world, scratch_bytes)?;
        if bytes < parts.end {
            return Err(Error::invalid_argument(format!(
                "a control block of {bytes} bytes; {} ranks with {scratch_bytes} bytes of scratch \
                 need {}",
                layout.world, parts.end
            )));
        }
        if offset.checked_add(bytes).is_none_or(|end| end > layout.stride) {
            return Err(Error::invalid_argument(format!(
                "a control block at {offset:#x} of {bytes} bytes does not fit a slot of {} bytes",
                layout.stride
            )));
        }
        let base = layout.base + offset;
        let aligned = |address: u64| address.is_multiple_of(ALIGN);
        if !aligned(base) || (layout.world > 1 && !aligned(layout.stride)) {
            return Err(Error::invalid_argument(format!(
                "a control block at {base:#x} with stride {:#x}; multiples of {ALIGN} are needed",
                layout.stride
            )));
        }
        Ok(Self { base, stride: layout.stride, layout: parts, scratch_bytes })
    }

    #[inline]
    fn at(&self, owner: u32, part: u64) -> u64 {
        (self.base + u64::from(owner) * self.stride).wrapping_add(part)
    }

    /// How far behind the beginning of `owner`'s block an address lies, modulo 2^64.
    pub(in crate::host) fn part_at(&self, owner: u32, address: u64) -> u64 {
        address.wrapping_sub(self.at(owner, 0))
    }

    /// Where the communicator's own channels begin.
    pub(in crate::host) fn own_channels(&self) -> u64 {
        self.layout.channels
    }

    #[inline]
    fn slot(&self, owner: u32, part: u64, index: u64) -> &SignalSlot<Native> {
        let at = self.at(owner, part.wrapping_add(index * SLOT)) as *const SlotBytes;
        // SAFETY: `new`'s caller keeps the block mapped while `self` is used, the parts leave room
        // for all slots of their sources, and every boundary is a multiple of the slot's alignment. A set of
        // channels elsewhere has the same room and alignment, and its caller keeps it mapped.
        // A slot is nothing but atomics, valid for any bits, so sharing it with other processes is
        // sound.
        unsafe { &*at }
    }

    /// Where `source` signals `owner` that it makes a call.
    #[inline]
    pub(in crate::host) fn handshake(
        &self,
        owner: u32,
        parity: u64,
        source: u32,
    ) -> &SignalSlot<Native> {
        debug_assert!(parity < 2);
        self.slot(owner, self.layout.handshakes, 2 * u64::from(source) + parity)
    }

    /// Where `source` signals `owner` that it has reached a step.
    #[inline]
    pub(in crate::host) fn step(
        &self,
        owner: u32,
        parity: u64,
        source: u32,
    ) -> &SignalSlot<Native> {
        debug_assert!(parity < 2);
        self.slot(owner, self.layout.steps, 2 * u64::from(source) + parity)
    }

    /// Where `source` signals `owner` on a channel, outside of calls. Channels begin at `part`, which is
    /// [`Self::own_channels`] or of memory that the caller of [`Communicator::channel_set_at`] keeps.
    ///
    /// [`Communicator::channel_set_at`]: crate::Communicator::channel_set_at
    #[inline]
    pub(in crate::host) fn channel(
        &self,
        part: u64,
        (owner, source): (u32, u32),
        channel: u32,
    ) -> &SignalSlot<Native> {
        debug_assert!(channel < CHANNELS);
        let index = u64::from(source) * u64::from(CHANNELS) + u64::from(channel);
        self.slot(owner, part, index)
    }

    /// Where `source` signals `owner` on a channel of the call's plan.
    #[inline]
    pub(in crate::host) fn plan_channel(
        &self,
        owner: u32,
        source: u32,
        channel: u32,
    ) -> &SignalSlot<Native> {
        debug_assert!(channel < CHANNELS);
        let index = u64::from(source) * u64::from(CHANNELS) + u64::from(channel);
        self.slot(owner, self.layout.plans, index)
    }

    /// The fault that a peer has reported to the rank of `layout`, if one has. Costs one load if none has.
    #[inline]
    pub(in crate::host) fn reported_fault(&self, layout: &HeapLayout) -> Option<WaitFailure> {
        let is_reported = self.abort_flag(layout.rank).load(Ordering::Acquire) != 0;
        if is_reported { self.first_report(layout) } else { None }
    }

    fn abort_flag(&self, owner: u32) -> &AtomicU32 {
        let at = self.at(owner, 0) as *mut u32;
        // SAFETY: the first word of a mapped block, aligned; only ever used as this atomic.
        unsafe { AtomicU32::from_ptr(at) }
    }

    /// `source`'s record, in `owner`'s block, of why it gave up.
    fn abort_record(&self, owner: u32, source: u32) -> &AbortRecord {
        let part = self.layout.aborts + u64::from(source) * size_of::<AbortRecord>() as u64;
        let at = self.at(owner, part) as *const AbortRecord;
        // SAFETY: `ControlBlock::new` was promised that the block is mapped while this lives; the record is aligned and
        // within its part, and holds nothing but atomics.
        unsafe { &*at }
    }

    /// Writes a fault of rank `me` to the block of `peer`, and raises the peer's abort flag.
    pub(in crate::host) fn report_fault(&self, peer: u32, me: u32, fault: &WaitFault) {
        self.abort_record(peer, me).report(self.abort_flag(peer), fault);
    }

    /// The first fault, by the reporting rank, in the block of `layout`'s rank.
    fn first_report(&self, layout: &HeapLayout) -> Option<WaitFailure> {
        peers(layout).find_map(|reporter| {
            let fault = self.abort_record(layout.rank, reporter).read()?;
            Some(WaitFailure { fault, reporter: Some(reporter) })
        })
    }

    /// One of the numbers that `owner` publishes for a call: at `0..world` what it sends to each rank, at
    /// `world..2 * world` what it expects from each, then where its input and output lie.
    #[inline]
    pub(in crate::host) fn row(&self, owner: u32, parity: u64, index: u32) -> &AtomicU64 {
        debug_assert!(parity < 2 && u64::from(index) * 8 < self.layout.row_bytes);
        let part = self.layout.rows + parity * self.layout.row_bytes + u64::from(index) * 8;
        let at = self.at(owner, part) as *mut u64;
        // SAFETY: `ControlBlock::new` was promised that the block is mapped while this lives; the word is aligned and
        // within its part, and only ever used as this atomic.
        unsafe { AtomicU64::from_ptr(at) }
    }

    /// `owner`'s scratch for calls of this parity. It is raw memory: signals order who may access it.
    #[inline]
    pub(in crate::host) fn scratch(&self, owner: u32, parity: u64) -> *mut u8 {
        self.at(owner, self.layout.scratch + parity * self.scratch_bytes) as *mut u8
    }

    /// The bytes of the scratch of one parity.
    #[inline]
    pub(in crate::host) fn scratch_bytes(&self) -> usize {
        self.scratch_bytes as usize
    }

    /// Where `source` counts the packets that it has sent to `owner`.
    #[inline]
    pub(in crate::host) fn packets_sent(&self, owner: u32, source: u32) -> &SignalSlot<Native> {
        self.slot(owner, self.layout.sent, u64::from(source))
    }

    /// Where `receiver` counts the packets of `owner` that it has taken.
    #[inline]
    pub(in crate::host) fn packets_taken(&self, owner: u32, receiver: u32) -> &SignalSlot<Native> {
        self.slot(owner, self.layout.taken, u64::from(receiver))
    }

    /// The place of a packet that `source` sends to `owner`, which is another rank.
    pub(in crate::host) fn packet(&self, owner: u32, source: u32, number: u64) -> Packet<'_> {
        debug_assert!(owner != source);
        let nth = u64::from(if source < owner { source } else { source - 1 });
        let each = ALIGN + self.layout.packet_bytes;
        let part = self.layout.packets + (nth * PACKETS + number % PACKETS) * each;
        let at = self.at(owner, part) as *const PacketHeader;
        // SAFETY: `ControlBlock::new` was promised that the block is mapped while this lives; the header is aligned and
        // within its part, and holds nothing but atomics.
        let header = unsafe { &*at };
        let data = self.at(owner, part + ALIGN) as *mut u8;
        Packet { header, data, room: self.layout.packet_bytes as usize }
    }

    /// How many packets a message of `bytes` bytes has.
    pub(in crate::host) fn packets_of(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.layout.packet_bytes).max(1)
    }

    /// Report of `peer` to `owner` on messages between them.
    pub(in crate::host) fn message_record(&self, owner: u32, peer: u32) -> &MessageRecord {
        let part =
            self.layout.message_records + u64::from(peer) * size_of::<MessageRecord>() as u64;
        let at = self.at(owner, part) as *const MessageRecord;
        // SAFETY: `ControlBlock::new` was promised that the block is mapped while this lives; the record is aligned and
        // within its part, and holds nothing but atomics.
        unsafe { &*at }
    }

    /// Whether `offset .. offset + bytes` of a slot touches the control block.
    pub(in crate::host) fn overlaps(&self, layout: &HeapLayout, offset: u64, bytes: u64) -> bool {
        let block = self.base - layout.base;
        bytes > 0 && offset < block + self.layout.end && block < offset + bytes
    }
}

/// The other ranks, beginning with the one after this rank, so that not all ranks access the same peer at once.
#[inline]
pub(in crate::host) fn peers(layout: &HeapLayout) -> impl Iterator<Item = u32> + use<> {
    let HeapLayout { rank, world, .. } = *layout;
    (rank + 1..world).chain(0..rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap_and_fill_the_stated_size() {
        for world in [1, 2, 3, 5, 64, MAX_WORLD] {
            let p = BlockLayout::new(world, 4096).unwrap();
            let w = u64::from(world);
            assert!(p.aborts + w * 64 <= p.handshakes && p.handshakes.is_multiple_of(ALIGN));
            assert_eq!(p.handshakes + 2 * w * SLOT, p.steps);
            assert_eq!(p.steps + 2 * w * SLOT, p.channels);
            assert_eq!(p.channels + 16 * w * SLOT, p.plans);
            assert_eq!(p.plans + 16 * w * SLOT, p.rows);
            assert!(p.rows + 2 * (2 * w + 1) * 8 <= p.sent && p.sent.is_multiple_of(ALIGN));
            assert!(p.scratch.is_multiple_of(ALIGN));
            assert_eq!(p.scratch + 2 * 4096, p.end);
            assert_eq!((p.sent + w * SLOT, p.taken + w * SLOT), (p.taken, p.message_records));
            assert_eq!(p.message_records + w * 128, p.packets);
            assert!(p.packets.is_multiple_of(ALIGN) && p.packet_bytes.is_multiple_of(ALIGN));
            assert!(p.packet_bytes > 0 && p.packets + 4 * (w - 1) * p.packet_bytes <= p.scratch);
        }
        assert!(BlockLayout::new(0, 4096).unwrap_err().is_invalid_argument());
        assert!(BlockLayout::new(MAX_WORLD + 1, 4096).unwrap_err().is_invalid_argument());
        for scratch in [0, 100, 384, 4096 + 128, (1 << 40) + 256] {
            assert!(BlockLayout::new(2, scratch).unwrap_err().is_invalid_argument(), "{scratch}");
        }
    }

    #[test]
    fn no_two_parts_of_a_slot_overlap() {
        const WORLD: u32 = 3;
        let bytes = ControlBlock::required(WORLD, 256).unwrap();
        let mut memory = vec![0_u64; (u64::from(WORLD) * bytes + ALIGN) as usize / 8];
        let base = (memory.as_mut_ptr() as u64).next_multiple_of(ALIGN);
        let layout = HeapLayout { base, stride: bytes, rank: 0, world: WORLD };
        // SAFETY: the memory is zeroed, long enough and this test's.
        let control = unsafe { ControlBlock::new(&layout, 0, bytes, 256) }.unwrap();
        let end_of = |at: u64, length: u64| (at, at + length);
        for owner in 0..WORLD {
            let slot = |slot: &SignalSlot<Native>| end_of(std::ptr::from_ref(slot) as u64, SLOT);
            let mut places = vec![end_of(control.abort_flag(owner).as_ptr() as u64, 4)];
            for source in 0..WORLD {
                let record = std::ptr::from_ref(control.abort_record(owner, source)) as u64;
                places.push(end_of(record, size_of::<AbortRecord>() as u64));
                for channel in 0..CHANNELS {
                    places.push(slot(control.channel(
                        control.own_channels(),
                        (owner, source),
                        channel,
                    )));
                    places.push(slot(control.plan_channel(owner, source, channel)));
                }
                places.push(slot(control.packets_sent(owner, source)));
                places.push(slot(control.packets_taken(owner, source)));
                let record = std::ptr::from_ref(control.message_record(owner, source)) as u64;
                places.push(end_of(record, size_of::<MessageRecord>() as u64));
                for number in 5..9 {
                    if source != owner {
                        let packet = control.packet(owner, source, number);
                        let header = std::ptr::from_ref(packet.header) as u64;
                        places.push(end_of(header, size_of::<PacketHeader>() as u64));
                        places.push(end_of(packet.data as u64, packet.room as u64));
                    }
                }
            }
            for parity in 0..2 {
                for source in 0..WORLD {
                    places.push(slot(control.handshake(owner, parity, source)));
                    places.push(slot(control.step(owner, parity, source)));
                }
                for index in 0..2 * WORLD + 2 {
                    places.push(end_of(control.row(owner, parity, index).as_ptr() as u64, 8));
                }
                places.push(end_of(control.scratch(owner, parity) as u64, 256));
            }
            places.sort_unstable();
            let begin = base + u64::from(owner) * bytes;
            assert!(places[0].0 >= begin && places[places.len() - 1].1 <= begin + bytes);
            assert!(places.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{places:x?}");
        }
    }
}
