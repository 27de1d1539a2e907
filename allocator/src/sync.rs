//! Atomics and locks of what threads share, and the crate's way to take a lock.
//!
//! They are std's. In the crate's own unit tests they are those of [`models`](crate::models), which loom watches while a
//! model runs, so that a model runs what is shipped.

#[cfg(not(test))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard, OnceLock,
    atomic::{AtomicBool, AtomicUsize},
};
#[cfg(not(test))]
pub(crate) use std::thread;

use std::sync::PoisonError;

#[cfg(test)]
pub(crate) use crate::models::{
    AtomicBool, AtomicUsize, Condvar, Mutex, MutexGuard, OnceLock, mutant, thread,
};

/// Locks `mutex`, also if another thread panicked while it held the lock: what these locks guard is
/// consistent at every point that can panic. A lane is not, so it refuses calls after that
/// (`SharedLane::lock`).
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks a mutex of std whose holder calls nothing that another thread could wait for. Models try no interleaving inside.
pub(crate) fn lock_leaf<T: ?Sized>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a model runs with the fault of this name. It never does outside of unit tests.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn mutant(_name: &str) -> bool {
    false
}
