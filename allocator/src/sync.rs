//! Locks that do not poison: everything they guard is left whole at every point that can panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also after another thread panicked while it held it.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
