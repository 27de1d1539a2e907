//! Combine: rows go back to the ranks of their tokens, and are summed up there in the order of ranks.

#![allow(unsafe_code)] // reads and writes memory by address

use symmpool_allocator::Result;

use super::memory::{RoutingHandle, SymmetricRegion, given_weights};
use super::{ExpertScratch, HostEngine};
use crate::call::experts::ExpertCall;
use crate::call::{CallDescription, OpType};
use crate::host::kernels::{ExpertRows, copy};
use crate::host::layout::numbers::Numbers;

/// Parts that the rows of a combine are made of.
struct CombineRows<'a> {
    call: &'a ExpertCall,
    handle: &'a RoutingHandle,
    /// How many rows were received: those for which there are weights. It is read once.
    received: usize,
    /// The weights of rows by expert.
    weights: Numbers<f32>,
}

impl HostEngine {
    /// Sends rows back, and sums up the rows of each token.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::dispatch`]. The input has all rows that the handle has places for.
    pub(crate) unsafe fn combine(&mut self, call: &ExpertCall) -> Result<()> {
        self.ready()?;
        let mut scratch = std::mem::take(&mut self.expert_scratch);
        // SAFETY: the caller promised that the addresses in `call.work` are as `ExpertsWork` describes them, and that
        // the input has all rows that the handle has places for.
        let done = unsafe { self.combine_in(call, &mut scratch) };
        self.expert_scratch = scratch;
        done
    }

    /// # Safety
    ///
    /// You must keep the promises of [`Self::combine`].
    unsafe fn combine_in(&mut self, call: &ExpertCall, scratch: &mut ExpertScratch) -> Result<()> {
        let (me, world, work) = (self.rank() as usize, self.world(), &call.work);
        let region = SymmetricRegion::of(call, world);
        // SAFETY: the handle is one of this buffer, which has these parts.
        let handle = unsafe { RoutingHandle::new(work, world) };
        self.begin_with(&handle, work, Some((call.mode.by_expert, work.input_rows)))?;
        let description = CallDescription::new(OpType::ExpertCombine);
        self.handshake(&description.experts(&call.shape, call.mode).output(call.region))?;
        let received = handle.received(work.capacity);
        let mut weights = handle.weights;
        if call.mode.weights {
            // SAFETY: every rank has made this call, so nobody uses what the last one left in the region.
            unsafe { self.send_weights(&region, &handle, call) };
            self.step()?;
            let count = received * work.top_k as usize;
            // SAFETY: the part has room for the capacity.
            weights = unsafe { region.numbers(self, me, region.parts.combine_weights, 0, count) };
        }
        let ExpertScratch { row, sum, own, .. } = scratch;
        own.resize(call.shape.hidden, 0.0);
        let mut sums = ExpertRows::new(call.shape.dtype, call.shape.hidden, (row, sum));
        let rows = CombineRows { call, handle: &handle, received, weights };
        // SAFETY: every rank has made this call, so nobody uses what the last one left in the region; this rank alone
        // writes its rows.
        unsafe { self.send_back(&region, &rows, &mut sums) };
        self.step()?;
        // SAFETY: all rows of this rank's tokens have come back.
        unsafe { self.sum_tokens(&region, &rows, &mut sums, own.as_mut_ptr().cast()) };
        Ok(())
    }

    /// Sends the weights of each token to the ranks that have its rows.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::combine`], after the handshake.
    unsafe fn send_weights(
        &self,
        region: &SymmetricRegion,
        handle: &RoutingHandle,
        call: &ExpertCall,
    ) {
        let (work, world, top_k) = (&call.work, self.world() as usize, call.work.top_k as usize);
        // SAFETY: the caller promised that weights, if there are any, are readable for the tokens.
        let Some(given) = (unsafe { given_weights(work) }) else { return };
        for at in 0..work.tokens as usize * world {
            let (token, rank) = (at / world, at % world);
            let found = handle.row_at(rank, handle.positions.get(at), work.capacity);
            let Some(row) = found else { continue };
            // SAFETY: the row is within the capacity.
            let to = unsafe {
                region.numbers::<f32>(self, rank, region.parts.combine_weights, row, top_k)
            };
            (0..top_k).for_each(|k| to.set(k, given.get(token * top_k + k)));
        }
    }

    /// Where the rows that rank `from` sends back to rank `to` begin there.
    fn combined_at(
        &self,
        region: &SymmetricRegion,
        (from, to): (u32, u32),
        call: &ExpertCall,
    ) -> *mut u8 {
        let world = self.world();
        let distance = (from + world - to) % world;
        let index = (distance as usize - 1) * call.shape.max_tokens;
        region.at(self, to, region.parts.combined, index, call.shape.row_bytes())
    }

    /// Writes the rows of other ranks' tokens into their memory.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::combine`], after the handshake.
    unsafe fn send_back(
        &self,
        region: &SymmetricRegion,
        rows: &CombineRows<'_>,
        sums: &mut ExpertRows<'_>,
    ) {
        let (call, row_bytes) = (rows.call, rows.call.shape.row_bytes());
        let received = rows.received;
        for peer in self.peers() {
            let offset = |index: u32| {
                (rows.handle.source_offsets.get(index as usize).max(0) as usize).min(received)
            };
            let (begin, end) = (offset(peer), offset(peer + 1));
            let to = self.combined_at(region, (self.rank(), peer), call);
            for (index, row) in (begin..end).take(call.shape.max_tokens).enumerate() {
                let to = to.wrapping_add(index * row_bytes);
                // SAFETY: the row was received, and its place is that of this rank's row at the peer.
                unsafe { rows.write(row, sums, to) };
            }
        }
    }

    /// Sums up the rows of each token, in the order of ranks.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::combine`], after all rows have come back. `own` has room for a row.
    unsafe fn sum_tokens(
        &self,
        region: &SymmetricRegion,
        rows: &CombineRows<'_>,
        sums: &mut ExpertRows<'_>,
        own: *mut u8,
    ) {
        let (call, row_bytes) = (rows.call, rows.call.shape.row_bytes());
        let (me, world, work) = (self.rank(), self.world(), &call.work);
        for token in 0..work.tokens as usize {
            let position = |rank: u32| {
                let found = rows.handle.positions.get(token * world as usize + rank as usize);
                usize::try_from(found).ok().filter(|at| *at < call.shape.max_tokens)
            };
            let mine = position(me)
                .and_then(|at| rows.handle.row_at(me as usize, at as i32, work.capacity))
                .filter(|row| *row < rows.received);
            if let Some(row) = mine {
                // SAFETY: the row was received.
                unsafe { rows.write(row, sums, own) };
            }
            for rank in 0..world {
                let from = if rank == me {
                    if mine.is_none() {
                        continue;
                    }
                    own.cast_const()
                } else {
                    let Some(at) = position(rank) else { continue };
                    self.combined_at(region, (rank, me), call).wrapping_add(at * row_bytes)
                };
                // SAFETY: the rank has received the row, and has sent it back.
                unsafe { sums.add(from, None) };
            }
            let output = (work.output as *mut u8).wrapping_add(token * row_bytes);
            // SAFETY: the caller promised that the output is writable and aligned for the tokens, of which this is
            // one.
            unsafe { sums.store(output) };
        }
    }
}

impl CombineRows<'_> {
    /// Writes what goes back for a received row.
    ///
    /// # Safety
    ///
    /// The row was received, and `to` has room for one.
    unsafe fn write(&self, row: usize, sums: &mut ExpertRows<'_>, to: *mut u8) {
        let (work, row_bytes) = (&self.call.work, self.call.shape.row_bytes());
        let input = |row: usize| {
            let at = (work.input as *const u8).wrapping_add(row * row_bytes);
            ((row as u64) < work.input_rows).then_some(at)
        };
        if !self.call.mode.by_expert {
            let Some(from) = input(row) else { return };
            // SAFETY: the input has this row.
            return unsafe { copy(from, to, row_bytes) };
        }
        let top_k = work.top_k as usize;
        for at in row * top_k..(row + 1) * top_k {
            let Ok(place) = usize::try_from(self.handle.places.get(at)) else { continue };
            let Some(from) = input(place) else { continue };
            // SAFETY: the input has this row, which `input` has checked.
            unsafe { sums.add(from, Some(self.weights.get(at))) };
        }
        // SAFETY: the caller promised that `to` has room for a row.
        unsafe { sums.store(to) };
    }
}
