//! Dispatch to experts and combine, on the CPU.
//!
//! Ranks tell each other in the handshake how many rows they send to whom, and which id is no expert, so each knows
//! where its rows lie in a peer's memory, and all return the same error. Ids, weights and rows are the caller's memory,
//! which its other threads may write meanwhile: numbers are read once and checked before they are indices.

#![allow(unsafe_code)] // reads and writes memory by address

mod combine;
mod memory;

use symmpool_allocator::{Error, Result};

use self::memory::{RoutingHandle, SymmetricRegion};
use crate::call::experts::{ExpertCall, ExpertsWork, HandleParts};
use crate::call::{CallDescription, OpType};
use crate::host::HostEngine;
use crate::host::kernels::{ExpertRows, copy};
use crate::host::layout::expert_routing::{BadId, Routing};
use crate::host::layout::expert_scratch::ExpertScratch;
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
        let handle = unsafe { RoutingHandle::new(&call.work, self.world()) };
        let number = |found: i32| found.max(0) as usize;
        let local = call.shape.local_experts(self.world()) as usize;
        Ok(ReceivedSizes {
            rows: handle.received(call.work.capacity),
            rows_by_expert: number(handle.head.get(RoutingHandle::BY_EXPERT)),
            expert_counts: (0..local).map(|at| number(handle.expert_counts.get(at))).collect(),
        })
    }

    /// # Safety
    ///
    /// You must keep the promises of [`Self::dispatch`].
    unsafe fn dispatch_in(&mut self, call: &ExpertCall, scratch: &mut ExpertScratch) -> Result<()> {
        let (world, work, region) =
            (self.world(), &call.work, SymmetricRegion::of(call, self.world()));
        // SAFETY: the handle is one of this buffer, which has these parts.
        let handle = unsafe { RoutingHandle::new(work, world) };
        // A known routing names rows of peers only, and those by expert are as many as the output has room for or less.
        let known = (work.known != 0).then_some((call.mode.by_expert, u64::MAX));
        self.begin_with(&handle, work, known)?;
        if work.known == 0 {
            // SAFETY: the caller promised that the ids are aligned and readable for the tokens.
            unsafe { scratch.routing.read(work, world) };
            self.publish_counts(&scratch.routing, work.tokens);
        }
        let description = CallDescription::new(OpType::ExpertDispatch);
        self.handshake(&description.experts(&call.shape, call.mode).output(call.region))?;
        let routed = if work.known == 0 {
            handle.head.set(RoutingHandle::LAYOUT, HandleParts::layout_word(call.mode.by_expert));
            self.keep_routing(&handle, &scratch.routing, work)
        } else {
            Ok(())
        };
        // SAFETY: every rank has made this call, so nobody uses what the last call of the buffer left in the region.
        unsafe { self.send(&region, &handle, call, scratch) };
        self.step()?;
        if work.known == 0 {
            // SAFETY: all rows that this rank receives are there.
            unsafe { self.keep_received(&region, &handle, work) };
        }
        if !call.mode.by_expert {
            return routed;
        }
        let needed = if work.known == 0 {
            // SAFETY: all rows that this rank receives are there, and `keep_received` has counted those of each
            // expert.
            unsafe { self.place_by_expert(&region, &handle, work) }
        } else {
            handle.head.get(RoutingHandle::BY_EXPERT) as u64
        };
        // SAFETY: all rows that this rank receives are there; the caller promised that the output is writable for its
        // capacity.
        unsafe { self.expand(&region, &handle, work) };
        // Every rank writes how many rows by expert it needs room for, and how much it has: of one expert if each has a
        // part of its own.
        let needed = needed.min(u64::from(u32::MAX));
        let room = if work.expert_rows == 0 { work.output_capacity } else { work.expert_rows };
        self.set_row(world + 2, needed << 32 | room);
        self.step()?;
        routed.and_then(|()| self.check_room(work.expert_rows != 0))
    }

    /// Waits for calls that this rank refused before, and declines this one if it cannot use the handle of an earlier
    /// dispatch: `again` is how rows lie, and how many rows by expert there may be.
    fn begin_with(
        &mut self,
        handle: &RoutingHandle,
        work: &ExpertsWork,
        again: Option<(bool, u64)>,
    ) -> Result<()> {
        let ranks = (self.rank() as usize, self.world() as usize);
        let refusal =
            again.and_then(|(by_expert, rows)| handle.refusal(work, ranks, by_expert, rows));
        let found = refusal.map_or(Ok(()), |why| {
            Err(Error::invalid_argument(format!("experts on rank {}: {why}", self.rank())))
        });
        self.or_decline(found)
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

    /// Computes from the rows of all ranks where each rank's rows begin, and keeps it in the handle with the places of
    /// this rank's rows. Rows that have no room at their rank have no place.
    ///
    /// Returns the error of the lowest rank with an id that is no expert, else that of the lowest one without room; it
    /// is the same on every rank.
    fn keep_routing(
        &self,
        handle: &RoutingHandle,
        routing: &Routing,
        work: &ExpertsWork,
    ) -> Result<()> {
        let (me, world) = (self.rank(), self.world());
        let mut outcome = Ok(());
        let mut fail = |error: Error| {
            if outcome.is_ok() {
                outcome = Err(error);
            }
        };
        for rank in 0..world {
            let word = self.row(rank, world);
            let (tokens, token) = (word as u32, (word >> 32) as u32);
            handle.source_tokens.set(rank as usize, tokens as i32);
            if token != u32::MAX {
                let id = self.row(rank, world + 1) as i64;
                fail(BadId { token, id }.error(rank, work.experts));
            }
        }
        for to in 0..world {
            let mut begin = 0;
            for from in 0..world {
                let clamped = begin.min(work.capacity) as i32;
                if to == me {
                    handle.source_offsets.set(from as usize, clamped);
                }
                if from == me {
                    handle.bases.set(to as usize, clamped);
                }
                begin += self.row(from, to);
            }
            if to == me {
                let received = begin.min(work.capacity) as i32;
                handle.source_offsets.set(world as usize, received);
                handle.head.set(RoutingHandle::RECEIVED, received);
            }
            if begin > work.capacity {
                fail(no_room(to, begin, work.capacity, "the buffer", "capacity"));
            }
        }
        handle.head.set(RoutingHandle::TOKENS, work.tokens as i32);
        handle.head.set(RoutingHandle::BY_EXPERT, 0);
        for (at, position) in routing.positions.iter().enumerate() {
            let base = handle.bases.get(at % world as usize);
            let fits = *position >= 0 && ((base + *position) as u64) < work.capacity;
            handle.positions.set(at, if fits { *position } else { -1 });
        }
        outcome
    }

    /// Writes this rank's rows, and what belongs to them, into the memory of the ranks they go to.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::dispatch`], after the handshake.
    unsafe fn send(
        &self,
        region: &SymmetricRegion,
        handle: &RoutingHandle,
        call: &ExpertCall,
        scratch: &mut ExpertScratch,
    ) {
        let work = &call.work;
        let world = self.world() as usize;
        let (row_bytes, scale_bytes) = (work.row_bytes as usize, work.scale_bytes as usize);
        let quantization = [
            ExpertQuantization::None,
            ExpertQuantization::Fp8,
            ExpertQuantization::Fp8PowerOfTwo,
            ExpertQuantization::Fp8Ue8m0,
        ]
        .into_iter()
        .find(|how| *how as u32 == work.quantize)
        .unwrap_or_default();
        let ExpertScratch { routing, row, sum, bytes, scales, .. } = scratch;
        let mut rows = ExpertRows::new(call.shape.dtype, call.shape.hidden, (row, sum));
        let input_row = call.shape.row_bytes();
        for token in 0..work.tokens as usize {
            let (mut from, mut from_scales) = (
                (work.input as *const u8).wrapping_add(token * row_bytes),
                (work.input_scales as *const u8).wrapping_add(token * scale_bytes),
            );
            let mut pending = quantization != ExpertQuantization::None;
            for rank in 0..world {
                let position = handle.positions.get(token * world + rank);
                let Some(at) = handle.row_at(rank, position, work.capacity) else { continue };
                if std::mem::take(&mut pending) {
                    let input = (work.input as *const u8).wrapping_add(token * input_row);
                    // SAFETY: the caller promised that the input is readable and aligned for all tokens; the vectors
                    // grow as needed.
                    unsafe { rows.quantize(input, quantization, bytes, scales) };
                    (from, from_scales) = (bytes.as_ptr(), scales.as_ptr());
                }
                let to = |part, size: usize| region.at(self, rank as u32, part, at, size);
                // SAFETY: the row and its scales are readable; `at` is within the capacity, and nobody else writes that
                // row.
                unsafe { copy(from, to(region.parts.rows, row_bytes), row_bytes) };
                // SAFETY: the scales of the row are readable; `at` is within the capacity, and nobody else writes
                // that row.
                unsafe { copy(from_scales, to(region.parts.scales, scale_bytes), scale_bytes) };
                if work.known == 0 {
                    // SAFETY: the handshake is over, and the row at `at` is this rank's to write.
                    unsafe { self.send_ids(region, (rank, at), (token, routing), work) };
                }
            }
        }
    }

    /// Writes the experts of a row on its rank, their weights, and the number of its token.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::send`].
    unsafe fn send_ids(
        &self,
        region: &SymmetricRegion,
        (rank, at): (usize, usize),
        (token, routing): (usize, &Routing),
        work: &ExpertsWork,
    ) {
        let top_k = work.top_k as usize;
        let local = (work.experts / self.world()) as i32;
        // SAFETY: every rank is in this call, and `at` is a row of this rank's within the capacity, so the part has
        // `top_k` numbers there.
        let ids = unsafe { region.numbers::<i32>(self, rank, region.parts.ids, at, top_k) };
        // SAFETY: every rank is in this call, and `at` is a row of this rank's within the capacity, so the part has
        // `top_k` numbers there.
        let weights = unsafe { region.numbers::<f32>(self, rank, region.parts.weights, at, top_k) };
        // SAFETY: every rank is in this call, and `at` is a row of this rank's within the capacity, so the part has a
        // number there.
        let number = unsafe { region.numbers::<i32>(self, rank, region.parts.tokens, at, 1) };
        // SAFETY: the caller promised that weights, if there are any, are readable for the tokens.
        let given = unsafe { memory::given_weights(work) };
        for k in 0..top_k {
            let id = routing.ids[token * top_k + k];
            let here = id >= 0 && id / local == rank as i32;
            ids.set(k, if here { id % local } else { -1 });
            weights.set(k, given.map_or(1.0, |given| given.get(token * top_k + k)));
        }
        number.set(0, token as i32);
    }

    /// Keeps in the handle which tokens the received rows are, and counts the rows of each expert. The rows have no places
    /// by expert yet.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::dispatch`], after all rows have arrived.
    unsafe fn keep_received(
        &self,
        region: &SymmetricRegion,
        handle: &RoutingHandle,
        work: &ExpertsWork,
    ) {
        let (me, received) = (self.rank() as usize, handle.received(work.capacity));
        // SAFETY: the part has room for the capacity.
        let numbers = unsafe { region.numbers::<i32>(self, me, region.parts.tokens, 0, received) };
        for row in 0..received {
            handle.tokens.set(row, numbers.get(row));
        }
        handle.expert_counts.fill(0);
        for at in 0..received * work.top_k as usize {
            // SAFETY: `at` is an id of one of the `received` rows.
            if let Some(expert) = unsafe { self.expert_at(region, at, work) } {
                handle.expert_counts.set(expert, handle.expert_counts.get(expert) + 1);
            }
            handle.places.set(at, -1);
        }
    }

    /// Which expert of this rank an id of the received rows is.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::keep_received`]; the id is that of a received row.
    unsafe fn expert_at(
        &self,
        region: &SymmetricRegion,
        at: usize,
        work: &ExpertsWork,
    ) -> Option<usize> {
        let (me, local) = (self.rank() as usize, (work.experts / self.world()) as usize);
        // SAFETY: the caller promised that the id is that of a received row, so it lies within the part, and its row
        // has arrived.
        let id = unsafe { region.numbers::<i32>(self, me, region.parts.ids, at, 1) }.get(0);
        usize::try_from(id).ok().filter(|expert| *expert < local)
    }

    /// Gives each received row a place for each of its experts on this rank: by expert, and there in the order of received
    /// rows, as far as the output has room. Returns for how many rows there should be room, padding included; if each
    /// expert has a part of its own, the most rows of one of them.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::keep_received`], which has counted the rows of each expert.
    unsafe fn place_by_expert(
        &self,
        region: &SymmetricRegion,
        handle: &RoutingHandle,
        work: &ExpertsWork,
    ) -> u64 {
        let (me, received) = (self.rank() as usize, handle.received(work.capacity));
        let local = (work.experts / self.world()) as usize;
        let count = received * work.top_k as usize;
        // SAFETY: the part has room for the capacity.
        let weights = unsafe { region.numbers::<f32>(self, me, region.parts.weights, 0, count) };
        // Where the next row of an expert goes is in the place of its count, which is made of it again in the end.
        let mut begin = 0_u64;
        let clamped = |row: u64| row.min(work.output_capacity) as i32;
        let mut most = 0_u64;
        for expert in 0..local {
            let rows = handle.expert_counts.get(expert).max(0) as u64;
            most = most.max(rows);
            handle.expert_offsets.set(expert, clamped(begin));
            handle.expert_counts.set(expert, clamped(begin));
            begin += match work.expert_rows {
                0 => rows.next_multiple_of(u64::from(work.alignment)),
                of_each => of_each,
            };
        }
        handle.expert_offsets.set(local, clamped(begin));
        handle.head.set(RoutingHandle::BY_EXPERT, clamped(begin));
        for at in 0..count {
            handle.weights.set(at, weights.get(at));
            // SAFETY: the id is that of a received row.
            let Some(expert) = (unsafe { self.expert_at(region, at, work) }) else { continue };
            let place = handle.expert_counts.get(expert).max(0);
            let end = match work.expert_rows {
                0 => work.output_capacity,
                of_each => of_each * (expert as u64 + 1),
            };
            if (place as u64) < end {
                handle.expert_counts.set(expert, place + 1);
                handle.places.set(at, place);
            }
        }
        for expert in 0..local {
            let rows =
                handle.expert_counts.get(expert).wrapping_sub(handle.expert_offsets.get(expert));
            handle.expert_counts.set(expert, rows);
        }
        if work.expert_rows == 0 { begin } else { most }
    }

    /// Copies received rows to their places by expert, as far as the output has room.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::dispatch`], after all rows have arrived.
    unsafe fn expand(&self, region: &SymmetricRegion, handle: &RoutingHandle, work: &ExpertsWork) {
        let (me, received) = (self.rank(), handle.received(work.capacity));
        let (row_bytes, scale_bytes) = (work.row_bytes as usize, work.scale_bytes as usize);
        for at in 0..received * work.top_k as usize {
            let Ok(place) = usize::try_from(handle.places.get(at)) else { continue };
            if place as u64 >= work.output_capacity {
                continue;
            }
            let row = at / work.top_k as usize;
            let copy_part = |part, output: u64, bytes: usize| {
                let from = region.at(self, me, part, row, bytes);
                let to = (output as *mut u8).wrapping_add(place * bytes);
                // SAFETY: the row is within the capacity, and the place within that of the output.
                unsafe { copy(from, to, bytes) };
            };
            copy_part(region.parts.rows, work.output, row_bytes);
            if work.output_scales == 0 {
                continue;
            }
            let Ok(rows @ 1..) = usize::try_from(work.expert_rows) else {
                copy_part(region.parts.scales, work.output_scales, scale_bytes);
                continue;
            };
            // The scales of each expert's part are column-major.
            let unit = if scale_bytes.is_multiple_of(4) { 4 } else { 1 };
            let units = scale_bytes / unit;
            let from = region.at(self, me, region.parts.scales, row, scale_bytes);
            for of in 0..units {
                let at = (place / rows * units + of) * rows + place % rows;
                let to = (work.output_scales as *mut u8).wrapping_add(at * unit);
                // SAFETY: the row is within the capacity, and the place within that of the output, whose scales lie
                // column by column.
                unsafe { copy(from.wrapping_add(of * unit), to, unit) };
            }
        }
    }

    /// The error of the lowest rank whose output has no room for all rows by expert.
    fn check_room(&self, packed: bool) -> Result<()> {
        for rank in 0..self.world() {
            let word = self.row(rank, self.world() + 2);
            let (needed, room) = (word >> 32, word & 0xffff_ffff);
            if needed > room {
                let what = match packed {
                    false => "its output by expert",
                    true => "an expert's part of its output",
                };
                return Err(no_room(rank, needed, room, what, "room"));
            }
        }
        Ok(())
    }
}

fn no_room(rank: u32, needed: u64, room: u64, what: &str, more: &str) -> Error {
    Error::overflow(format!(
        "dispatch to experts: rank {rank} was sent {needed} rows, and {what} has room for {room}. The last {} were not \
         written and do not come back, and the communicator stays usable. Make it with more {more}, or send less",
        needed - room
    ))
    .naming([rank])
}
