//! Replaying a trace on several ranks, each a thread of this process, and the outcome.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};
use std::thread;

use super::rank::{ReplayReport, run};
use super::{ReplayOptions, Trace};
use crate::lane::{Digest, Side};
use crate::{Error, Group, Result};

/// Stack size of a rank's thread. The handshake needs the most.
const STACK: usize = 1 << 20;

/// The outcome of a replay.
#[derive(Clone, Debug)]
pub struct ReplayOutcome {
    /// Number of ranks.
    pub ranks: u32,
    /// Number of operations that were replayed: all of the trace, unless there is an `error`.
    pub events: u64,
    /// Whether all ranks ended at the same counter with the same digest: every block was placed
    /// alike on every rank.
    pub digests_equal: bool,
    /// Digest of rank 0's lane.
    pub digest: Digest,
    /// Time per operation of the slowest rank, in nanoseconds. Commits in the trace count; reading the trace
    /// and building pools do not.
    pub ns_per_event: f64,
    /// The most bytes in use at one time, by the sizes in the trace.
    pub peak_live_bytes: u64,
    /// The most bytes of physical memory that a rank held for the lane.
    pub peak_reserved_bytes: u64,
    /// The most segments that the lane had at one time.
    pub segments: u64,
    /// Number of windows at the end.
    pub windows: u64,
    /// Why the replay failed, if it did.
    pub error: Option<ReplayFailure>,
}

/// Why a replay failed.
#[derive(Clone, Debug)]
pub struct ReplayFailure {
    /// The error of the first rank that has one, without the context of that rank.
    pub error: Error,
    /// Text of the error.
    pub message: String,
    /// Number of the operation that returned the error on that rank: usually a commit after the event in
    /// question. The commit at the end has the number after the last operation's.
    pub event: u64,
    /// The lane, if its events differ.
    pub lane: Option<String>,
    /// Number of the lane's first event that differs.
    pub counter: Option<u64>,
    /// The latest event that may be the first to differ, if that is not known exactly.
    pub until: Option<u64>,
    /// Ranks grouped by their event at that counter.
    pub sides: Vec<Side>,
    /// The ranks, grouped by their errors. There is more than one group if a rank has left out a commit for
    /// which the others then waited; otherwise that is a bug of this library.
    pub groups: Vec<RankGroup>,
}

/// Ranks with the same error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankGroup {
    /// The ranks, ascending.
    pub ranks: Vec<u32>,
    /// Their error; `None` if they have none.
    pub message: Option<String>,
}

impl ReplayFailure {
    /// Whether every rank has the same error.
    pub fn is_same_everywhere(&self) -> bool {
        self.groups.len() == 1
    }
}

/// Replays `trace` on `options.ranks` ranks, all threads of this process.
///
/// If ranks diverge or run out of memory, that is a [`ReplayOutcome`]. An error means that there was no replay,
/// because the options are invalid ([`Error::is_invalid_argument`]) or threads could not be started.
pub fn replay(trace: &Trace, options: &ReplayOptions) -> Result<ReplayOutcome> {
    replay_with(trace, options, &|_| ())
}

/// Replays like [`replay`]; from time to time, rank 0's thread calls `progress` with the number of operations that it
/// has done.
pub fn replay_with(
    trace: &Trace,
    options: &ReplayOptions,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<ReplayOutcome> {
    options.validate(trace.ops().len() as u64)?;
    let reports = on_threads(trace, options, progress)?;
    let slowest = reports.iter().map(|report| report.elapsed).max().unwrap_or_default();
    let events = reports.iter().map(|report| report.events).max().unwrap_or(0);
    let most = |of: fn(&ReplayReport) -> u64| reports.iter().map(of).max().unwrap_or(0);
    Ok(ReplayOutcome {
        ranks: options.ranks,
        events,
        digests_equal: reports.iter().all(|report| report.state == reports[0].state),
        digest: reports[0].state.1,
        ns_per_event: slowest.as_nanos() as f64 / events.max(1) as f64,
        peak_live_bytes: trace.peak_live(),
        peak_reserved_bytes: most(|report| report.peak_reserved),
        segments: most(|report| report.peak_segments),
        windows: most(|report| report.windows),
        error: failure(&reports),
    })
}

/// Runs every rank on a thread; returns their reports in rank order.
fn on_threads(
    trace: &Trace,
    options: &ReplayOptions,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Vec<ReplayReport>> {
    // Ranks start when all threads exist, so that none waits for a rank whose thread could not be started.
    let gate = RwLock::new(());
    let cancelled = AtomicBool::new(false);
    let pass = || {
        drop(gate.read().unwrap_or_else(PoisonError::into_inner));
        !cancelled.load(Ordering::Acquire)
    };
    let groups = Group::in_process(options.ranks)?;
    thread::scope(|scope| {
        let closed = gate.write().unwrap_or_else(PoisonError::into_inner);
        let mut threads = Vec::with_capacity(groups.len());
        for group in groups {
            let rank = group.rank();
            let group = group.with_timeout(options.timeout);
            let body = move || pass().then(|| run(group, trace, options, progress));
            let name = format!("rank {rank}");
            let spawned =
                thread::Builder::new().name(name).stack_size(STACK).spawn_scoped(scope, body);
            match spawned {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    cancelled.store(true, Ordering::Release);
                    return Err(Error::system(
                        format!("starting the thread of rank {rank} of {}", options.ranks),
                        error,
                    ));
                }
            }
        }
        drop(closed);
        let reports = threads.into_iter().zip(0_u32..).map(|(thread, rank)| {
            let report = thread.join().ok().flatten();
            report.unwrap_or_else(|| {
                let error = Error::invalid_state(format!("the thread of rank {rank} panicked"));
                ReplayReport { error: Some((0, error)), ..ReplayReport::default() }
            })
        });
        Ok(reports.collect())
    })
}

fn failure(reports: &[ReplayReport]) -> Option<ReplayFailure> {
    let (event, error) = reports.iter().find_map(|report| report.error.clone())?;
    let mut groups: Vec<(Option<&Error>, Vec<u32>)> = Vec::new();
    for (report, rank) in reports.iter().zip(0_u32..) {
        let own = report.error.as_ref().map(|(_, error)| error);
        let same = |(other, _): &&mut (Option<&Error>, Vec<u32>)| {
            other.map(Error::kind) == own.map(Error::kind)
        };
        match groups.iter_mut().find(same) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((own, vec![rank])),
        }
    }
    // The context of an error names a rank and a commit, which are true of one rank only.
    let without_context = |error: &Error| Error::from_kind(error.kind().clone());
    let groups = groups.into_iter().map(|(error, ranks)| {
        let message = error.map(|error| without_context(error).to_string());
        RankGroup { ranks, message }
    });
    let groups = groups.collect();
    let error = without_context(&error);
    let divergence = error.divergence();
    Some(ReplayFailure {
        message: error.to_string(),
        event,
        lane: divergence.map(|divergence| divergence.lane.clone()),
        counter: divergence.map(|divergence| divergence.counter),
        until: divergence.and_then(|divergence| divergence.until),
        sides: divergence.map(|divergence| divergence.sides.clone()).unwrap_or_default(),
        groups,
        error,
    })
}
