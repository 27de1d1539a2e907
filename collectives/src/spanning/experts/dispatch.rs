//! Dispatch: tokens go to the rank that forwards them on each host, and from there to the ranks of their experts.

#![allow(unsafe_code)] // reads and writes memory by address

use symmpool_allocator::Result;

use super::steps::ReadyCall;
use super::table::CallTable;
use super::token_list::EntryLayout;
use crate::ExpertQuantization;
use crate::call::experts::ExpertCall;
use crate::call::{CallDescription, OpType};
use crate::host::experts::{ExpertScratch, RankSide, RoutedToken, RoutingHandle, SentRow};
use crate::host::kernels::{ExpertRows, copy};
use crate::outer::{Ticket, Transfer};
use crate::spanning::phases::Phase;
use crate::spanning::state::SpanningEngine;

/// Parts of a chunk for a host, one behind the other: rows, scales, and an entry for each token.
#[derive(Clone, Copy)]
struct TokenChunkLayout {
    row: usize,
    scales: usize,
    entry: EntryLayout,
}

impl TokenChunkLayout {
    /// Bytes of a part of so many tokens: a multiple of 16, as rows are.
    fn bytes(self, tokens: usize) -> usize {
        (tokens * (self.row + self.scales + self.entry.bytes())).next_multiple_of(16)
    }
}

/// A dispatch on its way, as far as it is the same for all chunks.
struct Sending<'a> {
    side: &'a RankSide<'a>,
    table: &'a CallTable,
    /// Tokens for each host.
    lists: &'a [Vec<u32>],
    ids: &'a [i32],
    /// Rows and scales as they travel.
    rows: SentRow,
    /// Tokens of a chunk.
    most: usize,
}

/// Rows of each source that this rank has forwarded to each slot so far, and where the first ones lie.
struct Forwarded {
    begins: Vec<Vec<u64>>,
    counts: Vec<Vec<u64>>,
}

impl SpanningEngine {
    /// Sends tokens to the ranks of their experts.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine::dispatch`](crate::engine::Engine::dispatch).
    pub(in crate::spanning) unsafe fn dispatch_over_hosts(
        &mut self,
        call: &ExpertCall,
    ) -> Result<()> {
        let (rank, world) = (self.ranks.rank, self.ranks.hosts.world());
        // SAFETY: the caller promised the handle and the buffer's region.
        let side = &unsafe { RankSide::new(call, (rank, world), self.staging.layout()) };
        let known = (call.work.known != 0).then_some((call.mode.by_expert, u64::MAX));
        let ready = side.refusal(known).and_then(|()| self.reserve_for_dispatch(side));
        self.call_with_scratch(ready, |engine, ready, scratch| {
            // SAFETY: the caller promised what `dispatch` asks; the memory is ready.
            unsafe { engine.run_dispatch(side, ready, scratch) }
        })
    }

    /// Takes the memory for rows on their way, before other ranks count on this one.
    fn reserve_for_dispatch(&mut self, side: &RankSide<'_>) -> Result<ReadyCall> {
        let (work, rank) = (&side.call.work, side.rank);
        let (row, scales) = (work.row_bytes as usize, work.scale_bytes as usize);
        let most = self.chunk_tokens(row, side);
        let top_k = work.top_k as usize;
        let entry = EntryLayout::new(self.ranks.hosts.max_ranks() as usize, top_k, top_k);
        let part = TokenChunkLayout { row, scales, entry }.bytes(most);
        let (to, from) = (self.forwarding.outgoing.len(), self.forwarding.incoming.len());
        for turn in 0..2 {
            self.transit.leaving[turn].reserve(to * part, rank)?;
            self.transit.arriving[turn].reserve(from * part, rank)?;
        }
        if side.quantization() != ExpertQuantization::None {
            let tokens = work.tokens as usize;
            self.transit.rows.reserve(tokens * row, rank)?;
            self.transit.scales.reserve(tokens * scales, rank)?;
        }
        if work.known == 0 {
            self.expert_scratch.routing.reserve(work, (rank, side.world))?;
        }
        self.ready_call(side, most, false)
    }

    /// # Safety
    ///
    /// You must keep the promises of [`Self::dispatch_over_hosts`]. The memory for the call is ready.
    unsafe fn run_dispatch(
        &mut self,
        side: &RankSide<'_>,
        ready: ReadyCall,
        scratch: &mut ExpertScratch,
    ) -> Result<()> {
        let (call, work, world) = (side.call, &side.call.work, side.world);
        let ReadyCall { most, mut table, mut lists } = ready;
        let is_new = work.known == 0;
        if is_new {
            // SAFETY: the caller promised that the ids are aligned and readable for the tokens.
            unsafe { scratch.routing.read(work, world) };
            table.announce(&scratch.routing);
            self.fill_lists(side, &mut lists, |at| scratch.routing.positions[at]);
        } else {
            let by_expert = side.handle.head.get(RoutingHandle::BY_EXPERT);
            table.announce_known(|rank| side.handle.bases.get(rank), by_expert as u32);
            self.fill_lists(side, &mut lists, |at| side.handle.positions.get(at));
        }
        lists.all().iter().enumerate().for_each(|(host, list)| table.list(host, list.len()));
        let description = CallDescription::new(OpType::ExpertDispatch);
        let description = description.experts(&call.shape, call.mode).output(call.region);
        let mut rows =
            SentRow { row: work.input as *const u8, scales: work.input_scales as *const u8 };
        self.exchange_table(description, &mut table, |engine| {
            if side.quantization() != ExpertQuantization::None {
                engine.timed(Phase::Before, |engine| {
                    // SAFETY: the caller promised that the tokens are readable; memory for what is made of them is reserved.
                    rows = unsafe { engine.quantized_rows(side, scratch) };
                });
            }
        })?;
        let routed = if is_new { side.keep_routing(&scratch.routing, &table) } else { Ok(()) };
        let ids = &scratch.routing.ids;
        let sending = Sending { side, table: &table, lists: lists.all(), ids, rows, most };
        // SAFETY: all ranks are in this call, so nobody uses what the last one left in the region.
        unsafe { self.send_chunks(&sending) }?;
        self.meet_inside(&description)?;
        self.timed(Phase::After, |_| {
            if is_new {
                // SAFETY: all rows that this rank receives are there.
                unsafe { side.keep_received() };
            }
            if call.mode.by_expert {
                if is_new {
                    // SAFETY: all rows that this rank receives are there, and those of each expert are counted.
                    unsafe { side.place_by_expert() };
                }
                // SAFETY: all rows that this rank receives are there; the caller promised the output for its capacity.
                unsafe { side.expand() };
            }
        });
        let fits = if call.mode.by_expert { table.check_room(call) } else { Ok(()) };
        routed.and(fits).map_err(|why| {
            // All ranks find the same in the table.
            self.agreement.is_shared = true;
            match why.ranks() {
                &[rank] => why.context(format!("rank {rank} on host {}", self.host_name(rank))),
                _ => why,
            }
        })
    }

    /// Quantises the rows of this rank's tokens.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::run_dispatch`].
    unsafe fn quantized_rows(
        &mut self,
        side: &RankSide<'_>,
        scratch: &mut ExpertScratch,
    ) -> SentRow {
        let (work, shape) = (&side.call.work, &side.call.shape);
        let how = side.quantization();
        let ExpertScratch { row, bytes, scales, .. } = scratch;
        let rows = ExpertRows::new(shape.dtype, shape.hidden);
        let (to, to_scales) = (self.transit.rows.at(), self.transit.scales.at());
        for token in 0..work.tokens as usize {
            let input = (work.input as *const u8).wrapping_add(token * shape.row_bytes());
            // SAFETY: the caller promised that the input is readable and aligned for all tokens.
            unsafe { rows.quantize(input, how, (row, bytes, scales)) };
            for (from, to) in [(&*bytes, to), (&*scales, to_scales)] {
                let to = to.wrapping_add(token * from.len());
                // SAFETY: the memory has room for the rows and scales of all tokens.
                unsafe { from.as_ptr().copy_to_nonoverlapping(to, from.len()) };
            }
        }
        SentRow { row: to.cast_const(), scales: to_scales.cast_const() }
    }

    /// Sends chunks to the other hosts, and writes what arrives and this rank's own rows into the memory of this host's ranks.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::run_dispatch`], after the agreement.
    unsafe fn send_chunks(&mut self, sending: &Sending<'_>) -> Result<()> {
        let longest = sending.table.longest_list(|rank| self.ranks.hosts.of(rank) as usize);
        let chunks = longest.div_ceil(sending.most);
        let mut forwarded = self.forwarded(sending);
        self.in_chunks(
            chunks,
            &mut forwarded,
            // SAFETY: the caller promised that the rows are readable; the chunk that had this memory has ended.
            |engine, _, chunk| unsafe { engine.begin_token_chunk(sending, chunk) },
            // SAFETY: all ranks of the host are in this call.
            |engine| unsafe { engine.write_own(sending) },
            // SAFETY: all ranks of the host are in this call, and the chunk is there.
            |engine, forwarded, chunk| unsafe { engine.forward_chunk(sending, chunk, forwarded) },
        )
    }

    /// Layout of a chunk's part for a host, or from a rank of another one.
    fn chunk_layout(&self, sending: &Sending<'_>, host: usize, source: u32) -> TokenChunkLayout {
        let work = &sending.side.call.work;
        let top_k = if work.known == 0 { work.top_k as usize } else { 0 };
        let weights = if sending.table.has_weights(source) { top_k } else { 0 };
        TokenChunkLayout {
            row: work.row_bytes as usize,
            scales: work.scale_bytes as usize,
            entry: EntryLayout::new(self.ranks.ranks_on(host), top_k, weights),
        }
    }

    /// Packs a chunk, and begins to send it.
    ///
    /// # Safety
    ///
    /// The rows are readable, and nobody uses the chunk's memory.
    unsafe fn begin_token_chunk(&mut self, sending: &Sending<'_>, chunk: usize) -> Result<Ticket> {
        let route = self.forwarding.route;
        let (me, here, turn) = (self.ranks.rank, self.ranks.host as usize, chunk & 1);
        let mut send = vec![0; self.width(route)];
        let mut receive = send.clone();
        let (leaving, arriving) =
            (self.transit.leaving[turn].at(), self.transit.arriving[turn].at());
        let mut to = leaving;
        let began = self.clock.begin();
        for (place, host) in &self.forwarding.outgoing {
            let layout = self.chunk_layout(sending, *host, me);
            let tokens = part(&sending.lists[*host], chunk, sending.most);
            // SAFETY: the memory has room for a part of so many tokens for each host.
            unsafe { self.pack(sending, (*host, tokens), layout, to) };
            send[*place] = layout.bytes(tokens.len());
            to = to.wrapping_add(send[*place]);
        }
        self.clock.end(Phase::Before, began);
        for (place, source) in &self.forwarding.incoming {
            let listed = sending.table.listed(*source, here);
            let tokens = listed.saturating_sub(chunk * sending.most).min(sending.most);
            receive[*place] = self.chunk_layout(sending, here, *source).bytes(tokens);
        }
        let transfer =
            Transfer::AllToAll { output: arriving, input: leaving, send: &send, receive: &receive };
        // SAFETY: the memory is the engine's, has room for a chunk of each host and source, and is not touched before the
        // transfer is finished or aborted.
        unsafe { self.begin(route, transfer) }
    }

    /// Copies the rows of tokens for a host, with what belongs to them, to `to`.
    ///
    /// # Safety
    ///
    /// The rows are readable, and `to` has room.
    unsafe fn pack(
        &self,
        sending: &Sending<'_>,
        (host, tokens): (usize, &[u32]),
        layout: TokenChunkLayout,
        to: *mut u8,
    ) {
        let (side, work) = (sending.side, &sending.side.call.work);
        let there = self.ranks.hosts.ranks(host as u32);
        let scales = to.wrapping_add(tokens.len() * layout.row);
        let entries = scales.wrapping_add(tokens.len() * layout.scales);
        let bytes = layout.entry.bytes();
        for (nth, token) in tokens.iter().enumerate() {
            let at = *token as usize;
            let from = sending.rows.row.wrapping_add(at * layout.row);
            // SAFETY: the caller promised that the row is readable and that there is room.
            unsafe { copy(from, to.wrapping_add(nth * layout.row), layout.row) };
            let from = sending.rows.scales.wrapping_add(at * layout.scales);
            let place = scales.wrapping_add(nth * layout.scales);
            // SAFETY: the caller promised that the scales are readable and that there is room.
            unsafe { copy(from, place, layout.scales) };
            // SAFETY: the caller promised that weights, if there are any, are readable for the tokens.
            let routed = (work.known == 0).then(|| unsafe { side.routed(at, sending.ids) });
            // SAFETY: the caller promised that there is room for the entries, which nobody else uses.
            let entry =
                unsafe { std::slice::from_raw_parts_mut(entries.wrapping_add(nth * bytes), bytes) };
            let goes = |slot: usize| {
                there.get(slot).is_some_and(|rank| {
                    let at = at * side.world as usize + *rank as usize;
                    let position = side.handle.positions.get(at);
                    side.handle.row_at(*rank as usize, position, work.capacity).is_some()
                })
            };
            let parts = routed
                .as_ref()
                .map_or((&[][..], &[][..]), |found| (&found.ids[..], &found.weights[..]));
            layout.entry.write(entry, *token, goes, parts);
        }
    }

    /// Writes the rows of this rank's tokens into the memory of the ranks of its host.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::dispatch_over_hosts`]. All ranks of the host are in this call.
    unsafe fn write_own(&self, sending: &Sending<'_>) {
        let (side, work) = (sending.side, &sending.side.call.work);
        let (row, scales) = (work.row_bytes as usize, work.scale_bytes as usize);
        for token in 0..work.tokens as usize {
            let mut routed: Option<RoutedToken> = None;
            for (slot, rank) in (0..).zip(self.ranks.hosts.here(self.ranks.rank)) {
                let at = token * side.world as usize + *rank as usize;
                let position = side.handle.positions.get(at);
                let found = side.handle.row_at(*rank as usize, position, work.capacity);
                let Some(at) = found else { continue };
                if work.known == 0 && routed.is_none() {
                    // SAFETY: the caller promised that weights, if there are any, are readable for the tokens.
                    routed = Some(unsafe { side.routed(token, sending.ids) });
                }
                let sent = SentRow {
                    row: sending.rows.row.wrapping_add(token * row),
                    scales: sending.rows.scales.wrapping_add(token * scales),
                };
                // SAFETY: the row is this rank's to write, and is within the capacity. The caller promised that the token's data is
                // readable, and that all ranks of the host are in this call.
                unsafe { side.write_row((slot, *rank), at, sent, routed.as_ref()) };
            }
        }
    }

    /// Where the rows of each source begin that this rank forwards.
    fn forwarded(&self, sending: &Sending<'_>) -> Forwarded {
        let (table, work) = (sending.table, &sending.side.call.work);
        let there = self.ranks.hosts.here(self.ranks.rank);
        let begin = |source: u32, rank: u32| match work.known {
            0 => (0..source).map(|from| u64::from(table.to_rank(from, rank))).sum(),
            _ => u64::from(table.to_rank(source, rank)),
        };
        let of_source = |source: u32| there.iter().map(|rank| begin(source, *rank)).collect();
        let incoming = &self.forwarding.incoming;
        Forwarded {
            begins: incoming.iter().map(|(_, source)| of_source(*source)).collect(),
            counts: vec![vec![0; there.len()]; incoming.len()],
        }
    }

    /// Writes the rows of a chunk that has arrived into the memory of the ranks of this host.
    ///
    /// # Safety
    ///
    /// All ranks of the host are in this call, and the chunk is there.
    unsafe fn forward_chunk(
        &mut self,
        sending: &Sending<'_>,
        chunk: usize,
        forwarded: &mut Forwarded,
    ) {
        let (side, work) = (sending.side, &sending.side.call.work);
        let here = self.ranks.host as usize;
        let mut part = self.transit.arriving[chunk & 1].at().cast_const();
        for (nth, (_, source)) in self.forwarding.incoming.iter().enumerate() {
            let layout = self.chunk_layout(sending, here, *source);
            let listed = sending.table.listed(*source, here);
            let tokens = listed.saturating_sub(chunk * sending.most).min(sending.most);
            let scales = part.wrapping_add(tokens * layout.row);
            let entries = scales.wrapping_add(tokens * layout.scales);
            // SAFETY: the chunk has arrived, with an entry for each token.
            let entries =
                unsafe { std::slice::from_raw_parts(entries, tokens * layout.entry.bytes()) };
            let (begins, counts) = (&forwarded.begins[nth], &mut forwarded.counts[nth]);
            for at in 0..tokens {
                let entry = layout.entry.entry(entries, at);
                let routed = (work.known == 0).then(|| entry.routed(work.experts));
                let sent = SentRow {
                    row: part.wrapping_add(at * layout.row),
                    scales: scales.wrapping_add(at * layout.scales),
                };
                for (slot, rank) in (0..).zip(self.ranks.hosts.here(self.ranks.rank)) {
                    if !entry.goes_to(slot) {
                        continue;
                    }
                    let row = begins[slot] + counts[slot];
                    counts[slot] += 1;
                    if row < work.capacity {
                        let to = (slot as u32, *rank);
                        // SAFETY: the row is the source's, for which this rank writes it, and is within the capacity. The caller
                        // promised that the chunk is there, and that all ranks of the host are in this call.
                        unsafe { side.write_row(to, row as usize, sent, routed.as_ref()) };
                    }
                }
            }
            part = part.wrapping_add(layout.bytes(tokens));
        }
    }
}

/// A chunk's part of a list.
fn part(list: &[u32], chunk: usize, most: usize) -> &[u32] {
    let begin = (chunk * most).min(list.len());
    &list[begin..(begin + most).min(list.len())]
}
