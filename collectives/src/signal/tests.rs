//! Models of the epoch protocol, each small enough for loom to try every interleaving.

mod plain {
    use crate::signal::{handshake_word, is_handshake};

    #[test]
    fn handshake_words_of_neighbouring_epochs_differ_from_each_other_and_from_empty() {
        // Near the wrap of the low half, and with the digest zero, which would look like an empty slot.
        for epoch in [1, 2, 0xffff_fffe, 0xffff_ffff, 1 << 32, (1 << 32) + 1] {
            for digest in [0, 1, 0xffff_ffff] {
                let word = handshake_word(epoch, digest);
                assert!(is_handshake(word, epoch));
                assert!(!is_handshake(word, epoch + 1));
                assert!(!is_handshake(word, epoch + 2));
                assert!(!is_handshake(0, epoch));
            }
        }
    }
}

pub(crate) use models::{Futex, Loom, Sleeper, Spinner};

mod models {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use loom::sync::atomic::{AtomicU32, AtomicU64};
    use loom::sync::{Condvar, Mutex};
    use symmpool_allocator::models::{ALL, Watched, prove};

    use crate::signal::*;

    pub(crate) struct Loom;

    macro_rules! loom_word {
        ($atomic:ty, $value:ty) => {
            impl Word<$value> for $atomic {
                fn load(&self, order: Ordering) -> $value {
                    Self::load(self, order)
                }
                fn store(&self, value: $value, order: Ordering) {
                    Self::store(self, value, order);
                }
                fn add(&self, value: $value, order: Ordering) -> $value {
                    self.fetch_add(value, order)
                }
                fn replace(&self, old: $value, new: $value) -> bool {
                    self.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed).is_ok()
                }
            }
        };
    }
    loom_word!(AtomicU64, u64);
    loom_word!(AtomicU32, u32);

    impl Atomics for Loom {
        type U64 = AtomicU64;
        type U32 = AtomicU32;
        fn fence() {
            loom::sync::atomic::fence(Ordering::SeqCst);
        }
    }

    /// A model of the operating system's futex: for wakers, comparing and queueing are one step. It never wakes up by
    /// itself, so a lost wake-up is a deadlock, which loom reports.
    pub(crate) struct Futex {
        bucket: Mutex<()>,
        queue: Condvar,
    }

    impl Futex {
        pub(crate) fn new() -> Self {
            Self { bucket: Mutex::new(()), queue: Condvar::new() }
        }
        pub(crate) fn wake(&self) {
            let _bucket = self.bucket.lock().unwrap();
            self.queue.notify_all();
        }
    }

    /// Parks at once, because the models are about sleeping and waking.
    pub(crate) struct Sleeper<'a>(pub(crate) &'a Futex);
    impl Pause<Loom> for Sleeper<'_> {
        type Error = Infallible;
        fn pause(&mut self) -> Result<bool, Infallible> {
            Ok(true)
        }
        fn park(&mut self, slot: &SignalSlot<Loom>, seen: u32) {
            let bucket = self.0.bucket.lock().unwrap();
            if slot.word.load(Ordering::Relaxed) as u32 == seen {
                drop(self.0.queue.wait(bucket).unwrap());
            }
        }
    }

    /// Never parks.
    pub(crate) struct Spinner;
    impl Pause<Loom> for Spinner {
        type Error = Infallible;
        fn pause(&mut self) -> Result<bool, Infallible> {
            loom::thread::yield_now();
            Ok(false)
        }
        fn park(&mut self, _slot: &SignalSlot<Loom>, _seen: u32) {}
    }

    fn wait<P: Pause<Loom, Error = Infallible>>(
        slot: &SignalSlot<Loom>,
        accept: impl Fn(u64) -> bool,
        pause: &mut P,
    ) -> u64 {
        match await_word(slot, accept, pause) {
            Ok(word) => word,
            Err(never) => match never {},
        }
    }

    #[test]
    fn loom_no_wake_up_is_lost() {
        prove(ALL, &["mutant_wake_unfenced", "mutant_sleeps_without_a_look"], || {
            let shared = Arc::new((SignalSlot::<Loom>::for_model(), Futex::new()));
            let theirs = Arc::clone(&shared);
            let waiter = loom::thread::spawn(move || {
                wait(&theirs.0, |word| is_handshake(word, 1), &mut Sleeper(&theirs.1))
            });
            shared.0.publish(handshake_word(1, 7), &[0; DESCRIPTION_WORDS]);
            wake_sleepers(std::iter::once(&shared.0), |_| shared.1.wake());
            assert_eq!(waiter.join().unwrap(), handshake_word(1, 7));
        });
    }

    /// Rule S6.
    #[test]
    fn loom_digest_and_description_come_with_their_epoch() {
        // Whoever sees a rank's handshake word sees its whole description.
        prove(ALL, &["mutant_word_before_description", "mutant_relaxed_wait"], || {
            let slot = Arc::new(SignalSlot::<Loom>::for_model());
            let theirs = Arc::clone(&slot);
            let signaller = loom::thread::spawn(move || {
                theirs.publish(handshake_word(1, 11), &[1; DESCRIPTION_WORDS]);
            });
            let word = wait(&slot, |word| is_handshake(word, 1), &mut Spinner);
            assert_eq!(word >> 32, 11);
            assert_eq!(slot.description(), [1; DESCRIPTION_WORDS]);
            signaller.join().unwrap();
        });
    }

    /// Rule S2.
    #[test]
    fn loom_stale_epochs_are_not_taken() {
        // The slot still holds the handshake of two calls ago, across the wrap of the low half.
        prove(ALL, &["mutant_any_epoch"], || {
            let slot = Arc::new(SignalSlot::<Loom>::for_model());
            slot.publish(handshake_word(0xffff_fffe, 3), &[3; DESCRIPTION_WORDS]);
            let theirs = Arc::clone(&slot);
            let signaller = loom::thread::spawn(move || {
                theirs.publish(handshake_word(1 << 32, 5), &[5; DESCRIPTION_WORDS]);
            });
            let word = wait(&slot, |word| is_handshake(word, 1 << 32), &mut Spinner);
            assert_eq!(word >> 32, 5);
            assert_eq!(slot.description(), [5; DESCRIPTION_WORDS]);
            signaller.join().unwrap();
        });
    }

    /// Two ranks that exchange a value in each call through scratch, of which there is one for each parity. Loom's
    /// cells report a write that is not ordered after the peer's reads.
    struct ScratchExchange {
        /// Slots by owner and parity, in which the peer signals the owner.
        slots: [[SignalSlot<Loom>; 2]; 2],
        /// Scratch by owner and parity.
        scratch: [[Watched<u64>; 2]; 2],
    }

    impl ScratchExchange {
        fn call(&self, me: usize, epoch: u64) {
            let (peer, parity) = (1 - me, parity(epoch) as usize);
            self.scratch[me][parity].set(epoch * 10 + me as u64);
            self.slots[peer][parity].publish_word(handshake_word(epoch, 1));
            wait(&self.slots[me][parity], |word| is_handshake(word, epoch), &mut Spinner);
            let seen = self.scratch[peer][parity].get();
            assert_eq!(seen, epoch * 10 + peer as u64);
        }
    }

    /// Rule S4.
    #[test]
    fn loom_scratch_changes_hands_by_parity() {
        // Three calls use one of the two scratch buffers twice.
        prove(
            3,
            &[
                "mutant_relaxed_signal",
                "mutant_relaxed_wait",
                "mutant_any_epoch",
                "mutant_one_parity",
            ],
            || {
                let shared = Arc::new(ScratchExchange {
                    slots: std::array::from_fn(|_| {
                        std::array::from_fn(|_| SignalSlot::for_model())
                    }),
                    scratch: std::array::from_fn(|_| std::array::from_fn(|_| Watched::new(0))),
                });
                let theirs = Arc::clone(&shared);
                let other = loom::thread::spawn(move || (1..=3).for_each(|e| theirs.call(1, e)));
                (1..=3).for_each(|epoch| shared.call(0, epoch));
                other.join().unwrap();
            },
        );
    }

    /// Two ranks that publish how much they send, and push it into the other's output once they have received the
    /// other's row, as all-to-alls on devices do. A rank that is sent nothing waits for no data.
    struct Counts {
        /// Slots by owner and parity, in which the peer publishes its row, with the call's epoch.
        rows: [[SignalSlot<Loom>; 2]; 2],
        /// Slots by owner and parity, in which the peer signals that its data is there.
        arrivals: [[SignalSlot<Loom>; 2]; 2],
        /// Outputs by owner. There is one for both parities.
        outputs: [Watched<u64>; 2],
    }

    impl Counts {
        fn new() -> Self {
            let slots =
                || std::array::from_fn(|_| std::array::from_fn(|_| SignalSlot::for_model()));
            Self {
                rows: slots(),
                arrivals: slots(),
                outputs: std::array::from_fn(|_| Watched::new(0)),
            }
        }

        fn call(&self, me: usize, epoch: u64, counts: [u64; 2]) {
            let (peer, parity) = (1 - me, parity(epoch) as usize);
            self.rows[peer][parity]
                .publish(handshake_word(epoch, 1), &[counts[me]; DESCRIPTION_WORDS]);
            wait(&self.rows[me][parity], |word| is_handshake(word, epoch), &mut Spinner);
            let theirs = self.rows[me][parity].description()[0];
            assert_eq!(theirs, counts[peer], "a row of another call");
            if counts[me] > 0 {
                self.outputs[peer].set(epoch * 10 + me as u64);
                self.arrivals[peer][parity].publish_word(handshake_word(epoch, 1));
            }
            if theirs > 0 {
                wait(&self.arrivals[me][parity], |word| is_handshake(word, epoch), &mut Spinner);
                let seen = self.outputs[me].get();
                assert_eq!(seen, epoch * 10 + peer as u64);
            }
        }
    }

    fn exchange(calls: &'static [[u64; 2]]) {
        let shared = Arc::new(Counts::new());
        let theirs = Arc::clone(&shared);
        let all = move |counts: &Counts, me| {
            (1..).zip(calls).for_each(|(epoch, sent)| counts.call(me, epoch, *sent));
        };
        let other = loom::thread::spawn(move || all(&theirs, 1));
        all(&shared, 0);
        other.join().unwrap();
    }

    /// Rules S1 and S2.
    #[test]
    fn loom_zero_counts_keep_ranks_in_step() {
        // A pair that sends nothing still publishes its rows, and stale words do not match.
        let mutants = ["mutant_any_epoch", "mutant_relaxed_signal"];
        prove(2, &mutants, || exchange(&[[1, 0], [0, 0], [0, 1]]));
    }

    #[test]
    fn loom_an_output_changes_hands_with_the_row() {
        // The output of a call is read before the next call writes it; rows alternate by parity (S4).
        prove(2, &["mutant_relaxed_wait"], || exchange(&[[1, 1], [1, 1], [1, 1]]));
    }
}
