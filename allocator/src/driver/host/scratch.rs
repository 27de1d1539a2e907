//! The mapping of a new segment at an address that the kernel chooses. It exists from the population of the
//! segment until it is moved into a reservation.

// Upholds the contracts of `space`.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;

use rustix::io::Errno;

use super::{GRANULARITY, space};
use crate::Result;

/// Owns its address range, which is unmapped when this is dropped.
#[derive(Debug)]
pub(super) struct ScratchMapping {
    base: u64,
    bytes: u64,
}

impl ScratchMapping {
    /// Maps the first `bytes` of `fd`, which is at least that long and cannot shrink.
    pub(super) fn new(fd: BorrowedFd<'_>, bytes: u64, huge_pages: bool) -> Result<Self> {
        // From here on dropping gives the range back.
        let mapping = Self { base: space::reserve(bytes, GRANULARITY)?, bytes };
        // SAFETY: the reservation is fresh and wholly ours.
        unsafe { space::map(mapping.base, bytes, fd) }?;
        if huge_pages {
            // SAFETY: mapped in the line above.
            unsafe { space::prefer_huge_pages(mapping.base, bytes) };
        }
        Ok(mapping)
    }

    /// Commits `[offset, offset + bytes)`, which lies inside.
    pub(super) fn populate(&self, offset: u64, bytes: u64) -> Result<(), Errno> {
        debug_assert!(offset + bytes <= self.bytes);
        // SAFETY: the range is part of what `new` mapped.
        unsafe { space::populate(self.base + offset, bytes) }
    }

    /// Moves the whole mapping to `address`, page tables and all. If that fails it is gone, and
    /// `address` is as it was.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`space::map`].
    pub(super) unsafe fn move_to(self, address: u64) -> Result<()> {
        // SAFETY: `new` mapped exactly this range, whose address never left this struct; the
        // caller promises what `space::map` asks of the target.
        unsafe { space::relocate(self.base, address, self.bytes) }?;
        // The range is no longer ours to give back.
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for ScratchMapping {
    fn drop(&mut self) {
        // SAFETY: `new` reserved the range, and its address never left this struct.
        if let Err(error) = unsafe { space::unreserve(self.base, self.bytes) } {
            tracing::warn!(%error, "a scratch mapping stays behind");
        }
    }
}
