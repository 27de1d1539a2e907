//! Numbers in memory that others may write while a call reads it.

#![allow(unsafe_code)] // reads and writes memory by address

/// An array of numbers that other threads may write meanwhile.
#[derive(Clone, Copy)]
pub(in crate::host) struct Numbers<T> {
    at: *mut T,
    count: usize,
}

impl<T: Copy> Numbers<T> {
    /// # Safety
    ///
    /// While the value is used, `at` is aligned and readable for `count` numbers, and writable where
    /// they are set.
    pub(in crate::host) unsafe fn new(at: u64, count: usize) -> Self {
        Self { at: at as *mut T, count }
    }

    pub(in crate::host) fn get(self, index: usize) -> T {
        assert!(index < self.count);
        // SAFETY: within the count (`new`). The read is volatile, so that the value that was checked is the one that is
        // used.
        unsafe { self.at.wrapping_add(index).read_volatile() }
    }

    pub(in crate::host) fn set(self, index: usize, value: T) {
        assert!(index < self.count);
        // SAFETY: within the count (`new`).
        unsafe { self.at.wrapping_add(index).write_volatile(value) };
    }

    pub(in crate::host) fn fill(self, value: T) {
        (0..self.count).for_each(|index| self.set(index, value));
    }
}
