//! Ranks that wait on the host until all have come to a step. A rank whose wait ends leaves again, and commits go on.
//!
//! Ranks have no common order there, so they take two steps. First each says that it is here, and waits for the others; it may
//! leave, and says so. A rank that knows all to be here says that it goes on, and leaves no more; the barrier is over when all
//! have said so. So no rank goes on without one that has left.

use std::sync::{PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use super::Pool;
use super::committer::Committer;
use super::exchange_segments::GRACE;
use crate::error::ErrorKind;
use crate::group::Interrupt;
use crate::rendezvous::sockets::{BarrierMessage, BarrierStep, PeerSockets};
use crate::{Deadline, Error, Result};

/// Which step a barrier is for: two numbers that it has on all ranks, and no other barrier of the pool has.
pub type BarrierId = (u64, u64);

/// Between two looks whether a rank has said something.
const PAUSE: Duration = Duration::from_micros(50);
/// How often a rank that waits asks whether it is to stop, and whether all others are still there.
const ASK_EVERY: Duration = Duration::from_millis(50);
/// The most bytes that a rank brings. Ranks tell each other in one packet, whose frame holds more than that.
const MAX_BROUGHT: usize = 16 << 10;

/// A barrier on one rank.
struct HostBarrier<'a> {
    pool: &'a Pool,
    id: BarrierId,
    deadline: Deadline,
    /// Which ranks are here, and which of them go on.
    here: Vec<bool>,
    going_on: Vec<bool>,
    /// Whether a rank has left, so that none goes on.
    is_off: bool,
}

impl Pool {
    /// Waits on the host until every rank has come to the barrier. `check` judges what each of the others `brings`, as it
    /// comes: its error ends the barrier, and it must come to the same on all ranks.
    ///
    /// It is no commit, and waits for no device. Other threads may commit meanwhile.
    ///
    /// # Errors
    ///
    /// The error of a rank whose wait ends: that of `check`; [`Error::is_timeout`], which names ranks that have not
    /// come; [`Error::is_peer_lost`]; after an interrupt. No rank goes on then: others get the error of one that has
    /// left, as they come or at once. The pool can commit as before, unless a rank is lost that has said it goes on.
    /// `is_invalid_argument` on a rank that brings more than 16 KiB: it says nothing to the others.
    pub fn host_barrier(
        &self,
        id: BarrierId,
        brings: &[u8],
        deadline: Deadline,
        mut check: impl FnMut(u32, &[u8]) -> Result<()>,
    ) -> Result<()> {
        self.check_process()?;
        self.check_brought(brings)?;
        if !self.0.has_barrier_messages {
            return self.barrier_in_store(id, brings, deadline, check);
        }
        let world = self.world() as usize;
        let (here, going_on) = (vec![false; world], vec![false; world]);
        let mut barrier = HostBarrier { pool: self, id, deadline, here, going_on, is_off: false };
        let come = barrier
            .say(BarrierStep::Here(brings.to_vec()), deadline)
            .and_then(|()| barrier.wait_for_all(&mut check))
            .inspect_err(|why| barrier.leave(why));
        come.and_then(|()| barrier.go_on()).map_err(|error| self.at_barrier(error))
    }

    /// Says that this rank comes to the step in another way, where others may come to a [barrier](Self::host_barrier): their `check`
    /// is given what it `brings`, at most 16 KiB. Where ranks have no sockets, nothing is said.
    ///
    /// # Errors
    ///
    /// Those of [`Self::host_barrier`], but for errors of a `check`.
    pub fn come_elsewhere(&self, id: BarrierId, brings: &[u8], deadline: Deadline) -> Result<()> {
        self.check_process()?;
        self.check_brought(brings)?;
        if !self.0.has_barrier_messages {
            return Ok(());
        }
        self.say(&BarrierMessage { id, step: BarrierStep::Here(brings.to_vec()) }, deadline)
            .map_err(|error| self.at_barrier(error))
    }

    /// Returns, for each rank that has come to the step since the last call, its number and what it brings. Does not
    /// wait.
    pub fn have_come(&self, id: BarrierId) -> Vec<(u32, Vec<u8>)> {
        let heard = self.with_sockets(|sockets| Ok(sockets.heard(id)));
        let Ok(Some(heard)) = heard else { return Vec::new() };
        let come = heard.into_iter().filter_map(|(rank, said)| match said {
            BarrierStep::Here(brings) => Some((rank, brings)),
            BarrierStep::GoesOn | BarrierStep::Left(_) => None,
        });
        come.collect()
    }

    /// Uses the sockets, unless another thread commits.
    fn with_sockets<T>(
        &self,
        work: impl FnOnce(&mut PeerSockets) -> Result<T>,
    ) -> Result<Option<T>> {
        let mut committer = match self.0.committer.try_lock() {
            Ok(committer) => committer,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        let Committer { peers, broken, .. } = &mut *committer;
        match (broken, peers.sockets_mut()) {
            (Some(cause), _) => Err(cause.clone().context("ranks lost each other before")),
            (None, Some(sockets)) => work(sockets).map(Some),
            (None, None) => Ok(None),
        }
    }

    fn check_brought(&self, brings: &[u8]) -> Result<()> {
        if brings.len() <= MAX_BROUGHT {
            return Ok(());
        }
        let why = format!("{} bytes are brought, and at most {MAX_BROUGHT} can be", brings.len());
        Err(self.at_barrier(Error::invalid_argument(why)))
    }

    /// Says something to the other ranks, as soon as no other thread commits. An interrupt ends a wait to say that this rank
    /// is here. What a rank says later, others may depend on.
    fn say(&self, message: &BarrierMessage, deadline: Deadline) -> Result<()> {
        let interrupt = match message.step {
            BarrierStep::Here(_) => self.group().interrupt(),
            BarrierStep::GoesOn | BarrierStep::Left(_) => None,
        };
        let (mut sent, mut asked) = (Vec::new(), Instant::now());
        loop {
            if asked.elapsed() >= ASK_EVERY {
                asked = Instant::now();
                if interrupt.as_ref().is_some_and(Interrupt::is_requested) {
                    return Err(Error::interrupted("interrupted"));
                }
            }
            if self.with_sockets(|sockets| sockets.say(message, &mut sent))? == Some(true) {
                return Ok(());
            }
            if deadline.expired() {
                let deaf = (0..self.world()).filter(|peer| !sent.contains(peer));
                let deaf = deaf.filter(|peer| *peer != self.rank()).collect();
                let what = "to say that this rank is here: another thread commits, or other ranks do not listen";
                return Err(Error::timeout(what, deadline.budget(), deaf));
            }
            thread::sleep(PAUSE);
        }
    }

    /// Meets through the store, which takes back what a rank has said that leaves.
    fn barrier_in_store(
        &self,
        (one, other): BarrierId,
        brings: &[u8],
        deadline: Deadline,
        mut check: impl FnMut(u32, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let (group, interrupt) = (self.group(), self.group().interrupt());
        let stop = || interrupt.as_ref().is_some_and(Interrupt::is_requested);
        let gather = |step: &str, value: &[u8], deadline, stop: Option<&dyn Fn() -> bool>| {
            let key = format!("{}/barrier/{one}.{other}/{step}", group.name());
            let (rank, world) = (self.rank(), self.world());
            let gathered = group.store().all_gather_until(&key, rank, world, value, deadline, stop);
            gathered.map_err(|error| self.at_barrier(error))
        };
        let here = gather("here", brings, deadline, Some(&stop))?;
        for (peer, brings) in (0..).zip(here.parts()).filter(|(peer, _)| *peer != self.rank()) {
            check(peer, brings)?;
        }
        let deadline = Deadline::after(deadline.remaining().max(GRACE));
        gather("goes-on", &[], deadline, None).map(drop)
    }

    fn at_barrier(&self, error: Error) -> Error {
        error.context(format!("rank {}, waiting on the host for all ranks", self.rank()))
    }
}

impl HostBarrier<'_> {
    fn say(&self, step: BarrierStep, deadline: Deadline) -> Result<()> {
        self.pool.say(&BarrierMessage { id: self.id, step }, deadline)
    }

    /// Takes in what other ranks have said.
    fn listen(&mut self, check: &mut impl FnMut(u32, &[u8]) -> Result<()>) -> Result<()> {
        let heard = self.pool.with_sockets(|sockets| Ok(sockets.heard(self.id)))?;
        for (peer, said) in heard.into_iter().flatten() {
            match said {
                BarrierStep::Here(brings) => {
                    check(peer, &brings)?;
                    self.here[peer as usize] = true;
                }
                BarrierStep::GoesOn => self.going_on[peer as usize] = true,
                BarrierStep::Left(why) => {
                    self.is_off = true;
                    return Err(left(peer, why));
                }
            }
        }
        Ok(())
    }

    fn missing(&self, come: &[bool]) -> Vec<u32> {
        let ranks = (0..).zip(come).filter(|(rank, come)| !*come && *rank != self.pool.rank());
        ranks.map(|(rank, _)| rank).collect()
    }

    fn wait_for_all(&mut self, check: &mut impl FnMut(u32, &[u8]) -> Result<()>) -> Result<()> {
        let interrupt = self.pool.group().interrupt();
        let mut asked = Instant::now();
        loop {
            self.listen(check)?;
            let missing = self.missing(&self.here);
            if missing.is_empty() {
                return Ok(());
            }
            if self.deadline.expired() {
                let what = "for ranks that have not come to the call";
                return Err(Error::timeout(what, self.deadline.budget(), missing));
            }
            if asked.elapsed() >= ASK_EVERY {
                asked = Instant::now();
                self.pool.with_sockets(PeerSockets::check_all_here)?;
                if interrupt.as_ref().is_some_and(Interrupt::is_requested) {
                    return Err(Error::interrupted("interrupted"));
                }
            }
            thread::sleep(PAUSE);
        }
    }

    /// Says that this rank has left, and why, as far as others listen.
    fn leave(&self, why: &Error) {
        let said = self.say(BarrierStep::Left(why.kind().clone()), Deadline::after(GRACE));
        if let Err(error) = said {
            tracing::debug!(%error, %why, "other ranks are not told that this one waits for them no longer");
        }
    }

    /// The second step, once all ranks are here.
    fn go_on(mut self) -> Result<()> {
        let deadline = Deadline::after(self.deadline.remaining().max(GRACE));
        let outcome = self.say(BarrierStep::GoesOn, deadline).and_then(|()| {
            let mut asked = Instant::now();
            loop {
                self.listen(&mut |_, _| Ok(()))?;
                let missing = self.missing(&self.going_on);
                if missing.is_empty() {
                    return Ok(());
                }
                if deadline.expired() {
                    let what = "for ranks that had come to the call to go on";
                    return Err(Error::timeout(what, deadline.budget(), missing));
                }
                if asked.elapsed() >= ASK_EVERY {
                    asked = Instant::now();
                    self.pool.with_sockets(PeerSockets::check_all_here)?;
                }
                thread::sleep(PAUSE);
            }
        });
        outcome.inspect_err(|why| {
            // Where no rank has left, others may have gone on, and must not wait for this one. Another thread's commit ends
            // by its own deadline.
            if !self.is_off {
                let committer = self.pool.0.committer.lock();
                committer.unwrap_or_else(PoisonError::into_inner).stop_commits_after(why);
            }
        })
    }
}

/// The error of a rank that hears that another one has left.
fn left(peer: u32, why: ErrorKind) -> Error {
    let passes_on = matches!(
        why,
        ErrorKind::Timeout { .. }
            | ErrorKind::PeerLost { .. }
            | ErrorKind::Diverged(_)
            | ErrorKind::Mismatch { .. }
    );
    if passes_on {
        return Error::from_kind(why).context(format!("rank {peer} has left"));
    }
    Error::peer_lost(vec![peer], format!("it has left: {why}"))
}
