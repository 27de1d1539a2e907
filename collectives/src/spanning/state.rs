//! The state of an engine over hosts, and how its calls begin and end.

#![allow(unsafe_code)] // hands raw buffers to engines

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use symmpool_allocator::{Deadline, Driver, Error, Group, Hosts, Pool, ProcessId, Result, Stream};

use super::call_records::CallRecords;
use super::experts::{ExpertTransit, Forwarding};
use super::host_message::Agreement;
use super::phases::{Phase, PhaseClock};
use super::ranks::{RankTable, Route};
use super::staging::Staging;
use crate::algorithm::{AUTO, StandardCollective};
use crate::call::{Arguments, CallDescription, StandardCall, rank_list};
use crate::cuda::sm_count;
use crate::engine::{Engine, FailureHandle};
use crate::host::Isa;
use crate::host::experts::ExpertScratch;
use crate::outer::{MAX_OUTER_BLOCKS, Outers};
use crate::types::place::Place;
use crate::{DType, PhaseTimes, ReduceOp};

/// How long a rank whose transfer has failed waits for the reason of another one.
const REASON_WAIT: Duration = Duration::from_secs(2);
/// How long a rank tries to leave its reason.
const REASON_LEAVE: Duration = Duration::from_secs(2);

/// Why a communicator fails, and whether its memory may still be in use.
pub(super) struct SpanningFailure {
    why: OnceLock<Error>,
    keeps_memory: AtomicBool,
    /// The engine inside the host, which may use its memory longer.
    inner: Arc<dyn FailureHandle>,
}

impl SpanningFailure {
    pub(super) fn get(&self) -> Option<&Error> {
        self.why.get()
    }
}

impl FailureHandle for SpanningFailure {
    fn get(&self) -> Option<&Error> {
        self.why.get()
    }

    fn leaks(&self) -> bool {
        self.keeps_memory.load(Ordering::Relaxed) || self.inner.leaks()
    }
}

/// One rank's side of a communicator that spans hosts.
pub(crate) struct SpanningEngine {
    /// The engine of this host's ranks.
    pub(super) inner: Box<dyn Engine>,
    pub(super) outers: Outers,
    pub(super) ranks: RankTable,
    pub(super) staging: Staging,
    pub(super) isa: Isa,
    pub(super) failed: Arc<SpanningFailure>,
    /// Where ranks leave why they stopped, and under which name.
    pub(super) group: Group,
    pub(super) name: String,
    /// Agreement of all hosts, before a call's bytes leave one: in host memory.
    pub(super) agreement: Agreement,
    /// The device, if the memory is one's, and records of its calls.
    pub(super) device: Option<Driver>,
    pub(super) records: Option<CallRecords>,
    /// The timeout that the outer engines have.
    limit: Duration,
    pub(super) maker: ProcessId,
    pub(super) rehearses: bool,
    /// Which way the call takes that is rehearsed.
    pub(super) rehearsed: &'static str,
    pub(super) clock: PhaseClock,
    /// How tokens go to experts on other hosts, and memory for that.
    pub(super) forwarding: Forwarding,
    pub(super) transit: ExpertTransit,
    pub(super) expert_scratch: ExpertScratch,
}

impl SpanningEngine {
    /// The engine on a pool that spans hosts. Its staging is at `staging` in every slot, as long as
    /// [`staging_bytes`](super::staging_bytes) says, in windows. The commit with that `number` made these windows: no other
    /// communicator of the pool has it. On a device its calls take no more SMs than `most_sms`.
    pub(crate) fn new(
        pool: &Pool,
        mut inner: Box<dyn Engine>,
        outers: Outers,
        (staging, number): (u64, u64),
        most_sms: Option<u32>,
    ) -> Result<Self> {
        let ranks = RankTable::new(pool.hosts(), pool.rank());
        check(&outers, &ranks)?;
        let hosts = ranks.host_count();
        inner.sleep_soon();
        let forwarding = Forwarding::new(&ranks, outers.rail.is_some());
        let name = format!("communicator of commit {number} at offset {staging:#x}");
        let staging = Staging::new(pool.layout(), staging);
        let device = pool.driver().as_cuda().map(|_| pool.driver().clone());
        let records = match &device {
            Some(device) => {
                inner.set_sm_budget(sms_inside(device, most_sms));
                Some(CallRecords::new(device, ranks.world(), staging.records())?)
            }
            None => None,
        };
        let failed = SpanningFailure {
            why: OnceLock::new(),
            keeps_memory: AtomicBool::new(false),
            inner: inner.failure_handle(),
        };
        Ok(Self {
            inner,
            outers,
            staging,
            isa: Isa::detect(),
            failed: Arc::new(failed),
            device,
            records,
            group: pool.group().clone(),
            name,
            agreement: Agreement::new(hosts),
            limit: Duration::ZERO,
            maker: ProcessId::here(),
            rehearses: false,
            rehearsed: "",
            clock: PhaseClock::default(),
            forwarding,
            transit: ExpertTransit::default(),
            expert_scratch: ExpertScratch::default(),
            ranks,
        })
    }

    /// Makes a call, unless this rank has found its own arguments wrong. A rank that declines it, and ranks that make different
    /// calls, are an error on all ranks of all hosts, and the communicator stays usable. Whatever goes wrong behind that ends
    /// it on all ranks: hosts do not see each other's steps, so none knows what others have done.
    pub(super) fn call<T>(
        &mut self,
        (call, bytes): (CallDescription, u64),
        own: Result<T>,
        stream: &Stream,
        run: impl FnOnce(&mut Self, T) -> Result<()>,
    ) -> Result<()> {
        if self.device.is_some() {
            return self.call_on_device((call, bytes), own, stream, run);
        }
        self.call_behind(own, |engine, own| {
            engine.enter(call, |_| ())?;
            engine.announce()?;
            run(engine, own)?;
            // Calls without data have begun no transfer.
            engine.settle()
        })
    }

    /// Waits until every rank of every host has come to a call without data.
    pub(crate) fn meet_all(&mut self, call: CallDescription, stream: &Stream) -> Result<()> {
        if self.device.is_some() {
            return self.barrier_on_device(call, stream);
        }
        self.call((call, 0), Ok(()), stream, |_, ()| Ok(()))
    }

    /// [`Self::call`] that enters the call itself.
    pub(super) fn call_behind<T>(
        &mut self,
        own: Result<T>,
        run: impl FnOnce(&mut Self, T) -> Result<()>,
    ) -> Result<()> {
        self.ready()?;
        let own = match own {
            Err(why) => return Err(self.decline(why, &Stream::DEFAULT)),
            Ok(_) if self.rehearses => return Ok(()),
            Ok(own) => own,
        };
        self.pass_timeout();
        self.agreement.take_shared();
        let began = Instant::now();
        let made = run(self, own);
        self.clock.times.total += began.elapsed();
        self.clock.times.calls += u64::from(made.is_ok());
        made.map_err(|why| if self.agreement.take_shared() { why } else { self.fail(why) })
    }

    /// Gives the outer engines the communicator's timeout.
    pub(super) fn pass_timeout(&mut self) {
        let limit = self.inner.timeout().get();
        if limit != self.limit {
            self.limit = limit;
            if let Some(rail) = &mut self.outers.rail {
                rail.set_timeout(limit);
            }
            self.outers.flat.set_timeout(limit);
        }
    }

    /// Time of this rank's calls so far.
    pub(crate) fn phase_times(&self) -> PhaseTimes {
        self.clock.times
    }

    /// Does a part of a call, whose time counts as that phase's. A phase within another one counts as the outer one.
    pub(super) fn timed<T>(&mut self, phase: Phase, run: impl FnOnce(&mut Self) -> T) -> T {
        let began = self.clock.begin();
        let made = run(self);
        self.clock.end(phase, began);
        made
    }

    pub(super) fn ready(&mut self) -> Result<()> {
        self.maker.check("a communicator")?;
        if let Some(why) = self.failed.get() {
            return Err(why.clone());
        }
        if self.device.is_some() {
            self.look_back()?;
        }
        self.inner.ready().map_err(|why| self.in_group(why))
    }

    /// Ends the communicator on all ranks. Returns why, which is another rank's reason where that came first.
    #[cold]
    pub(super) fn fail(&mut self, why: Error) -> Error {
        // Errors that are not of this rank's own making may be consequences.
        let own = why.is_invalid_argument() || why.is_unsupported() || why.is_out_of_memory();
        let wait = match self.agreement.awaits_leader {
            _ if own => Duration::ZERO,
            // The leader waited for other hosts, and says why it stopped.
            true => 2 * REASON_WAIT,
            false => REASON_WAIT,
        };
        self.stop(why, wait)
    }

    pub(super) fn stop(&mut self, why: Error, wait: Duration) -> Error {
        // Connections and memory are those of the parent, which goes on.
        if let Err(forked) = self.maker.check("a communicator") {
            return forked;
        }
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
        self.abort();
        self.failed
            .why
            .get_or_init(|| {
                why.clone().context(format!(
                    "rank {}: this communicator has failed on all hosts; rebuild it",
                    self.ranks.rank
                ))
            })
            .clone()
    }

    /// Whether a rank has ended the communicator, and left the reason. Waits for none.
    #[cold]
    pub(super) fn has_stopped(&self) -> bool {
        self.group.has_reason(&self.name, Deadline::after(REASON_WAIT))
    }

    /// Ends all transfers, and closes the connections.
    fn abort(&mut self) {
        let rail = self.outers.rail.as_mut().map_or(Ok(()), |rail| rail.abort());
        let flat = self.outers.flat.abort();
        if let Err(error) = rail.and(flat) {
            self.failed.keeps_memory.store(true, Ordering::Relaxed);
            tracing::error!(%error, "memory of a communicator over hosts is not given back, as transfers may use it");
        }
    }

    /// The error of an engine of this host, with ranks as the group counts them.
    pub(super) fn in_group(&self, error: Error) -> Error {
        let here = self.ranks.hosts.here(self.ranks.rank);
        let numbered = error.renumbered(|index| self.ranks.here(index));
        let named = match numbered.ranks() {
            [] => String::new(),
            ranks => format!("{} of the group: ", rank_list(ranks)),
        };
        numbered.context(format!(
            "{named}on host {}, whose ranks from 0 on are ranks {here:?} of the group",
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
        stream: &Stream,
    ) -> Result<()> {
        let arguments = Arguments { input, output, count, dtype, op, root };
        let call = StandardCall { collective, algorithm: AUTO, arguments };
        let made = self.timed(Phase::inside(collective), |engine| {
            // SAFETY: the caller promised that the places are readable or writable for these lengths until the call returns
            // on every rank of the host.
            unsafe { engine.inner.run(&call, stream) }
        });
        made.map_err(|error| self.in_group(error))
    }

    /// Which outer engine calls use.
    pub(super) fn route(&self) -> Route {
        if self.ranks.is_even && self.outers.rail.is_some() { Route::Rail } else { Route::Flat }
    }

    /// Which outer engine reductions use, where hosts have as many ranks.
    pub(super) fn reduction_route(&self, dtype: DType, op: ReduceOp) -> Route {
        if Self::divides(dtype, op) { self.route() } else { Route::Flat }
    }

    /// Name of the way by an outer engine.
    pub(super) fn way_between(&self, route: Route) -> &'static str {
        if route == Route::Rail { "hierarchical" } else { "outer" }
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

    /// Refuses a call that reaches the ranks of one host only. The other ranks get an error too.
    pub(crate) fn decline_across(&mut self, what: &str) -> Error {
        let why = self.not_across(what);
        // Every rank refuses such a call; on a device, to decline it would end the communicator.
        if self.device.is_some() { why } else { self.decline(why, &Stream::DEFAULT) }
    }

    /// Ends a transfer that failed, before its memory is given back. Returns what to report.
    pub(super) fn behind_transfers(&mut self, why: Error) -> Error {
        if self.agreement.is_shared() { why } else { self.fail(why) }
    }

    /// The error of a call that reaches the ranks of one host only.
    pub(crate) fn not_across(&self, what: &str) -> Error {
        not_across(what, &self.ranks.hosts, self.ranks.rank)
    }
}

impl Drop for SpanningEngine {
    /// Ends all transfers before their memory is given back. A forked child leaves its parent's alone.
    fn drop(&mut self) {
        if !self.maker.is_here() {
            return;
        }
        // On a device calls go on behind the host's back: they end by themselves, unless the communicator has failed.
        let is_done = self.device_is_done();
        if self.device.is_none() || self.failed.get().is_some() || !is_done {
            self.abort();
        }
        match &mut self.records {
            Some(records) if is_done => records.end(),
            Some(_) => self.failed.keeps_memory.store(true, Ordering::Relaxed),
            None => {}
        }
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

/// SMs that calls inside a host take at most, where a program wants no more than `most`: NCCL's kernels wait for other hosts while
/// those of the host's calls wait for its ranks, so each must find room beside the other.
pub(super) fn sms_inside(device: &Driver, most: Option<u32>) -> Option<u32> {
    // A device that does not say how many it has says so to the kernels' launches, too.
    let all = sm_count(device).ok()?;
    let rest = all.saturating_sub(2 * MAX_OUTER_BLOCKS).max(all / 2).max(1);
    Some(most.map_or(rest, |most| most.min(rest)))
}

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
        (None, None) if (ranks.is_alike || ranks.index == 0) && ranks.host_count() > 1 => {
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
