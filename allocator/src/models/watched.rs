//! Memory whose accesses must be ordered, as what it stands for is written without atomics.

#![allow(unsafe_code)] // loom's cells are read and written through raw pointers

use loom::cell::UnsafeCell;

/// A value in memory that threads of a model share. An access that is not ordered after another thread's write, or a write
/// that is not ordered after a read, fails the model. It exists inside models only.
#[derive(Debug)]
pub struct Watched<T>(UnsafeCell<T>);

// SAFETY: loom runs one thread at a time, and panics before two accesses that are not ordered.
unsafe impl<T: Send> Sync for Watched<T> {}

impl<T: Copy> Watched<T> {
    /// Memory that holds this value.
    pub fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// Reads the value.
    pub fn get(&self) -> T {
        // SAFETY: loom panics before if another thread's write is not ordered before this.
        self.0.with(|value| unsafe { *value })
    }

    /// Writes the value.
    pub fn set(&self, new: T) {
        // SAFETY: loom panics before if another thread's access is not ordered before this.
        self.0.with_mut(|value| unsafe { *value = new });
    }
}
