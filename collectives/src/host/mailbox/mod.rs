//! Point-to-point messages of a group's ranks on one machine, which need no communicator: pairs of ranks connect when
//! one of them first needs the other, and no third rank takes part.
//!
//! | file | holds |
//! | --- | --- |
//! | `segment` | the memory through which one rank sends to another |
//! | `state` | which message is for which receive, and what moves messages on |
//! | `peer` | what waits for one peer, and how bytes pass |
//! | `self_messages` | messages of a rank to itself |
//! | `operation` | one message that was begun |
//! | `progress_thread` | the thread that moves on what nobody waits for |
//!
//! A message of up to 64 KiB is sent whole (MPI's eager protocol): its send is done when it lies in the receiver's segment,
//! wherever the receiver is. There it waits in the receiver's list of unexpected messages until somebody receives it. A larger
//! one is offered (MPI's rendezvous protocol): its bytes stay where they are until the receiver has memory for them, and asks.
//! So is a small one beyond the 4 MiB that a rank may have sent another one without a receive.
//!
//! A receive takes the first message of its tag from its source, or, of several sources, the one that came first.
//! Messages of one sender and one tag are received in the order of their sends.
//!
//! A rank may send itself something, and receives it by its own number.
//!
//! Each call makes progress on all messages of the mailbox. While messages are open and nobody calls, a thread does so every
//! two milliseconds, so that a rank may wait for something else meanwhile.

#![allow(unsafe_code)] // takes callers' memory

mod operation;
mod peer;
mod progress_thread;
mod segment;
mod self_messages;
mod state;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_cancelled;

use std::any::Any;
use std::fmt;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use symmpool_allocator::{Error, PairAddress, PairListener, ProcessId, Result};

use self::operation::BegunMessage;
use self::state::MailboxState;
use crate::DType;
use crate::call::p2p::{Direction, Payload};
use crate::host::wait::cores::enough_here;
use crate::host::wait::fault::Cause;
use crate::host::wait::waiter::{Interrupted, SpinPolicy, WaitWatchdog, Waiter};
use crate::signal::Pause;
use crate::types::timeout::Timeout;

/// Name of the mailbox in the errors of a forked child, which may not use it.
const WHAT: &str = "a group's mailbox";
/// How long a waiter sleeps at most before it looks whether its peers are still there.
const SLICE: Duration = Duration::from_millis(10);

/// A rank's messages to and from the other ranks of a group.
///
/// Every rank makes one, and publishes its [`Self::address`]. Whoever has a first message passes the addresses of all
/// ranks to [`Self::connect`].
pub struct Mailbox {
    shared: Arc<Shared>,
}

/// State that calls, operations and the thread share.
struct Shared {
    rank: u32,
    world: u32,
    state: Mutex<MailboxState>,
    /// Wakes the thread when there is something to move on.
    begun: Condvar,
    /// Threads that wait for operations, and those of them that sleep.
    waiting: AtomicU32,
    sleeping: AtomicU32,
    /// Whether a peer has ever refused what it was sent whole.
    has_reports: Arc<AtomicBool>,
    timeout: Timeout,
    interrupted: Option<Interrupted>,
    spin_policy: SpinPolicy,
    maker: ProcessId,
}

/// A send or a receive that was begun. Dropping it leaves the message as it is.
#[derive(Clone)]
pub struct PendingMessage {
    op: Arc<BegunMessage>,
    shared: Arc<Shared>,
}

impl Mailbox {
    /// A mailbox for rank `rank` of `world`, whose waits end after `timeout`, and when `interrupted` says so.
    ///
    /// # Errors
    ///
    /// - `is_invalid_argument` if `rank` is no rank of `world`.
    /// - `is_out_of_memory` where there are too many open files.
    pub fn new(
        rank: u32,
        world: u32,
        timeout: Duration,
        interrupted: Option<Interrupted>,
    ) -> Result<Self> {
        if rank >= world {
            return Err(Error::invalid_argument(format!("rank {rank} of {world} ranks")));
        }
        let has_reports = Arc::new(AtomicBool::new(false));
        let state = MailboxState::new(rank, world, PairListener::bind()?, Arc::clone(&has_reports));
        let shared = Shared {
            rank,
            world,
            state: Mutex::new(state),
            begun: Condvar::new(),
            waiting: AtomicU32::new(0),
            sleeping: AtomicU32::new(0),
            has_reports,
            timeout: Timeout::new(timeout),
            interrupted,
            spin_policy: SpinPolicy::new(enough_here(world)),
            maker: ProcessId::here(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns the address by which other ranks find this mailbox.
    ///
    /// # Errors
    ///
    /// - Where the system does not say which machine this is.
    pub fn address(&self) -> Result<Vec<u8>> {
        let listener = self.shared.lock()?.listener();
        listener.ok_or_else(|| Error::invalid_state("the mailbox has ended"))?.address()
    }

    /// Takes the addresses of all ranks, in the order of their ranks. Talks to nobody. Returns why this group's
    /// ranks cannot have messages by their mailboxes, which is the same on all ranks, if they cannot.
    ///
    /// # Errors
    ///
    /// - `is_invalid_argument` for another number of addresses than of ranks.
    /// - `is_diverged` for an address that another version of the package has published.
    pub fn connect(&self, addresses: &[Vec<u8>]) -> Result<Option<String>> {
        let world = self.shared.world;
        if addresses.len() != world as usize {
            let found = addresses.len();
            return Err(Error::invalid_argument(format!("{found} addresses of {world} ranks")));
        }
        let read = |(rank, bytes): (u32, &Vec<u8>)| PairAddress::decode(rank, bytes);
        let found: Vec<PairAddress> = (0..).zip(addresses).map(read).collect::<Result<Vec<_>>>()?;
        let obstacle = found[1..].iter().find_map(|address| found[0].obstacle(address));
        if obstacle.is_none() {
            self.shared.lock()?.addresses = found;
        }
        Ok(obstacle)
    }

    /// Sets how long operations that are waited for from now on may take.
    pub fn set_timeout(&self, timeout: Duration) {
        self.shared.timeout.set(timeout);
    }

    /// Begins to send `count` elements from `memory` on to `peer`, where a receive with the same `tag` takes them. `held`
    /// is dropped when they are not needed any more.
    ///
    /// # Safety
    ///
    /// While `held` is not dropped, `memory` is readable for these elements. Nobody writes them before the operation
    /// has ended.
    ///
    /// # Errors
    ///
    /// - `is_invalid_argument` for a peer that is no rank.
    /// - `is_peer_lost` if the peer's process has ended, or has ended its mailbox.
    /// - `is_invalid_state` before [`Self::connect`], after [`Self::end`], and in a forked child.
    pub unsafe fn send(
        &self,
        (memory, count, dtype): (*const u8, usize, DType),
        peer: u32,
        tag: i64,
        held: Box<dyn Any + Send + Sync>,
    ) -> Result<PendingMessage> {
        let key = (Direction::Send, Some(peer), tag as u64);
        self.shared.begin(key, (memory.cast_mut(), count, dtype), held)
    }

    /// Begins to receive `count` elements to `memory`: what `peer` sends, or any rank if there is none, with the same
    /// `tag`. Otherwise as [`Self::send`].
    ///
    /// # Safety
    ///
    /// While `held` is not dropped, `memory` is writable for these elements. Nobody touches them before the
    /// operation has ended.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::send`].
    pub unsafe fn recv(
        &self,
        (memory, count, dtype): (*mut u8, usize, DType),
        peer: Option<u32>,
        tag: i64,
        held: Box<dyn Any + Send + Sync>,
    ) -> Result<PendingMessage> {
        let key = (Direction::Receive, peer, tag as u64);
        self.shared.begin(key, (memory, count, dtype), held)
    }

    /// Ends all messages with an error, and all later calls. Peers see that this rank has ended.
    pub fn end(&self) {
        self.shared.end();
    }
}

impl Shared {
    fn lock(&self) -> Result<MutexGuard<'_, MailboxState>> {
        self.maker.check(WHAT)?;
        // Counts are valid even if a thread panicked between two of them.
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn end(&self) {
        if let Ok(mut state) = self.lock()
            && state.ended.is_none()
        {
            let rank = self.rank;
            let why = format!("the group of this send or recv, on rank {rank}, was destroyed");
            state.end(&Error::invalid_state(why));
            drop(state);
            self.begun.notify_all();
        }
    }

    fn begin(
        self: &Arc<Self>,
        key: (Direction, Option<u32>, u64),
        (memory, count, dtype): (*mut u8, usize, DType),
        held: Box<dyn Any + Send + Sync>,
    ) -> Result<PendingMessage> {
        let (direction, peer, _) = key;
        let (rank, world, what) = (self.rank, self.world, direction.name());
        if let Some(peer) = peer.filter(|peer| *peer >= world) {
            return Err(Error::invalid_argument(format!(
                "{what} on rank {rank} with rank {peer}: there are {world} ranks"
            )));
        }
        let payload = Payload::new(what, rank, count, dtype)?;
        let mut state = self.lock()?;
        if state.addresses.is_empty() && state.ended.is_none() {
            return Err(Error::invalid_state(format!("{what}: the mailbox is not connected")));
        }
        let op = Arc::new(BegunMessage::new(key, payload, memory, held));
        state.begin(&op)?;
        if op.outcome().is_none() {
            self.ensure_progress(&mut state);
        }
        Ok(PendingMessage { op, shared: Arc::clone(self) })
    }

    /// Moves messages on while this thread sleeps, until something has come or a while has passed.
    fn sleep(&self) -> Result<()> {
        let mut state = self.lock()?;
        self.sleeping.fetch_add(1, Ordering::Relaxed);
        state.set_asleep(true);
        if !state.advance() {
            let (sockets, listener) = (state.sockets(), state.listener());
            drop(state);
            let polls = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            let mut polled: Vec<_> = listener.iter().map(|each| polls(each.as_fd())).collect();
            polled.extend(sockets.iter().map(|socket| polls(socket.as_fd())));
            // Another thread may take what wakes this one.
            let alone = self.waiting.load(Ordering::Relaxed) < 2;
            let slice = if alone { SLICE } else { SLICE / 10 };
            let limit = Timespec { tv_sec: 0, tv_nsec: slice.subsec_nanos().into() };
            // However the sleep ends, what is there is looked at.
            let _ = rustix::event::poll(&mut polled, Some(&limit));
            state = self.lock()?;
            state.look_at_sockets();
            state.advance();
        }
        if self.sleeping.fetch_sub(1, Ordering::Relaxed) == 1 {
            state.set_asleep(false);
        }
        Ok(())
    }
}

impl PendingMessage {
    /// Whether it has ended, as all have in a forked child. Moves messages on, and does not wait.
    pub fn is_done(&self) -> bool {
        if self.op.outcome().is_none() {
            let Ok(mut state) = self.shared.lock() else { return true };
            if !state.advance() {
                state.look_at_sockets();
            }
        }
        self.op.outcome().is_some()
    }

    /// How it ended: with the other rank, or an error. `None` if it has not. What was open at a fork is an error in the
    /// child.
    pub fn outcome(&self) -> Option<Result<u32>> {
        let lost = || self.shared.maker.check(WHAT).err().map(Err);
        self.op.outcome().cloned().or_else(lost)
    }

    /// Waits until the message is received, or its memory may be written again. Returns the other rank.
    ///
    /// With `limit` a wait that takes longer leaves the operation as it is. Without one, the operation is given up
    /// after the mailbox's timeout, and so it is if the wait is interrupted.
    ///
    /// # Errors
    ///
    /// - `is_diverged` where the two ends have other elements, or another number of them. A sender whose message was
    ///   sent whole learns of it by its next wait for a message to or from that rank, once that message has ended as
    ///   [`Self::outcome`] says, or has not come in time.
    /// - `is_timeout` if the other rank does not come in time.
    /// - `is_peer_lost` if its process has ended, or has ended its mailbox.
    /// - `is_interrupted`; and `is_invalid_state` after [`Mailbox::end`], and in a forked child.
    pub fn wait(&self, limit: Option<Duration>) -> Result<u32> {
        if self.op.outcome().is_none() {
            self.shared.maker.check(WHAT)?;
            self.shared.waiting.fetch_add(1, Ordering::Relaxed);
            let waited = self.await_end(limit);
            self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
            if let Err(error) = waited {
                // A refusal may be why nothing has come.
                let refused = if error.is_timeout() { self.report()? } else { None };
                return Err(refused.unwrap_or(error));
            }
        }
        if let Some(error) = self.report()? {
            return Err(error);
        }
        self.op.outcome().cloned().unwrap_or_else(|| Err(Error::invalid_state("not ended")))
    }

    /// Returns an error if the peer has refused an earlier message of this rank's.
    fn report(&self) -> Result<Option<Error>> {
        if !self.shared.has_reports.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let mut state = self.shared.lock()?;
        Ok(self.op.peer.and_then(|peer| state.report(peer)))
    }

    fn await_end(&self, limit: Option<Duration>) -> Result<()> {
        let shared = &*self.shared;
        let mut watchdog = None;
        let check = || {
            let watchdog = watchdog
                .get_or_insert_with(|| WaitWatchdog::new(limit.unwrap_or(shared.timeout.get())));
            let alive: Option<fn() -> bool> = None;
            watchdog
                .run(alive, shared.interrupted.as_ref())
                .map_err(|cause| (cause, watchdog.timeout()))
        };
        let mut waiter = Waiter::new(shared.spin_policy, check);
        loop {
            let mut state = shared.lock()?;
            state.advance();
            drop(state);
            if self.op.outcome().is_some() {
                return Ok(());
            }
            match waiter.pause() {
                Ok(false) => {}
                Ok(true) => shared.sleep()?,
                Err((cause, timeout)) => return self.end_in_vain(cause, timeout, limit.is_some()),
            }
        }
    }

    /// Ends a wait whose operation has not ended.
    #[cold]
    fn end_in_vain(&self, cause: Cause, timeout: Duration, keeps: bool) -> Result<()> {
        let (rank, world) = (self.shared.rank, self.shared.world);
        let what = format!("{} on rank {rank}", self.op.describe());
        let missing = self.op.peer.map_or_else(|| (0..world).collect(), |peer| vec![peer]);
        let missing: Vec<u32> = missing.into_iter().filter(|peer| *peer != rank).collect();
        let error = match cause {
            Cause::Interrupted => {
                Error::interrupted(format!("interrupted: {what}")).naming(missing)
            }
            _ => Error::timeout(format!("in a {what}"), timeout, missing),
        };
        let mut state = self.shared.lock()?;
        state.look_at_sockets();
        state.advance();
        match self.op.outcome() {
            Some(_) => Ok(()),
            None if keeps && error.is_timeout() => Err(error),
            None => {
                state.cancel(&self.op, &error);
                if state.is_busy() {
                    // The peer is still to be told.
                    self.shared.ensure_progress(&mut state);
                }
                Err(error)
            }
        }
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { rank, world, .. } = &*self.shared;
        f.debug_struct("Mailbox").field("rank", rank).field("world", world).finish_non_exhaustive()
    }
}

impl fmt::Debug for PendingMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.op.fmt(f)
    }
}
