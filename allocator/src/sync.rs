//! The crate's way to take a lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also if another thread panicked while it held the lock: what these locks guard is
/// consistent at every point that can panic. A lane is not, so it refuses calls after that
/// (`SharedLane::lock`).
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
