//! Send and recv between two ranks, which are in no order with collectives.
//!
//! Like one-sided operations they have no epoch, and commit nothing. But the receiver compares what is sent with what
//! it expects, and a rank that refuses its own arguments reports that to the other one.

#![allow(unsafe_code)] // sends from and receives into raw memory

use bytemuck::Pod;
use symmpool_allocator::{Block, Error, Result, Stream};

use super::Communicator;
use crate::DType;
use crate::call::p2p::{Direction, Payload};

impl Communicator {
    /// Sends `input` to `peer`, whose next [`Self::recv`] from this rank receives it. That must expect as many
    /// elements, of the same type. `input` is any memory of the pool, and nothing is committed.
    ///
    /// Messages from one rank to another are received in the order in which they are sent, whatever
    /// streams or threads send them. They are in no order with messages of other ranks, messages in the other
    /// direction, and collectives.
    ///
    /// A send is complete when `input` may be written again: in host memory when it returns, on a device
    /// when `stream` is past it. It does not wait for the receiver as long as the receiver has free slots: between
    /// two ranks on devices, for four messages of up to 16 KiB, or for 512 KiB in each of up to 16 stripes of longer
    /// messages; in host memory, for four messages of up to 64 KiB. With more ranks or little scratch
    /// ([`CommunicatorOptions`](super::CommunicatorOptions)) there are fewer. Beyond that it waits, as a
    /// receive does; so ranks that exchange long messages need two streams, or two threads, for it.
    ///
    /// On a device it is a kernel of at most 16 blocks. Up to two such kernels for each peer, one in each direction,
    /// must not keep out a collective that other ranks wait for. So from the first send or recv on, the device's
    /// communicators leave a third of its SMs free, as after [`share_sms`](crate::share_sms). Call that
    /// before the first collective that may be under way at the same time as a send or recv. Counts of messages are
    /// kept in device memory, so each replay of a graph sends or receives its captured messages again. Do not run
    /// two graphs at once that have messages in the same direction between the same two ranks.
    ///
    /// # Errors
    ///
    /// - `is_invalid_argument` for a peer that is no rank or is this rank, for elements of more than 255
    ///   bytes, and for memory of other ranks. If the peer is another rank, its receive fails with `is_diverged`, which
    ///   names this rank.
    /// - `is_diverged` where the receiver expects something else, or refuses its own arguments. Both ranks' errors name
    ///   both payloads.
    /// - `is_timeout`, or `is_peer_lost` if the peer's process is gone, where the peer does not receive
    ///   messages that fill all its slots within the communicator's timeout. These fail the communicator.
    /// - Why the communicator has failed, if it has.
    ///
    /// In host memory a message that fails with `is_diverged` counts on both ranks and is written nowhere, and the
    /// communicator stays usable. The sender's call may have returned by then. Its next message to or from this peer
    /// then fails with the same error, and is not made, as the peer learns; a receive that waits already
    /// does so at once. [`Self::synchronize`] returns the error too, and collectives do not.
    ///
    /// On a device these errors are returned by [`Self::synchronize`] or a later call, and fail the communicator on all
    /// ranks, also those that have no part in the message: their waits end at once. What the receive should have written
    /// is undefined.
    pub fn send<T: Pod>(&self, input: &Block<T>, peer: u32, stream: &Stream) -> Result<()> {
        self.block_send_or_recv(Direction::Send, input, peer, stream)
    }

    /// Receives `peer`'s next message for this rank into `output`, which it fills. See [`Self::send`].
    ///
    /// In host memory the message is there when the call returns; on a device, when `stream` is past it.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::send`]; `is_timeout` and `is_peer_lost` where no message comes.
    pub fn recv<T: Pod>(&self, output: &Block<T>, peer: u32, stream: &Stream) -> Result<()> {
        self.block_send_or_recv(Direction::Receive, output, peer, stream)
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
        let end = (Direction::Send, input.cast_mut());
        // SAFETY: the caller promised that `input` is readable for these elements until `stream` is past them; a send
        // does not write to the memory.
        unsafe { self.send_or_recv_at(end, count, dtype, peer, stream) }
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
        // SAFETY: the caller promised that `output` is writable for these elements until `stream` is past them, and
        // that nobody else touches them.
        unsafe { self.send_or_recv_at((Direction::Receive, output), count, dtype, peer, stream) }
    }

    /// The ranks that have sent what this one does not receive yet, in host memory. Does not wait.
    ///
    /// # Errors
    ///
    /// Why the communicator has failed; `is_unsupported` on devices.
    pub fn waiting_senders(&self) -> Result<Vec<u32>> {
        match &self.one_sided {
            Some(host) => host.waiting_senders(),
            None => Err(Error::unsupported("messages on devices, whose senders must be named")),
        }
    }

    /// Declines a message. You must call this in place of a [`Self::send`] whose arguments you have found wrong: `peer`'s
    /// receive gets an error at once instead of waiting, and both ranks have made as many messages. Returns what to
    /// report: `why`, or why the communicator has failed. Does not wait for the peer; if that is no other rank, does
    /// nothing.
    #[cold]
    pub fn decline_send(&self, why: Error, peer: u32, stream: &Stream) -> Error {
        self.decline_message(why, Direction::Send, peer, stream)
    }

    /// Declines like [`Self::decline_send`], instead of a [`Self::recv`]: `peer`'s send fails.
    #[cold]
    pub fn decline_recv(&self, why: Error, peer: u32, stream: &Stream) -> Error {
        self.decline_message(why, Direction::Receive, peer, stream)
    }

    fn decline_message(
        &self,
        why: Error,
        direction: Direction,
        peer: u32,
        stream: &Stream,
    ) -> Error {
        if self.check_other_rank(direction.name(), peer).is_err() {
            return why;
        }
        match &self.one_sided {
            Some(host) => host.decline(why, direction, peer),
            None => match self.lock().engine.cuda() {
                Ok(cuda) => cuda.decline_message(why, direction, peer, *stream),
                Err(error) => error,
            },
        }
    }

    fn block_send_or_recv<T: Pod>(
        &self,
        direction: Direction,
        block: &Block<T>,
        peer: u32,
        stream: &Stream,
    ) -> Result<()> {
        let what = direction.name();
        self.check_other_rank(what, peer)?;
        let payload = self
            .check_block(what, block, peer)
            .and_then(|()| Payload::of::<T>(what, self.rank(), block.len()))
            .map_err(|why| self.decline_message(why, direction, peer, stream))?;
        // SAFETY: the block is borrowed, so live and mapped, for this length. Whoever else touches it meanwhile
        // does so through raw pointers as well: there are no references into blocks.
        unsafe { self.send_or_recv((direction, block.as_ptr().cast()), payload, peer, stream) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`Self::send_at`] or [`Self::recv_at`].
    unsafe fn send_or_recv_at(
        &self,
        (direction, memory): (Direction, *mut u8),
        count: usize,
        dtype: DType,
        peer: u32,
        stream: &Stream,
    ) -> Result<()> {
        let what = direction.name();
        self.check_other_rank(what, peer)?;
        let payload = Payload::new(what, self.rank(), count, dtype)
            .and_then(|payload| {
                self.check_own_memory(what, memory as u64, payload, peer).map(|()| payload)
            })
            .map_err(|why| self.decline_message(why, direction, peer, stream))?;
        // SAFETY: the caller promised that the memory is readable, or to receive writable, for these elements until
        // `stream` is past them.
        unsafe { self.send_or_recv((direction, memory), payload, peer, stream) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`Self::send_at`] or [`Self::recv_at`], for the payload's bytes; the peer is
    /// another rank.
    unsafe fn send_or_recv(
        &self,
        (direction, memory): (Direction, *mut u8),
        payload: Payload,
        peer: u32,
        stream: &Stream,
    ) -> Result<()> {
        tracing::trace!(rank = self.rank(), peer, %payload, "{}", direction.name());
        match &self.one_sided {
            // SAFETY: the caller promised that the memory is readable, or to receive writable, for the payload's
            // bytes.
            Some(host) => unsafe { host.send_or_recv((direction, memory), payload, peer) },
            None => {
                let mut inner = self.lock();
                let cuda = inner.engine.cuda()?;
                // SAFETY: the caller promised that the memory is readable, or to receive writable, for the payload's
                // bytes until `stream` is past them.
                unsafe { cuda.send_or_recv((direction, memory as u64), payload, peer, *stream) }
            }
        }
    }

    /// Refuses a peer that is no rank, or this one: a message to oneself is a copy.
    fn check_other_rank(&self, what: &str, peer: u32) -> Result<()> {
        self.check_one_host(what)?;
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

    /// Refuses memory of another rank, and null.
    fn check_own_memory(
        &self,
        what: &str,
        address: u64,
        payload: Payload,
        peer: u32,
    ) -> Result<()> {
        let (rank, bytes) = (self.rank(), payload.bytes());
        // Slots are those of a host.
        let layout = self.pool.layout();
        let elsewhere =
            |address| layout.locate(address).is_some_and(|(slot, _)| slot != layout.rank);
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
