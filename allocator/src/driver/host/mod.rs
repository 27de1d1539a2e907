//! Host memory that the processes of one machine share.
//!
//! Who owns what: a [`Physical`] names a memory file whose descriptor this driver holds until
//! [`release`](MemoryDriver::release). A mapping keeps the pages alive by itself, so descriptors
//! may go first, and so may the process that made them. Address ranges belong to the driver until
//! [`unreserve`](MemoryDriver::unreserve), at the latest until it is dropped; after that no
//! address of it may be used.
//!
//! Memory is committed when a segment is made (its pages exist, in the node of the thread that
//! made it): running out is an error of [`create`](MemoryDriver::create) and never a signal later.

// The driver calls `space`, whose contracts it upholds through the table.
#![allow(unsafe_code)]

mod available;
mod memfd;
mod scratch;
mod space;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::amount::Amount;
use super::table::{Table, check_align, check_size};
use super::{
    DeviceIdentity, Event, Exported, MemoryDriver, Physical, Reservation, Stream, Transport,
};
use crate::{Error, Result};

/// The size of a huge page on x86-64 and of the usual one on AArch64.
const GRANULARITY: u64 = 2 << 20;

/// How a [`HostDriver`] commits memory. The default turns everything on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostOptions {
    /// Compare a request with the memory that the system and the control groups have left, and
    /// refuse it rather than wake the out-of-memory killer. Turn it off where those numbers mean
    /// little, as in virtual machines whose memory grows with use.
    pub check_available: bool,
    /// Ask for huge pages (where `/sys/kernel/mm/transparent_hugepage/shmem_enabled` grants them).
    pub huge_pages: bool,
    /// Commit all pages of a segment when it is made. Without it pages come with the first
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
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    table: Table,
    segments: BTreeMap<u64, Segment>,
}

#[derive(Debug)]
struct Segment {
    fd: OwnedFd,
    bytes: u64,
}

impl State {
    fn fd(&self, physical: &Physical) -> Result<BorrowedFd<'_>> {
        self.segments
            .get(&physical.raw())
            .filter(|segment| segment.bytes == physical.bytes())
            .map(|segment| segment.fd.as_fd())
            .ok_or_else(|| unknown(physical))
    }

    fn keep(&mut self, fd: OwnedFd, bytes: u64) -> Physical {
        // Descriptors are small and not negative, and no two open ones are equal.
        let raw = fd.as_raw_fd() as u64;
        self.segments.insert(raw, Segment { fd, bytes });
        Physical::new(raw, bytes)
    }
}

fn unknown(physical: &Physical) -> Error {
    Error::invalid_argument(format!(
        "no segment {} of {} in this driver",
        physical.raw(),
        Amount(physical.bytes())
    ))
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
        let state = State { table: Table::new(GRANULARITY), segments: BTreeMap::new() };
        Ok(Self { options, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every method leaves the state whole before it can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemoryDriver for HostDriver {
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
        check_size("a reservation", bytes, GRANULARITY)?;
        check_align(align, GRANULARITY)?;
        let base = space::reserve(bytes, align)?;
        Ok(self.state().table.reserve(base, bytes))
    }

    fn unreserve(&self, reservation: Reservation) -> Result<()> {
        let mut state = self.state();
        state.table.unreserve(&reservation)?;
        // SAFETY: the table had the range with nothing mapped in it, and has forgotten it.
        unsafe { space::unreserve(reservation.base(), reservation.bytes()) }
    }

    fn create(&self, bytes: u64) -> Result<Physical> {
        check_size("a segment", bytes, GRANULARITY)?;
        let fd = memfd::create(bytes, &self.options)?;
        Ok(self.state().keep(fd, bytes))
    }

    fn export(&self, physical: &Physical) -> Result<Exported> {
        let state = self.state();
        Ok(Exported::Fd(memfd::duplicate(state.fd(physical)?)?))
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
        Ok(self.state().keep(fd, bytes))
    }

    fn map(&self, reservation: &Reservation, offset: u64, physical: &Physical) -> Result<()> {
        let mut state = self.state();
        state.fd(physical)?;
        state.table.map(reservation, offset, physical.bytes())?;
        let (address, bytes) = (reservation.base() + offset, physical.bytes());
        // SAFETY: the table has the reservation and had nothing in this range until just now; the
        // lock is held, so nobody else changes it.
        let mapped = unsafe { space::map(address, bytes, state.fd(physical)?) };
        if let Err(error) = mapped {
            state.table.unmap(reservation, offset, bytes)?;
            return Err(error);
        }
        if self.options.huge_pages {
            // SAFETY: mapped just now.
            unsafe { space::prefer_huge_pages(address, bytes) };
        }
        Ok(())
    }

    fn unmap(&self, reservation: &Reservation, offset: u64, bytes: u64) -> Result<()> {
        let mut state = self.state();
        state.table.unmap(reservation, offset, bytes)?;
        // SAFETY: the table had exactly this mapping; that nobody uses its memory any more is what
        // unmapping means for the caller. The lock is held.
        let unmapped = unsafe { space::unmap(reservation.base() + offset, bytes) };
        if unmapped.is_err() {
            state.table.map(reservation, offset, bytes)?;
        }
        unmapped
    }

    fn release(&self, physical: Physical) -> Result<()> {
        let mut state = self.state();
        state.fd(&physical)?;
        // Dropping the descriptor closes it.
        state.segments.remove(&physical.raw());
        Ok(())
    }

    fn record_event(&self, _stream: Stream) -> Result<Event> {
        // Work of the host is done when its call returns: there is nothing to wait for.
        Ok(Event(0))
    }

    fn wait_event(&self, _stream: Stream, _event: &Event) -> Result<()> {
        Ok(())
    }

    fn release_event(&self, _event: Event) {}

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}

impl Drop for HostDriver {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (base, bytes) in state.table.drain() {
            // SAFETY: the reservation was made here and never given back, and with its driver
            // gone nobody may use addresses in it.
            if let Err(error) = unsafe { space::unreserve(base, bytes) } {
                tracing::warn!(%error, "a reservation stays behind");
            }
        }
    }
}
