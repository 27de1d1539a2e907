//! The epoch protocol: how one rank tells another that it has come so far, and how it waits.
//!
//! A [`Slot`] is written by exactly one rank and waited on by exactly one other. There is one per
//! source rank and parity for the *entry* of calls, and one per source rank and parity for the
//! *steps* inside calls. What a word says:
//!
//! - entry: the low half is the low 32 bits of the call's epoch, the high half a digest of what is
//!   called, never zero (rule S6). Every call has an entry, so a slot always holds the entry of
//!   two calls ago when the next is awaited: comparing 32 bits for equality is enough, also when
//!   they wrap.
//! - step: the whole word is a 64-bit count of steps, which never wraps. A step may lie any number
//!   of calls after the one before it, so 32 bits would not be enough here.
//!
//! Equality, not order: a rank is at most one call, and one step, ahead of any peer (rule S4), for
//! it cannot pass a wait before every peer has signalled. Two parities therefore suffice for slots
//! and for whatever buffers a signal hands over: a buffer filled before signal `n` is filled again
//! only after every peer's signal `n + 1`, which a peer sends when it is done with `n`.
//!
//! Data is ordered by the word alone: stored with release after the data, loaded with acquire
//! before it (rule S3).
//!
//! A waiter that has waited long enough sleeps. It raises the slot's `sleeping` flag, fences, looks
//! once more, and parks on the word's low half; the signaller stores the word, fences, and looks at
//! the flag. Of the two looks at least one sees the other side's store, so no wake-up is lost.
//!
//! The atomics are a parameter so that loom can check all of this; see the tests.

pub(crate) mod channel;

use std::sync::atomic::Ordering;

/// One atomic word: the operations the protocols need.
pub(crate) trait Word<T> {
    fn load(&self, order: Ordering) -> T;
    fn store(&self, value: T, order: Ordering);
    /// Wraps. Gives back what was there before.
    fn add(&self, value: T, order: Ordering) -> T;
    /// Puts `new` where `old` is; false, and nothing done, where something else is. Not ordered
    /// with anything.
    fn replace(&self, old: T, new: T) -> bool;
}

/// A family of atomics: std's, or loom's in a model.
pub(crate) trait Atomics {
    type U64: Word<u64>;
    type U32: Word<u32>;

    /// A sequentially consistent fence.
    fn fence();
}

/// The processor's atomics.
pub(crate) struct Native;

macro_rules! native_word {
    ($atomic:ty, $value:ty) => {
        impl Word<$value> for $atomic {
            #[inline(always)]
            fn load(&self, order: Ordering) -> $value {
                Self::load(self, order)
            }
            #[inline(always)]
            fn store(&self, value: $value, order: Ordering) {
                Self::store(self, value, order);
            }
            #[inline(always)]
            fn add(&self, value: $value, order: Ordering) -> $value {
                self.fetch_add(value, order)
            }
            #[inline(always)]
            fn replace(&self, old: $value, new: $value) -> bool {
                self.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            }
        }
    };
}
native_word!(std::sync::atomic::AtomicU64, u64);
native_word!(std::sync::atomic::AtomicU32, u32);

impl Atomics for Native {
    type U64 = std::sync::atomic::AtomicU64;
    type U32 = std::sync::atomic::AtomicU32;

    #[inline(always)]
    fn fence() {
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// Words that say what a rank called; they travel with its entry signal.
pub(crate) const DETAILS: usize = 4;

/// One signal from one rank to another, alone on its cache lines. All zero is "never signalled".
#[repr(C, align(128))]
pub(crate) struct Slot<A: Atomics> {
    /// The signal. First, so that its low half is where a futex looks (little endian).
    pub(crate) word: A::U64,
    /// Not zero while a waiter is parked, or about to be. On channels, where several may wait, their
    /// number.
    sleeping: A::U32,
    /// Written by the signaller before the word, read by the waiter after it.
    details: [A::U64; DETAILS],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Slot<Native>>() == 128 && cfg!(target_endian = "little"));

impl<A: Atomics> Slot<A> {
    /// Signals: whoever sees `word` also sees the details and all this thread wrote before (S3).
    /// [`wake_sleepers`] must follow.
    #[inline]
    pub(crate) fn publish(&self, word: u64, details: &[u64; DETAILS]) {
        for (place, value) in self.details.iter().zip(details) {
            place.store(*value, Ordering::Relaxed);
        }
        self.word.store(word, Ordering::Release);
    }

    /// Signals without details. [`wake_sleepers`] must follow.
    #[inline]
    pub(crate) fn publish_word(&self, word: u64) {
        self.word.store(word, Ordering::Release);
    }

    /// The details of the signal that was last awaited here.
    pub(crate) fn details(&self) -> [u64; DETAILS] {
        std::array::from_fn(|i| self.details[i].load(Ordering::Relaxed))
    }
}

#[cfg(all(test, loom))]
impl Slot<tests::Loom> {
    fn for_model() -> Self {
        Self {
            word: loom::sync::atomic::AtomicU64::new(0),
            sleeping: loom::sync::atomic::AtomicU32::new(0),
            details: std::array::from_fn(|_| loom::sync::atomic::AtomicU64::new(0)),
        }
    }
}

/// The word of a call's entry.
#[inline]
pub(crate) fn entry_word(epoch: u64, digest: u32) -> u64 {
    // Zero is "never signalled", so no digest may be zero.
    (u64::from(digest.max(1)) << 32) | (epoch & 0xffff_ffff)
}

/// Whether `word` is the entry of the call with this epoch.
#[inline]
pub(crate) fn is_entry(word: u64, epoch: u64) -> bool {
    word >> 32 != 0 && word as u32 == epoch as u32
}

/// How a waiter passes the time.
pub(crate) trait Pause<A: Atomics> {
    /// Why a wait may end without its signal.
    type Error;

    /// Called after every look that found nothing. Returns whether to park.
    fn pause(&mut self) -> Result<bool, Self::Error>;

    /// Sleeps while the low half of the slot's word is `seen`, until woken or for a bounded time.
    fn park(&mut self, slot: &Slot<A>, seen: u32);
}

/// Wakes whoever sleeps on one of `slots`, which this thread has just signalled.
#[inline]
pub(crate) fn wake_sleepers<'a, A: Atomics + 'a>(
    slots: impl Iterator<Item = &'a Slot<A>>,
    mut wake: impl FnMut(&'a Slot<A>),
) {
    // Pairs with the fence in `await_word`: either that waiter sees the word, or we its flag.
    A::fence();
    for slot in slots {
        if slot.sleeping.load(Ordering::Relaxed) != 0 {
            wake(slot);
        }
    }
}

/// Waits until `accept` takes the slot's word, and returns that word.
#[inline]
pub(crate) fn await_word<A: Atomics, P: Pause<A>>(
    slot: &Slot<A>,
    accept: impl Fn(u64) -> bool,
    pause: &mut P,
) -> Result<u64, P::Error> {
    loop {
        let word = slot.word.load(Ordering::Acquire);
        if accept(word) {
            return Ok(word);
        }
        if pause.pause()? {
            slot.sleeping.store(1, Ordering::Relaxed);
            A::fence();
            let word = slot.word.load(Ordering::Acquire);
            if !accept(word) {
                pause.park(slot, word as u32);
            }
            slot.sleeping.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests;
