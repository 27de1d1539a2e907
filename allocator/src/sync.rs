//! Locks and atomics; under `--cfg loom` the atomics are loom's, so that a model can check them.

use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, Ordering};

/// Locks `mutex`, also if another thread panicked while it held the lock: what these locks guard is
/// consistent at every point that can panic. A lane is not, so it refuses calls after that
/// (`SharedLane::lock`).
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
