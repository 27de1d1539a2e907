//! What belongs to the process that made it.
//!
//! A forked child has a copy of every object, but one set of shared memory, signals and connections
//! with its parent: what it did with them would be done in the parent's name, to all ranks. And a
//! lock that another thread held at the fork is never released there. So objects of the parent
//! refuse calls in the child, and are left as they are when it lets go of them.

use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};

use symmpool_allocator::{Error, Result};

/// How many forks lie between this process and the one that began.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Called in every child that Python forks, before anything else runs there.
#[pyo3::pyfunction]
pub(crate) fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A value of the process that made it.
pub(crate) struct Own<T> {
    /// `None` only while dropping.
    value: Option<T>,
    made_after: u32,
}

impl<T> Own<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), made_after: FORKS.load(Ordering::Relaxed) }
    }

    /// Refuses what is done in a child of the process that made this.
    #[inline]
    pub(crate) fn check(&self, what: &str) -> Result<()> {
        if self.is_here() { Ok(()) } else { Err(elsewhere(what)) }
    }

    /// The value; in a child, where it stays as it is, nothing.
    pub(crate) fn into_here(mut self) -> Option<T> {
        if self.is_here() { self.value.take() } else { None }
    }

    #[inline]
    fn is_here(&self) -> bool {
        self.made_after == FORKS.load(Ordering::Relaxed)
    }
}

#[cold]
fn elsewhere(what: &str) -> Error {
    Error::invalid_state(format!(
        "{what} of another process is used in process {}, forked from it; make a group, and what is \
         needed on it, after the fork",
        std::process::id()
    ))
}

impl<T> Deref for Own<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.value.as_ref().expect("there until dropped")
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if !self.is_here() {
            std::mem::forget(self.value.take());
        }
    }
}
