//! The state of an engine over hosts, and how its calls begin and end.

#![allow(unsafe_code)] // hands raw buffers to engines

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use symmpool_allocator::{Deadline, Error, Group, Hosts, Pool, Result, Stream};

use super::ranks::{RankTable, Route};
use super::staging::Staging;
use crate::algorithm::{AUTO, StandardCollective};
use crate::call::{Arguments, Call, StandardCall};
use crate::engine::Engine;
use crate::host::Isa;
use crate::outer::{Outers, Ticket, Transfer};
use crate::types::place::Place;
use crate::{DType, ReduceOp};

/// Calls of at least so many bytes are compared with those of other hosts each time, smaller ones every few calls: a
/// comparison is a small message, which would be a good part of a small call.
const COMPARED_BYTES: usize = 64 << 10;
/// How many calls come to one comparison where they are small.
const CALLS_A_COMPARISON: u64 = 16;
/// How long a rank whose transfer has failed waits for the reason of another one.
const REASON_WAIT: Duration = Duration::from_secs(2);
/// How long a rank tries to leave its reason.
const REASON_LEAVE: Duration = Duration::from_secs(2);

/// One rank's side of a communicator that spans hosts.
pub(crate) struct SpanningEngine {
    /// The engine of this host's ranks.
    pub(super) inner: Box<dyn Engine>,
    pub(super) outers: Outers,
    pub(super) ranks: RankTable,
    pub(super) staging: Staging,
    pub(super) isa: Isa,
    pub(super) failed: Arc<OnceLock<Error>>,
    /// Where ranks leave why they stopped, and under which name.
    pub(super) group: Group,
    pub(super) name: String,
    /// Calls so far, which all ranks count alike, and a digest of those since the last comparison.
    pub(super) calls: u64,
    pub(super) digest: u64,
    /// The comparison that is under way.
    pub(super) comparison: Option<Comparison>,
    pub(super) rehearses: bool,
}

/// A comparison of calls that is under way.
pub(super) struct Comparison {
    call: Call,
    route: Route,
    /// This rank's description, and room for those of all ranks of the outer engine.
    own: Vec<u8>,
    all: Vec<u8>,
    ticket: Ticket,
}

impl SpanningEngine {
    /// The engine on a pool that spans hosts, in host memory. Its staging is at `staging` in every slot, [`STAGING_BYTES`](super::STAGING_BYTES)
    /// long, in windows.
    pub(crate) fn new(
        pool: &Pool,
        inner: Box<dyn Engine>,
        outers: Outers,
        staging: u64,
    ) -> Result<Self> {
        let ranks = RankTable::new(pool.hosts(), pool.rank());
        check(&outers, &ranks)?;
        Ok(Self {
            inner,
            outers,
            staging: Staging::new(pool.layout(), staging),
            isa: Isa::detect(),
            failed: Arc::new(OnceLock::new()),
            group: pool.group().clone(),
            name: format!("communicator at offset {staging:#x}"),
            calls: 0,
            digest: 0,
            comparison: None,
            rehearses: false,
            ranks,
        })
    }

    /// Makes a call. Whatever goes wrong ends the communicator on all ranks: hosts do not see each other's steps, so none
    /// knows what others have done.
    pub(super) fn call(
        &mut self,
        call: Call,
        bytes: usize,
        run: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        self.ready()?;
        if self.rehearses {
            return Ok(());
        }
        let made = self.begin_comparison(call, bytes).and_then(|()| run(self));
        // Calls without data have begun no transfer.
        let made = made.and_then(|()| self.finish_comparison());
        made.map_err(|why| self.fail(why))
    }

    pub(super) fn ready(&mut self) -> Result<()> {
        match self.failed.get() {
            Some(why) => Err(why.clone()),
            None => self.inner.ready().map_err(|why| self.in_group(why)),
        }
    }

    /// Begins to compare the call with those of other hosts, by its description and a digest of the small calls before it:
    /// while the phase inside the host is under way.
    fn begin_comparison(&mut self, call: Call, bytes: usize) -> Result<()> {
        self.calls += 1;
        self.digest = self.digest.rotate_left(7) ^ u64::from(call.digest(self.calls));
        if bytes < COMPARED_BYTES && !self.calls.is_multiple_of(CALLS_A_COMPARISON) {
            return Ok(());
        }
        let route = self.route();
        let words = call.words().iter().chain([&self.digest]);
        let own: Vec<u8> = words.flat_map(|word| word.to_le_bytes()).collect();
        self.digest = 0;
        let mut all = vec![0_u8; own.len() * self.width(route)];
        let gather =
            Transfer::AllGather { output: all.as_mut_ptr(), input: own.as_ptr(), bytes: own.len() };
        // SAFETY: both vectors are as long as that, and are kept until the transfer has ended: `finish_comparison` waits for
        // it, and what fails before leaves the comparison where it is.
        let ticket = unsafe { self.begin(route, gather) }?;
        self.comparison = Some(Comparison { call, route, own, all, ticket });
        Ok(())
    }

    /// Waits for the comparison that is under way, if there is one. Nothing leaves the host before.
    pub(super) fn finish_comparison(&mut self) -> Result<()> {
        let Some(Comparison { call, route, ticket, .. }) = self.comparison else { return Ok(()) };
        self.finish(route, ticket)?;
        let Some(Comparison { own, all, .. }) = self.comparison.take() else { return Ok(()) };
        let number = self.calls;
        let differs = |at: &usize| all[at * DESCRIPTION..][..DESCRIPTION] != own;
        let others: Vec<usize> = (0..all.len() / DESCRIPTION).filter(differs).collect();
        if others.is_empty() {
            return Ok(());
        }
        let described: Vec<String> = others
            .iter()
            .map(|&at| {
                let rank = self.rank_on(route, at);
                let word = |nth: usize| {
                    let bytes = &all[at * DESCRIPTION + 8 * nth..][..8];
                    bytes.iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte))
                };
                let theirs = Call::from_words(std::array::from_fn(word));
                let earlier = if theirs == call { ", but another one before it" } else { "" };
                format!("rank {rank} (host {}): {theirs}{earlier}", self.host_name(rank))
            })
            .collect();
        let ranks: Vec<u32> = others.iter().map(|&at| self.rank_on(route, at)).collect();
        let why = Error::mismatch(format!(
            "ranks of different hosts entered different collectives as call {number}:\n  rank {} (host {}): {call}\n  {}\n\
             Every rank must make the same calls in the same order",
            self.ranks.rank,
            self.host_name(self.ranks.rank),
            described.join("\n  ")
        ));
        // All ranks of the outer engine find it alike.
        Err(self.stop(why.naming(ranks), Duration::ZERO))
    }

    /// Ends the communicator on all ranks. Returns why, which is another rank's reason where that came first.
    #[cold]
    pub(super) fn fail(&mut self, why: Error) -> Error {
        // Errors that are not of this rank's own making may be consequences.
        let own = why.is_invalid_argument() || why.is_unsupported() || why.is_out_of_memory();
        self.stop(why, if own { Duration::ZERO } else { REASON_WAIT })
    }

    pub(super) fn stop(&mut self, why: Error, wait: Duration) -> Error {
        if let Some(before) = self.failed.get() {
            return before.clone();
        }
        let found = self.group.found_reason(&self.name, Deadline::after(wait));
        let why = match found.filter(|(rank, _)| *rank != self.ranks.rank) {
            Some((rank, reason)) => reason
                .context(format!(
                    "rank {rank} on host {} ended the call for all hosts",
                    self.host_name(rank)
                ))
                .naming([rank]),
            None => {
                let leave = Deadline::after(REASON_LEAVE);
                if let Err(error) = self.group.leave_reason(&self.name, &why, leave) {
                    tracing::warn!(%error, "the other hosts are not told why a call failed");
                }
                why
            }
        };
        self.inner.decline_and_fail(why.clone(), &Stream::DEFAULT);
        if let Some(rail) = &mut self.outers.rail {
            rail.abort();
        }
        self.outers.flat.abort();
        self.failed
            .get_or_init(|| {
                why.clone().context(format!(
                    "rank {}: this communicator is closed on all hosts; rebuild it",
                    self.ranks.rank
                ))
            })
            .clone()
    }

    /// The error of an engine of this host, with ranks as the group counts them.
    pub(super) fn in_group(&self, error: Error) -> Error {
        let here = self.ranks.hosts.here(self.ranks.rank);
        let numbered = error.renumbered(|index| self.ranks.here(index));
        numbered.context(format!(
            "on host {}, whose ranks from 0 on are ranks {here:?} of the group",
            self.host_name(self.ranks.rank)
        ))
    }

    pub(super) fn host_name(&self, rank: u32) -> &str {
        self.ranks.hosts.name(self.ranks.hosts.of(rank))
    }

    /// A collective inside the host.
    ///
    /// # Safety
    ///
    /// The places are readable or writable for the call's lengths, until it returns on every rank of the host.
    pub(super) unsafe fn inside(
        &mut self,
        collective: StandardCollective,
        (input, output): (Place, Place),
        (count, dtype, op): (usize, DType, ReduceOp),
        root: u32,
    ) -> Result<()> {
        let arguments = Arguments { input, output, count, dtype, op, root };
        let call = StandardCall { collective, algorithm: AUTO, arguments };
        // SAFETY: the caller promised that the places are readable or writable for these lengths until the call returns on
        // every rank of the host.
        let made = unsafe { self.inner.run(&call, &Stream::DEFAULT) };
        made.map_err(|error| self.in_group(error))
    }

    /// Which outer engine calls use.
    pub(super) fn route(&self) -> Route {
        if self.ranks.is_even && self.outers.rail.is_some() { Route::Rail } else { Route::Flat }
    }

    /// Rank in the group of a rank of an outer engine.
    pub(super) fn rank_on(&self, route: Route, at: usize) -> u32 {
        match route {
            Route::Rail if at < self.ranks.host_count() => {
                self.ranks.at(at, self.ranks.index as usize) as u32
            }
            Route::Rail | Route::Flat => at as u32,
        }
    }

    /// Address of a place in this process.
    pub(super) fn address(&self, place: Place) -> *mut u8 {
        match place {
            Place::Unregistered(address) => address,
            Place::Window(offset) => self.staging.address(offset),
        }
    }

    /// The error of a call that reaches the ranks of one host only.
    pub(crate) fn not_across(&self, what: &str) -> Error {
        not_across(what, &self.ranks.hosts, self.ranks.rank)
    }
}

/// The error of a call that reaches the ranks of one host only.
pub(crate) fn not_across(what: &str, hosts: &Hosts, rank: u32) -> Error {
    Error::unsupported(format!(
        "{what} on rank {rank} (host {}): the group's ranks are on {} hosts ({hosts}), and this call reaches the memory of \
         one; make a group of the ranks of one host for it",
        hosts.name(hosts.of(rank)),
        hosts.count()
    ))
}

/// Bytes of a description on its way: the call's words, and the digest.
const DESCRIPTION: usize = 8 * (crate::signal::DESCRIPTION_WORDS + 1);

/// Refuses outer engines that are not those of this rank.
fn check(outers: &Outers, ranks: &RankTable) -> Result<()> {
    let wrong = |what: &str, outer: &dyn crate::outer::Outer, rank: u32, world: u32| {
        ((outer.rank(), outer.world()) != (rank, world)).then(|| {
            Error::invalid_argument(format!(
                "rank {} is rank {} of {} in the {what} outer engine {}, where rank {rank} of {world} is expected",
                ranks.rank,
                outer.rank(),
                outer.world(),
                outer.name()
            ))
        })
    };
    let flat = wrong("flat", &*outers.flat, ranks.rank, ranks.hosts.world());
    let rail = outers.rail.as_ref().and_then(|rail| {
        let hosts = ranks.hosts.count();
        wrong("rail's", &**rail, ranks.host, hosts)
    });
    match (flat.or(rail), &outers.rail) {
        (Some(why), _) => Err(why),
        (None, None) if ranks.is_even && ranks.host_count() > 1 => {
            Err(Error::invalid_argument(format!(
                "rank {} has no outer engine between the ranks of index {} on all {} hosts",
                ranks.rank,
                ranks.index,
                ranks.host_count()
            )))
        }
        (None, _) => Ok(()),
    }
}
