//! The engine that carries data from host to host: [`Outer`], which a program brings along, and one over NCCL.

#![allow(unsafe_code)] // declares what implementations and callers promise about raw memory

mod nccl;

use std::time::Duration;

use symmpool_allocator::{Error, Result, Stream};

/// A move of bytes between the ranks of an [`Outer`]. Lengths are in bytes, and ranks count in the outer engine.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Transfer<'a> {
    /// Every rank's `bytes` at `input` come to every rank's `output`, in rank order.
    AllGather {
        /// Room for the bytes of all ranks.
        output: *mut u8,
        /// This rank's bytes; they do not overlap the output.
        input: *const u8,
        /// Bytes of one rank, the same on all.
        bytes: usize,
    },
    /// `send[r]` bytes go to rank `r`, and `receive[r]` come from it. Both lie in rank order, without gaps.
    AllToAll {
        /// Room for all that is received.
        output: *mut u8,
        /// All that is sent; it does not overlap the output.
        input: *const u8,
        /// Bytes for each rank.
        send: &'a [usize],
        /// Bytes from each rank, which sends as many.
        receive: &'a [usize],
    },
    /// The root's `bytes` at `data` come to every other rank's `data`.
    Broadcast {
        /// The bytes on the root, room for them elsewhere.
        data: *mut u8,
        /// How many, the same on all ranks.
        bytes: usize,
        /// The rank that has them.
        root: u32,
    },
}

/// Transfer that was begun; [`Outer::finish`] waits for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ticket(pub u64);

/// An outer engine: it carries bytes between ranks of several hosts, where memory is not shared. symmpool has no transport of
/// its own: [`Outers::nccl`] makes engines over NCCL, and Python's package over torch.distributed's groups.
///
/// All its ranks begin the same transfers in the same order. Every wait must be bounded: by the communicator's timeout,
/// or by [`abort`](Self::abort).
///
/// # Safety
///
/// Implementations read and write the memory of a transfer only from its `begin` until its `finish` has returned `Ok`, or
/// until [`abort`](Self::abort) has returned `Ok`.
pub unsafe trait Outer: Send {
    /// Name for messages and documents: `gloo`, `NCCL`.
    fn name(&self) -> String;

    /// This process's rank.
    fn rank(&self) -> u32;

    /// The number of ranks.
    fn world(&self) -> u32;

    /// Bounds the waits of transfers that are begun from now on. Called before the first one, and where the communicator's
    /// timeout has changed.
    fn set_timeout(&mut self, limit: Duration);

    /// Begins a transfer behind what the stream was given before. Host memory has no streams.
    ///
    /// # Errors
    ///
    /// Any error ends the communicator on all ranks.
    ///
    /// # Safety
    ///
    /// You must keep the transfer's memory readable and writable, and touch no output and change no input, until
    /// [`finish`](Self::finish) has returned `Ok` for its ticket and, on a device, the stream is past that.
    unsafe fn begin(&mut self, transfer: Transfer<'_>, stream: &Stream) -> Result<Ticket>;

    /// Waits until a transfer has ended; on a device, makes the stream wait. Tickets are finished once, in any order.
    ///
    /// # Errors
    ///
    /// Why it did not end. Any error ends the communicator on all ranks.
    fn finish(&mut self, ticket: Ticket, stream: &Stream) -> Result<()>;

    /// Why transfers fail from now on, where that is found while nobody waits for one: on a device.
    fn failure(&self) -> Option<Error> {
        None
    }

    /// Ends all transfers under way, with an error or not, and closes the connections, so that other ranks' transfers
    /// end as well. Nothing is begun afterwards. When it returns `Ok`, the memory of transfers is given to others. Bounded by the
    /// timeout of what is under way. May be called again.
    ///
    /// # Errors
    ///
    /// Why transfers may still use their memory: the communicator keeps its own, and never gives it back.
    fn abort(&mut self) -> Result<()>;
}

/// Most thread blocks that NCCL's kernels of one outer engine take of a device: those of a host's own calls leave as many SMs.
pub(crate) const MAX_OUTER_BLOCKS: u32 = 16;

/// The outer engines of one rank of a group that spans hosts.
pub struct Outers {
    /// Between the ranks of equal index on all hosts, in the order of hosts. Where hosts have different numbers of ranks, the
    /// first ranks of all hosts have one, and the others `None`, as all have on one host.
    pub rail: Option<Box<dyn Outer>>,
    /// Between all ranks of the group.
    pub flat: Box<dyn Outer>,
}
