//! Moves and reductions between the ranks of an outer engine.

#![allow(unsafe_code)] // hands raw buffers to outer engines and kernels

use symmpool_allocator::{Error, Result, Stream};

use super::host_message::HostMessage;
use super::ranks::Route;
use super::state::SpanningEngine;
use crate::host::{ReduceFn, select};
use crate::outer::{Outer, Ticket, Transfer};
use crate::{DType, ReduceOp};

/// A reduction of elements between hosts.
#[derive(Clone, Copy)]
pub(super) struct HostReduction {
    pub(super) dtype: DType,
    /// The operation inside hosts.
    pub(super) inside: ReduceOp,
    across: ReduceFn,
    /// The number that averages are divided by.
    world: usize,
}

impl SpanningEngine {
    fn outer(&mut self, route: Route) -> &mut dyn Outer {
        match (route, &mut self.outers.rail) {
            (Route::Rail, Some(rail)) => &mut **rail,
            _ => &mut *self.outers.flat,
        }
    }

    /// The number of ranks of an outer engine.
    pub(super) fn width(&self, route: Route) -> usize {
        match route {
            Route::Rail => self.ranks.host_count(),
            Route::Flat => self.ranks.world(),
        }
    }

    /// Begins a transfer. The first one of a call goes with the message by which hosts agree on the call, if it is small, and
    /// has ended then; nothing else leaves the host before.
    ///
    /// # Safety
    ///
    /// The transfer's memory stays readable and writable until it is finished, and nobody touches it meanwhile. Its lengths
    /// follow from the call, but for those of an all-to-all behind an agreement.
    pub(super) unsafe fn begin(&mut self, route: Route, transfer: Transfer<'_>) -> Result<Ticket> {
        if self.agreement.is_open() {
            let piece = if route == self.route() { largest(&transfer) } else { 0 };
            if route == self.route() && self.agreement.has_room(piece) {
                // SAFETY: the caller promised that the transfer's memory is there.
                unsafe { self.carry(route, &transfer, piece) }?;
                return Ok(CARRIED);
            }
            self.settle_with(piece, |_| (), |_| ())?;
        }
        // SAFETY: the caller promised what `Outer::begin` asks.
        let begun = unsafe { self.outer(route).begin(transfer, &Stream::DEFAULT) };
        begun.map_err(|error| self.between_hosts(route, error))
    }

    /// Has a transfer go with the message by which hosts agree on the call.
    ///
    /// # Safety
    ///
    /// The transfer's memory is readable and writable, and nobody touches it meanwhile.
    unsafe fn carry(&mut self, route: Route, transfer: &Transfer<'_>, piece: usize) -> Result<()> {
        let (width, me) = (self.width(route), self.outer(route).rank() as usize);
        let fill = |message: &mut HostMessage| {
            for at in 0..width {
                let (from, bytes) = sent_to(transfer, at, me);
                let begin = message.room(at);
                let room = &mut message.sent[begin..begin + bytes];
                // SAFETY: the caller promised that the input is readable; the message's memory is its own.
                unsafe { from.copy_to_nonoverlapping(room.as_mut_ptr(), bytes) };
            }
        };
        let empty = |message: &HostMessage| {
            for at in 0..width {
                let (to, bytes) = received_from(transfer, at, me);
                let begin = message.room(at);
                let room = &message.arrived[begin..begin + bytes];
                // SAFETY: the caller promised that the output is writable; the message's memory is its own.
                unsafe { room.as_ptr().copy_to_nonoverlapping(to, bytes) };
            }
        };
        self.settle_with(piece, fill, empty)
    }

    /// Begins the transfer of a message to every rank, which must be kept until it is finished or the connections are closed.
    pub(super) fn begin_message(&mut self, route: Route, message: &mut HostMessage) -> Result<()> {
        let parts = vec![message.bytes; self.width(route)];
        let transfer = Transfer::AllToAll {
            output: message.arrived.as_mut_ptr(),
            input: message.sent.as_ptr(),
            send: &parts,
            receive: &parts,
        };
        // SAFETY: both vectors have as many bytes for every rank. Whoever sends messages keeps them where they are, of which
        // the vectors' memory does not move.
        let begun = unsafe { self.outer(route).begin(transfer, &Stream::DEFAULT) };
        message.ticket = begun.map_err(|error| self.between_hosts(route, error))?;
        Ok(())
    }

    pub(super) fn finish(&mut self, route: Route, ticket: Ticket) -> Result<()> {
        if ticket == CARRIED {
            return Ok(());
        }
        let finished = self.outer(route).finish(ticket, &Stream::DEFAULT);
        finished.map_err(|error| self.between_hosts(route, error))
    }

    /// The error of an outer engine, with ranks as the group counts them.
    #[cold]
    fn between_hosts(&mut self, route: Route, error: Error) -> Error {
        let numbered = error.renumbered(|at| self.rank_on(route, at as usize));
        let carrier = self.outer(route).name();
        let ranks: Vec<String> = (0..self.width(route))
            .map(|at| {
                let rank = self.rank_on(route, at);
                format!("{rank} (host {})", self.host_name(rank))
            })
            .collect();
        numbered.context(format!("{carrier} between ranks {}", ranks.join(", ")))
    }

    /// Makes a transfer and waits for it.
    ///
    /// # Safety
    ///
    /// The transfer's memory is readable and writable, and nobody else touches it meanwhile.
    pub(super) unsafe fn transfer(&mut self, route: Route, transfer: Transfer<'_>) -> Result<()> {
        // SAFETY: the caller promised what `begin` asks, until this has returned; a failure ends all transfers before
        // the call returns (`fail`).
        let ticket = unsafe { self.begin(route, transfer) }?;
        self.finish(route, ticket)
    }

    /// How elements are reduced, first inside hosts and then across `hosts` of them.
    pub(super) fn reduction(
        &self,
        what: &str,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<HostReduction> {
        let across = select(self.isa, dtype, op);
        let across = across.ok_or_else(|| dtype.only_moved(what, self.ranks.rank))?;
        let inside = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
        Ok(HostReduction { dtype, inside, across, world: self.ranks.world() })
    }

    /// Whether an operation may be made in two steps. Averages of integers are sums in a wider type, which a partial result
    /// does not have.
    pub(super) fn divides(dtype: DType, op: ReduceOp) -> bool {
        let is_integer = matches!(dtype, DType::I32 | DType::I64 | DType::U8 | DType::I8);
        !(op == ReduceOp::Avg && is_integer)
    }
}

/// The ticket of a transfer that has ended with the message of its call. Outer engines do not count as far.
const CARRIED: Ticket = Ticket(u64::MAX);

/// The most bytes from one rank to another. The same on all ranks, for transfers that follow from the call.
fn largest(transfer: &Transfer<'_>) -> usize {
    match transfer {
        Transfer::AllGather { bytes, .. } | Transfer::Broadcast { bytes, .. } => *bytes,
        Transfer::AllToAll { send, receive, .. } => {
            send.iter().chain(*receive).copied().max().unwrap_or(0)
        }
    }
}

/// The bytes that rank `me` sends to the rank `at`.
fn sent_to(transfer: &Transfer<'_>, at: usize, me: usize) -> (*const u8, usize) {
    match *transfer {
        Transfer::AllGather { input, bytes, .. } => (input, bytes),
        Transfer::AllToAll { input, send, .. } => {
            (input.wrapping_add(send[..at].iter().sum()), send[at])
        }
        Transfer::Broadcast { data, bytes, root } if root as usize == me && at != me => {
            (data, bytes)
        }
        Transfer::Broadcast { data, .. } => (data, 0),
    }
}

/// The place of the bytes that rank `me` gets from the rank `at`.
fn received_from(transfer: &Transfer<'_>, at: usize, me: usize) -> (*mut u8, usize) {
    match *transfer {
        Transfer::AllGather { output, bytes, .. } => (output.wrapping_add(at * bytes), bytes),
        Transfer::AllToAll { output, receive, .. } => {
            (output.wrapping_add(receive[..at].iter().sum()), receive[at])
        }
        Transfer::Broadcast { data, bytes, root } if root as usize == at && at != me => {
            (data, bytes)
        }
        Transfer::Broadcast { data, .. } => (data, 0),
    }
}

impl HostReduction {
    /// Reduces `sources` arrays of `count` elements, which follow each other from `from` on, into `to`, in their order.
    ///
    /// # Safety
    ///
    /// The arrays are readable and `to` is writable; it is the first of them or overlaps none, and nobody else touches them.
    pub(super) unsafe fn reduce(&self, from: *const u8, sources: usize, count: usize, to: *mut u8) {
        let bytes = count * self.dtype.size();
        let all: Vec<*const u8> = (0..sources).map(|nth| from.wrapping_add(nth * bytes)).collect();
        // SAFETY: the caller promised that the arrays are readable and `to` is writable, and that it is one of them or
        // overlaps none. The instruction set was detected.
        unsafe { (self.across)(&all, &[to], count, self.world) };
    }
}

/// Copies `bytes` of each rank's part, one behind the other, to `to`: of the ranks in `order`, whose parts begin `pitch` bytes
/// apart, that of rank 0 at `from`.
///
/// # Safety
///
/// All of these bytes are readable, `to` is writable for them and overlaps none, and nobody else writes them.
pub(super) unsafe fn pack(
    (from, pitch): (*const u8, usize),
    order: &[usize],
    bytes: usize,
    to: *mut u8,
) {
    for (nth, rank) in order.iter().enumerate() {
        let source = from.wrapping_add(rank * pitch);
        // SAFETY: the caller promised that the parts are readable and that `to` has room for them.
        unsafe { source.copy_to_nonoverlapping(to.wrapping_add(nth * bytes), bytes) };
    }
}

/// Copies what [`pack`] has packed back to where it was.
///
/// # Safety
///
/// You must keep the promises of [`pack`], of memory that is read there and written here, and the other way round.
pub(super) unsafe fn unpack(
    from: *const u8,
    order: &[usize],
    bytes: usize,
    (to, pitch): (*mut u8, usize),
) {
    for (nth, rank) in order.iter().enumerate() {
        let source = from.wrapping_add(nth * bytes);
        // SAFETY: the caller promised that `from` has all parts and that their places are writable.
        unsafe { source.copy_to_nonoverlapping(to.wrapping_add(rank * pitch), bytes) };
    }
}
