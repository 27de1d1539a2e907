//! One rank's side of a dispatch or a combine: what the engine of one host and the one over hosts share.
//!
//! Ranks are those of the group, and *slots* those of the heap, which has the ranks of one host.

#![allow(unsafe_code)] // reads and writes memory by address

use symmpool_allocator::{Error, HeapLayout, Result};

use super::memory::{RoutingHandle, SymmetricRegion, given_weights};
use crate::ExpertQuantization;
use crate::call::experts::{ExpertCall, ExpertsWork, HandleParts, MAX_TOP_K};
use crate::host::kernels::{ExpertRows, copy};
use crate::host::layout::expert_routing::{BadId, Routing};
use crate::host::layout::numbers::Numbers;

/// One rank's side of a call.
pub(crate) struct RankSide<'a> {
    pub(crate) call: &'a ExpertCall,
    pub(crate) region: SymmetricRegion,
    pub(crate) handle: RoutingHandle,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    /// This rank's slot.
    pub(crate) slot: u32,
}

/// A row on its way to a rank.
#[derive(Clone, Copy)]
pub(crate) struct SentRow {
    /// The row's bytes, and those of its scales.
    pub(crate) row: *const u8,
    pub(crate) scales: *const u8,
}

/// Ids and weights that travel with a row whose routing is new.
pub(crate) struct RoutedToken {
    /// The number of the token on its rank.
    pub(crate) token: u32,
    /// Its experts, -1 for none.
    pub(crate) ids: [i32; MAX_TOP_K as usize],
    /// Their weights.
    pub(crate) weights: [f32; MAX_TOP_K as usize],
}

/// Counts that all ranks have announced of a dispatch whose routing is new.
pub(crate) trait Announced {
    /// Tokens of a rank.
    fn tokens(&self, rank: u32) -> u32;
    /// A rank's first id that is no expert.
    fn bad_id(&self, rank: u32) -> Option<BadId>;
    /// Rows that one rank sends to another.
    fn rows(&self, from: u32, to: u32) -> u64;
}

impl<'a> RankSide<'a> {
    /// # Safety
    ///
    /// While the value is used, the handle of the call is readable and writable, and `call.region` is memory of as many bytes
    /// as the buffer has, in every slot of `layout`.
    pub(crate) unsafe fn new(
        call: &'a ExpertCall,
        (rank, world): (u32, u32),
        layout: HeapLayout,
    ) -> Self {
        // SAFETY: the caller promised the handle, which is one of this buffer and has these parts.
        let handle = unsafe { RoutingHandle::new(&call.work, world) };
        let region = SymmetricRegion::of(call, world, layout);
        Self { call, region, handle, rank, world, slot: layout.rank }
    }

    fn work(&self) -> &ExpertsWork {
        &self.call.work
    }

    /// Experts of a rank.
    fn local_experts(&self) -> u32 {
        self.work().experts / self.world
    }

    /// Why this rank cannot make the call, if it cannot use the handle of an earlier dispatch: `again` is how rows lie, and how
    /// many rows a combine's input has (`u64::MAX` for a dispatch).
    pub(crate) fn refusal(&self, again: Option<(bool, u64)>) -> Result<()> {
        let ranks = (self.rank as usize, self.world as usize);
        let refusal = again
            .and_then(|(by_expert, rows)| self.handle.refusal(self.work(), ranks, by_expert, rows));
        match refusal {
            None => Ok(()),
            Some(why) => {
                Err(Error::invalid_argument(format!("experts on rank {}: {why}", self.rank)))
            }
        }
    }

    /// How the call quantises rows.
    pub(crate) fn quantization(&self) -> ExpertQuantization {
        [
            ExpertQuantization::None,
            ExpertQuantization::Fp8,
            ExpertQuantization::Fp8PowerOfTwo,
            ExpertQuantization::Fp8Ue8m0,
        ]
        .into_iter()
        .find(|how| *how as u32 == self.work().quantize)
        .unwrap_or_default()
    }

    /// Computes from what all ranks have said where each rank's rows begin, and keeps it in the handle with the places of
    /// this rank's rows. Rows that have no room at their rank have no place.
    ///
    /// Returns the error of the lowest rank with an id that is no expert, else that of the lowest one without room; it
    /// is the same on every rank.
    pub(crate) fn keep_routing(&self, routing: &Routing, said: &impl Announced) -> Result<()> {
        let (work, handle) = (self.work(), &self.handle);
        let (me, world) = (self.rank, self.world);
        handle.head.set(RoutingHandle::LAYOUT, HandleParts::layout_word(self.call.mode.by_expert));
        let mut outcome = Ok(());
        let mut fail = |error: Error| {
            if outcome.is_ok() {
                outcome = Err(error);
            }
        };
        for rank in 0..world {
            handle.source_tokens.set(rank as usize, said.tokens(rank) as i32);
            if let Some(bad) = said.bad_id(rank) {
                fail(bad.error(rank, work.experts));
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
                begin += said.rows(from, to);
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

    /// Ids and weights of a token of this rank.
    ///
    /// # Safety
    ///
    /// The call's weights, if there are any, are readable for the tokens.
    pub(crate) unsafe fn routed(&self, token: usize, ids: &[i32]) -> RoutedToken {
        let top_k = self.work().top_k as usize;
        let mut found = RoutedToken {
            token: token as u32,
            ids: [-1; MAX_TOP_K as usize],
            weights: [1.0; MAX_TOP_K as usize],
        };
        // SAFETY: the caller promised that weights, if there are any, are readable for the tokens.
        let given = unsafe { given_weights(self.work()) };
        for k in 0..top_k {
            found.ids[k] = ids[token * top_k + k];
            if let Some(given) = given {
                found.weights[k] = given.get(token * top_k + k);
            }
        }
        found
    }

    /// Writes a row, and what belongs to it, to row `at` of the rank that has the slot.
    ///
    /// # Safety
    ///
    /// Every rank of the host is in this call; `at` is a row of the sender's within the capacity, which nobody else writes. The
    /// row and its scales are readable.
    pub(crate) unsafe fn write_row(
        &self,
        (slot, rank): (u32, u32),
        at: usize,
        sent: SentRow,
        routed: Option<&RoutedToken>,
    ) {
        let (work, region) = (self.work(), &self.region);
        let (row_bytes, scale_bytes) = (work.row_bytes as usize, work.scale_bytes as usize);
        let to = |part, size: usize| region.at(slot, part, at, size);
        // SAFETY: the caller promised that the row is readable, and that nobody else writes row `at`.
        unsafe { copy(sent.row, to(region.parts.rows, row_bytes), row_bytes) };
        // SAFETY: the caller promised that the scales are readable, and that nobody else writes those of row `at`.
        unsafe { copy(sent.scales, to(region.parts.scales, scale_bytes), scale_bytes) };
        let Some(routed) = routed else { return };
        let (top_k, local) = (work.top_k as usize, self.local_experts() as i32);
        // SAFETY: `at` is a row within the capacity, so the part has `top_k` numbers there.
        let ids = unsafe { region.numbers::<i32>(slot, region.parts.ids, at, top_k) };
        // SAFETY: `at` is a row within the capacity, so the part has `top_k` numbers there.
        let weights = unsafe { region.numbers::<f32>(slot, region.parts.weights, at, top_k) };
        // SAFETY: `at` is a row within the capacity, so the part has a number there.
        let number = unsafe { region.numbers::<i32>(slot, region.parts.tokens, at, 1) };
        for k in 0..top_k {
            let id = routed.ids[k];
            let here = id >= 0 && id / local == rank as i32;
            ids.set(k, if here { id % local } else { -1 });
            weights.set(k, routed.weights[k]);
        }
        number.set(0, routed.token as i32);
    }

    /// Keeps in the handle which tokens the received rows are, and counts the rows of each expert. The rows have no places
    /// by expert yet.
    ///
    /// # Safety
    ///
    /// All rows that this rank receives have arrived.
    pub(crate) unsafe fn keep_received(&self) {
        let (work, handle, region) = (self.work(), &self.handle, &self.region);
        let received = handle.received(work.capacity);
        // SAFETY: the part has room for the capacity.
        let numbers = unsafe { region.numbers::<i32>(self.slot, region.parts.tokens, 0, received) };
        for row in 0..received {
            handle.tokens.set(row, numbers.get(row));
        }
        handle.expert_counts.fill(0);
        for at in 0..received * work.top_k as usize {
            // SAFETY: `at` is an id of one of the `received` rows.
            if let Some(expert) = unsafe { self.expert_at(at) } {
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
    unsafe fn expert_at(&self, at: usize) -> Option<usize> {
        let (region, local) = (&self.region, self.local_experts() as usize);
        // SAFETY: the caller promised that the id is that of a received row, so it lies within the part, and its row
        // has arrived.
        let id = unsafe { region.numbers::<i32>(self.slot, region.parts.ids, at, 1) }.get(0);
        usize::try_from(id).ok().filter(|expert| *expert < local)
    }

    /// Gives each received row a place for each of its experts on this rank: by expert, and there in the order of received
    /// rows, as far as the output has room. Returns for how many rows there should be room, padding included; if each
    /// expert has a part of its own, the most rows of one of them.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::keep_received`], which has counted the rows of each expert.
    pub(crate) unsafe fn place_by_expert(&self) -> u64 {
        let (work, handle, region) = (self.work(), &self.handle, &self.region);
        let received = handle.received(work.capacity);
        let local = self.local_experts() as usize;
        let count = received * work.top_k as usize;
        // SAFETY: the part has room for the capacity.
        let weights = unsafe { region.numbers::<f32>(self.slot, region.parts.weights, 0, count) };
        // Where the next row of an expert goes is in the place of its count, which is made of it again in the end.
        let clamped = |row: u64| row.min(work.output_capacity) as i32;
        let counts: Vec<u64> =
            (0..local).map(|expert| handle.expert_counts.get(expert).max(0) as u64).collect();
        let (begins, needed) = rows_by_expert(&counts, work.expert_rows, work.alignment);
        for (expert, begin) in begins.iter().enumerate() {
            handle.expert_offsets.set(expert, clamped(*begin));
            if expert < local {
                handle.expert_counts.set(expert, clamped(*begin));
            }
        }
        handle.head.set(RoutingHandle::BY_EXPERT, clamped(begins[local]));
        for at in 0..count {
            handle.weights.set(at, weights.get(at));
            // SAFETY: the id is that of a received row.
            let Some(expert) = (unsafe { self.expert_at(at) }) else { continue };
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
        needed
    }

    /// Copies received rows to their places by expert, as far as the output has room.
    ///
    /// # Safety
    ///
    /// All rows that this rank receives are there, and the output is writable for its capacity.
    pub(crate) unsafe fn expand(&self) {
        let (work, handle, region) = (self.work(), &self.handle, &self.region);
        let received = handle.received(work.capacity);
        let (row_bytes, scale_bytes) = (work.row_bytes as usize, work.scale_bytes as usize);
        for at in 0..received * work.top_k as usize {
            let Ok(place) = usize::try_from(handle.places.get(at)) else { continue };
            if place as u64 >= work.output_capacity {
                continue;
            }
            let row = at / work.top_k as usize;
            let copy_part = |part, output: u64, bytes: usize| {
                let from = region.at(self.slot, part, row, bytes);
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
            let from = region.at(self.slot, region.parts.scales, row, scale_bytes);
            for of in 0..units {
                let at = (place / rows * units + of) * rows + place % rows;
                let to = (work.output_scales as *mut u8).wrapping_add(at * unit);
                // SAFETY: the row is within the capacity, and the place within that of the output, whose scales lie
                // column by column.
                unsafe { copy(from.wrapping_add(of * unit), to, unit) };
            }
        }
    }

    /// Weights that a combine is given, as they came for the received rows.
    ///
    /// # Safety
    ///
    /// While the value is used, no rank writes them.
    pub(crate) unsafe fn given_weights(&self, received: usize) -> Numbers<f32> {
        let count = received * self.work().top_k as usize;
        // SAFETY: the part has room for the capacity, which is the most that is received.
        unsafe { self.region.numbers(self.slot, self.region.parts.combine_weights, 0, count) }
    }

    /// Where a row's weights that a combine is given lie.
    ///
    /// # Safety
    ///
    /// The row is within the capacity, and the sender's.
    pub(crate) unsafe fn weights_of(&self, slot: u32, row: usize) -> Numbers<f32> {
        let (part, top_k) = (self.region.parts.combine_weights, self.work().top_k as usize);
        // SAFETY: the caller promised that the row is within the capacity, for which the part has room.
        unsafe { self.region.numbers(slot, part, row, top_k) }
    }

    /// Where part `nth` of the rows that come back to a slot begins. Each part has room for the most tokens of a rank.
    pub(crate) fn combined_at(&self, slot: u32, nth: usize) -> *mut u8 {
        let (region, shape) = (&self.region, &self.call.shape);
        region.at(slot, region.parts.combined, nth * shape.max_tokens, shape.row_bytes())
    }

    /// Row of a combine's input. A row that the input does not have is none: a handle may have changed since it was checked.
    fn input_row(&self, row: usize) -> Option<*const u8> {
        let (work, row_bytes) = (self.work(), self.call.shape.row_bytes());
        let at = (work.input as *const u8).wrapping_add(row * row_bytes);
        ((row as u64) < work.input_rows).then_some(at)
    }

    /// Sums up what goes back for a received row by expert. `weights` are those of rows by expert.
    ///
    /// # Safety
    ///
    /// The row was received, and `to` has room for one. The input has `input_rows` rows.
    unsafe fn sum_by_expert(
        &self,
        row: usize,
        weights: Numbers<f32>,
        sums: &mut ExpertRows,
        to: *mut u8,
    ) {
        let top_k = self.work().top_k as usize;
        for at in row * top_k..(row + 1) * top_k {
            let Ok(place) = usize::try_from(self.handle.places.get(at)) else { continue };
            let Some(from) = self.input_row(place) else { continue };
            sums.add(from, Some(weights.get(at)));
        }
        // SAFETY: the caller promised that `to` has room for a row and that the input has these rows, which `input_row` has checked.
        unsafe { sums.store(to) };
    }

    /// Makes what goes back for a received row, and writes it: zeros for a row that the input does not have.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::sum_by_expert`].
    pub(crate) unsafe fn write_back(
        &self,
        row: usize,
        weights: Numbers<f32>,
        sums: &mut ExpertRows,
        to: *mut u8,
    ) {
        if self.call.mode.by_expert {
            // SAFETY: the caller promised the same.
            return unsafe { self.sum_by_expert(row, weights, sums, to) };
        }
        let row_bytes = self.call.shape.row_bytes();
        match self.input_row(row) {
            // SAFETY: the input has this row, and the caller promised room for one.
            Some(from) => unsafe { copy(from, to, row_bytes) },
            // SAFETY: the caller promised room for a row.
            None => unsafe { to.write_bytes(0, row_bytes) },
        }
    }

    /// Makes what goes back for a received row of a token that this rank sums up itself. Returns where it lies: in the input, or in
    /// `room`, which has room for a row.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::sum_by_expert`].
    pub(crate) unsafe fn own_row(
        &self,
        row: usize,
        weights: Numbers<f32>,
        sums: &mut ExpertRows,
        room: *mut u8,
    ) -> Option<*const u8> {
        if !self.call.mode.by_expert {
            return self.input_row(row);
        }
        // SAFETY: the caller promised the same.
        unsafe { self.sum_by_expert(row, weights, sums, room) };
        Some(room.cast_const())
    }
}

/// Returns where the rows of each expert of a rank begin, and where the last ones end, from how many rows each expert has
/// (`counts`). The second value is how many rows there should be room for: if each expert has a part of its own, of `of_each`
/// rows, the most rows of one of them.
pub(crate) fn rows_by_expert(counts: &[u64], of_each: u64, alignment: u32) -> (Vec<u64>, u64) {
    let mut begins = vec![0];
    let mut begin = 0_u64;
    for rows in counts {
        begin += match of_each {
            0 => rows.next_multiple_of(u64::from(alignment)),
            of_each => of_each,
        };
        begins.push(begin);
    }
    let most = counts.iter().copied().max().unwrap_or(0);
    (begins, if of_each == 0 { begin } else { most })
}

/// The error of a rank whose memory has no room for all rows. `packed` says whether each expert has a part of its own.
pub(crate) fn no_output_room(rank: u32, needed: u64, room: u64, packed: bool) -> Error {
    let what = match packed {
        false => "its output by expert",
        true => "an expert's part of its output",
    };
    no_room(rank, needed, room, what, "room")
}

fn no_room(rank: u32, needed: u64, room: u64, what: &str, more: &str) -> Error {
    Error::overflow(format!(
        "dispatch to experts: rank {rank} was sent {needed} rows, and {what} has room for {room}. The last {} were not \
         written and do not come back, and the communicator stays usable. Make it with more {more}, or send less",
        needed - room
    ))
    .naming([rank])
}
