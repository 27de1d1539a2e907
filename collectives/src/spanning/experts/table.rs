//! Table that ranks fill with the agreement on a call of experts: how many rows go where, and what is wrong.

#![allow(unsafe_code)] // hands its rows to a collective by address

use symmpool_allocator::{Error, Result, Stream};

use super::token_list::with_room;
use crate::algorithm::StandardCollective;
use crate::call::experts::ExpertCall;
use crate::call::{Arguments, CallDescription};
use crate::host::experts::{
    Announced, BadId, Routing, no_output_room, output_room, rows_by_expert,
};
use crate::spanning::state::SpanningEngine;
use crate::types::place::Place;
use crate::{DType, ReduceOp};

/// Words of a rank's row before those by host, by rank and by expert. `BAD_ID` takes two.
const TOKENS: usize = 0;
const BAD_TOKEN: usize = 1;
const BAD_ID: usize = 2;
const ROOM: usize = 4;
const NEEDED: usize = 5;
const ALIGNMENT: usize = 6;
const FLAGS: usize = 7;
const HEAD: usize = 8;
const HAS_WEIGHTS: u32 = 1;
const IS_PACKED: u32 = 2;
/// The most words by which a rank says in a combine which ranks its tokens go to. More would be many bytes where a rank has few
/// tokens in a buffer for many.
const MAX_TOLD: usize = 256;

/// A row for each rank, of which this rank writes its own.
pub(super) struct CallTable {
    words: Vec<u32>,
    /// Words of a row.
    each: usize,
    hosts: usize,
    world: usize,
    rank: usize,
    /// Where the bits are of the tokens' ranks, and how many words they have.
    told: usize,
    told_words: usize,
}

impl CallTable {
    /// A table in which only this rank's row is to be written. In a combine that is not given weights it has room for the ranks of
    /// all tokens, as far as these are few.
    ///
    /// # Errors
    ///
    /// `is_out_of_memory` where there is no memory.
    pub(super) fn new(engine: &SpanningEngine, call: &ExpertCall, combines: bool) -> Result<Self> {
        let (hosts, world) = (engine.ranks.host_count(), engine.ranks.world());
        let experts = if call.mode.by_expert { call.shape.experts as usize } else { 0 };
        let told = HEAD + hosts + world + experts;
        let told_words = match call.shape.max_tokens.saturating_mul(world).div_ceil(32) {
            words @ ..=MAX_TOLD if combines && !call.mode.weights => words,
            _ => 0,
        };
        let (each, rank) = (told + told_words, engine.ranks.rank);
        let mut words = with_room(world * each, rank, "counts of all ranks")?;
        words.resize(world * each, 0);
        let rank = rank as usize;
        let mut table = Self { words, each, hosts, world, rank, told, told_words };
        let work = &call.work;
        let mut flags = 0;
        if work.weights != 0 {
            flags |= HAS_WEIGHTS;
        }
        if work.expert_rows != 0 {
            flags |= IS_PACKED;
        }
        let room = output_room(work).min(u64::from(u32::MAX)) as u32;
        for (at, value) in [
            (TOKENS, work.tokens),
            (BAD_TOKEN, u32::MAX),
            (ROOM, room),
            (ALIGNMENT, work.alignment),
            (FLAGS, flags),
        ] {
            table.own()[at] = value;
        }
        Ok(table)
    }

    fn own(&mut self) -> &mut [u32] {
        &mut self.words[self.rank * self.each..][..self.each]
    }

    fn word(&self, rank: u32, at: usize) -> u32 {
        self.words[rank as usize * self.each + at]
    }

    /// Announces how many tokens go to a host.
    pub(super) fn list(&mut self, host: usize, tokens: usize) {
        self.own()[HEAD + host] = tokens as u32;
    }

    /// Announces a new routing: rows to each rank, and of each expert.
    pub(super) fn announce(&mut self, routing: &Routing) {
        let (hosts, world, told_words) = (self.hosts, self.world, self.told_words);
        let own = self.own();
        if let Some(BadId { token, id }) = routing.bad {
            own[BAD_TOKEN] = token;
            own[BAD_ID] = id as u64 as u32;
            own[BAD_ID + 1] = (id as u64 >> 32) as u32;
        }
        let (to_ranks, of_experts) = own[HEAD + hosts..].split_at_mut(world);
        debug_assert!(told_words == 0, "a routing is new in dispatches alone");
        to_ranks.copy_from_slice(&routing.counts);
        if of_experts.is_empty() {
            return;
        }
        for id in &routing.ids {
            if let Some(count) = usize::try_from(*id).ok().and_then(|id| of_experts.get_mut(id)) {
                *count += 1;
            }
        }
    }

    /// Announces a routing that a handle has: where this rank's rows begin on each rank, and how many rows by expert come here.
    pub(super) fn announce_known(&mut self, begin: impl Fn(usize) -> i32, by_expert: u32) {
        let (hosts, world) = (self.hosts, self.world);
        let own = self.own();
        own[NEEDED] = by_expert;
        for to in 0..world {
            own[HEAD + hosts + to] = begin(to).max(0) as u32;
        }
    }

    /// Whether the table says which ranks each token goes to.
    pub(super) fn tells_ranks(&self) -> bool {
        self.told_words > 0
    }

    /// Announces that a token of this rank has a row on another one: bit `token * world + rank`.
    pub(super) fn tell_rank(&mut self, at: usize) {
        let begin = self.told;
        self.own()[begin + at / 32] |= 1 << (at % 32);
    }

    /// Whether a token of a rank has a row on another one.
    pub(super) fn goes(&self, from: u32, token: usize, rank: u32) -> bool {
        let at = token * self.world + rank as usize;
        self.word(from, self.told + at / 32) >> (at % 32) & 1 != 0
    }

    /// Tokens that a rank has for a host.
    pub(super) fn listed(&self, rank: u32, host: usize) -> usize {
        self.word(rank, HEAD + host) as usize
    }

    /// Rows to a rank, or where rows of a known routing begin there.
    pub(super) fn to_rank(&self, from: u32, to: u32) -> u32 {
        self.word(from, HEAD + self.hosts + to as usize)
    }

    pub(super) fn has_weights(&self, rank: u32) -> bool {
        self.word(rank, FLAGS) & HAS_WEIGHTS != 0
    }

    /// The most tokens that any rank has.
    pub(super) fn max_tokens(&self) -> usize {
        (0..self.world as u32).map(|rank| self.word(rank, TOKENS) as usize).max().unwrap_or(0)
    }

    /// The most tokens that any rank has for another host. `home` is the host of a rank.
    pub(super) fn longest_list(&self, home: impl Fn(u32) -> usize) -> usize {
        let ranks = 0..self.world as u32;
        let lists = ranks.flat_map(|rank| (0..self.hosts).map(move |host| (rank, host)));
        lists
            .filter(|(rank, host)| home(*rank) != *host)
            .map(|(rank, host)| self.listed(rank, host))
            .max()
            .unwrap_or(0)
    }

    /// The error of the lowest rank whose output by expert has no room for all rows, the same on every rank.
    pub(super) fn check_room(&self, call: &ExpertCall) -> Result<()> {
        let (work, local) = (&call.work, call.shape.experts as usize / self.world);
        for rank in 0..self.world as u32 {
            let is_packed = self.word(rank, FLAGS) & IS_PACKED != 0;
            let room = u64::from(self.word(rank, ROOM));
            let needed = if work.known != 0 {
                u64::from(self.word(rank, NEEDED))
            } else {
                let first = rank as usize * local;
                let count = |expert: usize| -> u64 {
                    let at = HEAD + self.hosts + self.world + expert;
                    (0..self.world as u32).map(|from| u64::from(self.word(from, at))).sum()
                };
                let counts: Vec<u64> = (first..first + local).map(count).collect();
                let of_each = if is_packed { room } else { 0 };
                rows_by_expert(&counts, of_each, self.word(rank, ALIGNMENT).max(1)).1
            };
            if needed > room {
                return Err(no_output_room(rank, needed, room, is_packed));
            }
        }
        Ok(())
    }
}

impl Announced for CallTable {
    fn tokens(&self, rank: u32) -> u32 {
        self.word(rank, TOKENS)
    }

    fn bad_id(&self, rank: u32) -> Option<BadId> {
        let token = self.word(rank, BAD_TOKEN);
        let [low, high] = [BAD_ID, BAD_ID + 1].map(|at| u64::from(self.word(rank, at)));
        (token != u32::MAX).then_some(BadId { token, id: (low | high << 32) as i64 })
    }

    fn rows(&self, from: u32, to: u32) -> u64 {
        u64::from(self.to_rank(from, to))
    }
}

impl SpanningEngine {
    /// Agrees on a call, and fills the rows of all ranks. `meanwhile` runs once all ranks of this host have come, while the hosts
    /// agree: what it has written to the host's ranks is there when this returns on them. It must write no result.
    pub(super) fn exchange_table(
        &mut self,
        call: CallDescription,
        table: &mut CallTable,
        meanwhile: impl FnOnce(&mut Self),
    ) -> Result<()> {
        let mut own = table.own().to_vec();
        let place = |at: *mut u32| Place::Unregistered(at.cast());
        let given = Arguments {
            input: place(own.as_mut_ptr()),
            output: place(table.words.as_mut_ptr()),
            count: own.len() * size_of::<u32>(),
            dtype: DType::U8,
            op: ReduceOp::Sum,
            root: 0,
        };
        let made = match self.by_leaders(StandardCollective::AllGather, &given) {
            // SAFETY: both are this function's alone, as long as the call needs, and live until it has returned.
            Some(plan) => unsafe { self.run_by_leaders(call, &plan, meanwhile) },
            None => self.enter(call, |_| ()).and_then(|()| self.announce()).and_then(|()| {
                meanwhile(self);
                self.settle()?;
                // SAFETY: both are this function's alone, as long as the call needs, and live until it has returned or ended its
                // transfers.
                unsafe { self.all_gather(&given, &Stream::DEFAULT) }
            }),
        };
        made.map_err(|why: Error| self.behind_transfers(why))
    }
}
