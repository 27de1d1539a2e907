//! Combine: rows come back to the rank that forwarded their tokens, and their sums to the tokens' own rank.

#![allow(unsafe_code)] // reads and writes memory by address

use symmpool_allocator::{Result, Stream};

use super::steps::ReadyCall;
use super::table::CallTable;
use super::token_list::EntryLayout;
use crate::call::experts::ExpertCall;
use crate::call::{CallDescription, OpType};
use crate::host::experts::{Announced, ExpertScratch, Numbers, RankSide, given_weights};
use crate::host::kernels::ExpertRows;
use crate::outer::{Ticket, Transfer};
use crate::spanning::phases::Phase;
use crate::spanning::state::SpanningEngine;

/// Rows that a combine gives back.
#[derive(Clone, Copy)]
struct GivenRows<'a> {
    side: &'a RankSide<'a>,
    /// How many rows were received. It is read once.
    received: usize,
    /// Weights of rows by expert.
    weights: Numbers<f32>,
}

impl GivenRows<'_> {
    /// Rows that this rank has received of another one's tokens.
    fn of(&self, source: u32) -> std::ops::Range<usize> {
        let offset = |index: u32| {
            let found = self.side.handle.source_offsets.get(index as usize);
            (found.max(0) as usize).min(self.received)
        };
        offset(source)..offset(source + 1)
    }
}

/// A combine on its way.
struct Returning<'a> {
    side: &'a RankSide<'a>,
    rows: GivenRows<'a>,
    table: &'a CallTable,
    /// Tokens that have rows on each host.
    lists: &'a [Vec<u32>],
    /// Tokens of a chunk: chunks are ranges of a rank's tokens.
    most: usize,
}

/// Place among the entries of a rank whose tokens this one forwards.
struct Cursor {
    /// Entries of the rank's tokens.
    entries: *const u8,
    count: usize,
    next: usize,
    /// Rows of each slot so far.
    rows: Vec<usize>,
}

/// Sums on their way: of a row of this rank, and of a token's rows.
struct Sums<'a> {
    own: ExpertRows,
    token: ExpertRows,
    /// Room for a row of this rank.
    row: &'a mut [f32],
}

impl<'a> Sums<'a> {
    fn new(call: &ExpertCall, scratch: &'a mut ExpertScratch) -> Self {
        scratch.own.resize(call.shape.hidden, 0.0);
        let rows = || ExpertRows::new(call.shape.dtype, call.shape.hidden);
        Self { own: rows(), token: rows(), row: &mut scratch.own }
    }
}

impl SpanningEngine {
    /// Sends rows back, and sums up the rows of each token.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Engine::combine`](crate::engine::Engine::combine).
    pub(in crate::spanning) unsafe fn combine_over_hosts(
        &mut self,
        call: &ExpertCall,
    ) -> Result<()> {
        let (rank, world) = (self.ranks.rank, self.ranks.hosts.world());
        // SAFETY: the caller promised the handle and the buffer's region.
        let side = &unsafe { RankSide::new(call, (rank, world), self.staging.layout()) };
        let ready = side
            .refusal(Some((call.mode.by_expert, call.work.input_rows)))
            .and_then(|()| self.reserve_for_combine(side));
        self.call_with_scratch(ready, |engine, ready, scratch| {
            // SAFETY: the caller promised what `combine` asks; the memory is ready.
            unsafe { engine.run_combine(side, ready, scratch) }
        })
    }

    /// Takes the memory for rows on their way, before other ranks count on this one.
    fn reserve_for_combine(&mut self, side: &RankSide<'_>) -> Result<ReadyCall> {
        let (shape, rank) = (&side.call.shape, side.rank);
        let row = shape.row_bytes();
        let most = self.chunk_tokens(row, side);
        let weights = if side.call.mode.weights { shape.top_k as usize } else { 0 };
        let entry = EntryLayout::new(self.ranks.hosts.max_ranks() as usize, 0, weights).bytes();
        let (others, sources) = (self.forwarding.outgoing.len(), self.forwarding.incoming.len());
        for turn in 0..2 {
            self.transit.leaving[turn].reserve(sources * most * row, rank)?;
            self.transit.arriving[turn].reserve(others * most * row, rank)?;
        }
        self.transit.told.reserve(others * side.call.work.tokens as usize * entry, rank)?;
        self.transit.heard.reserve(sources * shape.max_tokens * entry, rank)?;
        self.ready_call(side, most, true)
    }

    /// # Safety
    ///
    /// You must keep the promises of [`Self::combine_over_hosts`]. The memory for the call is ready.
    unsafe fn run_combine(
        &mut self,
        side: &RankSide<'_>,
        ready: ReadyCall,
        scratch: &mut ExpertScratch,
    ) -> Result<()> {
        let (call, ReadyCall { most, mut table, mut lists }) = (side.call, ready);
        table.announce_known(|rank| side.handle.bases.get(rank), 0);
        let tells_ranks = table.tells_ranks();
        self.fill_lists(side, &mut lists, |at| {
            let position = side.handle.positions.get(at);
            if tells_ranks && position >= 0 {
                table.tell_rank(at);
            }
            position
        });
        lists.all().iter().enumerate().for_each(|(host, list)| table.list(host, list.len()));
        let description = CallDescription::new(OpType::ExpertCombine);
        let description = description.experts(&call.shape, call.mode).output(call.region);
        let mut sums = Sums::new(call, scratch);
        let received = side.handle.received(call.work.capacity);
        let mut rows = GivenRows { side, received, weights: side.handle.weights };
        let weighs = call.mode.weights;
        self.exchange_table(description, &mut table, |engine| {
            if !weighs {
                // SAFETY: all ranks of the host are in this call, so none of them uses what the last one left in the region, which
                // only they do.
                engine.timed(Phase::Before, |engine| unsafe {
                    engine.send_back(rows, &mut sums.own);
                });
            }
        })?;
        let returning = |rows| Returning { side, rows, table: &table, lists: lists.all(), most };
        if tells_ranks {
            // SAFETY: there is memory for the entries, which no transfer uses.
            unsafe { self.take_entries(&returning(rows)) };
        } else {
            // SAFETY: the caller promised that weights are readable; memory for the entries is reserved.
            unsafe { self.tell_entries(&returning(rows)) }?;
        }
        if weighs {
            // SAFETY: all ranks are in this call, so nobody uses what the last one left in the region; the entries are there.
            self.timed(Phase::Before, |engine| unsafe { engine.send_weights(&returning(rows)) });
            self.meet_inside(&description)?;
            // SAFETY: all ranks of the host have written the weights of this rank's rows.
            rows.weights = unsafe { side.given_weights(received) };
            self.timed(Phase::Before, |engine| {
                // SAFETY: all ranks are in this call, so nobody uses what the last one left in the region.
                unsafe { engine.send_back(rows, &mut sums.own) };
            });
            self.meet_inside(&description)?;
        }
        // SAFETY: all rows of the host's ranks have come back, and the entries are there.
        unsafe { self.sum_chunks(&returning(rows), &mut sums) }
    }

    /// Entries of tokens for a host, or of a rank of another one.
    fn entries(&self, returning: &Returning<'_>, host: usize) -> EntryLayout {
        let call = returning.side.call;
        let weights = if call.mode.weights { call.shape.top_k as usize } else { 0 };
        EntryLayout::new(self.ranks.ranks_on(host), 0, weights)
    }

    /// Makes the entries of the tokens that this rank forwarded, of what the table says.
    ///
    /// # Safety
    ///
    /// There is memory for all entries, which nobody else uses.
    unsafe fn take_entries(&mut self, returning: &Returning<'_>) {
        let here = self.ranks.host as usize;
        let there = self.ranks.hosts.here(self.ranks.rank);
        let layout = self.entries(returning, here);
        let (table, max_tokens) = (returning.table, returning.side.call.shape.max_tokens);
        let mut at = self.transit.heard.at();
        for (_, source) in &self.forwarding.incoming {
            let tokens = 0..(table.tokens(*source) as usize).min(max_tokens);
            let goes = |token: usize, slot: usize| {
                there.get(slot).is_some_and(|rank| table.goes(*source, token, *rank))
            };
            let listed = tokens.filter(|token| (0..there.len()).any(|slot| goes(*token, slot)));
            for token in listed {
                // SAFETY: there is memory for the entries of all tokens of each source, which nobody else uses.
                let entry = unsafe { std::slice::from_raw_parts_mut(at, layout.bytes()) };
                layout.write(entry, token as u32, |slot| goes(token, slot), (&[], &[]));
                at = at.wrapping_add(layout.bytes());
            }
        }
    }

    /// Tells the ranks that forwarded this rank's tokens which these were, and what weights they have. There is nothing to tell where
    /// no rank has any.
    ///
    /// # Safety
    ///
    /// The weights, if there are any, are readable, and there is memory for all entries.
    unsafe fn tell_entries(&mut self, returning: &Returning<'_>) -> Result<()> {
        let (side, work) = (returning.side, &returning.side.call.work);
        if returning.table.longest_list(|rank| self.ranks.hosts.of(rank) as usize) == 0 {
            return Ok(());
        }
        let route = self.forwarding.route;
        let here = self.ranks.host as usize;
        let (told, heard) = (self.transit.told.at(), self.transit.heard.at());
        let mut send = vec![0; self.width(route)];
        let mut receive = send.clone();
        let mut to = told;
        let top_k = work.top_k as usize;
        // SAFETY: the caller promised that weights, if there are any, are readable for the tokens.
        let given = unsafe { given_weights(work) };
        let mut weights = vec![0.0; top_k];
        for (place, host) in &self.forwarding.outgoing {
            let layout = self.entries(returning, *host);
            let there = self.ranks.hosts.ranks(*host as u32);
            let list = &returning.lists[*host];
            for (nth, token) in list.iter().enumerate() {
                let at = to.wrapping_add(nth * layout.bytes());
                // SAFETY: there is memory for the entries of all tokens for each host, which nobody else uses.
                let entry = unsafe { std::slice::from_raw_parts_mut(at, layout.bytes()) };
                let goes = |slot: usize| {
                    there.get(slot).is_some_and(|rank| {
                        let at = *token as usize * side.world as usize + *rank as usize;
                        side.handle.positions.get(at) >= 0
                    })
                };
                if let Some(given) = given {
                    (0..top_k).for_each(|k| weights[k] = given.get(*token as usize * top_k + k));
                }
                layout.write(entry, *token, goes, (&[], &weights));
            }
            send[*place] = list.len() * layout.bytes();
            to = to.wrapping_add(send[*place]);
        }
        let layout = self.entries(returning, here);
        for (place, source) in &self.forwarding.incoming {
            let count = returning.table.listed(*source, here).min(side.call.shape.max_tokens);
            receive[*place] = count * layout.bytes();
        }
        let transfer =
            Transfer::AllToAll { output: heard, input: told, send: &send, receive: &receive };
        // SAFETY: the memory is the engine's, has room for these bytes, and is not touched before the transfer is finished or
        // aborted.
        unsafe { self.transfer(route, transfer, &Stream::DEFAULT) }
    }

    /// Begins to read the entries that have come.
    fn cursors(&mut self, returning: &Returning<'_>) -> Vec<Cursor> {
        let (here, inside) = (self.ranks.host as usize, self.ranks.local_world());
        let bytes = self.entries(returning, here).bytes();
        let mut at = self.transit.heard.at().cast_const();
        let max_tokens = returning.side.call.shape.max_tokens;
        let cursor = |(_, source): &(usize, u32)| {
            let count = returning.table.listed(*source, here).min(max_tokens);
            let found = Cursor { entries: at, count, next: 0, rows: vec![0; inside] };
            at = at.wrapping_add(count * bytes);
            found
        };
        self.forwarding.incoming.iter().map(cursor).collect()
    }

    /// Sends the weights of tokens to the ranks of this host that have their rows: of this rank's tokens, and of those that it
    /// forwards.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::combine_over_hosts`]. All ranks of the host are in this call, and all entries have come.
    unsafe fn send_weights(&mut self, returning: &Returning<'_>) {
        let (side, work) = (returning.side, &returning.side.call.work);
        let top_k = work.top_k as usize;
        let cursors = self.cursors(returning);
        let layout = self.entries(returning, self.ranks.host as usize);
        let there = self.ranks.hosts.here(self.ranks.rank);
        for (mut cursor, (_, source)) in cursors.into_iter().zip(&self.forwarding.incoming) {
            for nth in 0..cursor.count {
                // SAFETY: the caller promised that the entries have come.
                let all = unsafe {
                    std::slice::from_raw_parts(cursor.entries, cursor.count * layout.bytes())
                };
                let entry = layout.entry(all, nth);
                let weights = entry.routed(0).weights;
                for (slot, rank) in
                    there.iter().enumerate().filter(|(slot, _)| entry.goes_to(*slot))
                {
                    let begin = u64::from(returning.table.to_rank(*source, *rank));
                    let row = begin + cursor.rows[slot] as u64;
                    cursor.rows[slot] += 1;
                    if row < work.capacity {
                        // SAFETY: the row is within the capacity, and of the source, for which this rank writes.
                        let to = unsafe { side.weights_of(slot as u32, row as usize) };
                        (0..top_k).for_each(|k| to.set(k, weights[k]));
                    }
                }
            }
        }
        // SAFETY: the caller promised that weights, if there are any, are readable for the tokens.
        let Some(given) = (unsafe { given_weights(work) }) else { return };
        for token in 0..work.tokens as usize {
            for (slot, rank) in (0..).zip(there) {
                let position =
                    side.handle.positions.get(token * side.world as usize + *rank as usize);
                let found = side.handle.row_at(*rank as usize, position, work.capacity);
                let Some(row) = found else { continue };
                // SAFETY: the row is within the capacity, and this rank's.
                let to = unsafe { side.weights_of(slot, row) };
                (0..top_k).for_each(|k| to.set(k, given.get(token * top_k + k)));
            }
        }
    }

    /// Writes received rows into the memory of the ranks of this host that forwarded their tokens.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::combine_over_hosts`]. All ranks of the host are in this call.
    unsafe fn send_back(&self, rows: GivenRows<'_>, sums: &mut ExpertRows) {
        let GivenRows { side, weights, .. } = rows;
        let (row_bytes, max_tokens) = (side.call.shape.row_bytes(), side.call.shape.max_tokens);
        for source in 0..side.world {
            let to = self.forwarding.slots[source as usize];
            if to == side.slot {
                continue;
            }
            let area = self.forwarding.area(source, side.slot, self.ranks.local_world() as u32);
            let at = side.combined_at(to, area);
            for (index, row) in rows.of(source).take(max_tokens).enumerate() {
                let to = at.wrapping_add(index * row_bytes);
                // SAFETY: the row was received, and its place is that of this rank's row there.
                unsafe { side.write_back(row, weights, sums, to) };
            }
        }
    }

    /// Adds the row that a slot has sent back of a token of `source`, its `index`-th one, to the token's sum.
    ///
    /// # Safety
    ///
    /// All rows of the host's ranks have come back. The sum is stored before this is called for another token.
    unsafe fn add_row(
        &self,
        returning: &Returning<'_>,
        (source, slot, index): (u32, u32, usize),
        sums: &mut Sums<'_>,
    ) {
        let side = returning.side;
        let (row_bytes, max_tokens) = (side.call.shape.row_bytes(), side.call.shape.max_tokens);
        if slot == side.slot {
            let Some(row) = returning.rows.of(source).nth(index) else { return };
            let room = sums.row.as_mut_ptr().cast();
            // SAFETY: the row was received, and a token has one of this rank at most, which `room` holds until the sum is stored.
            let own = unsafe { side.own_row(row, returning.rows.weights, &mut sums.own, room) };
            if let Some(own) = own {
                sums.token.add(own, None);
            }
        } else if index < max_tokens {
            let area = self.forwarding.area(source, slot, self.ranks.local_world() as u32);
            let at = side.combined_at(side.slot, area).wrapping_add(index * row_bytes);
            sums.token.add(at, None);
        }
    }

    /// Sums up what this rank forwarded and sends it on, in chunks, and sums up its own tokens as the sums of other hosts come.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::combine_over_hosts`]. All rows of the host's ranks have come back, and the entries are
    /// there.
    unsafe fn sum_chunks(&mut self, returning: &Returning<'_>, sums: &mut Sums<'_>) -> Result<()> {
        let chunks = returning.table.max_tokens().div_ceil(returning.most);
        let mut state = (self.cursors(returning), sums);
        self.in_chunks(
            chunks,
            &mut state,
            |engine, (cursors, sums), chunk| {
                // SAFETY: the caller promised that the rows and entries are there; the chunk that had this memory has ended.
                unsafe { engine.begin_sums(returning, chunk, cursors, sums) }
            },
            |_| (),
            |engine, (_, sums), chunk| {
                // SAFETY: all sums of the chunk's tokens are there, and the caller promised the rest.
                unsafe { engine.sum_tokens(returning, chunk, sums) };
            },
        )
    }

    /// Sums up the rows of a chunk's tokens that this rank forwarded, and begins to send the sums.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::sum_chunks`], and nobody uses the chunk's memory.
    unsafe fn begin_sums(
        &mut self,
        returning: &Returning<'_>,
        chunk: usize,
        cursors: &mut [Cursor],
        sums: &mut Sums<'_>,
    ) -> Result<Ticket> {
        let side = returning.side;
        let (row_bytes, turn, route) =
            (side.call.shape.row_bytes(), chunk & 1, self.forwarding.route);
        let inside = self.ranks.local_world();
        let layout = self.entries(returning, self.ranks.host as usize);
        let (leaving, arriving) =
            (self.transit.leaving[turn].at(), self.transit.arriving[turn].at());
        let end = (chunk + 1) * returning.most;
        let mut send = vec![0; self.width(route)];
        let mut receive = send.clone();
        let mut to = leaving;
        let began = self.clock.begin();
        for (cursor, (place, source)) in cursors.iter_mut().zip(&self.forwarding.incoming) {
            // SAFETY: the caller promised that the entries are there.
            let all = unsafe {
                std::slice::from_raw_parts(cursor.entries, cursor.count * layout.bytes())
            };
            for _ in 0..returning.most {
                if cursor.next == cursor.count {
                    break;
                }
                let entry = layout.entry(all, cursor.next);
                if entry.token() as usize >= end {
                    break;
                }
                cursor.next += 1;
                for slot in (0..inside).filter(|slot| entry.goes_to(*slot)) {
                    let row = (*source, slot as u32, cursor.rows[slot]);
                    cursor.rows[slot] += 1;
                    // SAFETY: all rows have come back.
                    unsafe { self.add_row(returning, row, sums) };
                }
                // SAFETY: the rows have come back, and there is memory for the most tokens of a chunk, of each source.
                unsafe { sums.token.store(to) };
                to = to.wrapping_add(row_bytes);
                send[*place] += row_bytes;
            }
        }
        self.clock.end(Phase::Before, began);
        for (place, host) in &self.forwarding.outgoing {
            receive[*place] =
                range(&returning.lists[*host], chunk, returning.most).len() * row_bytes;
        }
        let transfer =
            Transfer::AllToAll { output: arriving, input: leaving, send: &send, receive: &receive };
        // SAFETY: the memory is the engine's, has room for these rows, and is not touched before the transfer is finished or
        // aborted.
        unsafe { self.begin(route, transfer) }
    }

    /// Sums up a chunk of this rank's tokens, in the order of hosts.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::sum_chunks`]; the chunk's sums of other hosts have come, and the output is writable.
    unsafe fn sum_tokens(&mut self, returning: &Returning<'_>, chunk: usize, sums: &mut Sums<'_>) {
        let (side, work) = (returning.side, &returning.side.call.work);
        let row_bytes = side.call.shape.row_bytes();
        let (hosts, here) = (self.ranks.host_count(), self.ranks.host as usize);
        // Tokens of each host that are left, and where their sums lie.
        let mut parts: Vec<(&[u32], *const u8)> = vec![(&[], std::ptr::null()); hosts];
        let mut at = self.transit.arriving[chunk & 1].at().cast_const();
        for (_, host) in &self.forwarding.outgoing {
            let tokens = range(&returning.lists[*host], chunk, returning.most);
            parts[*host] = (tokens, at);
            at = at.wrapping_add(tokens.len() * row_bytes);
        }
        let begin = chunk * returning.most;
        for token in begin..(begin + returning.most).min(work.tokens as usize) {
            for (host, (tokens, at)) in parts.iter_mut().enumerate() {
                if host == here {
                    for (slot, rank) in (0..).zip(self.ranks.hosts.here(side.rank)) {
                        let place = token * side.world as usize + *rank as usize;
                        let position = side.handle.positions.get(place);
                        let Ok(index) = usize::try_from(position) else { continue };
                        // SAFETY: all rows have come back.
                        unsafe { self.add_row(returning, (side.rank, slot, index), sums) };
                    }
                } else if tokens.first() == Some(&(token as u32)) {
                    sums.token.add(*at, None);
                    *tokens = &tokens[1..];
                    *at = at.wrapping_add(row_bytes);
                }
                sums.token.end_part();
            }
            let output = (work.output as *mut u8).wrapping_add(token * row_bytes);
            // SAFETY: all rows and sums of the token are there. The caller promised that the output is writable for the tokens.
            unsafe { sums.token.store(output) };
        }
    }
}

/// Part of a list whose tokens are in a chunk's range.
fn range(list: &[u32], chunk: usize, most: usize) -> &[u32] {
    let below = |end: usize| list.partition_point(|token| (*token as usize) < end);
    &list[below(chunk * most)..below((chunk + 1) * most)]
}
