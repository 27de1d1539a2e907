//! Words of pinned host memory, which the device writes and reads as the host does.

#![allow(unsafe_code)] // pinned memory, by address

use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use symmpool_allocator::Result;

use super::api::Api;

/// Pinned words. They are not given back unless [`Self::free`] is called, as work on the device may still write them.
pub(crate) struct Words {
    begin: NonNull<AtomicU32>,
    count: usize,
}

// SAFETY: the memory has atomics only, and lives until `free`.
unsafe impl Send for Words {}
// SAFETY: threads share nothing but atomics, and the memory lives until `free`.
unsafe impl Sync for Words {}

impl Words {
    /// Makes `count` words, which are zero. The device's context must be current.
    pub(crate) fn new(api: &Api, count: usize) -> Result<Self> {
        Ok(Self { begin: api.pinned(4 * count)?.cast(), count })
    }

    pub(crate) fn all(&self) -> &[AtomicU32] {
        // SAFETY: `new` made `count` words at `begin`. They live until `free`, whose caller promised that nothing uses `self`
        // afterwards. The device writes each whole, as an atomic store would.
        unsafe { std::slice::from_raw_parts(self.begin.as_ptr(), self.count) }
    }

    /// The address, which is the same for the host and, with unified addressing, the device.
    pub(crate) fn address(&self, nth: usize) -> u64 {
        self.begin.as_ptr() as u64 + 4 * nth as u64
    }

    /// Frees the memory.
    ///
    /// # Safety
    ///
    /// Nothing uses the words from now on: neither `self` nor work on the device. The device's context is current.
    pub(crate) unsafe fn free(&self, api: &Api) {
        // SAFETY: `new` made the words by `pinned`, and the caller promised that nothing uses them from now on.
        unsafe { api.free_pinned(self.begin.cast()) };
    }
}
