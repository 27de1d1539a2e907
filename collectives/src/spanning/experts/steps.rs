//! Steps that dispatch and combine share.

use symmpool_allocator::Result;

use super::table::CallTable;
use super::token_list::TokenLists;
use crate::call::CallDescription;
use crate::host::experts::{ExpertScratch, RankSide};
use crate::outer::Ticket;
use crate::spanning::phases::Phase;
use crate::spanning::state::SpanningEngine;

/// Bytes of rows that a rank sends in a chunk, about.
const CHUNK_BYTES: usize = 2 << 20;
/// The least tokens of a chunk.
const MIN_CHUNK: usize = 16;

/// Memory of a call that is ready before other ranks count on this one.
pub(super) struct ReadyCall {
    /// Tokens of a chunk.
    pub(super) most: usize,
    pub(super) table: CallTable,
    pub(super) lists: TokenLists,
}

impl SpanningEngine {
    /// Makes a call of experts whose memory is ready, with the engine's scratch.
    pub(super) fn call_with_scratch(
        &mut self,
        ready: Result<ReadyCall>,
        run: impl FnOnce(&mut Self, ReadyCall, &mut ExpertScratch) -> Result<()>,
    ) -> Result<()> {
        let mut scratch = std::mem::take(&mut self.expert_scratch);
        let made = self.call_behind(ready, |engine, ready| run(engine, ready, &mut scratch));
        self.expert_scratch = scratch;
        made
    }

    /// Takes the memory that is not kept for the next call: for the table of counts and the lists of tokens.
    ///
    /// # Errors
    ///
    /// `is_out_of_memory` where there is none.
    pub(super) fn ready_call(
        &self,
        side: &RankSide<'_>,
        most: usize,
        combines: bool,
    ) -> Result<ReadyCall> {
        let table = CallTable::new(self, side.call, combines)?;
        let hosts = (self.ranks.host_count(), self.ranks.host as usize);
        Ok(ReadyCall { most, table, lists: TokenLists::reserve(side, hosts)? })
    }

    /// Lists the tokens that have rows on other hosts. `position` says which row a token is of those for a rank, or -1.
    pub(super) fn fill_lists(
        &self,
        side: &RankSide<'_>,
        lists: &mut TokenLists,
        position: impl FnMut(usize) -> i32,
    ) {
        let home = |rank: usize| self.ranks.hosts.of(rank as u32) as usize;
        lists.fill(side, home, position);
    }

    /// Tokens of a chunk, the same on all ranks.
    pub(super) fn chunk_tokens(&self, row: usize, side: &RankSide<'_>) -> usize {
        let wished = CHUNK_BYTES / (row.max(1) * (self.ranks.host_count() - 1).max(1));
        wished.clamp(MIN_CHUNK, side.call.shape.max_tokens.max(MIN_CHUNK))
    }

    /// Waits for the ranks of this host, in the middle of a call.
    pub(super) fn meet_inside(&mut self, call: &CallDescription) -> Result<()> {
        let met = self.timed(Phase::Meeting, |engine| engine.inner.meet(call));
        met.map_err(|why| self.in_group(why))
    }

    /// Sends chunks to the other hosts, of which one is on its way while the next one is made: `begin` makes a chunk and begins to
    /// send it, and `end` takes what has arrived for it. `meanwhile` runs once the first one is on its way, or at once if there is none.
    pub(super) fn in_chunks<S>(
        &mut self,
        chunks: usize,
        state: &mut S,
        mut begin: impl FnMut(&mut Self, &mut S, usize) -> Result<Ticket>,
        meanwhile: impl FnOnce(&mut Self),
        mut end: impl FnMut(&mut Self, &mut S, usize),
    ) -> Result<()> {
        let mut under_way = match chunks {
            0 => None,
            _ => Some(begin(self, state, 0)?),
        };
        self.timed(Phase::After, meanwhile);
        for chunk in 0..chunks {
            let next = match chunk + 1 {
                next if next < chunks => Some(begin(self, state, next)?),
                _ => None,
            };
            if let Some(ticket) = std::mem::replace(&mut under_way, next) {
                self.finish(self.forwarding.route, ticket)?;
                self.timed(Phase::After, |engine| end(engine, state, chunk));
            }
        }
        Ok(())
    }
}
