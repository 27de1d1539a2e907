//! Steps that all ranks make together, or none: they say whether they are ready before any of them begins.

use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Pool;
use super::commit_guard::{CommitGuard, LockedLane};
use super::committer::{Committer, incomplete_commit, own_failure_or};
use super::lane_memory::LaneInner;
use super::shared_lane::SharedLane;
use crate::rendezvous::message::{Message, decode_all};
use crate::rendezvous::status::{RankStatus, all_ok, encode_status};
use crate::{Deadline, Error, Result};

/// Between two looks whether another thread still commits.
const PAUSE: Duration = Duration::from_micros(200);

/// Subject of a rank's vote, if the rank is ready for it, or why it is not.
#[derive(Debug, Serialize, Deserialize)]
struct Vote(RankStatus<u64>);

impl Message for Vote {
    const KIND: u16 = 12;
    const NAME: &'static str = "vote";
}

impl Pool {
    /// Commits with what `prepare` allocates, if every rank passes `Ok`: as a commit, but no rank begins to allocate unless all
    /// are ready. Collective. `subject` says what the step is for, by a number that it has on all ranks, so that threads which
    /// come to steps of several subjects in another order on another rank do not take one for the other.
    ///
    /// Returns what `prepare` did, or why no rank has allocated anything, which is the same on every rank: the error of a rank
    /// that is not ready or could not prepare, which is named, or that ranks were at steps of different subjects. Then
    /// all ranks may try again.
    ///
    /// No other commit of this pool comes between the question and the commit, and it waits for one that another thread makes.
    ///
    /// # Errors
    ///
    /// Those of this rank alone, after which the ranks are no longer alike. [`Error::is_timeout`] and [`Error::is_peer_lost`],
    /// after which no commit of the pool can succeed; others as of [`commit_by`](Self::commit_by).
    pub fn commit_together<T>(
        &self,
        subject: u64,
        ready: Result<()>,
        deadline: Deadline,
        prepare: impl FnOnce() -> Result<T>,
    ) -> Result<Result<T>> {
        self.step(subject, ready, deadline, false, prepare)
    }

    /// Works like [`commit_together`](Self::commit_together), but commits before `prepare` too, so that it finds the
    /// memory of blocks which all ranks have dropped.
    ///
    /// # Errors
    ///
    /// The errors of [`commit_together`](Self::commit_together).
    pub fn reclaim_and_commit_together<T>(
        &self,
        subject: u64,
        ready: Result<()>,
        deadline: Deadline,
        prepare: impl FnOnce() -> Result<T>,
    ) -> Result<Result<T>> {
        self.step(subject, ready, deadline, true, prepare)
    }

    fn step<T>(
        &self,
        subject: u64,
        ready: Result<()>,
        deadline: Deadline,
        reclaims: bool,
        prepare: impl FnOnce() -> Result<T>,
    ) -> Result<Result<T>> {
        self.check_process()?;
        self.await_background(deadline)?;
        let mut committer = self.committer_by(deadline)?;
        if let Err(why) = self.vote(&mut committer, subject, ready, deadline)? {
            return Ok(Err(why));
        }
        if reclaims && let Err(why) = self.commit_alike(&mut committer, deadline, ())? {
            return Ok(Err(why));
        }
        let prepared = prepare();
        // Had one rank alone failed, the commit had found that ranks differ.
        Ok(self.commit_alike(&mut committer, deadline, prepared)?.and_then(|prepared| prepared))
    }

    /// Commits with what was prepared; or returns why no rank has, which is the same on every rank.
    fn commit_alike<T>(
        &self,
        committer: &mut Committer,
        deadline: Deadline,
        prepared: T,
    ) -> Result<Result<T>> {
        match self.commit_with(committer, deadline) {
            Ok(_) => Ok(Ok(prepared)),
            // All ranks find alike that a stream is captured on one of them.
            Err(why) if why.is_invalid_state() && committer.is_sound() => Ok(Err(why)),
            // There was room when ranks were asked, and some rank found none then.
            Err(why) if why.is_out_of_memory() && committer.is_sound() => {
                drop(prepared);
                self.resync_with(committer, deadline)?;
                if self.retire_unshared(|_| true) {
                    self.give_back_retired(committer, deadline)?;
                }
                Ok(Err(why))
            }
            Err(why) => Err(why),
        }
    }

    /// The right to commit, once no other thread has it.
    pub(super) fn committer_by(&self, deadline: Deadline) -> Result<CommitGuard<'_>> {
        // Whether a thread commits is asked once a turn: it may end its commit between two questions.
        while !deadline.expired() {
            if let Some(committer) = self.free_committer()? {
                return Ok(committer);
            }
            thread::sleep(PAUSE);
        }
        self.committer()
    }

    /// Retires segments of some lanes that no commit could share and that are free. Otherwise every later commit would
    /// try again to share them. Every rank must do it in the same place. Returns whether there are some.
    pub(super) fn retire_unshared(&self, of: impl Fn(&SharedLane) -> bool) -> bool {
        let mut found = false;
        let mut locked = self.lock_lanes();
        for LockedLane { inner, .. } in locked.iter_mut().filter(|locked| of(locked.lane)) {
            let LaneInner { state, memory } = &mut **inner;
            if state.has_free_segment_since(memory.shared_below) {
                state.trim(None);
                memory.raise_due();
                found = true;
            }
        }
        found
    }

    /// Commits, so that the memory of retired segments is given back. What else could not be shared stays due.
    pub(super) fn give_back_retired(
        &self,
        committer: &mut Committer,
        deadline: Deadline,
    ) -> Result<()> {
        match self.commit_with(committer, deadline) {
            Err(why) if !committer.is_sound() => Err(why),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    pub(super) fn vote(
        &self,
        committer: &mut Committer,
        subject: u64,
        ready: Result<()>,
        deadline: Deadline,
    ) -> Result<Result<()>> {
        let ready = match &committer.incomplete {
            Some(cause) => Err(incomplete_commit(cause)),
            None => ready,
        };
        let own = ready.as_ref().err().cloned();
        let ready = ready.map(|()| subject).map_err(|error| error.kind().clone());
        let votes = encode_status(Vote, ready)
            .and_then(|vote| committer.peers.all_gather(&self.0.group, "vote", &vote, deadline))
            .map_err(|error| own_failure_or(own, error))
            .and_then(|gathered| decode_all::<Vote>(&gathered));
        let votes = votes.map_err(|error| {
            committer.stop_commits_after(&error);
            self.in_vote(error)
        })?;
        let agreed = all_ok("a vote", votes.into_iter().map(|Vote(status)| status));
        let subjects = match agreed {
            Ok(subjects) => subjects,
            Err(why) => return Ok(Err(self.in_vote(why))),
        };
        match subjects.iter().position(|other| *other != subjects[0]) {
            None => Ok(Ok(())),
            Some(rank) => Ok(Err(self.in_vote(Error::invalid_state(format!(
                "ranks 0 and {rank} were at steps of different subjects ({:#x} and {:#x}): threads came to them in \
                 another order",
                subjects[0], subjects[rank]
            ))))),
        }
    }

    fn in_vote(&self, error: Error) -> Error {
        error.context(format!("rank {}, asking whether all ranks are ready", self.rank()))
    }
}
