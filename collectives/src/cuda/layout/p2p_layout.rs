//! Where slots of point-to-point messages lie, and how messages are divided among them.

#![allow(unsafe_code)] // reads and writes words of control blocks by address

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{HeapLayout, Result};

use super::params::ChannelEnd;
use crate::call::p2p::Direction;
use crate::signal::channel::CHANNELS;

/// Most chunks of a stripe that are under way, each in a slot of its own: `SLOTS` in `p2p/p2p.cu`.
const SLOTS: u64 = 4;

/// Most stripes of a message: `MAX_STRIPES` in `p2p/p2p.cu`.
const MAX_STRIPES: u64 = 16;

/// Most stripes of the messages of all peers: `SHARED_STRIPES` in `p2p/p2p.cu`. Kernels of both directions then have 48 blocks,
/// about a third of a large device.
const SHARED_STRIPES: u64 = 24;

/// Bytes that are worth a stripe, which is a block, of their own.
const STRIPE_BYTES: u64 = 16 << 10;

/// Chunks that a stripe's data is divided into, so that the receiver handles one while the next arrives.
const CHUNKS: u64 = 4;

/// Least bytes of a chunk: sending a flag takes as long as this many bytes.
const MIN_CHUNK_BYTES: u64 = 32 << 10;

/// Bytes of a line: stripes begin at multiples of it.
const LINE: u64 = 128;

/// Where the slots and counts of point-to-point operations lie in a control block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct P2pLayout {
    /// Where flags, acknowledgements and counts begin, and how many bytes they have.
    pub(in crate::cuda) words: u64,
    pub(in crate::cuda) words_bytes: u64,
    /// Where slots begin, and how many bytes a slot has.
    pub(in crate::cuda) slots: u64,
    pub(in crate::cuda) slot_bytes: u64,
    pub(in crate::cuda) peers: u64,
    /// Stripes that each peer has slots for.
    pub(in crate::cuda) stripes: u64,
}

/// How a message is divided. Sender and receiver divide it in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct Division {
    pub(in crate::cuda) stripes: u64,
    /// Bytes of each stripe but the last one.
    pub(in crate::cuda) stripe_bytes: u64,
    /// Bytes of a chunk.
    pub(in crate::cuda) chunk: u64,
}

impl P2pLayout {
    /// The layout for `world` ranks, behind the first `begin` bytes of the control block, which are whole pages; the
    /// slots of all that send to a rank have `staging` bytes together.
    /// A communicator of one rank has no peer to send to, and needs none of it.
    pub(in crate::cuda) fn new(world: u32, begin: u64, staging: u64) -> Self {
        let ranks = u64::from(world);
        let peers = ranks.max(2) - 1;
        let stripes = (SHARED_STRIPES / peers).min(MAX_STRIPES);
        // For each rank: a flag of 16 bytes for each slot; an acknowledgement and two counts for each stripe. Behind them, the
        // number of SMs of the device.
        let words_bytes = ranks * (stripes * (16 * SLOTS + 3 * 8));
        let slot_bytes = (staging / peers / stripes / SLOTS / LINE * LINE).max(LINE);
        let slots = (begin + words_bytes + 8).next_multiple_of(4096);
        Self { words: begin, words_bytes, slots, slot_bytes, peers, stripes }
    }

    /// Where the control block ends.
    pub(in crate::cuda) fn end(&self, world: u32) -> u64 {
        if world < 2 {
            return self.words;
        }
        (self.slots + self.peers * self.stripes * SLOTS * self.slot_bytes).next_multiple_of(4096)
    }

    /// Where the bytes before the slots begin, which must be zeros at first, and how many there are.
    pub(in crate::cuda) fn zeroed(&self) -> (u64, u64) {
        (self.words, self.slots - self.words)
    }

    /// Where a rank writes how many SMs its device has.
    pub(in crate::cuda) fn sm_count(&self) -> u64 {
        self.words + self.words_bytes
    }

    /// How a message of `bytes` bytes is divided, if the smallest device of the ranks has `sm_count` SMs.
    /// The kernels of all peers and both directions occupy at most a third of them, and leave the others to
    /// collectives.
    pub(in crate::cuda) fn divide(&self, bytes: u64, sm_count: u32) -> Division {
        let most = (u64::from(sm_count) / 6 / self.peers).clamp(1, self.stripes);
        let stripes = bytes.div_ceil(STRIPE_BYTES).clamp(1, most);
        let stripe_bytes = bytes.div_ceil(stripes).next_multiple_of(LINE);
        let chunk = (stripe_bytes / CHUNKS)
            .next_multiple_of(LINE)
            .max(MIN_CHUNK_BYTES)
            .min(self.slot_bytes);
        Division { stripes, stripe_bytes, chunk }
    }
}

/// Properties of send and recv that an engine needs.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct P2p {
    pub(in crate::cuda) layout: P2pLayout,
    /// SMs of the smallest device of the ranks.
    pub(in crate::cuda) sm_count: u32,
    /// Whether collectives leave SMs free for the kernels of send and recv.
    pub(in crate::cuda) shares_sms: bool,
}

impl P2p {
    /// Bytes of the control block that messages have.
    pub(in crate::cuda) fn staging(&self, world: u32) -> u64 {
        self.layout.end(world) - self.layout.words
    }

    /// For control blocks at `control` of every slot, which every rank has prepared.
    pub(in crate::cuda) fn new(
        driver: &CudaDriver,
        layout: &HeapLayout,
        control: u64,
        p2p_layout: P2pLayout,
    ) -> Result<Self> {
        let mut sm_count = u32::MAX;
        for rank in (0..layout.world).filter(|_| layout.world > 1) {
            let mut word = [0; 4];
            let at = layout.address(rank, control + p2p_layout.sm_count());
            // SAFETY: the word lies in a control block, which is a window; its rank wrote it before the
            // commit that made it one, and nobody does later.
            unsafe { driver.copy_to_host(&mut word, at) }?;
            sm_count = sm_count.min(u32::from_le_bytes(word));
        }
        Ok(Self { layout: p2p_layout, sm_count, shares_sms: false })
    }
}

/// The end of a channel whose order messages to or from a peer have.
pub(in crate::cuda) fn end_of_messages(direction: Direction, peer: u32) -> ChannelEnd {
    ChannelEnd { set: 0, sends: direction == Direction::Send, peer, number: CHANNELS }
}

/// Writes how many SMs this rank's device has, where peers read it.
///
/// # Safety
///
/// `block` is the address of a control block of the caller's that has this layout, and that no other rank knows yet.
pub(in crate::cuda) unsafe fn prepare(
    driver: &CudaDriver,
    block: u64,
    layout: P2pLayout,
) -> Result<()> {
    use cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as COUNT;
    let sm_count = u32::try_from(driver.attribute(COUNT as u32)?).unwrap_or(0);
    // SAFETY: a word of the caller's control block, which no other rank knows yet, as the caller promised.
    unsafe { driver.fill(block + layout.sm_count(), sm_count, 1) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jit::sources::P2P;

    #[test]
    fn kernels_have_the_same_numbers() {
        for (name, number) in
            [("SLOTS", SLOTS), ("MAX_STRIPES", MAX_STRIPES), ("SHARED_STRIPES", SHARED_STRIPES)]
        {
            let line = format!("constexpr u32 {name} = {number};");
            assert!(P2P.source.contains(&line), "{line}");
        }
    }

    #[test]
    fn places_are_whole_lines_and_end_where_the_block_does() {
        for world in 2..=8 {
            for staging in [1 << 18, 1 << 20, 16 << 20] {
                let begin = 300 << 20;
                let layout = P2pLayout::new(world, begin, staging);
                let slots = layout.peers * layout.stripes * SLOTS;
                assert!(layout.slot_bytes >= LINE && layout.slot_bytes.is_multiple_of(LINE));
                assert!(layout.slots.is_multiple_of(4096));
                assert!(layout.sm_count() + 4 <= layout.slots);
                assert!(layout.slots + slots * layout.slot_bytes <= layout.end(world));
                assert!(layout.end(world) - begin <= staging + (1 << 16), "{layout:?}");
                assert!(layout.stripes * layout.peers <= SHARED_STRIPES);
                let (from, bytes) = layout.zeroed();
                assert_eq!((from, from + bytes), (begin, layout.slots));
            }
        }
        let alone = P2pLayout::new(1, 4096, 1 << 20);
        assert_eq!(alone.end(1), 4096);
    }

    #[test]
    fn every_message_is_divided_whole_and_fits_its_slots() {
        for (world, sm_count) in [(2, 132), (2, 4), (3, 132), (4, 108), (8, 132), (8, 1)] {
            for staging in [1 << 18, 16 << 20] {
                let layout = P2pLayout::new(world, 0, staging);
                let sizes = (0..40).flat_map(|bit| {
                    [(1_u64 << bit) - 1, 1 << bit, (1 << bit) + 1, (1 << bit) + 12_345]
                });
                for bytes in sizes {
                    let division = layout.divide(bytes, sm_count);
                    assert!(
                        (1..=layout.stripes).contains(&division.stripes),
                        "{bytes}: {division:?}"
                    );
                    assert!(
                        division.stripes == 1
                            || division.stripes * layout.peers * 6 <= sm_count.into()
                    );
                    assert!(
                        division.stripe_bytes * division.stripes >= bytes,
                        "{bytes}: {division:?}"
                    );
                    // No stripe is empty.
                    assert!(
                        bytes == 0 || division.stripe_bytes * (division.stripes - 1) < bytes,
                        "{bytes}: {division:?}"
                    );
                    assert!(
                        division.chunk > 0 && division.chunk <= layout.slot_bytes,
                        "{bytes}: {division:?}"
                    );
                    assert!(
                        division.chunk.is_multiple_of(LINE)
                            && division.stripe_bytes.is_multiple_of(LINE)
                    );
                }
            }
        }
    }
}
