//! Send and recv between two ranks, as kernels on a stream.
//!
//! Data goes through slots in the receiver's control block, as `p2p/p2p.cu` says. The kernels are loaded when the
//! communicator is made: loading code later might wait for running kernels, which may wait for the peer that waits
//! for this very data.

#![allow(unsafe_code)] // launches kernels on raw addresses

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{HeapLayout, Result, Stream};

use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::kernels::LoadedKernel;
use crate::cuda::kernel::mode::{KernelMode, P2pMode};
use crate::cuda::kernel::sm_budget::share_sms;
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::params::{CallParams, ChannelEnd};
use crate::jit::sources::P2P;
use crate::p2p::{Direction, Payload};
use crate::signal::channel::CHANNELS;

/// Most chunks of a lane that are under way: `SLOTS` in `p2p/p2p.cu`.
const SLOTS: u64 = 4;
/// Most lanes of a message, and of the messages of all peers: `MOST_LANES` and `SHARED_LANES` in `p2p/p2p.cu`. Kernels
/// of both directions then have 48 blocks, about a third of a large device.
const MOST_LANES: u64 = 16;
const SHARED_LANES: u64 = 24;

/// Threads of a block. Each handles four vectors at once, which is enough to keep the link busy with sixteen
/// blocks.
const THREADS: u32 = 512;
/// Bytes that are worth a lane, which is a block, of their own.
const LANE_BYTES: u64 = 16 << 10;
/// A lane's data goes in this many chunks, so that the receiver handles one while the next arrives,
const CHUNKS: u64 = 4;
/// unless chunks would have fewer bytes than this: sending a flag takes as long as so many bytes.
const MIN_PACKET: u64 = 32 << 10;
/// Lanes begin at multiples of so many bytes of the data, which are whole cache lines.
const LINE: u64 = 128;

/// Where the slots and counts of point-to-point operations lie in a control block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct P2pLayout {
    /// Where flags, acknowledgements and counts begin, and how many bytes they have.
    words: u64,
    words_bytes: u64,
    /// Where slots begin, and how many bytes a slot has.
    slots: u64,
    slot_bytes: u64,
    peers: u64,
    /// Lanes that each peer has slots for.
    lanes: u64,
}

/// How a message is divided. Sender and receiver divide it in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    lanes: u64,
    /// Bytes of each lane but the last one.
    lane_bytes: u64,
    /// Bytes of a chunk.
    chunk: u64,
}

impl P2pLayout {
    /// The layout for `world` ranks, behind the first `begin` bytes of the control block, which are whole pages; the
    /// slots of all that send to a rank have `staging` bytes together.
    /// A communicator of one rank has no peer to send to, and needs none of it.
    pub(in crate::cuda) fn new(world: u32, begin: u64, staging: u64) -> Self {
        let ranks = u64::from(world);
        let peers = ranks.max(2) - 1;
        let lanes = (SHARED_LANES / peers).min(MOST_LANES);
        // For each rank: a flag of 16 bytes for each slot; an acknowledgement and two counts for each lane. Behind them, the
        // number of processors of the device.
        let words_bytes = ranks * (lanes * (16 * SLOTS + 3 * 8));
        let slot_bytes = (staging / peers / lanes / SLOTS / LINE * LINE).max(LINE);
        let slots = (begin + words_bytes + 8).next_multiple_of(4096);
        Self { words: begin, words_bytes, slots, slot_bytes, peers, lanes }
    }

    /// Where the control block ends.
    pub(in crate::cuda) fn end(&self, world: u32) -> u64 {
        if world < 2 {
            return self.words;
        }
        (self.slots + self.peers * self.lanes * SLOTS * self.slot_bytes).next_multiple_of(4096)
    }

    /// Where the bytes before the slots begin, which must be zeros at first, and how many there are.
    pub(in crate::cuda) fn zeroed(&self) -> (u64, u64) {
        (self.words, self.slots - self.words)
    }

    /// Where a rank writes how many processors its device has.
    pub(in crate::cuda) fn processors(&self) -> u64 {
        self.words + self.words_bytes
    }

    /// How a message of so many bytes is divided, if the smallest device of the ranks has `processors` processors.
    /// The kernels of all peers and both directions occupy at most a third of them, and leave the others to
    /// collectives.
    fn divide(&self, bytes: u64, processors: u32) -> Division {
        let most = (u64::from(processors) / 6 / self.peers).clamp(1, self.lanes);
        let lanes = bytes.div_ceil(LANE_BYTES).clamp(1, most);
        let lane_bytes = bytes.div_ceil(lanes).next_multiple_of(LINE);
        let chunk =
            (lane_bytes / CHUNKS).next_multiple_of(LINE).max(MIN_PACKET).min(self.slot_bytes);
        Division { lanes, lane_bytes, chunk }
    }
}

/// What an engine needs to know for send and recv.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct P2p {
    layout: P2pLayout,
    /// Processors of the smallest device of the ranks.
    processors: u32,
    /// Whether collectives leave SMs free for the kernels of send and recv.
    shares_sms: bool,
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
        let mut processors = u32::MAX;
        for rank in (0..layout.world).filter(|_| layout.world > 1) {
            let mut word = [0; 4];
            let at = layout.address(rank, control + p2p_layout.processors());
            // SAFETY: the word lies in a control block, which is a window; its rank wrote it before the
            // commit that made it one, and nobody does later.
            unsafe { driver.copy_to_host(&mut word, at) }?;
            processors = processors.min(u32::from_le_bytes(word));
        }
        Ok(Self { layout: p2p_layout, processors, shares_sms: false })
    }
}

/// The kernel of a direction.
fn kernel_spec(direction: Direction) -> KernelSpec {
    let mode = match direction {
        Direction::Send => P2pMode::Send,
        Direction::Receive => P2pMode::Receive,
    };
    KernelSpec { mode: KernelMode::PointToPoint(mode), ..KernelSpec::new(&P2P, THREADS) }
}

/// The end of a channel whose order messages to or from a peer have.
pub(in crate::cuda) fn end_of_messages(direction: Direction, peer: u32) -> ChannelEnd {
    ChannelEnd { set: 0, sends: direction == Direction::Send, peer, number: CHANNELS }
}

/// The kernels of both directions.
pub(in crate::cuda) fn kernel_specs() -> [KernelSpec; 2] {
    [Direction::Send, Direction::Receive].map(kernel_spec)
}

impl CudaEngine {
    /// Sends data at `address` to a peer, which is another rank, or receives the peer's data there.
    ///
    /// # Safety
    ///
    /// The memory is readable, or, to receive, writable, on the device for the payload's bytes until the stream is
    /// past the operation. Nobody else writes it meanwhile, or, to receive, touches it.
    pub(crate) unsafe fn send_or_recv(
        &mut self,
        (direction, address): (Direction, u64),
        payload: Payload,
        peer: u32,
        stream: Stream,
    ) -> Result<()> {
        self.message((direction, peer), stream, |engine| {
            // SAFETY: the caller's promise.
            unsafe { engine.put_message((direction, address), payload, peer, stream) }
        })
    }

    /// Puts a message on the stream. An error says that nothing was put there, or closes the communicator.
    ///
    /// # Safety
    ///
    /// As [`Self::send_or_recv`].
    unsafe fn put_message(
        &mut self,
        (direction, address): (Direction, u64),
        payload: Payload,
        peer: u32,
        stream: Stream,
    ) -> Result<()> {
        self.ready()?;
        self.check_stream(stream)?;
        let P2p { layout, processors, shares_sms } = self.p2p;
        if !shares_sms {
            share_sms(self.ordinal()?);
            self.p2p.shares_sms = true;
        }
        self.begin_outside_calls();
        let kernel: LoadedKernel = self.kernel(kernel_spec(direction))?;
        let Division { lanes, lane_bytes, chunk } = layout.divide(payload.bytes(), processors);
        let sends = direction == Direction::Send;
        let params = CallParams {
            description: [payload.word(), layout.words, layout.slot_bytes, lane_bytes],
            input: if sends { address } else { 0 },
            output: if sends { 0 } else { address },
            bytes: payload.bytes(),
            stride: layout.slots,
            root: peer,
            peer_blocks: chunk as u32,
        };
        // Sends to one peer run in the order of the calls, and so do receives; they are independent of everything
        // else. So the next one on another stream waits for this one alone, not for what follows it here.
        let end = end_of_messages(direction, peer);
        self.switch_channel_to(end, stream)?;
        // A collective on another stream waits for the last collective here, and not for this operation.
        self.before_wait(stream)?;
        // SAFETY: as the caller promised; nothing else is pointed to but control blocks.
        unsafe {
            self.launch_unordered(
                kernel,
                (lanes as u32, THREADS),
                &self.comm,
                &params,
                None,
                stream,
            )
        }?;
        // The message is made, but later ones would have no order.
        let ordered = self.after_operation(end, stream);
        ordered.inspect_err(|why| self.close(why))
    }

    /// Puts an empty message that its other end cannot expect on the stream, so that both fail.
    pub(in crate::cuda) fn put_declined(
        &mut self,
        direction: Direction,
        peer: u32,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: an empty message touches no memory.
        unsafe { self.put_message((direction, 0), Payload::DECLINED, peer, stream) }
    }
}

/// Writes how many processors this rank's device has, where peers read it.
pub(in crate::cuda) fn prepare(driver: &CudaDriver, block: u64, layout: P2pLayout) -> Result<()> {
    use cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as COUNT;
    let processors = u32::try_from(driver.attribute(COUNT as u32)?).unwrap_or(0);
    // SAFETY: a word of a block that the caller holds, of which no other rank knows before the commit.
    unsafe { driver.fill(block + layout.processors(), processors, 1) }
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
            for staging in [1 << 18, 1 << 20, 16 << 20] {
                let begin = 300 << 20;
                let layout = P2pLayout::new(world, begin, staging);
                let slots = layout.peers * layout.lanes * SLOTS;
                assert!(layout.slot_bytes >= LINE && layout.slot_bytes.is_multiple_of(LINE));
                assert!(layout.slots.is_multiple_of(4096));
                assert!(layout.processors() + 4 <= layout.slots);
                assert!(layout.slots + slots * layout.slot_bytes <= layout.end(world));
                assert!(layout.end(world) - begin <= staging + (1 << 16), "{layout:?}");
                assert!(layout.lanes * layout.peers <= SHARED_LANES);
                let (from, bytes) = layout.zeroed();
                assert_eq!((from, from + bytes), (begin, layout.slots));
            }
        }
        let alone = P2pLayout::new(1, 4096, 1 << 20);
        assert_eq!(alone.end(1), 4096);
    }

    #[test]
    fn every_message_is_divided_whole_and_fits_its_slots() {
        for (world, processors) in [(2, 132), (2, 4), (3, 132), (4, 108), (8, 132), (8, 1)] {
            for staging in [1 << 18, 16 << 20] {
                let layout = P2pLayout::new(world, 0, staging);
                let sizes = (0..40).flat_map(|bit| {
                    [(1_u64 << bit) - 1, 1 << bit, (1 << bit) + 1, (1 << bit) + 12_345]
                });
                for bytes in sizes {
                    let division = layout.divide(bytes, processors);
                    assert!((1..=layout.lanes).contains(&division.lanes), "{bytes}: {division:?}");
                    assert!(
                        division.lanes == 1
                            || division.lanes * layout.peers * 6 <= processors.into()
                    );
                    assert!(division.lane_bytes * division.lanes >= bytes, "{bytes}: {division:?}");
                    // No lane is empty.
                    assert!(
                        bytes == 0 || division.lane_bytes * (division.lanes - 1) < bytes,
                        "{bytes}: {division:?}"
                    );
                    assert!(
                        division.chunk > 0 && division.chunk <= layout.slot_bytes,
                        "{bytes}: {division:?}"
                    );
                    assert!(
                        division.chunk.is_multiple_of(LINE)
                            && division.lane_bytes.is_multiple_of(LINE)
                    );
                }
            }
        }
    }
}
