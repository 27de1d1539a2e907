//! How a rank waits: it spins, then yields the core, then sleeps on a futex. While other programs want its core (see
//! `crowd`), it spins for longer and does not yield.

#![allow(unsafe_code)] // a futex is an address in shared memory

use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::thread::futex;
use symmpool_allocator::Deadline;

use crate::host::wait::crowd::{CROWD, Crowd};
use crate::host::wait::fault::Cause;
use crate::signal::{Native, Pause, SignalSlot};

/// How long a waiter spins before it yields. It is short, because the peer may need this very core; on an idle
/// machine a yield costs little more than a load.
const SPIN: Duration = Duration::from_micros(3);
/// Yields before a waiter sleeps.
const YIELDS: u32 = 400;
/// Yields before a waiter sleeps that sleeps soon.
const FEW_YIELDS: u32 = 8;
/// How many times longer a waiter spins that does not yield, as other programs want its core: as long as a peer on another
/// core needs to wake up.
const SPIN_INSTEAD: u32 = 16;
/// Pauses between two loads of the word then.
const SPINS_AT_ONCE: u32 = 4;
/// Yields from one check of a waiter to the next.
const CHECK_EVERY: u32 = 16;
/// The longest single sleep, and so how often a sleeper checks for an abort, a dead peer and its deadline.
const SLICE: Duration = Duration::from_millis(10);
/// How often a waiter asks whether it is to stop. The answer may need a lock that others hold.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// How often a waiter spins and yields before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(in crate::host) struct SpinPolicy {
    spins: u32,
    yields: u32,
    crowd: &'static Crowd,
}

impl SpinPolicy {
    /// Spinning is worth it only for ranks that have another core than the waiter (see `cores` and `shared_cores`).
    pub(in crate::host) fn new(spin: bool) -> Self {
        // Measured once a process, as a program may make many groups.
        static SPINS: OnceLock<u32> = OnceLock::new();
        let spins = if spin { *SPINS.get_or_init(calibrate) } else { 0 };
        Self { spins, yields: YIELDS, crowd: &CROWD }
    }

    /// Policy of a waiter that sleeps soon.
    pub(in crate::host) fn with_few_yields(self) -> Self {
        Self { yields: FEW_YIELDS, ..self }
    }

    /// Policy for a rank on the waiter's own core.
    pub(in crate::host) fn here(self) -> Self {
        Self { spins: 0, ..self }
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
/// that ends before, as nearly all do in small calls of ranks that share cores, never makes it.
pub(in crate::host) struct Waiter<C> {
    spin_policy: SpinPolicy,
    looks: u32,
    spun_instead: u32,
    yielded_at: Option<Instant>,
    check: C,
}

impl<C> Waiter<C> {
    #[inline]
    pub(in crate::host) fn new(spin_policy: SpinPolicy, check: C) -> Self {
        Self { spin_policy, looks: 0, spun_instead: 0, yielded_at: None, check }
    }

    #[cold]
    fn pause_slowly<E>(&mut self) -> Result<bool, E>
    where
        C: FnMut() -> Result<(), E>,
    {
        let SpinPolicy { spins, yields, crowd } = self.spin_policy;
        if crowd.is_here() {
            if self.spun_instead < spins.saturating_mul(SPIN_INSTEAD) {
                self.spun_instead += SPINS_AT_ONCE;
                for _ in 0..SPINS_AT_ONCE {
                    std::hint::spin_loop();
                }
                return Ok(false);
            }
            (self.check)()?;
            return Ok(true);
        }
        let yielded = self.looks - spins;
        if yielded < yields {
            if yielded % CHECK_EVERY == CHECK_EVERY - 1 {
                (self.check)()?;
                self.yielded_at = None;
            }
            self.looks += 1;
            let began = self.yielded_at.unwrap_or_else(Instant::now);
            rustix::thread::sched_yield();
            let ended = Instant::now();
            self.yielded_at = Some(ended);
            crowd.note_yield(began, ended);
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

    fn park(&mut self, slot: &SignalSlot<Native>, seen: u32) {
        let slice = rustix::thread::Timespec {
            tv_sec: 0,
            tv_nsec: rustix::thread::Nsecs::from(SLICE.subsec_nanos()),
        };
        // However the sleep ends (woken, word changed before it began, interrupted, slice over), the waiter loads
        // the word again.
        let _ = futex::wait(low_half(slot), futex::Flags::empty(), seen, Some(&slice));
        self.yielded_at = None;
    }
}

/// Returns whether a wait is to stop, as after Ctrl-C.
pub(in crate::host) type Interrupted = Arc<dyn Fn() -> bool + Send + Sync>;

/// Ends one wait when its deadline passes, the peer's process ends, or the wait is to stop. It is made at the first
/// check, so that a wait that ends before never reads a clock.
pub(in crate::host) struct WaitWatchdog {
    deadline: Deadline,
    /// When to check next whether the peer's process runs.
    check_at: Instant,
    dead: bool,
    /// When to ask next whether to stop.
    ask_at: Instant,
}

impl WaitWatchdog {
    pub(in crate::host) fn new(timeout: Duration) -> Self {
        // Not at once, so that a peer that is only a little late costs no system call.
        let now = Instant::now();
        let (check_at, ask_at) = (now + SLICE, now + ASK_EVERY);
        Self { deadline: Deadline::after(timeout), check_at, dead: false, ask_at }
    }

    /// How long this wait may take in all.
    pub(in crate::host) fn timeout(&self) -> Duration {
        self.deadline.budget()
    }

    /// Returns the cause if the wait must end. `alive` returns whether the peer's process runs; `None` if that cannot
    /// be found out.
    pub(in crate::host) fn run(
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
pub(in crate::host) fn wake(slot: &SignalSlot<Native>) {
    // Waking cannot fail on a mapped address; if it did, the sleeper would wake up after its slice.
    let _ = futex::wake(low_half(slot), futex::Flags::empty(), 1);
}

/// Wakes all threads that sleep on `slot`.
#[cold]
pub(in crate::host) fn wake_all(slot: &SignalSlot<Native>) {
    // Waking cannot fail on a mapped address; if it did, the sleepers would wake up after their slice.
    let _ = futex::wake(low_half(slot), futex::Flags::empty(), i32::MAX as u32);
}

/// The half of the word that the operating system compares. Only the operating system reads it through this reference.
fn low_half(slot: &SignalSlot<Native>) -> &AtomicU32 {
    // SAFETY: the word is eight aligned bytes that live as long as `slot`; its first four are the
    // low half (little endian, asserted in `signal`), and AtomicU32 may be shared and changed.
    unsafe { AtomicU32::from_ptr(slot.word.as_ptr().cast()) }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    use super::*;

    fn policy(spins: u32) -> SpinPolicy {
        SpinPolicy { spins, yields: YIELDS, crowd: Box::leak(Box::new(Crowd::new())) }
    }

    /// How often a waiter looks in vain before it sleeps.
    fn looks(policy: SpinPolicy) -> u32 {
        let mut waiter = Waiter::new(policy, || Ok::<(), Infallible>(()));
        let mut looks = 0;
        loop {
            looks += 1;
            match waiter.pause() {
                Ok(true) => return looks,
                Ok(false) => assert!(looks < 10_000),
            }
        }
    }

    #[test]
    fn a_waiter_whose_yields_took_long_spins_a_little_and_sleeps() {
        let policy = policy(8);
        let now = Instant::now();
        policy.crowd.note_yield(now, now + Duration::from_millis(3));
        assert_eq!(looks(policy), 8 + 8 * SPIN_INSTEAD / SPINS_AT_ONCE + 1);
        assert_eq!(looks(policy.here()), 1, "for a rank on its own core at once");
    }

    /// Two threads that both want one core: else they would miss each other, at a time slice a signal.
    #[test]
    fn a_waiter_beside_a_busy_thread_soon_sleeps() {
        let busy = Arc::new(AtomicBool::new(true));
        let before = sched_getaffinity(None).unwrap();
        let mut one = CpuSet::new();
        one.set((0..CpuSet::MAX_CPU).find(|core| before.is_set(*core)).unwrap());
        let beside = {
            let busy = busy.clone();
            std::thread::spawn(move || {
                sched_setaffinity(None, &one).unwrap();
                while busy.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        };
        sched_setaffinity(None, &one).unwrap();
        let looks = looks(policy(1));
        sched_setaffinity(None, &before).unwrap();
        busy.store(false, Ordering::Relaxed);
        beside.join().unwrap();
        assert!(looks < YIELDS / 2, "{looks} looks");
    }
}
