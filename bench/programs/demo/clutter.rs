//! Other regions in a process's address space, which come and go differently on each rank.
#![allow(unsafe_code)] // maps and unmaps

use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use symmpool_allocator::{Error, Result};

use crate::program::hash;

/// Regions of random sizes, which are unmapped to leave holes. Nothing ever accesses them.
pub(crate) struct Clutter {
    regions: Vec<(NonNull<std::ffi::c_void>, usize)>,
    state: u64,
}

impl Clutter {
    /// About 40 regions, as after some time of running, with sizes that depend on `rank`.
    pub(crate) fn new(rank: u32) -> Result<Self> {
        let mut clutter = Self { regions: Vec::new(), state: u64::from(rank) + 1 };
        (0..40).try_for_each(|_| clutter.grow())?;
        Ok(clutter)
    }

    /// Unmaps one region and maps another one.
    pub(crate) fn churn(&mut self) -> Result<()> {
        if !self.regions.is_empty() {
            let index = self.random() as usize % self.regions.len();
            drop_region(self.regions.swap_remove(index));
        }
        // The new region is usually larger than a segment, so that the hole stays open.
        self.grow()
    }

    fn grow(&mut self) -> Result<()> {
        let bytes = (self.random() as usize % 8 + 5) << 20;
        // SAFETY: a new mapping at an address of the kernel's choosing, which nothing accesses.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), MapFlags::PRIVATE)
        };
        let start = start.map_err(|error| Error::system("mapping a region", error))?;
        self.regions.extend(NonNull::new(start).map(|start| (start, bytes)));
        Ok(())
    }

    fn random(&mut self) -> u64 {
        self.state = hash(self.state);
        self.state >> 8
    }
}

fn drop_region((start, bytes): (NonNull<std::ffi::c_void>, usize)) {
    // SAFETY: a whole mapping made by `grow`, which is unmapped once and which nothing accesses.
    let _ = unsafe { munmap(start.as_ptr(), bytes) };
}

impl Drop for Clutter {
    fn drop(&mut self) {
        self.regions.drain(..).for_each(drop_region);
    }
}
