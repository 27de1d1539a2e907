//! Locks and threads of calls, and faults that models of what is shared must notice. Locks and threads are std's, and in
//! unit tests those that models watch.

#[cfg(not(test))]
use std::sync::atomic::Ordering;
#[cfg(not(test))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard},
    thread,
};

#[cfg(test)]
pub(crate) use symmpool_allocator::models::{Condvar, Mutex, MutexGuard, mutant, thread, weakened};

/// Whether a model runs with the fault of this name. It never does outside of unit tests.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn mutant(_name: &str) -> bool {
    false
}

/// `order`, which the fault of this name makes relaxed.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn weakened(_name: &str, order: Ordering) -> Ordering {
    order
}
