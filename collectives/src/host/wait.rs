//! How a rank waits on the processor: spin, then give the core away, then sleep on a futex.

#![allow(unsafe_code)] // a futex is an address in shared memory

use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use rustix::thread::futex;
use symmpool_allocator::Deadline;

use super::fault::Cause;
use crate::signal::{Native, Pause, Slot};

/// How long a waiter spins before it gives the core away. Short, as the peer may need this very
/// core; a yield on an idle machine costs little more than a look.
const SPIN: Duration = Duration::from_micros(3);
/// Yields before a waiter sleeps.
const YIELDS: u32 = 400;
/// Longest single sleep: how often a sleeper looks for an abort, a dead peer and its deadline.
const SLICE: Duration = Duration::from_millis(10);

/// What a waiter may do before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    spins: u32,
    yields: u32,
}

impl Patience {
    /// Spinning pays only if every rank has a core to itself (see `cores`).
    pub(super) fn new(spin: bool) -> Self {
        Self { spins: if spin { calibrate() } else { 0 }, yields: YIELDS }
    }
}

/// Spins that take about [`SPIN`] here: the pause instruction costs 10 times more on some
/// processors than on others.
fn calibrate() -> u32 {
    const SAMPLE: u32 = 1000;
    let start = Instant::now();
    for _ in 0..SAMPLE {
        std::hint::spin_loop();
    }
    let each = start.elapsed().as_nanos().max(1) as u64 / u64::from(SAMPLE);
    (SPIN.as_nanos() as u64 / each.max(1)).clamp(50, 100_000) as u32
}

/// Passes the time of one wait. `check` looks for reasons to give up, and is called from the first
/// yield on, so that a wait that ends while spinning never reads a clock.
pub(super) struct Waiter<C> {
    patience: Patience,
    looks: u32,
    check: C,
}

impl<C> Waiter<C> {
    #[inline]
    pub(super) fn new(patience: Patience, check: C) -> Self {
        Self { patience, looks: 0, check }
    }

    #[cold]
    fn pause_slowly<E>(&mut self) -> Result<bool, E>
    where
        C: FnMut() -> Result<(), E>,
    {
        let yields = self.looks - self.patience.spins;
        if yields < self.patience.yields {
            // A clock at every 16th yield is soon enough.
            if yields.is_multiple_of(16) {
                (self.check)()?;
            }
            self.looks += 1;
            rustix::thread::sched_yield();
            return Ok(false);
        }
        (self.check)()?;
        Ok(true)
    }
}

impl<C, E> Pause<Native> for Waiter<C>
where
    C: FnMut() -> Result<(), E>,
{
    type Error = E;

    #[inline]
    fn pause(&mut self) -> Result<bool, E> {
        if self.looks < self.patience.spins {
            self.looks += 1;
            std::hint::spin_loop();
            return Ok(false);
        }
        self.pause_slowly()
    }

    fn park(&mut self, slot: &Slot<Native>, seen: u32) {
        let slice = rustix::thread::Timespec {
            tv_sec: 0,
            tv_nsec: rustix::thread::Nsecs::from(SLICE.subsec_nanos()),
        };
        // However the sleep ends - woken, changed before it began, interrupted, slice over - the
        // waiter looks at the word again.
        let _ = futex::wait(low_half(slot), futex::Flags::empty(), seen, Some(&slice));
    }
}

/// What one wait looks for beside its signal: the end of its time, and of the peer's process. Made at
/// the first look, so that a wait that ends while spinning never reads a clock.
pub(super) struct Lookout {
    deadline: Deadline,
    /// When it is next asked whether the peer lives.
    ask_at: Instant,
    dead: bool,
}

impl Lookout {
    pub(super) fn new(timeout: Duration) -> Self {
        // Not asked at once: a peer that is merely late costs no system call.
        let ask_at = Instant::now() + SLICE;
        Self { deadline: Deadline::after(timeout), ask_at, dead: false }
    }

    /// The time that this wait has in all.
    pub(super) fn timeout(&self) -> Duration {
        self.deadline.budget()
    }

    /// Why the wait is to end, if it is. `alive` tells whether the peer's process runs; `None` where
    /// there is nobody to ask.
    pub(super) fn look(&mut self, alive: Option<impl FnOnce() -> bool>) -> Result<(), Cause> {
        // The peer may have signalled and then ended: one more look came after `dead` was set.
        if self.dead {
            return Err(Cause::PeerLost);
        }
        if self.deadline.expired() {
            return Err(Cause::Timeout);
        }
        if let Some(alive) = alive {
            let now = Instant::now();
            if now >= self.ask_at {
                self.dead = !alive();
                self.ask_at = now + SLICE;
            }
        }
        Ok(())
    }
}

/// Wakes the one who sleeps on `slot`. Shared between processes, so never a private futex.
#[cold]
pub(super) fn wake(slot: &Slot<Native>) {
    // Waking cannot fail on a mapped address; if it did, the sleeper's slice would end it.
    let _ = futex::wake(low_half(slot), futex::Flags::empty(), 1);
}

/// Wakes all threads that sleep on `slot`.
#[cold]
pub(super) fn wake_all(slot: &Slot<Native>) {
    // As in `wake`.
    let _ = futex::wake(low_half(slot), futex::Flags::empty(), i32::MAX as u32);
}

/// The half of the word that the kernel compares. Only the kernel reads through it.
fn low_half(slot: &Slot<Native>) -> &AtomicU32 {
    // SAFETY: the word is eight aligned bytes that live as long as `slot`; its first four are the
    // low half (little endian, asserted in `signal`), and AtomicU32 may be shared and changed.
    unsafe { AtomicU32::from_ptr(slot.word.as_ptr().cast()) }
}
