//! How a rank waits: it spins, then yields the core, then sleeps on a futex.

#![allow(unsafe_code)] // a futex is an address in shared memory

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use rustix::thread::futex;
use symmpool_allocator::Deadline;

use super::fault::Cause;
use crate::signal::{Native, Pause, Slot};

/// How long a waiter spins before it yields. It is short, because the peer may need this very core; on an idle
/// machine a yield costs little more than a load.
const SPIN: Duration = Duration::from_micros(3);
/// Yields before a waiter sleeps.
const YIELDS: u32 = 400;
/// A waiter reads a clock at one of so many yields.
const CHECK_EVERY: u32 = 16;
/// The longest single sleep, and so how often a sleeper checks for an abort, a dead peer and its deadline.
const SLICE: Duration = Duration::from_millis(10);
/// How often a waiter asks whether it is to stop. The answer may need a lock that others hold.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// How often a waiter spins and yields before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpinPolicy {
    spins: u32,
    yields: u32,
}

impl SpinPolicy {
    /// Spinning is worth it only for ranks that have another core than the waiter (see `cores` and `shared_cores`).
    pub(super) fn new(spin: bool) -> Self {
        Self { spins: if spin { calibrate() } else { 0 }, yields: YIELDS }
    }
}

/// How many spins take about [`SPIN`] on this processor. The pause instruction takes 10 times longer on some
/// processors than on others.
fn calibrate() -> u32 {
    const SAMPLE: u32 = 250;
    let sample = |_| {
        let start = Instant::now();
        for _ in 0..SAMPLE {
            std::hint::spin_loop();
        }
        start.elapsed().as_nanos().max(1) as u64 / u64::from(SAMPLE)
    };
    // Others may have the core during some of the samples.
    let each = (0..4).map(sample).min().unwrap_or(1);
    (SPIN.as_nanos() as u64 / each.max(1)).clamp(50, 100_000) as u32
}

/// Paces one wait. `check` looks for reasons to give up. It is called at every [`CHECK_EVERY`]th yield, so that a wait
/// that ends before, as nearly all do in small calls of ranks that share cores, never reads a clock.
pub(super) struct Waiter<C> {
    spin_policy: SpinPolicy,
    looks: u32,
    check: C,
}

impl<C> Waiter<C> {
    #[inline]
    pub(super) fn new(spin_policy: SpinPolicy, check: C) -> Self {
        Self { spin_policy, looks: 0, check }
    }

    #[cold]
    fn pause_slowly<E>(&mut self) -> Result<bool, E>
    where
        C: FnMut() -> Result<(), E>,
    {
        let yields = self.looks - self.spin_policy.spins;
        if yields < self.spin_policy.yields {
            if yields % CHECK_EVERY == CHECK_EVERY - 1 {
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
        if self.looks < self.spin_policy.spins {
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
        // However the sleep ends (woken, word changed before it began, interrupted, slice over), the waiter loads
        // the word again.
        let _ = futex::wait(low_half(slot), futex::Flags::empty(), seen, Some(&slice));
    }
}

/// Returns whether a wait is to stop, as after Ctrl-C.
pub(super) type Interrupted = Arc<dyn Fn() -> bool + Send + Sync>;

/// Ends one wait when its deadline passes, the peer's process ends, or the wait is to stop. It is made at the first
/// check, so that a wait that ends before never reads a clock.
pub(super) struct Watchdog {
    deadline: Deadline,
    /// When to check next whether the peer's process runs.
    check_at: Instant,
    dead: bool,
    /// When to ask next whether to stop.
    ask_at: Instant,
}

impl Watchdog {
    pub(super) fn new(timeout: Duration) -> Self {
        // Not at once, so that a peer that is only a little late costs no system call.
        let now = Instant::now();
        let (check_at, ask_at) = (now + SLICE, now + ASK_EVERY);
        Self { deadline: Deadline::after(timeout), check_at, dead: false, ask_at }
    }

    /// How long this wait may take in all.
    pub(super) fn timeout(&self) -> Duration {
        self.deadline.budget()
    }

    /// Returns the cause if the wait must end. `alive` returns whether the peer's process runs; `None` if that cannot
    /// be found out.
    pub(super) fn look(
        &mut self,
        alive: Option<impl FnOnce() -> bool>,
        interrupted: Option<&Interrupted>,
    ) -> Result<(), Cause> {
        // The peer may have signalled before it ended: the word was loaded once more after `dead` was set.
        if self.dead {
            return Err(Cause::PeerLost);
        }
        if self.deadline.expired() {
            return Err(Cause::Timeout);
        }
        let now = Instant::now();
        if let Some(alive) = alive.filter(|_| now >= self.check_at) {
            self.dead = !alive();
            self.check_at = now + SLICE;
        }
        if let Some(interrupted) = interrupted.filter(|_| now >= self.ask_at) {
            if interrupted() {
                return Err(Cause::Interrupted);
            }
            self.ask_at = now + ASK_EVERY;
        }
        Ok(())
    }
}

/// Wakes the thread that sleeps on `slot`. Processes share the slot, so the futex is never a private one.
#[cold]
pub(super) fn wake(slot: &Slot<Native>) {
    // Waking cannot fail on a mapped address; if it did, the sleeper would wake up after its slice.
    let _ = futex::wake(low_half(slot), futex::Flags::empty(), 1);
}

/// Wakes all threads that sleep on `slot`.
#[cold]
pub(super) fn wake_all(slot: &Slot<Native>) {
    // As in `wake`.
    let _ = futex::wake(low_half(slot), futex::Flags::empty(), i32::MAX as u32);
}

/// The half of the word that the operating system compares. Only the operating system reads it through this reference.
fn low_half(slot: &Slot<Native>) -> &AtomicU32 {
    // SAFETY: the word is eight aligned bytes that live as long as `slot`; its first four are the
    // low half (little endian, asserted in `signal`), and AtomicU32 may be shared and changed.
    unsafe { AtomicU32::from_ptr(slot.word.as_ptr().cast()) }
}
