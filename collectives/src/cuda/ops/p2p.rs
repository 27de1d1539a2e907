//! Send and recv between two ranks, as kernels on a stream.
//!
//! Data goes through slots in the receiver's control block, as `p2p/p2p.cu` says. The kernels are loaded when the
//! communicator is made: loading code later might wait for running kernels, which may wait for the peer that waits
//! for this very data.

#![allow(unsafe_code)] // launches kernels on raw addresses

use symmpool_allocator::{Result, Stream};

use crate::call::p2p::{Direction, Payload};
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use crate::cuda::kernel::sm_budget::share_sms;
use crate::cuda::kernel::spec::{KernelSpec, P2P_THREADS};
use crate::cuda::layout::p2p_layout::{Division, P2p, end_of_messages};
use crate::cuda::layout::params::CallParams;

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
            // SAFETY: the caller promised that the memory at `address` is readable, or, to receive, writable, for the
            // payload's bytes until the stream is past the operation.
            unsafe { engine.put_message((direction, address), payload, peer, stream) }
        })
    }

    /// Puts a message on the stream. An error says that nothing was put there, or fails the communicator.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::send_or_recv`].
    unsafe fn put_message(
        &mut self,
        (direction, address): (Direction, u64),
        payload: Payload,
        peer: u32,
        stream: Stream,
    ) -> Result<()> {
        self.ready()?;
        self.check_stream(stream)?;
        let P2p { layout, sm_count, shares_sms } = self.p2p;
        if !shares_sms {
            share_sms(self.ordinal()?);
            self.p2p.shares_sms = true;
        }
        self.begin_outside_calls();
        let kernel: LoadedKernel = self.kernel(KernelSpec::p2p(direction))?;
        let Division { stripes, stripe_bytes, chunk } = layout.divide(payload.bytes(), sm_count);
        let sends = direction == Direction::Send;
        let params = CallParams {
            description: [payload.word(), layout.words, layout.slot_bytes, stripe_bytes],
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
        // SAFETY: the caller promised that the memory at `address` is there for the payload's bytes until the stream is
        // past the operation; nothing else is pointed to but control blocks, which the communicator keeps.
        unsafe {
            self.launch_unordered(
                kernel,
                (stripes as u32, P2P_THREADS),
                &self.comm,
                &params,
                None,
                stream,
            )
        }?;
        // The message is made, but later ones would have no order.
        let ordered = self.after_operation(end, stream);
        ordered.inspect_err(|why| self.fail(why))
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
