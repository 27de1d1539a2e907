//! Atomics and locks of slots: std's, and in unit tests those that models watch.

#[cfg(not(test))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic::AtomicU64};

#[cfg(test)]
pub(crate) use symmpool_allocator::models::{AtomicU64, Mutex, MutexGuard, mutant};

/// Whether a model runs with the fault of this name. It never does outside of unit tests.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn mutant(_name: &str) -> bool {
    false
}

/// A word of a static.
#[cfg(not(test))]
pub(crate) const fn word(value: u64) -> AtomicU64 {
    AtomicU64::new(value)
}

/// A word of a static, which no model watches.
#[cfg(test)]
pub(crate) const fn word(value: u64) -> AtomicU64 {
    AtomicU64::in_static(value)
}
