//! Host memory that the processes of one machine share.
//!
//! Ownership: a [`Physical`] names a memory file whose descriptor this driver holds until
//! [`release`](MemoryDriver::release). A mapping keeps the pages alive by itself, so descriptors may be
//! closed before, and the process that made them may end. Address ranges belong to the driver until
//! [`unreserve`](MemoryDriver::unreserve), or until the driver is dropped; after that no address of it may
//! be used.
//!
//! Memory is committed when a segment is made (its pages exist, on the NUMA node of the thread that made
//! it): running out of memory is an error of [`create`](MemoryDriver::create) and never a signal later. The
//! first mapping of a segment by its maker has its page tables filled, so its first accesses cause no
//! faults; those of peers do, which keeps commits short.

// The driver calls `space`, whose contracts it upholds through `Mappings`.
#![allow(unsafe_code)]

mod available;
mod memfd;
#[cfg(test)]
mod processes;
mod scratch;
mod space;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use super::mappings::{Mappings, check_reserve, check_size};
use super::{DeviceIdentity, Exported, MemoryDriver, Physical, Reservation, Transport};
use crate::byte_size::ByteSize;
use crate::sync::lock_leaf;
use crate::{Error, Result};

/// The size of a huge page on x86-64 and of the usual one on AArch64.
const GRANULARITY: u64 = 2 << 20;

/// How a [`HostDriver`] commits memory. The default turns everything on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Compare a request with the memory that the system and the control groups have left, and refuse it
    /// rather than wake the out-of-memory killer. Turn it off where those numbers are unreliable, as in
    /// virtual machines whose memory grows with use.
    pub check_available: bool,
    /// Ask for huge pages (where `/sys/kernel/mm/transparent_hugepage/shmem_enabled` grants them).
    pub huge_pages: bool,
    /// Commit all pages of a segment when it is made, but of one that is
    /// [made lazily](MemoryDriver::create_lazily). Without it pages come with the first
    /// access, and a machine out of memory kills the process that makes it.
    pub populate: bool,
}

impl Default for HostOptions {
    fn default() -> Self {
        Self { check_available: true, huge_pages: true, populate: true }
    }
}

/// Host memory in sealed memory files, handed to peers as file descriptors.
#[derive(Debug)]
pub struct HostDriver {
    options: HostOptions,
    mappings: Mappings,
    /// Not locked during a system call that maps, which may take long (rule D7).
    segments: Mutex<BTreeMap<u64, HostSegment>>,
}

#[derive(Debug)]
struct HostSegment {
    fd: Arc<OwnedFd>,
    bytes: u64,
    /// Whether mappings have their pages from the beginning: of what this driver has made, and not lazily.
    prefault: bool,
    /// The mapping through which a segment of our own was committed, until the first mapping in a reservation
    /// takes over its page tables: filling those is a third of the cost of new memory.
    committed: Option<scratch::ScratchMapping>,
}

impl HostSegment {
    /// Returns what its next mapping needs.
    fn mappable(&mut self) -> Mappable {
        let Self { fd, bytes, prefault, committed } = self;
        let committed = committed.take();
        Mappable { fd: fd.clone(), bytes: *bytes, prefault: *prefault, committed }
    }
}

/// Parts of a segment that is to be mapped.
struct Mappable {
    fd: Arc<OwnedFd>,
    bytes: u64,
    prefault: bool,
    committed: Option<scratch::ScratchMapping>,
}

impl Mappable {
    /// Maps the segment.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`space::map`].
    unsafe fn map_at(&mut self, address: u64, options: &HostOptions) -> Result<()> {
        if let Some(committed) = self.committed.take() {
            // SAFETY: the caller promised that the target lies in a reservation with nothing mapped over it.
            return unsafe { committed.move_to(address) };
        }
        // SAFETY: the caller promised that the target lies in a reservation with nothing mapped over it.
        unsafe { space::map(address, self.bytes, self.fd.as_fd()) }?;
        if options.huge_pages {
            // SAFETY: mapped just now.
            unsafe { space::prefer_huge_pages(address, self.bytes) };
        }
        if options.populate && self.prefault {
            // SAFETY: mapped just now.
            unsafe { space::prefault(address, self.bytes) };
        }
        Ok(())
    }
}

fn find<'a>(
    segments: &'a mut BTreeMap<u64, HostSegment>,
    physical: &Physical,
) -> Result<&'a mut HostSegment> {
    let found = segments.get_mut(&physical.raw());
    found.filter(|segment| segment.bytes == physical.bytes()).ok_or_else(|| {
        Error::invalid_argument(format!(
            "no segment {} of {} in this driver",
            physical.raw(),
            ByteSize(physical.bytes())
        ))
    })
}

impl HostDriver {
    /// A driver with the default [`HostOptions`]. Fails where the kernel has no memory files.
    pub fn new() -> Result<Self> {
        Self::with_options(HostOptions::default())
    }

    /// A driver that commits memory as the options say.
    pub fn with_options(options: HostOptions) -> Result<Self> {
        // Also checks that the kernel knows memory files and seals.
        let trial = HostOptions { check_available: false, huge_pages: false, populate: false };
        memfd::create(GRANULARITY, &trial)?;
        let (mappings, segments) = (Mappings::new(GRANULARITY), Mutex::default());
        Ok(Self { options, mappings, segments })
    }

    fn keep(&self, segment: HostSegment) -> Physical {
        // Descriptors are small and not negative, and no two open ones are equal.
        // SAFETY: the segment is this driver's, and comes here once.
        let physical = unsafe { Physical::new(segment.fd.as_raw_fd() as u64, segment.bytes) };
        lock_leaf(&self.segments).insert(physical.raw(), segment);
        physical
    }
}

// SAFETY: `Mappings` knows what is reserved and mapped, and refuses anything else; the system keeps pages
// of a memory file where they are mapped, readable and writable, until they are unmapped here.
unsafe impl MemoryDriver for HostDriver {
    fn name(&self) -> &'static str {
        "host"
    }

    fn device(&self) -> DeviceIdentity {
        DeviceIdentity { kind: "host".into(), name: "host memory".into(), uuid: String::new() }
    }

    fn granularity(&self) -> u64 {
        GRANULARITY
    }

    fn transport(&self) -> Transport {
        Transport::UnixSocket
    }

    fn host_accessible(&self) -> bool {
        true
    }

    fn reserve(&self, bytes: u64, align: u64) -> Result<Reservation> {
        check_reserve(bytes, align, GRANULARITY)?;
        let base = space::reserve(bytes, align)?;
        Ok(self.mappings.reserve(base, bytes))
    }

    fn unreserve(&self, reservation: Reservation) -> Result<()> {
        self.mappings.unreserve(&reservation, || {
            // SAFETY: the reservation was live until now, with nothing mapped in it.
            unsafe { space::unreserve(reservation.base(), reservation.bytes()) }
        })
    }

    fn check_room(&self, bytes: u64) -> Result<()> {
        if self.options.check_available { available::check(bytes) } else { Ok(()) }
    }

    fn create(&self, bytes: u64) -> Result<Physical> {
        check_size("a segment", bytes, GRANULARITY)?;
        let (fd, committed) = memfd::create(bytes, &self.options)?;
        Ok(self.keep(HostSegment { fd: Arc::new(fd), bytes, prefault: true, committed }))
    }

    fn create_lazily(&self, bytes: u64) -> Result<Physical> {
        check_size("a segment", bytes, GRANULARITY)?;
        let fd = memfd::create_lazily(bytes, &self.options)?;
        Ok(self.keep(HostSegment { fd: Arc::new(fd), bytes, prefault: false, committed: None }))
    }

    fn create_sparsely(&self, bytes: u64) -> Result<Physical> {
        check_size("a segment", bytes, GRANULARITY)?;
        let unchecked = HostOptions { check_available: false, ..self.options };
        let fd = memfd::create_lazily(bytes, &unchecked)?;
        Ok(self.keep(HostSegment { fd: Arc::new(fd), bytes, prefault: false, committed: None }))
    }

    fn export(&self, physical: &Physical) -> Result<Exported> {
        let fd = find(&mut lock_leaf(&self.segments), physical)?.fd.clone();
        Ok(Exported::Fd(memfd::duplicate(fd.as_fd())?))
    }

    fn import(&self, exported: Exported, bytes: u64) -> Result<Physical> {
        check_size("a peer's segment", bytes, GRANULARITY)?;
        let Exported::Fd(fd) = exported else {
            return Err(Error::invalid_argument(
                "a handle that is not a file descriptor handed to the host driver; all ranks of a \
                 group must use the same driver",
            ));
        };
        let fd = memfd::import(fd, bytes)?;
        Ok(self.keep(HostSegment { fd: Arc::new(fd), bytes, prefault: false, committed: None }))
    }

    fn map(&self, reservation: &Reservation, offset: u64, physical: &Physical) -> Result<()> {
        let mut mappable = find(&mut lock_leaf(&self.segments), physical)?.mappable();
        let mapped = self.mappings.map(reservation, offset, mappable.bytes, || {
            let address = reservation.base() + offset;
            // SAFETY: the reservation is live and nothing is mapped in this part of it, which is
            // this thread's to change until this returns.
            unsafe { mappable.map_at(address, &self.options) }
        });
        if let Some(unused) = mappable.committed {
            // The range was refused: the next mapping takes it.
            if let Ok(segment) = find(&mut lock_leaf(&self.segments), physical) {
                segment.committed = Some(unused);
            }
        }
        mapped
    }

    unsafe fn map_again(
        &self,
        reservation: &Reservation,
        offset: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()> {
        self.mappings.map(reservation, offset, bytes, || {
            // SAFETY: the caller promised that `bytes` are mapped from `from` on; the reservation is live and nothing
            // is mapped in this part of it, which is this thread's to change until this returns.
            unsafe { space::map_again(from, reservation.base() + offset, bytes) }
        })
    }

    fn unmap(&self, reservation: &Reservation, offset: u64, bytes: u64) -> Result<()> {
        self.mappings.unmap(reservation, offset, bytes, || {
            // SAFETY: this range alone is mapped as a whole, and it is this thread's to change until this returns; by
            // unmapping, the caller says that nobody uses its memory any more.
            unsafe { space::unmap(reservation.base() + offset, bytes) }
        })
    }

    fn release(&self, physical: Physical) -> Result<()> {
        let mut segments = lock_leaf(&self.segments);
        find(&mut segments, &physical)?;
        // Dropping the descriptor closes it: not under the lock, as that may free the memory.
        let gone = segments.remove(&physical.raw());
        drop(segments);
        drop(gone);
        Ok(())
    }
}

impl Drop for HostDriver {
    fn drop(&mut self) {
        for (base, bytes) in self.mappings.drain() {
            // SAFETY: the reservation was made here and never given back, and with its driver
            // gone nobody may use addresses in it.
            if let Err(error) = unsafe { space::unreserve(base, bytes) } {
                tracing::warn!(%error, "a reservation stays behind");
            }
        }
    }
}
