//! Whether other programs keep this machine's cores busy, as far as yields tell.
//!
//! A rank that waits yields its core, which costs next to nothing if nobody else wants it. If a program does, the
//! operating system gives it the core for a whole time slice, some milliseconds, and the peer finds that this rank is away:
//! both then take turns in missing each other, at a slice a call. So a rank that finds that a yield took long sleeps
//! instead, as a sleeper gets its core back as soon as it is woken. It tries a yield again now and then.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A yield that takes this long has given the core to another program. The least time slice on Linux is longer.
const LONG: Duration = Duration::from_micros(500);
/// For how long nobody yields after a yield that took long: each time in a row twice as long as the last time.
const MIN_HOLD: Duration = Duration::from_millis(20);
const MAX_HOLD: Duration = Duration::from_millis(640);

/// Knowledge from yields. All threads of a process share one, as all may run on any of its cores.
#[derive(Debug)]
pub(in crate::host) struct Crowd {
    /// When to yield again, in nanoseconds since `begin`; 0 if yields are short.
    until: AtomicU64,
    /// How long the last hold was, in nanoseconds; 0 if the last yield was short.
    hold: AtomicU64,
    begin: OnceLock<Instant>,
}

/// The knowledge of this process.
pub(in crate::host) static CROWD: Crowd = Crowd::new();

impl Crowd {
    pub(in crate::host) const fn new() -> Self {
        Self { until: AtomicU64::new(0), hold: AtomicU64::new(0), begin: OnceLock::new() }
    }

    /// Whether nobody yields now, as far as that is known without a look at a clock.
    #[inline]
    pub(in crate::host) fn is_known(&self) -> bool {
        self.until.load(Ordering::Relaxed) != 0
    }

    /// Whether a waiter is to sleep rather than to yield.
    pub(in crate::host) fn is_here(&self) -> bool {
        let until = self.until.load(Ordering::Relaxed);
        if until == 0 {
            return false;
        }
        let is_over = self.nanoseconds(Instant::now()) >= until;
        if is_over {
            self.until.store(0, Ordering::Relaxed);
        }
        !is_over
    }

    /// Notes that a yield began and ended at these times.
    pub(in crate::host) fn note_yield(&self, began: Instant, ended: Instant) {
        let hold = self.hold.load(Ordering::Relaxed);
        if ended - began < LONG {
            if hold != 0 {
                self.hold.store(0, Ordering::Relaxed);
            }
            return;
        }
        let least = MIN_HOLD.as_nanos() as u64;
        let hold = (2 * hold).clamp(least, MAX_HOLD.as_nanos() as u64);
        self.hold.store(hold, Ordering::Relaxed);
        self.until.store(self.nanoseconds(ended).saturating_add(hold).max(1), Ordering::Relaxed);
    }

    fn nanoseconds(&self, at: Instant) -> u64 {
        let begin = *self.begin.get_or_init(|| at);
        at.saturating_duration_since(begin).as_nanos() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yields_that_take_long_hold_off_others_for_longer_and_longer() {
        let crowd = Crowd::new();
        let now = Instant::now();
        crowd.note_yield(now, now + LONG / 2);
        assert!(!crowd.is_here() && !crowd.is_known());
        let mut held = Vec::new();
        for _ in 0..8 {
            crowd.note_yield(now, now + LONG);
            assert!(crowd.is_known() && crowd.is_here());
            held.push(crowd.hold.load(Ordering::Relaxed));
        }
        let doubled = (0..8).map(|n| (20_000_000 << n).min(640_000_000));
        assert_eq!(held, doubled.collect::<Vec<u64>>());
        crowd.note_yield(now, now);
        crowd.note_yield(now, now + LONG);
        assert_eq!(crowd.hold.load(Ordering::Relaxed), 20_000_000, "a short one was between");
    }

    #[test]
    fn a_hold_ends() {
        let crowd = Crowd::new();
        let before = Instant::now() - Duration::from_secs(1);
        crowd.note_yield(before - LONG, before);
        assert!(crowd.is_known(), "nobody has looked at a clock yet");
        assert!(!crowd.is_here() && !crowd.is_known());
    }
}
