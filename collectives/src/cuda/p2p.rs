//! Messages between two ranks: `send` and `recv` as kernels on a stream.
//!
//! Data goes through slots in the receiver's control block, as `p2p/p2p.cu` says. The kernels are loaded
//! when the communicator is made, as nothing may have to be waited for when a message is sent: whoever
//! loads code may have to wait for kernels that wait for this very message.

#![allow(unsafe_code)] // launches kernels on raw addresses

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{HeapLayout, Result, Stream};

use super::engine::CudaEngine;
use super::kernel_spec::Specialty;
use super::kernels::Loaded;
use super::params::{CallParams, Channel};
use super::sm_budget::leave_room;
use crate::jit::sources::P2P;
use crate::p2p::Length;
use crate::signal::channel::CHANNELS;

/// Packets of a lane that are on their way at most: `SLOTS` in `p2p/p2p.cu`.
const SLOTS: u64 = 8;
/// Lanes of a message at most, and those of all peers: `MOST_LANES` and `SHARED_LANES` there. Kernels of
/// both ways then hold 48 blocks, about a third of a large device.
const MOST_LANES: u64 = 16;
const SHARED_LANES: u64 = 24;
/// Bytes of slots that a rank has at most, for all that send to it,
const MOST_STAGING: u64 = 16 << 20;
/// and its part of the scratch that the communicator was made with.
const SCRATCH_PART: u64 = 4;

/// Threads of a block, of which each handles four vectors at once: enough to keep the link of one of
/// sixteen blocks busy.
const THREADS: u32 = 512;
/// Bytes for which a lane is worth a block.
const LANE_BYTES: u64 = 16 << 10;
/// A lane goes in this many packets, so that the receiver takes one while the next comes,
const PACKETS: u64 = 4;
/// unless they would have less: a flag takes as long as so many bytes.
const LEAST_PACKET: u64 = 32 << 10;
/// Where a lane begins in the data: whole cache lines.
const LINE: u64 = 128;

/// Where a control block has what messages need, and how they are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Places {
    /// Where flags, acknowledgements and counts begin in the control block,
    words: u64,
    words_bytes: u64,
    /// and slots.
    slots: u64,
    slot_bytes: u64,
    peers: u64,
    /// Lanes that there is room for.
    lanes: u64,
}

/// How a message is cut, on either rank alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    lanes: u64,
    /// Bytes of a lane, but for the last one.
    each: u64,
    /// Bytes of a packet.
    packet: u64,
}

impl Places {
    /// For `world` ranks, behind the first `begin` bytes of the control block, which are whole pages.
    /// A communicator of one rank has nobody to send to.
    pub(super) fn new(world: u32, begin: u64, scratch: u64) -> Self {
        let ranks = u64::from(world);
        let peers = ranks.max(2) - 1;
        let lanes = (SHARED_LANES / peers).min(MOST_LANES);
        // A flag of 16 bytes for each slot; acknowledgements, and two counts, of each lane; two words of
        // a refusal. Behind them the device's processors.
        let words_bytes = ranks * (lanes * (16 * SLOTS + 3 * 8) + 2 * 8);
        let room = (scratch / SCRATCH_PART).min(MOST_STAGING);
        let slot_bytes = (room / peers / lanes / SLOTS / LINE * LINE).max(LINE);
        let slots = (begin + words_bytes + 8).next_multiple_of(4096);
        Self { words: begin, words_bytes, slots, slot_bytes, peers, lanes }
    }

    /// Where the control block ends.
    pub(super) fn end(&self, world: u32) -> u64 {
        if world < 2 {
            return self.words;
        }
        (self.slots + self.peers * self.lanes * SLOTS * self.slot_bytes).next_multiple_of(4096)
    }

    /// Bytes before the slots, which begin as zeros.
    pub(super) fn zeroed(&self) -> (u64, u64) {
        (self.words, self.slots - self.words)
    }

    /// Where a rank says how many processors its device has.
    pub(super) fn processors(&self) -> u64 {
        self.words + self.words_bytes
    }

    /// A message of so many bytes, where the smallest device of the ranks has so many processors. Kernels
    /// of all peers and both ways are to hold a third of them at most: collectives have the others.
    fn cut(&self, bytes: u64, processors: u32) -> Cut {
        let most = (u64::from(processors) / 6 / self.peers).clamp(1, self.lanes);
        let lanes = bytes.div_ceil(LANE_BYTES).clamp(1, most);
        let each = bytes.div_ceil(lanes).next_multiple_of(LINE);
        let packet = (each / PACKETS).next_multiple_of(LINE).max(LEAST_PACKET).min(self.slot_bytes);
        Cut { lanes, each, packet }
    }
}

/// What an engine knows of messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct P2p {
    places: Places,
    /// Of the smallest device of the ranks.
    processors: u32,
    /// Whether collectives leave room for kernels of messages.
    leaves_room: bool,
}

impl P2p {
    /// As every rank has prepared it, in the control blocks at `control` of every slot.
    pub(super) fn new(
        driver: &CudaDriver,
        layout: &HeapLayout,
        control: u64,
        places: Places,
    ) -> Result<Self> {
        let mut processors = u32::MAX;
        for rank in (0..layout.world).filter(|_| layout.world > 1) {
            let mut word = [0; 4];
            let at = layout.address(rank, control + places.processors());
            // SAFETY: the word lies in a control block, which is a window; its rank wrote it before the
            // commit that made it one, and nobody does later.
            unsafe { driver.copy_to_host(&mut word, at) }?;
            processors = processors.min(u32::from_le_bytes(word));
        }
        Ok(Self { places, processors, leaves_room: false })
    }
}

/// What a kernel does, as the bits of `SHOTS` in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Send = 1,
    Receive = 2,
}

impl Way {
    fn specialty(self) -> Specialty {
        Specialty { shots: self as u8, ..Specialty::new(&P2P, THREADS) }
    }
}

/// The kernels of messages.
pub(super) fn specialties() -> [Specialty; 2] {
    [Way::Send.specialty(), Way::Receive.specialty()]
}

impl CudaEngine {
    /// Sends a message to a peer, which is another rank.
    ///
    /// # Safety
    ///
    /// `from` is readable on the device for the message's bytes until the stream is past it, and nobody
    /// writes it meanwhile.
    pub(crate) unsafe fn send(
        &mut self,
        from: u64,
        length: Length,
        peer: u32,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.put_message((Way::Send, from), length, peer, stream) }
    }

    /// Receives a message of a peer, which is another rank.
    ///
    /// # Safety
    ///
    /// `to` is writable on the device for the message's bytes until the stream is past it, and nobody
    /// touches it meanwhile.
    pub(crate) unsafe fn receive(
        &mut self,
        to: u64,
        length: Length,
        peer: u32,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.put_message((Way::Receive, to), length, peer, stream) }
    }

    /// # Safety
    ///
    /// As [`Self::send`] or [`Self::receive`].
    unsafe fn put_message(
        &mut self,
        (way, address): (Way, u64),
        length: Length,
        peer: u32,
        stream: Stream,
    ) -> Result<()> {
        self.ready()?;
        self.expects(stream)?;
        let P2p { places, processors, leaves_room } = self.p2p;
        if !leaves_room {
            leave_room(self.ordinal()?);
            self.p2p.leaves_room = true;
        }
        self.begin_apart();
        let kernel: Loaded = self.kernel(way.specialty())?;
        let Cut { lanes, each, packet } = places.cut(length.bytes(), processors);
        let params = CallParams {
            details: [length.word(), places.words, places.slot_bytes, each],
            input: if way == Way::Send { address } else { 0 },
            output: if way == Way::Receive { address } else { 0 },
            bytes: length.bytes(),
            stride: places.slots,
            root: peer,
            teams: packet as u32,
        };
        // Messages of one direction run in the order of the calls, and are independent of all others. So
        // the next one on another stream waits for this one alone, not for what comes behind it here.
        let end = Channel { sends: way == Way::Send, peer, number: CHANNELS };
        self.turn_channel_to(end, stream)?;
        // A collective on another stream comes behind the last one here, and not behind this message.
        self.before_a_wait(stream)?;
        // SAFETY: as the caller promised; nothing else is pointed to but control blocks.
        unsafe {
            self.launch_apart(kernel, (lanes as u32, THREADS), &self.comm, &params, None, stream)
        }?;
        self.operated(end, stream)
    }
}

/// Says how many processors this rank's device has, where peers read it.
pub(super) fn prepare(driver: &CudaDriver, block: u64, places: Places) -> Result<()> {
    use cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as COUNT;
    let processors = u32::try_from(driver.attribute(COUNT as u32)?).unwrap_or(0);
    // SAFETY: a word of a block that the caller holds, of which no other rank knows before the commit.
    unsafe { driver.fill(block + places.processors(), processors, 1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_have_the_same_numbers() {
        for (name, number) in
            [("SLOTS", SLOTS), ("MOST_LANES", MOST_LANES), ("SHARED_LANES", SHARED_LANES)]
        {
            let line = format!("constexpr u32 {name} = {number};");
            assert!(P2P.source.contains(&line), "{line}");
        }
    }

    #[test]
    fn places_are_whole_lines_and_end_where_the_block_does() {
        for world in 2..=8 {
            for scratch in [1 << 20, 4 << 20, 192 << 20, 1 << 32] {
                let begin = 300 << 20;
                let places = Places::new(world, begin, scratch);
                let slots = places.peers * places.lanes * SLOTS;
                assert!(places.slot_bytes >= LINE && places.slot_bytes.is_multiple_of(LINE));
                assert!(places.slots.is_multiple_of(4096));
                assert!(places.processors() + 4 <= places.slots);
                assert!(places.slots + slots * places.slot_bytes <= places.end(world));
                assert!(places.end(world) - begin <= MOST_STAGING + (1 << 16), "{places:?}");
                assert!(places.lanes * places.peers <= SHARED_LANES);
                let (from, bytes) = places.zeroed();
                assert_eq!((from, from + bytes), (begin, places.slots));
            }
        }
        let alone = Places::new(1, 4096, 1 << 20);
        assert_eq!(alone.end(1), 4096);
    }

    #[test]
    fn every_message_is_cut_whole_and_fits_its_slots() {
        for (world, processors) in [(2, 132), (2, 4), (3, 132), (4, 108), (8, 132), (8, 1)] {
            for scratch in [1 << 20, 192 << 20] {
                let places = Places::new(world, 0, scratch);
                let sizes = (0..40).flat_map(|bit| {
                    [(1_u64 << bit) - 1, 1 << bit, (1 << bit) + 1, (1 << bit) + 12_345]
                });
                for bytes in sizes {
                    let cut = places.cut(bytes, processors);
                    assert!((1..=places.lanes).contains(&cut.lanes), "{bytes}: {cut:?}");
                    assert!(cut.lanes == 1 || cut.lanes * places.peers * 6 <= processors.into());
                    assert!(cut.each * cut.lanes >= bytes, "{bytes}: {cut:?}");
                    // Each lane has some of it, so that none is there for nothing.
                    assert!(bytes == 0 || cut.each * (cut.lanes - 1) < bytes, "{bytes}: {cut:?}");
                    assert!(cut.packet > 0 && cut.packet <= places.slot_bytes, "{bytes}: {cut:?}");
                    assert!(cut.packet.is_multiple_of(LINE) && cut.each.is_multiple_of(LINE));
                }
            }
        }
    }
}
