//! Numbers in memory that others may write while a call reads it.

#![allow(unsafe_code)] // reads and writes memory by address

/// An array of numbers that other threads may write meanwhile.
#[derive(Clone, Copy)]
pub(crate) struct Numbers<T> {
    at: *mut T,
    count: usize,
}

impl<T: Copy> Numbers<T> {
    /// # Safety
    ///
    /// While the value is used, `at` is aligned and readable for `count` numbers, and writable where
    /// they are set.
    pub(crate) unsafe fn new(at: u64, count: usize) -> Self {
        Self { at: at as *mut T, count }
    }

    pub(crate) fn get(self, index: usize) -> T {
        assert!(index < self.count);
        // SAFETY: within the count (`new`). The read is volatile, so that the value that was checked is the one that is
        // used.
        unsafe { self.at.wrapping_add(index).read_volatile() }
    }

    pub(crate) fn set(self, index: usize, value: T) {
        assert!(index < self.count);
        // SAFETY: within the count (`new`).
        unsafe { self.at.wrapping_add(index).write_volatile(value) };
    }

    pub(crate) fn fill(self, value: T) {
        (0..self.count).for_each(|index| self.set(index, value));
    }
}
