//! What threads share, swapped for loom's under `--cfg loom` where a model checks it.

use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, Ordering};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, Ordering};

/// Locks `mutex`, also after another thread panicked while it held it: everything these locks
/// guard is left whole at every point that can panic. A lane is not, and refuses instead
/// (`SharedLane::lock`).
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
