//! Objects of the Python package that belong to the process that made them.
//!
//! In a forked child they refuse calls, and are left as they are when it drops them: see
//! [`ProcessId`].

use std::ops::Deref;

use symmpool_allocator::{ProcessId, Result};

/// A value of the process that made it.
pub(crate) struct ForkGuarded<T> {
    /// `None` only while dropping.
    value: Option<T>,
    maker: ProcessId,
}

impl<T> ForkGuarded<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), maker: ProcessId::here() }
    }

    /// Refuses what is done in a child of the process that made this.
    #[inline]
    pub(crate) fn check(&self, what: &str) -> Result<()> {
        self.maker.check(what)
    }

    /// The value, to be changed; in a child nothing.
    pub(crate) fn here_mut(&mut self) -> Option<&mut T> {
        if self.maker.is_here() { self.value.as_mut() } else { None }
    }

    /// The value; in a child, where it stays as it is, nothing.
    pub(crate) fn into_here(mut self) -> Option<T> {
        if self.maker.is_here() { self.value.take() } else { None }
    }
}

impl<T> Deref for ForkGuarded<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.value.as_ref().expect("there until dropped")
    }
}

impl<T> Drop for ForkGuarded<T> {
    fn drop(&mut self) {
        if !self.maker.is_here() {
            std::mem::forget(self.value.take());
        }
    }
}
