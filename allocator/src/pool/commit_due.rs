//! Whether a commit is due: a flag that lanes and commits share without a lock of its own.
//!
//! A lane raises it while it holds its own lock; a commit lowers it while it holds the locks of all
//! symmetric lanes. A commit therefore never lowers it after a growth that it has not seen.

use std::sync::atomic::Ordering;

use crate::sync::AtomicBool;

/// Raised when a symmetric lane has grown, or has enough deferred frees.
#[derive(Debug)]
pub(crate) struct CommitDue(AtomicBool);

impl CommitDue {
    pub(crate) fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Makes a commit due. The caller holds the lock of the lane that needs it.
    pub(crate) fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Sets whether a commit is still due. The caller holds the locks of all symmetric lanes.
    pub(crate) fn set(&self, due: bool) {
        self.0.store(due, Ordering::Release);
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
