//! Dispatch to experts and combine, on the CPU.
//!
//! Ranks tell each other in the handshake how many rows they send to whom, and which id is no expert, so each knows
//! where its rows lie in a peer's memory, and all return the same error. Ids, weights and rows are the caller's memory,
//! which its other threads may write meanwhile: numbers are read once and checked before they are indices.

#![allow(unsafe_code)] // reads and writes memory by address

mod combine;
mod memory;
mod side;

use symmpool_allocator::Result;

pub(crate) use self::memory::{RoutingHandle, given_weights};
pub(crate) use self::side::{
    Announced, RankSide, RoutedToken, SentRow, no_output_room, rows_by_expert,
};
use crate::call::experts::{ExpertCall, ExpertsWork};
use crate::call::{CallDescription, OpType};
use crate::host::HostEngine;
use crate::host::kernels::ExpertRows;
pub(crate) use crate::host::layout::expert_routing::{BadId, Routing};
pub(crate) use crate::host::layout::expert_scratch::ExpertScratch;
pub(crate) use crate::host::layout::numbers::Numbers;
use crate::{ExpertQuantization, ReceivedSizes};

impl HostEngine {
    /// Sends tokens to the ranks of their experts.
    ///
    /// # Safety
    ///
    /// The addresses in `call.work` are as [`ExpertsWork`] describes them, and `call.region` is memory of as many bytes
    /// as the buffer has, in every rank's slot; nobody but calls of the buffer writes it.
    pub(crate) unsafe fn dispatch(&mut self, call: &ExpertCall) -> Result<()> {
        self.ready()?;
        let mut scratch = std::mem::take(&mut self.expert_scratch);
        // SAFETY: the caller promised that the addresses in `call.work` are as `ExpertsWork` describes them, and that
        // the region has the buffer's bytes.
        let done = unsafe { self.dispatch_in(call, &mut scratch) };
        self.expert_scratch = scratch;
        done
    }

    /// Dispatches like [`Self::dispatch`], and says how many rows arrived.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::dispatch`].
    pub(crate) unsafe fn dispatch_exact(&mut self, call: &ExpertCall) -> Result<ReceivedSizes> {
        // SAFETY: the caller promised that the addresses in `call.work` are as `ExpertsWork` describes them, and that
        // the region has the buffer's bytes.
        unsafe { self.dispatch(call) }?;
        // SAFETY: the handle is one of this buffer, which has these parts.
        Ok(unsafe { received_sizes(call, self.world()) })
    }

    /// # Safety
    ///
    /// You must keep the promises of [`Self::dispatch`].
    unsafe fn dispatch_in(&mut self, call: &ExpertCall, scratch: &mut ExpertScratch) -> Result<()> {
        let (rank, world, work) = (self.rank(), self.world(), &call.work);
        // SAFETY: the caller promised that the handle is one of this buffer and that the region has the buffer's bytes.
        let side = unsafe { RankSide::new(call, (rank, world), self.layout) };
        // A known routing names rows of peers only, and those by expert are as many as the output has room for or less.
        let known = (work.known != 0).then_some((call.mode.by_expert, u64::MAX));
        let ready = match work.known {
            0 => scratch.routing.reserve(work, (rank, world)),
            _ => Ok(()),
        };
        self.or_decline(side.refusal(known).and(ready))?;
        if work.known == 0 {
            // SAFETY: the caller promised that the ids are aligned and readable for the tokens.
            unsafe { scratch.routing.read(work, world) };
            self.publish_counts(&scratch.routing, work.tokens);
        }
        let description = CallDescription::new(OpType::ExpertDispatch);
        self.handshake(&description.experts(&call.shape, call.mode).output(call.region))?;
        let routed = match work.known {
            0 => side.keep_routing(&scratch.routing, &HandshakeRows(self)),
            _ => Ok(()),
        };
        // SAFETY: every rank has made this call, so nobody uses what the last call of the buffer left in the region.
        unsafe { self.send(&side, scratch) };
        self.step()?;
        if work.known == 0 {
            // SAFETY: all rows that this rank receives are there.
            unsafe { side.keep_received() };
        }
        if !call.mode.by_expert {
            return routed;
        }
        let needed = if work.known == 0 {
            // SAFETY: all rows that this rank receives are there, and `keep_received` has counted those of each
            // expert.
            unsafe { side.place_by_expert() }
        } else {
            side.handle.head.get(RoutingHandle::BY_EXPERT) as u64
        };
        // SAFETY: all rows that this rank receives are there; the caller promised that the output is writable for its
        // capacity.
        unsafe { side.expand() };
        // Every rank writes how many rows by expert it needs room for, and how much it has: of one expert if each has a
        // part of its own.
        let needed = needed.min(u64::from(u32::MAX));
        self.set_row(world + 2, needed << 32 | output_room(work));
        self.step()?;
        routed.and_then(|()| self.check_room(work.expert_rows != 0))
    }

    /// Writes into this rank's row of the next call how many rows go to each rank, how many tokens it has, and the first
    /// id that is no expert.
    fn publish_counts(&self, routing: &Routing, tokens: u32) {
        let world = self.world();
        for (rank, count) in (0..world).zip(&routing.counts) {
            self.set_next_row(rank, u64::from(*count));
        }
        let BadId { token, id } = routing.bad.unwrap_or(BadId { token: u32::MAX, id: 0 });
        self.set_next_row(world, u64::from(tokens) | u64::from(token) << 32);
        self.set_next_row(world + 1, id as u64);
    }

    /// Writes this rank's rows, and what belongs to them, into the memory of the ranks they go to.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::dispatch`], after the handshake.
    unsafe fn send(&self, side: &RankSide<'_>, scratch: &mut ExpertScratch) {
        let (call, work, world) = (side.call, &side.call.work, self.world() as usize);
        let (row_bytes, scale_bytes) = (work.row_bytes as usize, work.scale_bytes as usize);
        let quantization = side.quantization();
        let ExpertScratch { routing, row, bytes, scales, .. } = scratch;
        let rows = ExpertRows::new(call.shape.dtype, call.shape.hidden);
        let input_row = call.shape.row_bytes();
        for token in 0..work.tokens as usize {
            let mut sent = SentRow {
                row: (work.input as *const u8).wrapping_add(token * row_bytes),
                scales: (work.input_scales as *const u8).wrapping_add(token * scale_bytes),
            };
            let mut pending = quantization != ExpertQuantization::None;
            // SAFETY: the caller promised that weights, if there are any, are readable for the tokens.
            let routed = (work.known == 0).then(|| unsafe { side.routed(token, &routing.ids) });
            for rank in 0..world {
                let position = side.handle.positions.get(token * world + rank);
                let Some(at) = side.handle.row_at(rank, position, work.capacity) else { continue };
                if std::mem::take(&mut pending) {
                    let input = (work.input as *const u8).wrapping_add(token * input_row);
                    // SAFETY: the caller promised that the input is readable and aligned for all tokens; the vectors
                    // grow as needed.
                    unsafe { rows.quantize(input, quantization, (row, bytes, scales)) };
                    sent = SentRow { row: bytes.as_ptr(), scales: scales.as_ptr() };
                }
                let to = (rank as u32, rank as u32);
                // SAFETY: the handshake is over; the row and its scales are readable, and row `at` is this rank's to write.
                unsafe { side.write_row(to, at, sent, routed.as_ref()) };
            }
        }
    }

    /// The error of the lowest rank whose output has no room for all rows by expert.
    fn check_room(&self, packed: bool) -> Result<()> {
        for rank in 0..self.world() {
            let word = self.row(rank, self.world() + 2);
            let (needed, room) = (word >> 32, word & 0xffff_ffff);
            if needed > room {
                return Err(no_output_room(rank, needed, room, packed));
            }
        }
        Ok(())
    }
}

/// Rows by expert that a call's output has room for; of one expert if each has a part of its own.
pub(crate) fn output_room(work: &ExpertsWork) -> u64 {
    if work.expert_rows == 0 { work.output_capacity } else { work.expert_rows }
}

/// Counts that ranks have announced in the handshake.
struct HandshakeRows<'a>(&'a HostEngine);

impl Announced for HandshakeRows<'_> {
    fn tokens(&self, rank: u32) -> u32 {
        self.0.row(rank, self.0.world()) as u32
    }

    fn bad_id(&self, rank: u32) -> Option<BadId> {
        let token = (self.0.row(rank, self.0.world()) >> 32) as u32;
        let id = self.0.row(rank, self.0.world() + 1) as i64;
        (token != u32::MAX).then_some(BadId { token, id })
    }

    fn rows(&self, from: u32, to: u32) -> u64 {
        self.0.row(from, to)
    }
}

/// How many rows arrived in a dispatch.
///
/// # Safety
///
/// The handle is readable, and the dispatch has written it.
pub(crate) unsafe fn received_sizes(call: &ExpertCall, world: u32) -> ReceivedSizes {
    // SAFETY: the caller promised that the handle is readable; it is one of this buffer, which has these parts.
    let handle = unsafe { RoutingHandle::new(&call.work, world) };
    let number = |found: i32| found.max(0) as usize;
    let local = call.shape.local_experts(world) as usize;
    ReceivedSizes {
        rows: handle.received(call.work.capacity),
        rows_by_expert: number(handle.head.get(RoutingHandle::BY_EXPERT)),
        expert_counts: (0..local).map(|at| number(handle.expert_counts.get(at))).collect(),
    }
}
