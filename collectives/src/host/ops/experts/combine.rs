//! Combine: rows go back to the ranks of their tokens, and are summed up there in the order of ranks.

#![allow(unsafe_code)] // reads and writes memory by address

use symmpool_allocator::Result;

use super::memory::given_weights;
use super::{ExpertScratch, HostEngine, RankSide};
use crate::call::experts::ExpertCall;
use crate::call::{CallDescription, OpType};
use crate::host::kernels::ExpertRows;
use crate::host::layout::numbers::Numbers;

/// Parts that the rows of a combine are made of.
struct CombineRows<'a> {
    side: &'a RankSide<'a>,
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
        let (world, work) = (self.world(), &call.work);
        // SAFETY: the caller promised that the handle is one of this buffer and that the region has the buffer's bytes.
        let side = &unsafe { RankSide::new(call, (self.rank(), world), self.layout) };
        self.or_decline(side.refusal(Some((call.mode.by_expert, work.input_rows))))?;
        let description = CallDescription::new(OpType::ExpertCombine);
        self.handshake(&description.experts(&call.shape, call.mode).output(call.region))?;
        let received = side.handle.received(work.capacity);
        let mut weights = side.handle.weights;
        if call.mode.weights {
            // SAFETY: every rank has made this call, so nobody uses what the last one left in the region.
            unsafe { self.send_weights(side) };
            self.step()?;
            // SAFETY: the part has room for the capacity.
            weights = unsafe { side.given_weights(received) };
        }
        let own = &mut scratch.own;
        own.resize(call.shape.hidden, 0.0);
        let mut sums = ExpertRows::new(call.shape.dtype, call.shape.hidden);
        let rows = CombineRows { side, received, weights };
        // SAFETY: every rank has made this call, so nobody uses what the last one left in the region; this rank alone
        // writes its rows.
        unsafe { self.send_back(&rows, &mut sums) };
        self.step()?;
        // SAFETY: all rows of this rank's tokens have come back.
        unsafe { self.sum_tokens(&rows, sums, own.as_mut_ptr().cast()) };
        Ok(())
    }

    /// Sends the weights of each token to the ranks that have its rows.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::combine`], after the handshake.
    unsafe fn send_weights(&self, side: &RankSide<'_>) {
        let (work, world) = (&side.call.work, self.world() as usize);
        let (handle, top_k) = (&side.handle, work.top_k as usize);
        // SAFETY: the caller promised that weights, if there are any, are readable for the tokens.
        let Some(given) = (unsafe { given_weights(work) }) else { return };
        for at in 0..work.tokens as usize * world {
            let (token, rank) = (at / world, at % world);
            let found = handle.row_at(rank, handle.positions.get(at), work.capacity);
            let Some(row) = found else { continue };
            // SAFETY: the row is within the capacity.
            let to = unsafe { side.weights_of(rank as u32, row) };
            (0..top_k).for_each(|k| to.set(k, given.get(token * top_k + k)));
        }
    }

    /// Where the rows that rank `from` sends back to rank `to` begin there.
    fn combined_at(&self, side: &RankSide<'_>, (from, to): (u32, u32)) -> *mut u8 {
        let world = self.world();
        let distance = (from + world - to) % world;
        side.combined_at(to, distance as usize - 1)
    }

    /// Writes the rows of other ranks' tokens into their memory.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::combine`], after the handshake.
    unsafe fn send_back(&self, rows: &CombineRows<'_>, sums: &mut ExpertRows) {
        let CombineRows { side, received, weights } = *rows;
        let (call, row_bytes) = (side.call, side.call.shape.row_bytes());
        for peer in self.peers() {
            let offset = |index: u32| {
                (side.handle.source_offsets.get(index as usize).max(0) as usize).min(received)
            };
            let (begin, end) = (offset(peer), offset(peer + 1));
            let to = self.combined_at(side, (self.rank(), peer));
            for (index, row) in (begin..end).take(call.shape.max_tokens).enumerate() {
                let to = to.wrapping_add(index * row_bytes);
                // SAFETY: the row was received, and its place is that of this rank's row at the peer.
                unsafe { side.write_back(row, weights, sums, to) };
            }
        }
    }

    /// Sums up the rows of each token, in the order of ranks.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::combine`], after all rows have come back. `own` has room for a row.
    unsafe fn sum_tokens(&self, rows: &CombineRows<'_>, mut own_sums: ExpertRows, own: *mut u8) {
        let CombineRows { side, received, weights } = *rows;
        let (call, row_bytes) = (side.call, side.call.shape.row_bytes());
        let (me, world, work) = (self.rank(), self.world(), &call.work);
        let mut sums = ExpertRows::new(call.shape.dtype, call.shape.hidden);
        for token in 0..work.tokens as usize {
            let position = |rank: u32| {
                let found = side.handle.positions.get(token * world as usize + rank as usize);
                usize::try_from(found).ok().filter(|at| *at < call.shape.max_tokens)
            };
            let mine = position(me)
                .and_then(|at| side.handle.row_at(me as usize, at as i32, work.capacity))
                .filter(|row| *row < received);
            for rank in 0..world {
                let from = if rank == me {
                    // SAFETY: the row was received, and a token has one at most, so `own` holds it until the sum is stored.
                    mine.and_then(|row| unsafe { side.own_row(row, weights, &mut own_sums, own) })
                } else {
                    let place =
                        |at| self.combined_at(side, (rank, me)).wrapping_add(at * row_bytes);
                    position(rank).map(|at| place(at).cast_const())
                };
                if let Some(from) = from {
                    sums.add(from, None);
                }
            }
            let output = (work.output as *mut u8).wrapping_add(token * row_bytes);
            // SAFETY: each rank has received its row, and has sent it back. The caller promised that the output is writable and
            // aligned for the tokens, of which this is one.
            unsafe { sums.store(output) };
        }
    }
}
