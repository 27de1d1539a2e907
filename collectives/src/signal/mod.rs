//! The epoch protocol: how one rank signals another that it has reached a point, and how a rank waits for that.
//!
//! A [`SignalSlot`] is written by exactly one rank and waited on by exactly one other. For each source rank and parity there
//! is one slot for the *handshake* of calls and one for the *steps* inside of calls. The words mean:
//!
//! - Handshake: the low half is the low 32 bits of the call's epoch, the high half a digest of the call description,
//!   never zero (rule S6). Every call has a handshake, so while a rank waits for the next one, the slot holds the word
//!   of two calls before: it is enough to compare 32 bits for equality, also when they wrap.
//! - Step: the whole word is a 64-bit count of steps, which never wraps. Any number of calls may lie between two
//!   steps, so 32 bits would not be enough here.
//!
//! Words are compared for equality, not for order: a rank is at most one call, and one step, ahead of any peer
//! (rule S4), because it cannot pass a wait before every peer has signalled. Two parities therefore suffice for slots
//! and for the buffers that a signal hands over: a buffer filled before signal `n` is filled again only after every
//! peer's signal `n + 1`, which a peer sends when it has finished reading what belongs to `n`.
//!
//! The word alone orders data: it is stored with release after the data, and loaded with acquire before the data
//! (rule S3).
//!
//! A waiter that has waited long enough sleeps. It raises the slot's `sleeping` flag, fences, loads the word once more,
//! and parks on the word's low half. The signaller stores the word, fences, and loads the flag. At least one of the two
//! loads sees the other side's store, so no wake-up is lost.
//!
//! The atomics are a type parameter so that loom can check all of this; see the tests.

pub(crate) mod channel;

use std::sync::atomic::Ordering;

use crate::sync::{mutant, weakened};

/// One atomic word, with the operations that the protocols need.
pub(crate) trait Word<T> {
    fn load(&self, order: Ordering) -> T;
    fn store(&self, value: T, order: Ordering);
    /// Adds, wrapping, and returns the former value.
    fn add(&self, value: T, order: Ordering) -> T;
    /// Replaces `old` by `new`. Returns false and changes nothing if the word holds another value. Relaxed.
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
#[derive(Debug)]
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

/// The number of words of a call description, which travels with the handshake signal.
pub(crate) const DESCRIPTION_WORDS: usize = 4;

/// One signal from one rank to another, alone on its cache lines. All zero means "never signalled".
#[repr(C, align(128))]
pub(crate) struct SignalSlot<A: Atomics> {
    /// The signal. It is the first field, so that its low half lies at the address of the slot's futex (little endian).
    pub(crate) word: A::U64,
    /// Not zero while a waiter is parked or about to park. On channels, where several threads may wait, it is their
    /// number.
    sleeping: A::U32,
    /// The core on which the signaller runs plus one; 0 if it did not say. No data depends on it.
    core: A::U32,
    /// The call description: written by the signaller before the word, read by the waiter after it.
    description: [A::U64; DESCRIPTION_WORDS],
}

const _: () = assert!(size_of::<SignalSlot<Native>>() == 128 && cfg!(target_endian = "little"));

impl<A: Atomics> SignalSlot<A> {
    /// Signals with a description: whoever sees `word` also sees the description and all that this thread wrote
    /// before (S3). [`wake_sleepers`] must follow.
    #[inline]
    pub(crate) fn publish(&self, word: u64, description: &[u64; DESCRIPTION_WORDS]) {
        if mutant("mutant_word_before_description") {
            self.word.store(word, Ordering::Release);
        }
        for (place, value) in self.description.iter().zip(description) {
            place.store(*value, Ordering::Relaxed);
        }
        self.word.store(word, Ordering::Release);
    }

    /// Signals without a description. [`wake_sleepers`] must follow.
    #[inline]
    pub(crate) fn publish_word(&self, word: u64) {
        self.word.store(word, weakened("mutant_relaxed_signal", Ordering::Release));
    }

    /// Says on which core the signaller runs, if it is to be known. You must call this before it signals.
    #[inline]
    pub(crate) fn set_core(&self, core: Option<u32>) {
        self.core.store(core.map_or(0, |core| core.wrapping_add(1)), Ordering::Relaxed);
    }

    /// The core on which the signaller ran when it last said so.
    #[inline]
    pub(crate) fn core(&self) -> Option<u32> {
        self.core.load(Ordering::Relaxed).checked_sub(1)
    }

    /// The description of the signal that was last awaited here.
    pub(crate) fn description(&self) -> [u64; DESCRIPTION_WORDS] {
        std::array::from_fn(|i| self.description[i].load(Ordering::Relaxed))
    }
}

#[cfg(test)]
impl SignalSlot<tests::Loom> {
    fn for_model() -> Self {
        Self {
            word: loom::sync::atomic::AtomicU64::new(0),
            sleeping: loom::sync::atomic::AtomicU32::new(0),
            core: loom::sync::atomic::AtomicU32::new(0),
            description: std::array::from_fn(|_| loom::sync::atomic::AtomicU64::new(0)),
        }
    }
}

/// The handshake word of a call.
#[inline]
pub(crate) fn handshake_word(epoch: u64, digest: u32) -> u64 {
    // Zero means "never signalled", so no digest may be zero.
    (u64::from(digest.max(1)) << 32) | (epoch & 0xffff_ffff)
}

/// Whether `word` is the handshake of the call with this epoch.
#[inline]
pub(crate) fn is_handshake(word: u64, epoch: u64) -> bool {
    word >> 32 != 0 && (word as u32 == epoch as u32 || mutant("mutant_any_epoch"))
}

/// The parity of a call, which says which half of scratch and which slots it uses.
#[inline]
pub(crate) fn parity(epoch: u64) -> u64 {
    if mutant("mutant_one_parity") { 0 } else { epoch & 1 }
}

/// How a waiter paces its loads of the word.
pub(crate) trait Pause<A: Atomics> {
    /// Why a wait may end without its signal.
    type Error;

    /// Called after every load that found no signal. Returns whether to park.
    fn pause(&mut self) -> Result<bool, Self::Error>;

    /// Sleeps while the low half of the slot's word is `seen`, until woken or for a bounded time.
    fn park(&mut self, slot: &SignalSlot<A>, seen: u32);
}

/// Wakes the threads that sleep on one of `slots`, which this thread has just signalled.
#[inline]
pub(crate) fn wake_sleepers<'a, A: Atomics + 'a>(
    slots: impl Iterator<Item = &'a SignalSlot<A>>,
    mut wake: impl FnMut(&'a SignalSlot<A>),
) {
    // Pairs with the fence in `await_word`: either the waiter sees the word, or this thread sees its flag.
    if !mutant("mutant_wake_unfenced") {
        A::fence();
    }
    for slot in slots {
        if slot.sleeping.load(Ordering::Relaxed) != 0 {
            wake(slot);
        }
    }
}

/// Waits until `accept` returns true for the slot's word, and returns that word.
#[inline]
pub(crate) fn await_word<A: Atomics, P: Pause<A>>(
    slot: &SignalSlot<A>,
    accept: impl Fn(u64) -> bool,
    pause: &mut P,
) -> Result<u64, P::Error> {
    loop {
        let word = slot.word.load(weakened("mutant_relaxed_wait", Ordering::Acquire));
        if accept(word) {
            return Ok(word);
        }
        if pause.pause()? {
            slot.sleeping.store(1, Ordering::Relaxed);
            A::fence();
            let word = slot.word.load(Ordering::Acquire);
            if !accept(word) || mutant("mutant_sleeps_without_a_look") {
                pause.park(slot, word as u32);
            }
            slot.sleeping.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
