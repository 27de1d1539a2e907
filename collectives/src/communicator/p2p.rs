//! Messages between two ranks: `send` and `recv`, outside the order of collectives.
//!
//! As one-sided operations they have no epoch, commit nothing, and tell what is wrong with their
//! arguments to the caller alone; but who receives compares what came with what was expected.

#![allow(unsafe_code)] // messages from and into raw memory

use bytemuck::Pod;
use symmpool_allocator::{Block, Error, Result, Stream};

use super::Communicator;
use crate::DType;
use crate::p2p::Length;

impl Communicator {
    /// Sends `input` to `peer`, whose next [`Self::recv`] from this rank takes it: as many elements, of
    /// the same size. Any memory of the pool will do, and nothing is committed.
    ///
    /// Messages from one rank to another are received in the order in which they are sent, whatever
    /// streams or threads send them. Messages of other ranks, those of the other direction, and
    /// collectives are in no order with them.
    ///
    /// A send is complete when `input` may be written again: in host memory when it returns, on a device
    /// when `stream` is past it. It does not wait for the receiver as long as there is room: between two
    /// ranks on devices for eight messages of up to 16 KiB, and of longer ones for 1 MiB in each of up to
    /// 16 lanes; for four of up to 64 KiB in host memory. With more ranks or little scratch
    /// ([`CommunicatorOptions`](super::CommunicatorOptions)) there is less. Beyond that it waits, as a
    /// receive does; so ranks that are to exchange long messages do so on two streams, or two threads.
    ///
    /// On a device it is a kernel of 16 blocks at most. Two of those for each peer, one each way, are
    /// not to keep out a collective that others wait for: from the first message on, the device's
    /// communicators leave a third of it free, as after [`leave_room`](crate::leave_room). Call that
    /// before the first collective that may be under way beside a message. Counts are kept in device
    /// memory, so captured messages are messages more in every replay of their graph; whoever launches
    /// graphs sees that no two with messages of one direction between two ranks run at once.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for a peer that is no rank or is this one, for elements of more than 255
    /// bytes, and for memory of others; why the communicator is closed, if it is. What closes it, in
    /// host memory from this call, on a device from [`Self::synchronize`] or a later call:
    /// - `is_diverged` where the receiver expects something else. Both ranks name both lengths, and
    ///   nothing is written to the receiver's output. The sender, whose input may be gone by then, hears
    ///   of it in its next message to or from anybody.
    /// - `is_timeout`, or `is_peer_lost` where its process is gone, where the peer does not receive what
    ///   there is no room for within the communicator's timeout.
    pub fn send<T: Pod>(&self, input: &Block<T>, peer: u32, stream: &Stream) -> Result<()> {
        self.mine("send", input, peer)?;
        let length = self.length("send", peer, input.len(), size_of::<T>())?;
        // SAFETY: the block is borrowed, so live and mapped, for this length. Whoever writes it
        // meanwhile does so through raw pointers as well: there are no references into blocks.
        unsafe { self.send_message(input.as_ptr().cast(), length, peer, stream) }
    }

    /// Receives `peer`'s next message for this rank into `output`, which it fills. See [`Self::send`].
    ///
    /// In host memory the message is there when the call returns; on a device, when `stream` is past it.
    ///
    /// # Errors
    ///
    /// As [`Self::send`]; `is_timeout` and `is_peer_lost` where no message comes.
    pub fn recv<T: Pod>(&self, output: &Block<T>, peer: u32, stream: &Stream) -> Result<()> {
        self.mine("recv", output, peer)?;
        let length = self.length("recv", peer, output.len(), size_of::<T>())?;
        // SAFETY: as in `send`.
        unsafe { self.receive_message(output.as_ptr().cast(), length, peer, stream) }
    }

    /// Sends `count` elements from `input` on, which is any memory. Otherwise as [`Self::send`].
    ///
    /// # Safety
    ///
    /// `input` is readable for these elements by whoever sends them (the CPU in host memory, else the
    /// device), from now until `stream` is past it, and nobody writes them meanwhile.
    pub unsafe fn send_at(
        &self,
        input: *const u8,
        count: usize,
        dtype: DType,
        peer: u32,
        stream: &Stream,
    ) -> Result<()> {
        let length = self.length("send", peer, count, dtype.size())?;
        self.reachable("send", input as u64, length, peer)?;
        // SAFETY: the caller's promise.
        unsafe { self.send_message(input, length, peer, stream) }
    }

    /// Receives `count` elements to `output`, which is any memory. Otherwise as [`Self::recv`].
    ///
    /// # Safety
    ///
    /// `output` is writable for these elements by whoever receives them (the CPU in host memory, else
    /// the device), from now until `stream` is past it, and nobody else touches them meanwhile.
    pub unsafe fn recv_at(
        &self,
        output: *mut u8,
        count: usize,
        dtype: DType,
        peer: u32,
        stream: &Stream,
    ) -> Result<()> {
        let length = self.length("recv", peer, count, dtype.size())?;
        self.reachable("recv", output as u64, length, peer)?;
        // SAFETY: the caller's promise.
        unsafe { self.receive_message(output, length, peer, stream) }
    }

    /// # Safety
    ///
    /// As [`Self::send_at`], of the length's bytes; the peer is another rank.
    unsafe fn send_message(
        &self,
        input: *const u8,
        length: Length,
        peer: u32,
        stream: &Stream,
    ) -> Result<()> {
        tracing::trace!(rank = self.rank(), peer, %length, "send");
        match &self.sided {
            // SAFETY: the caller's promise, here and below.
            Some(host) => unsafe { host.send(input, length, peer) },
            None => {
                let mut inner = self.lock();
                // SAFETY: as above.
                unsafe { inner.engine.cuda()?.send(input as u64, length, peer, *stream) }
            }
        }
    }

    /// # Safety
    ///
    /// As [`Self::recv_at`], of the length's bytes; the peer is another rank.
    unsafe fn receive_message(
        &self,
        output: *mut u8,
        length: Length,
        peer: u32,
        stream: &Stream,
    ) -> Result<()> {
        tracing::trace!(rank = self.rank(), peer, %length, "recv");
        match &self.sided {
            // SAFETY: the caller's promise, here and below.
            Some(host) => unsafe { host.receive(output, length, peer) },
            None => {
                let mut inner = self.lock();
                // SAFETY: as above.
                unsafe { inner.engine.cuda()?.receive(output as u64, length, peer, *stream) }
            }
        }
    }

    /// Refuses a peer that is no other rank, and a block of another pool.
    fn mine<T: Pod>(&self, what: &str, block: &Block<T>, peer: u32) -> Result<()> {
        self.other(what, peer)?;
        self.own(what, block, peer)
    }

    /// What a message with a peer is, which is another rank.
    fn length(&self, what: &str, peer: u32, count: usize, element: usize) -> Result<Length> {
        self.other(what, peer)?;
        Length::new(what, self.rank(), count, element)
    }

    /// Refuses a peer that is no rank, or this one: a message to oneself is a copy.
    fn other(&self, what: &str, peer: u32) -> Result<()> {
        let (rank, world) = (self.rank(), self.world());
        if peer == rank || peer >= world {
            let why = if peer == rank {
                "a rank sends itself nothing; copy it".to_owned()
            } else {
                format!("there are {world} ranks")
            };
            return Err(Error::invalid_argument(format!(
                "{what} on rank {rank} with rank {peer}: {why}"
            )));
        }
        Ok(())
    }

    /// Refuses what is no memory of this rank.
    fn reachable(&self, what: &str, address: u64, length: Length, peer: u32) -> Result<()> {
        let (rank, bytes) = (self.rank(), length.bytes());
        let elsewhere =
            |address| self.pool.layout().locate(address).is_some_and(|(slot, _)| slot != rank);
        let why = match address.checked_add(bytes) {
            _ if bytes == 0 => return Ok(()),
            None => "no memory is that long",
            Some(_) if address == 0 => "it is not memory",
            Some(end) if elsewhere(address) || elsewhere(end - 1) => {
                "it reaches into another rank's slot"
            }
            Some(_) => return Ok(()),
        };
        Err(Error::invalid_argument(format!(
            "{what} of {bytes} bytes at {address:#x} on rank {rank} with rank {peer}: {why}"
        )))
    }
}
