//! Channels: counted signals from one rank to another, outside of collectives.
//!
//! The word of a channel's [`SignalSlot`] is the number of signals that were ever sent; only the sending rank changes it,
//! and it only grows. The waiting rank counts the signals that it took. A wait succeeds once more were sent than
//! taken, and takes exactly one. So signals may run ahead of waits, and waits ahead of signals, without bound: 64
//! bits do not wrap.
//!
//! Several threads of either rank may signal and wait at the same time. Every signal is an addition with release, so
//! whoever acquires count `n` sees what was written before each of the first `n` signals.

use std::sync::atomic::Ordering;

use super::{Atomics, Pause, SignalSlot, Word};
use crate::sync::{mutant, weakened};

/// The number of channels between two ranks, in each direction.
pub(crate) const CHANNELS: u32 = 16;

impl<A: Atomics> SignalSlot<A> {
    /// Sends one more signal: whoever takes it sees all that this thread wrote before (S3).
    /// [`wake_sleepers`](super::wake_sleepers) must follow, and wake all sleepers.
    #[inline]
    pub(crate) fn count_up(&self) {
        self.word.add(1, weakened("mutant_relaxed_count", Ordering::Release));
    }
}

/// Waits until there is a signal that was not taken, takes it, and returns its number, counted from 1. If the pause
/// ends the wait, no signal was taken.
#[inline]
pub(crate) fn take<A: Atomics, P: Pause<A>>(
    slot: &SignalSlot<A>,
    taken: &A::U64,
    pause: &mut P,
) -> Result<u64, P::Error> {
    loop {
        let before = taken.load(Ordering::Relaxed);
        let sent = slot.word.load(Ordering::Acquire);
        if sent > before {
            // Another thread may have taken this signal first; then wait for the next.
            if taken.replace(before, before + 1) || mutant("mutant_signal_taken_twice") {
                return Ok(before + 1);
            }
            continue;
        }
        if pause.pause()? {
            slot.sleeping.add(1, Ordering::Relaxed);
            // Pairs with the fence in `wake_sleepers`, as in `await_word`.
            A::fence();
            if slot.word.load(Ordering::Acquire) == sent {
                pause.park(slot, sent as u32);
            }
            if mutant("mutant_other_sleeper_forgotten") {
                slot.sleeping.store(0, Ordering::Relaxed);
                continue;
            }
            slot.sleeping.add(1_u32.wrapping_neg(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod models {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use loom::sync::atomic::AtomicU64;
    use symmpool_allocator::models::{ALL, Watched, prove};

    use super::super::tests::{Futex, Loom, Sleeper, Spinner};
    use super::super::wake_sleepers;
    use super::*;

    struct Channel {
        slot: SignalSlot<Loom>,
        taken: AtomicU64,
        futex: Futex,
        /// The data that the signals hand over, one after the other.
        data: [Watched<u64>; 2],
    }

    impl Channel {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                slot: SignalSlot::for_model(),
                taken: AtomicU64::new(0),
                futex: Futex::new(),
                data: std::array::from_fn(|_| Watched::new(0)),
            })
        }

        fn put(&self, which: usize) {
            self.data[which].set(7);
        }

        fn seen(&self, which: usize) -> u64 {
            self.data[which].get()
        }

        fn signal(&self) {
            self.slot.count_up();
            wake_sleepers(std::iter::once(&self.slot), |_| self.futex.wake());
        }

        fn take<P: Pause<Loom, Error = std::convert::Infallible>>(&self, pause: &mut P) -> u64 {
            match take(&self.slot, &self.taken, pause) {
                Ok(number) => number,
                Err(never) => match never {},
            }
        }
    }

    /// Rule S3.
    #[test]
    fn loom_a_wait_sees_what_came_before_its_signal() {
        // This holds even if the next signal was sent before the first was taken.
        prove(ALL, &["mutant_relaxed_count"], || {
            let channel = Channel::new();
            let theirs = Arc::clone(&channel);
            let sender = loom::thread::spawn(move || {
                for which in 0..2 {
                    theirs.put(which);
                    theirs.signal();
                }
            });
            for which in 0..2 {
                assert_eq!(channel.take(&mut Spinner), which as u64 + 1);
                assert_eq!(channel.seen(which), 7);
            }
            sender.join().unwrap();
        });
    }

    #[test]
    fn loom_signals_of_two_threads_are_all_counted_and_seen() {
        prove(ALL, &["mutant_relaxed_count"], || {
            let channel = Channel::new();
            let senders: Vec<_> = (0..2)
                .map(|which| {
                    let theirs = Arc::clone(&channel);
                    loom::thread::spawn(move || {
                        theirs.put(which);
                        theirs.slot.count_up();
                    })
                })
                .collect();
            for _ in 0..2 {
                channel.take(&mut Spinner);
            }
            // Both were taken, so what was written before either is visible.
            assert_eq!([channel.seen(0), channel.seen(1)], [7, 7]);
            for sender in senders {
                sender.join().unwrap();
            }
        });
    }

    #[test]
    fn loom_two_sleepers_take_a_signal_each() {
        // No wake-up is lost, which would be a deadlock, and no signal is taken twice.
        let mutants =
            ["mutant_signal_taken_twice", "mutant_other_sleeper_forgotten", "mutant_wake_unfenced"];
        prove(2, &mutants, || {
            let channel = Channel::new();
            let theirs = Arc::clone(&channel);
            let waiter = loom::thread::spawn(move || theirs.take(&mut Sleeper(&theirs.futex)));
            let sends = Arc::clone(&channel);
            let sender = loom::thread::spawn(move || {
                sends.signal();
                sends.signal();
            });
            let mine = channel.take(&mut Sleeper(&channel.futex));
            let other = waiter.join().unwrap();
            sender.join().unwrap();
            assert_eq!(mine + other, 3, "signals {mine} and {other}");
            assert_eq!(channel.taken.load(Ordering::Relaxed), 2);
        });
    }
}
