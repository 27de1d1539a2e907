//! Address ranges and what lies in them: the only place where the host driver changes mappings.
//!
//! A reservation is an inaccessible private mapping, so its addresses are given to nobody else. Segments are
//! mapped over parts of it and replaced by inaccessible memory again. The functions here do not check
//! anything: `Mappings` knows which range is used for what.

// mmap and its relatives are unsafe by nature: they make and destroy memory by address.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};

use crate::byte_size::ByteSize;
use crate::{Error, Result};

const PAGE: usize = 4096;
const INACCESSIBLE: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

fn no_room(bytes: u64, cause: impl std::fmt::Display) -> Error {
    Error::out_of_memory(format!(
        "cannot reserve {} of addresses: {cause}; raise the address space limit (ulimit -v), or \
         lower the stride of the heap or the number of ranks",
        ByteSize(bytes)
    ))
}

/// Reserves `bytes` aligned to `align`; returns the base. Both are multiples of a page.
pub(super) fn reserve(bytes: u64, align: u64) -> Result<u64> {
    let length = |bytes: u64| usize::try_from(bytes).map_err(|e| no_room(bytes, e));
    let (wanted, align) = (length(bytes)?, length(align)?);
    let whole = wanted
        .checked_add(align - PAGE)
        .ok_or_else(|| no_room(bytes, "more than there are addresses"))?;
    // SAFETY: a null hint without MAP_FIXED lets the kernel choose; no existing mapping changes.
    let mapped = unsafe {
        rustix::mm::mmap_anonymous(ptr::null_mut(), whole, ProtFlags::empty(), INACCESSIBLE)
    };
    let start = mapped.map_err(|cause| no_room(bytes, cause))? as usize;
    let base = start.next_multiple_of(align);
    trim(start, base - start);
    trim(base + wanted, start + whole - (base + wanted));
    Ok(base as u64)
}

/// Gives back addresses that were mapped only to reach the alignment.
fn trim(start: usize, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the range is part of what `reserve` mapped a moment ago and nobody else knows.
        let unmapped = unsafe { rustix::mm::munmap(start as *mut c_void, bytes) };
        if let Err(error) = unmapped {
            // Only addresses are lost.
            tracing::debug!(%error, bytes, "keeping surplus addresses");
        }
    }
}

/// Gives a whole reservation back, mapped segments included.
///
/// # Safety
///
/// `[base, base + bytes)` is a reservation of [`reserve`], and nobody uses memory in it any more.
pub(super) unsafe fn unreserve(base: u64, bytes: u64) -> Result<()> {
    // SAFETY: by the contract the range is ours and unused.
    unsafe { rustix::mm::munmap(base as *mut c_void, bytes as usize) }.map_err(|cause| {
        Error::system(format!("giving back {} of addresses at {base:#x}", ByteSize(bytes)), cause)
    })
}

/// Maps the first `bytes` of `fd` at `address`, readable and writable.
///
/// # Safety
///
/// The range lies in a reservation of [`reserve`], and nothing is mapped over that part of it.
pub(super) unsafe fn map(address: u64, bytes: u64, fd: BorrowedFd<'_>) -> Result<()> {
    let (at, length) = (address as *mut c_void, bytes as usize);
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: MAP_FIXED replaces only inaccessible memory of a reservation that is ours.
    match unsafe { rustix::mm::mmap(at, length, access, flags, fd, 0) } {
        Ok(_) => Ok(()),
        Err(cause) => {
            close_gap(at, length);
            Err(mapping_failed(bytes, cause))
        }
    }
}

/// Moves a mapping of [`map`] to `to`. The addresses at `from` are given back.
///
/// # Safety
///
/// `[from, from + bytes)` is a whole reservation of [`reserve`], mapped by one call of [`map`],
/// and nobody uses memory in it; for `[to, to + bytes)` holds what [`map`] asks.
pub(super) unsafe fn relocate(from: u64, to: u64, bytes: u64) -> Result<()> {
    let (old, new, length) = (from as *mut c_void, to as *mut c_void, bytes as usize);
    // SAFETY: by the contract the old range is ours and unused, and what is replaced at the new
    // one is inaccessible memory of a reservation that is ours.
    match unsafe { rustix::mm::mremap_fixed(old, length, length, MremapFlags::MAYMOVE, new) } {
        Ok(_) => Ok(()),
        Err(cause) => {
            close_gap(new, length);
            Err(mapping_failed(bytes, cause))
        }
    }
}

/// Maps what [`map`] has mapped at `from` a second time, at `to`. Both ranges have the same pages from then on.
///
/// # Safety
///
/// In `[from, from + bytes)` one segment is mapped; for `[to, to + bytes)` holds what [`map`] asks.
pub(super) unsafe fn map_again(from: u64, to: u64, bytes: u64) -> Result<()> {
    let (old, new, length) = (from as *mut c_void, to as *mut c_void, bytes as usize);
    // SAFETY: an old length of 0 leaves the old range as it is, and maps shared pages once more; what is replaced at the
    // new one is inaccessible memory of a reservation that is ours.
    match unsafe { rustix::mm::mremap_fixed(old, 0, length, MremapFlags::MAYMOVE, new) } {
        Ok(_) => Ok(()),
        Err(cause) => {
            close_gap(new, length);
            Err(mapping_failed(bytes, cause))
        }
    }
}

/// Called after a failed change of `[at, at + length)`, part of a reservation: if the kernel has already
/// removed the old pages, closes the gap before those addresses are given to somebody else.
fn close_gap(at: *mut c_void, length: usize) {
    let close = INACCESSIBLE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: MAP_FIXED_NOREPLACE never replaces a mapping.
    let _ = unsafe { rustix::mm::mmap_anonymous(at, length, ProtFlags::empty(), close) };
}

/// Puts inaccessible memory back in the place of a segment.
///
/// # Safety
///
/// Exactly this range was mapped by [`map`], and nobody uses memory in it any more.
pub(super) unsafe fn unmap(address: u64, bytes: u64) -> Result<()> {
    let flags = INACCESSIBLE | MapFlags::FIXED;
    let (at, length) = (address as *mut c_void, bytes as usize);
    // SAFETY: MAP_FIXED replaces only a segment that by the contract is ours and unused.
    unsafe { rustix::mm::mmap_anonymous(at, length, ProtFlags::empty(), flags) }.map_err(
        |cause| Error::system(format!("unmapping {} at {address:#x}", ByteSize(bytes)), cause),
    )?;
    Ok(())
}

/// Asks for huge pages where the kernel has them for shared memory. It works without, so errors are ignored.
///
/// # Safety
///
/// The range is mapped by [`map`].
pub(super) unsafe fn prefer_huge_pages(address: u64, bytes: u64) {
    let at = address as *mut c_void;
    // SAFETY: the advice changes no contents, and the range is ours.
    let _ = unsafe { rustix::mm::madvise(at, bytes as usize, Advice::LinuxHugepage) };
}

/// Fills the page tables of memory that exists already, sixteen pages at a time, where touching it would
/// cause a fault for each page. It works without, so errors are ignored.
///
/// # Safety
///
/// The range is mapped by [`map`].
pub(super) unsafe fn prefault(address: u64, bytes: u64) {
    let at = address as *mut c_void;
    // SAFETY: populating changes no contents, and the range is ours.
    let _ = unsafe { rustix::mm::madvise(at, bytes as usize, Advice::LinuxPopulateRead) };
}

/// Commits every page of the range now, so that no later access can fail for want of memory.
///
/// # Safety
///
/// The range is mapped by [`map`].
pub(super) unsafe fn populate(address: u64, bytes: u64) -> Result<(), Errno> {
    let at = address as *mut c_void;
    loop {
        // SAFETY: populating writes no contents (it only faults pages in), and the range is ours.
        match unsafe { rustix::mm::madvise(at, bytes as usize, Advice::LinuxPopulateWrite) } {
            Err(Errno::INTR | Errno::AGAIN) => {}
            done => return done,
        }
    }
}

fn mapping_failed(bytes: u64, cause: Errno) -> Error {
    if cause == Errno::NOMEM {
        return Error::out_of_memory(format!(
            "cannot map {}: {cause}; this process may have used up vm.max_map_count: raise it, or \
             use fewer and larger segments",
            ByteSize(bytes)
        ));
    }
    Error::system(format!("mapping {}", ByteSize(bytes)), cause)
}
