//! Moves and reductions between the ranks of an outer engine.

#![allow(unsafe_code)] // hands raw buffers to outer engines and kernels

use symmpool_allocator::{Error, Result, Stream};

use super::host_message::HostMessage;
use super::phases::Phase;
use super::ranks::Route;
use super::state::SpanningEngine;
use crate::engine::LocalReduction;
use crate::host::{ReduceFn, select};
use crate::outer::{Outer, Ticket, Transfer};
use crate::{DType, ReduceOp};

/// A reduction of elements between hosts.
#[derive(Clone, Copy)]
pub(super) struct HostReduction {
    pub(super) dtype: DType,
    /// The operation of the call, and the one inside hosts.
    op: ReduceOp,
    pub(super) inside: ReduceOp,
    /// The function of `inside`.
    within: ReduceFn,
    /// The function between hosts.
    across: ReduceFn,
    /// The number that averages are divided by.
    world: usize,
}

impl SpanningEngine {
    pub(super) fn outer(&mut self, route: Route) -> &mut dyn Outer {
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

    /// Begins a transfer, once all hosts have agreed on the call.
    ///
    /// # Safety
    ///
    /// The transfer's memory stays readable and writable until it is finished, and nobody touches it meanwhile. Its lengths
    /// follow from the call, but for those of an all-to-all behind an agreement.
    pub(super) unsafe fn begin(&mut self, route: Route, transfer: Transfer<'_>) -> Result<Ticket> {
        // SAFETY: the caller promised what `begin_on` asks.
        unsafe { self.begin_on(route, transfer, &Stream::DEFAULT) }
    }

    /// [`Self::begin`] behind what the stream was given before: on devices.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::begin`], until the stream is past the transfer's end.
    pub(super) unsafe fn begin_on(
        &mut self,
        route: Route,
        transfer: Transfer<'_>,
        stream: &Stream,
    ) -> Result<Ticket> {
        self.settle()?;
        self.timed(Phase::Between, |engine| {
            // SAFETY: the caller promised what `Outer::begin` asks.
            let begun = unsafe { engine.outer(route).begin(transfer, stream) };
            begun.map_err(|error| engine.between_hosts(route, error))
        })
    }

    /// Begins a transfer of a call on which the leaders have agreed.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::begin`].
    pub(super) unsafe fn begin_agreed(
        &mut self,
        route: Route,
        transfer: Transfer<'_>,
    ) -> Result<Ticket> {
        // SAFETY: the caller promised what `Outer::begin` asks.
        let begun = unsafe { self.outer(route).begin(transfer, &Stream::DEFAULT) };
        begun.map_err(|error| self.between_hosts(route, error))
    }

    /// Begins the transfer of a message to the other leaders, which must be kept until it is finished or the connections are
    /// closed.
    pub(super) fn begin_message(&mut self, message: &mut HostMessage) -> Result<()> {
        let mut parts = vec![message.bytes; self.ranks.host_count()];
        parts[self.ranks.host as usize] = 0;
        let transfer = Transfer::AllToAll {
            output: message.arrived.as_mut_ptr(),
            input: message.sent.as_ptr(),
            send: &parts,
            receive: &parts,
        };
        // SAFETY: both vectors have as many bytes for every other host. The transfer uses their heap memory, which stays where
        // it is when the message is moved; callers keep the message until the transfer is finished, or has been aborted.
        message.ticket = unsafe { self.begin_agreed(Route::Rail, transfer) }?;
        Ok(())
    }

    pub(super) fn finish(&mut self, route: Route, ticket: Ticket) -> Result<()> {
        self.finish_on(route, ticket, &Stream::DEFAULT)
    }

    /// Waits until a transfer has ended; on devices the stream does.
    pub(super) fn finish_on(
        &mut self,
        route: Route,
        ticket: Ticket,
        stream: &Stream,
    ) -> Result<()> {
        let finished =
            self.timed(Phase::Between, |engine| engine.outer(route).finish(ticket, stream));
        finished.map_err(|error| self.between_hosts(route, error))
    }

    /// The error of an outer engine, with ranks as the group counts them.
    #[cold]
    pub(super) fn between_hosts(&mut self, route: Route, error: Error) -> Error {
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
    pub(super) unsafe fn transfer(
        &mut self,
        route: Route,
        transfer: Transfer<'_>,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised what `begin` asks, until the stream is past this; a failure ends all transfers before
        // the call returns (`fail`).
        let ticket = unsafe { self.begin_on(route, transfer, stream) }?;
        self.finish_on(route, ticket, stream)
    }

    /// Copies bytes of this rank's memory, behind what the stream was given.
    ///
    /// # Safety
    ///
    /// The bytes are readable and writable until the stream is past this, they do not overlap, and nobody else touches them.
    pub(super) unsafe fn copy(
        &mut self,
        (from, to): (*const u8, *mut u8),
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that the bytes are readable and writable, and do not overlap.
        unsafe { self.inner.copy_local(to, from, bytes, stream) }
    }

    /// Copies `bytes` of each rank's part, one behind the other, to `to`: of the ranks in `order`, whose parts begin `pitch` bytes
    /// apart, that of rank 0 at `from`.
    ///
    /// # Safety
    ///
    /// All of these bytes are readable, `to` is writable for them and overlaps none, and nobody else writes them, until the
    /// stream is past this.
    pub(super) unsafe fn pack_parts(
        &mut self,
        (from, pitch): (*const u8, usize),
        order: &[usize],
        bytes: usize,
        to: *mut u8,
        stream: &Stream,
    ) -> Result<()> {
        for (nth, rank) in order.iter().enumerate() {
            let places = (from.wrapping_add(rank * pitch), to.wrapping_add(nth * bytes));
            // SAFETY: the caller promised that the parts are readable and that `to` has room for them.
            unsafe { self.copy(places, bytes, stream) }?;
        }
        Ok(())
    }

    /// Copies what [`Self::pack_parts`] has packed back to where it was.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::pack_parts`], of memory that is read there and written here, and the other way round.
    pub(super) unsafe fn unpack_parts(
        &mut self,
        from: *const u8,
        order: &[usize],
        bytes: usize,
        (to, pitch): (*mut u8, usize),
        stream: &Stream,
    ) -> Result<()> {
        for (nth, rank) in order.iter().enumerate() {
            let places = (from.wrapping_add(nth * bytes), to.wrapping_add(rank * pitch));
            // SAFETY: the caller promised that `from` has all parts and that their places are writable.
            unsafe { self.copy(places, bytes, stream) }?;
        }
        Ok(())
    }

    /// Reduces arrays of `count` elements, one from each host, into `to`, in their order.
    ///
    /// # Safety
    ///
    /// The arrays are readable and `to` is writable until the stream is past this; it is one of them or overlaps none, and
    /// nobody else touches them.
    pub(super) unsafe fn reduce(
        &mut self,
        reduction: &HostReduction,
        from: &[*const u8],
        count: usize,
        to: *mut u8,
        stream: &Stream,
    ) -> Result<()> {
        let HostReduction { dtype, op, world: divisor, .. } = *reduction;
        let work = LocalReduction { from, to, count, dtype, op, divisor };
        // SAFETY: the caller promised that the arrays are readable and `to` is writable, and that it is one of them or overlaps
        // none.
        unsafe { self.inner.reduce_local(&work, stream) }
    }

    /// Reduces `sources` arrays of `count` elements, which follow each other from `from` on, into `to`, in their order.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::reduce`].
    pub(super) unsafe fn reduce_row(
        &mut self,
        reduction: &HostReduction,
        (from, sources): (*const u8, usize),
        count: usize,
        to: *mut u8,
        stream: &Stream,
    ) -> Result<()> {
        let bytes = count * reduction.dtype.size();
        let all: Vec<*const u8> = (0..sources).map(|nth| from.wrapping_add(nth * bytes)).collect();
        // SAFETY: the caller promised that the arrays are readable and `to` is writable, and that it is one of them or overlaps
        // none.
        unsafe { self.reduce(reduction, &all, count, to, stream) }
    }

    /// How elements are reduced: first inside each host, then across hosts.
    pub(super) fn reduction(
        &self,
        what: &str,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<HostReduction> {
        let across = select(self.isa, dtype, op);
        let inside = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
        let (Some(across), Some(within)) = (across, select(self.isa, dtype, inside)) else {
            return Err(dtype.only_moved(what, self.ranks.rank));
        };
        Ok(HostReduction { dtype, op, inside, within, across, world: self.ranks.world() })
    }

    /// Whether an operation may be made in two steps. Averages of integers are sums in a wider type, which a partial result
    /// does not have.
    pub(super) fn divides(dtype: DType, op: ReduceOp) -> bool {
        let is_integer = matches!(dtype, DType::I32 | DType::I64 | DType::U8 | DType::I8);
        !(op == ReduceOp::Avg && is_integer)
    }

    /// Whether a reduction is made inside hosts of different numbers of ranks and between them.
    pub(super) fn divides_unevenly(&self, dtype: DType, op: ReduceOp) -> bool {
        !self.ranks.is_alike && Self::divides(dtype, op)
    }
}

impl HostReduction {
    /// Reduces arrays of `count` elements, one from each rank of a host, into `to`, in their order: without the division of an
    /// average.
    ///
    /// # Safety
    ///
    /// The arrays are readable and `to` is writable; it overlaps none, and nobody else touches them.
    pub(super) unsafe fn reduce_inside(&self, from: &[*const u8], count: usize, to: *mut u8) {
        // SAFETY: the caller promised that the arrays are readable and `to` is writable, and that it overlaps none. The
        // instruction set was detected.
        unsafe { (self.within)(from, &[to], count, from.len()) };
    }

    /// Reduces arrays of `count` elements, one from each host, into `to`, in their order.
    ///
    /// # Safety
    ///
    /// The arrays are readable and `to` is writable; it is one of them or overlaps none, and nobody else touches them.
    pub(super) unsafe fn reduce_hosts(&self, from: &[*const u8], count: usize, to: *mut u8) {
        // SAFETY: the caller promised that the arrays are readable and `to` is writable, and that it is one of them or
        // overlaps none. The instruction set was detected.
        unsafe { (self.across)(from, &[to], count, self.world) };
    }
}
