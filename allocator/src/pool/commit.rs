//! The collective step that compares the ranks' sequences and turns new segments into windows.
//!
//! | step | gathers |
//! | --- | --- |
//! | 1 publish counters, digests, freed blocks, failures; 2 judge them, alike on all ranks | 1 |
//! | 3 hand over handles: descriptors in an exchange, or bytes in a gather | 0 or 1 |
//! | 4 map peers' segments, confirm; if any rank failed, all undo | 1 |
//! | 5 finish: new windows, retired segments unmapped, freed blocks returned | 0 |
//! | 6 new windows are registered with NCCL, where communicators of it were given | 0 or 2 |
//!
//! Ranks that are connected by sockets gather over these, others through the store. Over sockets a
//! peer that is gone is seen at once; through the store, when time is up.
//!
//! Nothing is mapped before all digests agree. A commit in which nothing grew ends after step 2.
//! The lanes stay locked throughout, because a commit is part of their sequence.

use std::sync::atomic::Ordering;

use super::commit_guard::{Held, Turn, all_sound};
use super::lane_memory::LaneInner;
use super::share::{Fresh, GRACE, fresh_segments};
use super::{Committer, Pool, half_way, untold};
use crate::driver::{Step, Stream};
use crate::rendezvous::agreement::{Heard, LaneProposal, Proposal, Propose, Verdict, judge};
use crate::rendezvous::search::first_difference;
use crate::rendezvous::status::{agreed, encode_status};
use crate::sync::lock;
use crate::window::{Window, Windows};
use crate::{Deadline, Error, Result};

/// Unordered frees of one lane that a rank tells in one commit; more of them wait for the next.
const MOST_FREED: usize = 1 << 16;
/// The same over all lanes: well within what one message holds.
const MOST_FREED_TOGETHER: usize = 1 << 20;

/// What a commit did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommitReport {
    /// Its number, from 1.
    pub number: u64,
    /// Windows that are new.
    pub windows_added: u64,
    /// Windows that are gone, because their segments were released or moved.
    pub windows_removed: u64,
    /// Blocks freed without order that came back, over all lanes.
    pub blocks_returned: u64,
}

impl Pool {
    /// Checks that all ranks did the same, and makes windows of new memory, until `deadline`.
    /// Collective: every rank must call it, in the same place of its program.
    ///
    /// Errors leave the pool as it was, the same on every rank wherever ranks can still talk:
    /// - [`Error::is_diverged`]: the ranks' sequences differ; says where, and what each did. Free
    ///   what was allocated since and [`resync`](Pool::resync).
    /// - [`Error::is_out_of_memory`] and others: one rank could not do what the others did.
    /// - [`Error::is_timeout`], [`Error::is_peer_lost`]: names the ranks. No further commit of this
    ///   pool can succeed, and each says so at once; what is mapped stays usable. Where ranks hand
    ///   over file descriptors they are connected, and a peer that exits is seen at once; a failure
    ///   of the connection itself, such as too many open files, ends commits, too.
    /// - [`Error::is_invalid_state`]: another thread is committing, a stream is being captured, this
    ///   process was forked from the one that made the pool, or a rank is no longer like the others: a
    ///   call panicked inside one of its lanes, or an earlier commit went half-way there.
    ///
    /// New windows that NCCL refuses (see [`register_nccl`](Pool::register_nccl)) are an error on
    /// every rank too; the commit itself holds.
    pub fn commit_by(&self, deadline: Deadline) -> Result<CommitReport> {
        let mut committer = self.committer()?;
        let mut held = self.hold();
        let outcome = self.commit_held(&mut committer, &mut held, deadline);
        outcome.map_err(|error| {
            committer.give_up_if_apart(&error);
            let number = committer.commits + 1;
            error.context(format!("rank {}, commit {number}", self.rank()))
        })
    }

    /// The right to commit, unless this is another process, somebody else has it or no commit can
    /// succeed any more.
    ///
    /// None of it is told to the other ranks, for want of words: this rank is in the commit that the
    /// other thread runs, and ranks that lost each other are not in the same exchange any more.
    pub(super) fn committer(&self) -> Result<Turn<'_>> {
        // A child would speak in its parent's name, or wait for a thread that only its parent has.
        self.check_process()?;
        // A flag of its own: who only looks at the committer must not make a commit fail, which
        // would set this rank apart from the others.
        if self.0.committing.swap(true, Ordering::Acquire) {
            return Err(Error::invalid_state(format!(
                "rank {}: another thread is in a commit of this pool; commits are collective and \
                 come one at a time",
                self.rank()
            )));
        }
        let committer = Turn { committer: lock(&self.0.committer), committing: &self.0.committing };
        match &committer.broken {
            Some(cause) => {
                Err(cause.clone().context("this pool cannot commit any more; build a new one"))
            }
            None => Ok(committer),
        }
    }

    /// Locks the symmetric lanes, in order.
    pub(super) fn hold(&self) -> Vec<Held<'_>> {
        let symmetric = self.0.lanes.iter().filter(|lane| lane.is_symmetric());
        let held = symmetric.map(|lane| {
            let (inner, sound) = lane.lock_for_commit();
            Held { lane, inner, sound }
        });
        held.collect()
    }

    fn commit_held(
        &self,
        committer: &mut Committer,
        held: &mut [Held<'_>],
        deadline: Deadline,
    ) -> Result<CommitReport> {
        let heard = self.agree(committer, held, deadline)?;
        let mut ready = self.driver().at_step(Step::CommitAgree);
        let fresh = fresh_segments(held);
        if held.iter().any(Held::is_due) {
            self.share(committer, held, &fresh, ready, deadline)?;
            ready = Ok(());
        }
        let finished = ready
            .and_then(|()| self.deregister_retired(committer, held, deadline))
            .and_then(|()| self.driver().at_step(Step::CommitFinish))
            .and_then(|()| self.finish(held, &fresh, &heard, deadline));
        let registered = if fresh.is_empty() {
            Ok(())
        } else {
            let ready = finished.as_ref().map(drop).map_err(Clone::clone);
            self.register_new(committer, ready, deadline)
        };
        // The others went on: a rank that failed is no longer like them.
        let mut report = finished.inspect_err(|error| committer.leave_unfinished(error))?;
        committer.commits += 1;
        report.number = committer.commits;
        tracing::debug!(rank = self.rank(), ?report, "committed");
        registered.map(|()| report)
    }

    /// Steps 1 and 2. Returns, for each held lane, the blocks that ranks told as freed.
    fn agree(
        &self,
        committer: &mut Committer,
        held: &[Held<'_>],
        deadline: Deadline,
    ) -> Result<Vec<Heard>> {
        let proposal = self.propose(committer, held);
        let own = proposal.as_ref().err().cloned();
        let group = &self.0.group;
        let proposal = encode_status(Propose, proposal.map_err(|error| error.kind().clone()))?;
        let peers = &mut committer.peers;
        let gathered = peers.all_gather(group, "propose", &proposal, deadline);
        let gathered = gathered.map_err(|error| untold(own, error))?;
        match judge(&gathered)? {
            Verdict::Agreed(heard) => Ok(heard),
            Verdict::Differs { lane, failures } => {
                let Held { lane: shared, inner, .. } = &held[lane];
                let mut gather =
                    |what: &str, value: &[u8]| peers.all_gather(group, what, value, deadline);
                let found = first_difference(&shared.name, &inner.state, &mut gather)?;
                // A rank that could not do what the others did explains the difference best.
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

    fn propose(&self, committer: &Committer, held: &[Held<'_>]) -> Result<Proposal> {
        if let Some(cause) = &committer.unfinished {
            return Err(half_way(cause));
        }
        all_sound(held)?;
        self.driver().at_step(Step::CommitPublish)?;
        let used = held.iter().flat_map(|held| held.inner.state.streams());
        for stream in std::iter::once(Stream::DEFAULT).chain(used) {
            if self.driver().is_capturing(stream) {
                return Err(Error::invalid_state(format!(
                    "stream {:#x} is being captured into a graph; commit after the capture",
                    stream.raw()
                )));
            }
        }
        let most = most_freed(held.len());
        let lanes = held.iter().map(|held| {
            let state = &held.inner.state;
            LaneProposal {
                counter: state.counter(),
                digest: state.digest(),
                freed: state.to_tell(most),
                failure: state.failure().cloned(),
            }
        });
        Ok(Proposal { round: committer.commits, lanes: lanes.collect() })
    }

    /// Step 5. Local, and after all ranks confirmed.
    fn finish(
        &self,
        held: &mut [Held<'_>],
        fresh: &[Fresh],
        heard: &[Heard],
        deadline: Deadline,
    ) -> Result<CommitReport> {
        let mut report = CommitReport { windows_added: fresh.len() as u64, ..Default::default() };
        if held.iter().any(|held| held.inner.state.has_retired()) {
            // Kernels that were given this memory may still run. A device that has nothing to do is not
            // late, however long the other ranks took.
            let deadline = Deadline::after(deadline.remaining().max(GRACE));
            self.driver().synchronize_by(deadline)?;
        }
        let mut outcome = Ok(());
        let most = most_freed(held.len());
        for (held, heard) in held.iter_mut().zip(heard) {
            let LaneInner { state, memory } = &mut *held.inner;
            for segment in state.retired().collect::<Vec<_>>() {
                report.windows_removed += u64::from(segment.counter < memory.shared_below);
                let gone = self.0.heap.unmap_peers(held.lane.base + segment.offset);
                outcome = outcome.and(gone).and(memory.drop_segment(&segment));
            }
            state.take_retired();
            memory.shared_below = state.next_segment();
            let freed = state.told(most, heard, self.world());
            outcome = outcome.and(state.reclaim(&freed, memory));
            report.blocks_returned += freed.len() as u64;
            state.mark_agreed();
        }
        self.0.due.settle(false);
        if report.windows_added + report.windows_removed > 0 {
            self.publish_windows(held);
        }
        outcome.map(|()| report)
    }

    /// Makes the list of windows from the segments in use.
    pub(super) fn publish_windows(&self, held: &[Held<'_>]) {
        let windows = held.iter().flat_map(|held| {
            let shared = held.inner.memory.shared_below;
            let segments = held.inner.state.segments().iter();
            segments.filter(move |segment| segment.counter < shared).map(|segment| Window {
                lane: held.lane.name.clone(),
                counter: segment.counter,
                offset: held.lane.base + segment.offset,
                bytes: segment.bytes,
            })
        });
        let windows = Windows::new(self.layout(), windows.collect());
        *lock(&self.0.windows) = std::sync::Arc::new(windows);
    }
}

/// How many unordered frees of each of so many lanes a rank tells in one commit.
fn most_freed(lanes: usize) -> usize {
    MOST_FREED.min(MOST_FREED_TOGETHER / lanes.max(1)).max(1)
}
