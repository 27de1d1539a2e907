//! The collective step that compares the ranks' sequences and turns new segments into windows.
//!
//! | step | gathers |
//! | --- | --- |
//! | 1 publish counters, digests, deferred frees, failures; 2 judge them, with the same result on all ranks | 1 |
//! | 3 send handles to peers: descriptors in an exchange, or bytes in a gather | 0 or 1 |
//! | 4 map peers' segments, confirm; if any rank failed, all undo | 1 |
//! | 5 finish: new windows, retired segments unmapped, deferred frees returned | 0 |
//! | 6 register new windows with NCCL, if communicators of it are attached | 0 or 2 |
//!
//! Ranks that are connected by sockets gather over these, others through the store. Over sockets, a peer that
//! is gone is noticed immediately; through the store, when the deadline passes.
//!
//! Nothing is mapped before all digests agree. A commit without new segments skips steps 3 and 4. The lanes
//! stay locked throughout, because a commit is part of their sequence.

use std::sync::atomic::Ordering;

use super::Pool;
use super::commit_guard::{CommitGuard, LockedLane, all_sound};
use super::committer::{Committer, incomplete_commit, own_failure_or};
use super::exchange_segments::{GRACE, SegmentToMap, fresh_segments};
use super::lane_memory::LaneInner;
use crate::driver::{Step, Stream};
use crate::rendezvous::agreement::{
    CommitVerdict, LaneProposal, Proposal, Propose, ReportedFrees, judge,
};
use crate::rendezvous::search::first_difference;
use crate::rendezvous::status::{agreed, encode_status};
use crate::sync::{lock, mutant};
use crate::window::{Window, Windows};
use crate::{Deadline, Error, Result};

/// How many deferred frees of one lane a rank reports in one commit. More of them wait for the next.
const MAX_REPORTS: usize = 1 << 16;
/// Most reports over all lanes, so that a message stays well below its maximal length.
const MAX_REPORTS_TOGETHER: usize = 1 << 20;

/// Scope of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Covers {
    /// All that lanes have done.
    All,
    /// New segments alone: it waits for no device, and may be made during captures.
    NewMemory,
}

/// Effects of a commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommitReport {
    /// Its number, from 1.
    pub number: u64,
    /// Number of new windows.
    pub windows_added: u64,
    /// Number of windows removed, because their segments were released or moved.
    pub windows_removed: u64,
    /// Number of blocks freed without order that returned to their lanes, over all lanes.
    pub blocks_returned: u64,
}

impl Pool {
    /// Checks that all ranks did the same, and makes windows of new memory, until `deadline`.
    /// Collective: every rank must call it, in the same place of its program.
    ///
    /// # Errors
    ///
    /// They leave the pool as it was, and are the same on every rank as long as ranks can communicate:
    /// - [`Error::is_diverged`]: the ranks' sequences differ. The message says where, and what each rank did.
    ///   Free what was allocated since and call [`resync`](Pool::resync).
    /// - [`Error::is_out_of_memory`] and others: one rank could not do what the others did.
    /// - [`Error::is_timeout`], [`Error::is_peer_lost`]: the message names the ranks. No further commit of this
    ///   pool can succeed, and each fails immediately; what is mapped stays usable. If ranks exchange file
    ///   descriptors they are connected, and a peer that exits is noticed immediately. A failure of the
    ///   connection itself, such as too many open files, ends commits too.
    /// - [`Error::is_invalid_state`]: another thread is committing; a stream is being captured; this process was
    ///   forked from the one that made the pool; or a rank's state is no longer that of the others, because a
    ///   call panicked inside one of its lanes or an earlier commit stopped half-way there.
    ///
    /// If NCCL refuses new windows (see [`register_nccl`](Pool::register_nccl)), that is an error on every rank
    /// too, but the commit itself has succeeded.
    pub fn commit_by(&self, deadline: Deadline) -> Result<CommitReport> {
        self.check_process()?;
        self.await_background(deadline)?;
        self.commit_now(deadline)
    }

    /// Commits like `commit_by`, in front of a commit in the background.
    pub(super) fn commit_now(&self, deadline: Deadline) -> Result<CommitReport> {
        let mut committer = self.committer()?;
        self.commit_with(&mut committer, deadline)
    }

    /// Commits in a thread that has the right to commit.
    pub(super) fn commit_with(
        &self,
        committer: &mut Committer,
        deadline: Deadline,
    ) -> Result<CommitReport> {
        let mut locked = self.lock_lanes();
        let outcome = self.commit_locked(committer, &mut locked, deadline);
        if mutant("mutant_due_lowered_late") {
            drop(locked);
            self.0.due.set(false);
        }
        outcome.map_err(|error| {
            committer.stop_commits_after(&error);
            let number = committer.commits + 1;
            error.context(format!("rank {}, commit {number}", self.rank()))
        })
    }

    /// Takes the right to commit. An error if this is another process, if another thread has the right, or if
    /// no commit can succeed any more.
    ///
    /// These errors are not reported to the other ranks: the exchange with them belongs to the other thread's
    /// commit, and ranks that lost each other have no common exchange.
    pub(super) fn committer(&self) -> Result<CommitGuard<'_>> {
        self.free_committer()?.ok_or_else(|| {
            Error::invalid_state(format!(
                "rank {}: another thread is in a commit of this pool; commits are collective and \
                 come one at a time",
                self.rank()
            ))
        })
    }

    /// Takes the right to commit; `None` if another thread has it at the moment.
    ///
    /// # Errors
    ///
    /// The errors of [`committer`](Self::committer), but for that one.
    pub(super) fn free_committer(&self) -> Result<Option<CommitGuard<'_>>> {
        // A child would communicate in its parent's name, or wait for a thread that only its parent has.
        self.check_process()?;
        // A flag besides the mutex, because a thread that only reads from the committer must not make a
        // commit fail on this rank alone.
        if self.0.committing.swap(true, Ordering::Acquire) {
            return Ok(None);
        }
        let mut committer =
            CommitGuard { committer: lock(&self.0.committer), committing: &self.0.committing };
        if let Some(cause) = &committer.broken {
            return Err(cause.clone().context("this pool cannot commit any more; build a new one"));
        }
        committer.meet(&self.0.group, self.driver())?;
        Ok(Some(committer))
    }

    /// Locks the symmetric lanes, in the order of the configuration.
    pub(super) fn lock_lanes(&self) -> Vec<LockedLane<'_>> {
        let symmetric = self.0.lanes.iter().filter(|lane| lane.is_symmetric());
        let locked = symmetric.map(|lane| {
            let (inner, sound) = lane.lock_for_commit();
            LockedLane { lane, inner, sound }
        });
        locked.collect()
    }

    fn commit_locked(
        &self,
        committer: &mut Committer,
        locked: &mut [LockedLane<'_>],
        deadline: Deadline,
    ) -> Result<CommitReport> {
        let reports = self.agree(committer, locked, Ok(Covers::All), deadline)?;
        let mut ready = self.driver().at_step(Step::CommitAgree);
        let fresh = fresh_segments(locked);
        if locked.iter().any(LockedLane::is_due) {
            self.exchange_segments(committer, locked, &fresh, ready, deadline)?;
            ready = Ok(());
        }
        let finished = ready
            .and_then(|()| self.deregister_retired(committer, locked, deadline))
            .and_then(|()| self.driver().at_step(Step::CommitFinish))
            .and_then(|()| self.finish(locked, &fresh, &reports, deadline));
        let registered = if fresh.is_empty() {
            Ok(())
        } else {
            let ready = finished.as_ref().map(drop).map_err(Clone::clone);
            self.register_new(committer, ready, deadline)
        };
        // Other ranks completed the commit: if this rank failed, it is no longer like them.
        let mut report = finished.inspect_err(|error| committer.mark_incomplete(error))?;
        committer.commits += 1;
        report.number = committer.commits;
        tracing::debug!(rank = self.rank(), ?report, "committed");
        registered.map(|()| report)
    }

    /// Steps 1 and 2. Returns, for each locked lane, the deferred frees that ranks have reported. `covers` is an error if this
    /// rank has failed already.
    pub(super) fn agree(
        &self,
        committer: &mut Committer,
        locked: &[LockedLane<'_>],
        covers: Result<Covers>,
        deadline: Deadline,
    ) -> Result<Vec<ReportedFrees>> {
        let proposal = covers.and_then(|covers| self.propose(committer, locked, covers, deadline));
        let own = proposal.as_ref().err().cloned();
        let group = &self.0.group;
        let proposal = encode_status(Propose, proposal.map_err(|error| error.kind().clone()))?;
        let peers = &mut committer.peers;
        let gathered = peers.all_gather(group, "propose", &proposal, deadline);
        let gathered = gathered.map_err(|error| own_failure_or(own, error))?;
        match judge(&gathered)? {
            CommitVerdict::Agreed(reports) => Ok(reports),
            CommitVerdict::Differs { lane, failures } => {
                let LockedLane { lane: shared, inner, .. } = &locked[lane];
                let mut gather =
                    |what: &str, value: &[u8]| peers.all_gather(group, what, value, deadline);
                let found = first_difference(&shared.name, &inner.state, &mut gather)?;
                // If a rank could not do what the others did, its failure explains the difference best.
                let failed: Vec<_> = failures
                    .into_iter()
                    .filter(|(_, (counter, _))| *counter == found.counter)
                    .map(|(rank, (_, kind))| (rank, kind))
                    .collect();
                let step = format!(
                    "event {} of lane {:?}, which others passed",
                    found.counter, shared.name
                );
                Err(agreed(&step, &failed).unwrap_or_else(|| Error::diverged(found)))
            }
        }
    }

    fn propose(
        &self,
        committer: &Committer,
        locked: &[LockedLane<'_>],
        covers: Covers,
        deadline: Deadline,
    ) -> Result<Proposal> {
        if let Some(cause) = &committer.incomplete {
            return Err(incomplete_commit(cause));
        }
        all_sound(locked)?;
        self.driver().at_step(Step::CommitPublish)?;
        // Frees are reported once no kernel uses the blocks.
        let most = match covers {
            Covers::All => {
                self.refuse_captures(locked)?;
                self.wait_for_users(locked, deadline)?;
                max_reports(locked.len())
            }
            Covers::NewMemory => 0,
        };
        let lanes = locked.iter().map(|locked| {
            let state = &locked.inner.state;
            LaneProposal {
                counter: state.counter(),
                digest: state.digest(),
                freed: state.to_report(most),
                failure: state.failure().cloned(),
            }
        });
        Ok(Proposal { round: committer.commits, lanes: lanes.collect() })
    }

    fn refuse_captures(&self, locked: &[LockedLane<'_>]) -> Result<()> {
        let used = locked.iter().flat_map(|locked| locked.inner.state.streams());
        match std::iter::once(Stream::DEFAULT).chain(used).find(|s| self.driver().is_capturing(*s))
        {
            None => Ok(()),
            Some(stream) => Err(Error::invalid_state(format!(
                "stream {:#x} is being captured into a graph; commit after the capture",
                stream.raw()
            ))),
        }
    }

    /// Waits for kernels that may still use blocks which were freed (`Block::free_after_device`), here and, as every rank
    /// does it before it reports its frees, on peers.
    fn wait_for_users(&self, locked: &[LockedLane<'_>], deadline: Deadline) -> Result<()> {
        let waiting: Vec<_> =
            locked.iter().filter(|locked| locked.lane.take_waits_for_device()).collect();
        if waiting.is_empty() {
            return Ok(());
        }
        self.wait_for_device(deadline).inspect_err(|_| {
            waiting.iter().for_each(|locked| locked.lane.wait_for_device());
        })
    }

    /// Waits for the device, and leaves time to report to the other ranks that it is late.
    pub(super) fn wait_for_device(&self, deadline: Deadline) -> Result<()> {
        let share = deadline.remaining().mul_f64(0.8);
        self.driver().synchronize_by(Deadline::after(share))
    }

    /// Step 5, which is local and comes after all ranks have confirmed.
    fn finish(
        &self,
        locked: &mut [LockedLane<'_>],
        fresh: &[SegmentToMap],
        reports: &[ReportedFrees],
        deadline: Deadline,
    ) -> Result<CommitReport> {
        let mut report = CommitReport { windows_added: fresh.len() as u64, ..Default::default() };
        if locked.iter().any(|locked| locked.inner.state.has_retired()) {
            // Kernels that use this memory may still run. The grace is for the case that the other ranks
            // have used up the time: a device without work must not fail then.
            let deadline = Deadline::after(deadline.remaining().max(GRACE));
            self.driver().synchronize_by(deadline)?;
        }
        let mut outcome = Ok(());
        let most = max_reports(locked.len());
        for (locked, reports) in locked.iter_mut().zip(reports) {
            let LaneInner { state, memory } = &mut *locked.inner;
            for segment in state.retired().collect::<Vec<_>>() {
                report.windows_removed += u64::from(segment.counter < memory.shared_below);
                let gone = self.0.heap.unmap_peers(locked.lane.base + segment.offset);
                outcome = outcome.and(gone).and(memory.drop_segment(&segment));
            }
            state.take_retired();
            memory.shared_below = state.next_segment();
            let freed = state.apply_reports(most, reports, self.0.group.world());
            outcome = outcome.and(state.reclaim(&freed, memory));
            report.blocks_returned += freed.len() as u64;
            state.mark_agreed();
        }
        self.0.due.set(false);
        if report.windows_added + report.windows_removed > 0 {
            self.publish_windows(locked);
        }
        outcome.map(|()| report)
    }

    /// Replaces the list of windows by one made from the segments in use.
    pub(super) fn publish_windows(&self, locked: &[LockedLane<'_>]) {
        let windows = locked.iter().flat_map(|locked| {
            let shared = locked.inner.memory.shared_below;
            let segments = locked.inner.state.segments().iter();
            segments.filter(move |segment| segment.counter < shared).map(|segment| Window {
                lane: locked.lane.name.clone(),
                counter: segment.counter,
                offset: locked.lane.base + segment.offset,
                bytes: segment.bytes,
            })
        });
        let windows = Windows::new(self.layout(), windows.collect());
        *lock(&self.0.windows) = std::sync::Arc::new(windows);
    }
}

/// How many deferred frees of each lane a rank reports in one commit, if there are `lanes` lanes.
fn max_reports(lanes: usize) -> usize {
    MAX_REPORTS.min(MAX_REPORTS_TOGETHER / lanes.max(1)).max(1)
}
