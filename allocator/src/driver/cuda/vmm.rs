//! Virtual memory management: reservations, allocations, mappings and handles that travel.
//!
//! The free functions are one CUDA call each. [`Memory`] puts them together: it refuses misuse
//! before CUDA sees it, and undoes what it did when a later step fails.
#![allow(unsafe_code)] // FFI: the calls that manage memory.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cudarc::driver::sys;

use super::FABRIC_HANDLE_BYTES;
use super::api::{AccessDesc, AllocationProp, Api, Code};
use super::context::Context;
use super::probe::{self, FABRIC, POSIX_FD};
use crate::driver::amount::Amount;
use crate::driver::mappings::{Mappings, check_size};
use crate::driver::{Exported, Physical, Reservation};
use crate::{Error, Result};

/// What one driver holds. The driver keeps it behind a lock.
pub(super) struct Memory {
    granularity: u64,
    mappings: Mappings,
    /// Base of a reservation to the range that CUDA gave, which is larger where CUDA would not
    /// align it.
    ranges: BTreeMap<u64, (u64, u64)>,
    /// Allocation handle to its size and how often it is held: CUDA may give the same handle
    /// again when a process imports its own memory.
    handles: BTreeMap<u64, (u64, u32)>,
}

impl Memory {
    pub(super) fn new(granularity: u64) -> Self {
        Self {
            granularity,
            mappings: Mappings::new(granularity),
            ranges: BTreeMap::new(),
            handles: BTreeMap::new(),
        }
    }

    pub(super) fn reserve(&mut self, cx: &Context, bytes: u64, align: u64) -> Result<Reservation> {
        Mappings::check_reserve(bytes, align, self.granularity)?;
        let _current = cx.enter_for_memory()?;
        let given = reserve_aligned(cx.api, bytes, align)?;
        let base = given.0.next_multiple_of(align);
        self.ranges.insert(base, given);
        Ok(self.mappings.reserve(base, bytes))
    }

    pub(super) fn unreserve(&mut self, cx: &Context, reservation: &Reservation) -> Result<()> {
        let base = reservation.base();
        self.mappings.unreserve(reservation, || {
            let (start, bytes) =
                self.ranges.get(&base).copied().unwrap_or((base, reservation.bytes()));
            let _current = cx.enter_for_memory()?;
            address_free(cx.api, start, bytes)
        })?;
        self.ranges.remove(&base);
        Ok(())
    }

    pub(super) fn create(
        &mut self,
        cx: &Context,
        bytes: u64,
        prop: &AllocationProp,
    ) -> Result<Physical> {
        check_size("a segment", bytes, self.granularity)?;
        let _current = cx.enter_for_memory()?;
        let handle = create(cx.api, bytes, prop)?;
        Ok(self.hold(handle, bytes))
    }

    pub(super) fn import(
        &mut self,
        cx: &Context,
        exported: Exported,
        bytes: u64,
    ) -> Result<Physical> {
        check_size("a peer's segment", bytes, self.granularity)?;
        let _current = cx.enter_for_memory()?;
        let handle = match exported {
            // CUDA takes its own reference; the descriptor is closed on return, used or not.
            Exported::Fd(fd) => import_fd(cx.api, &fd, bytes)?,
            Exported::Bytes(handle) => {
                let mut handle =
                    <[u8; FABRIC_HANDLE_BYTES]>::try_from(handle).map_err(|other| {
                        Error::invalid_argument(format!(
                            "a FABRIC handle of {} bytes; they have {FABRIC_HANDLE_BYTES}",
                            other.len()
                        ))
                    })?;
                import_fabric(cx.api, &mut handle, bytes)?
            }
            Exported::Derived => {
                return Err(Error::invalid_argument(
                    "a handle of the simulation cannot be imported by the CUDA driver; all ranks \
                     of a group use the same kind of driver",
                ));
            }
        };
        Ok(self.hold(handle, bytes))
    }

    pub(super) fn export(
        &self,
        cx: &Context,
        physical: &Physical,
        as_fabric: bool,
    ) -> Result<Exported> {
        self.check_held(physical)?;
        let _current = cx.enter_for_memory()?;
        if as_fabric {
            Ok(Exported::Bytes(export_fabric(cx.api, physical.raw())?.to_vec()))
        } else {
            Ok(Exported::Fd(export_fd(cx.api, physical.raw())?))
        }
    }

    pub(super) fn map(
        &mut self,
        cx: &Context,
        reservation: &Reservation,
        offset: u64,
        physical: &Physical,
    ) -> Result<()> {
        self.check_held(physical)?;
        let bytes = physical.bytes();
        self.mappings.map(reservation, offset, bytes, || {
            let address = reservation.base() + offset;
            let _current = cx.enter_for_memory()?;
            map(cx.api, address, bytes, physical.raw())?;
            allow_access(cx, address, bytes, physical.raw()).map_err(|error| {
                match unmap(cx.api, address, bytes) {
                    Ok(()) => error,
                    // CUDA goes on refusing these addresses, so nothing worse follows.
                    Err(undo) => error.context(format!(
                        "mapping {bytes} bytes at {address:#x}, which could not be undone ({undo})"
                    )),
                }
            })
        })
    }

    pub(super) fn unmap(
        &mut self,
        cx: &Context,
        reservation: &Reservation,
        offset: u64,
        bytes: u64,
    ) -> Result<()> {
        self.mappings.unmap(reservation, offset, bytes, || {
            let _current = cx.enter_for_memory()?;
            unmap(cx.api, reservation.base() + offset, bytes)
        })
    }

    pub(super) fn release(&mut self, cx: &Context, physical: &Physical) -> Result<()> {
        self.check_held(physical)?;
        let _current = cx.enter_for_memory()?;
        release(cx.api, physical.raw())?;
        if let Some((_, count)) = self.handles.get_mut(&physical.raw()) {
            *count -= 1;
            if *count == 0 {
                self.handles.remove(&physical.raw());
            }
        }
        Ok(())
    }

    /// Reservations, mappings and handles that are still held.
    pub(super) fn held(&self) -> (u64, u64, u64) {
        let (reservations, mappings) = self.mappings.counts();
        (reservations, mappings, self.handles.len() as u64)
    }

    fn hold(&mut self, handle: u64, bytes: u64) -> Physical {
        let entry = self.handles.entry(handle).or_insert((bytes, 0));
        entry.1 += 1;
        Physical::new(handle, bytes)
    }

    fn check_held(&self, physical: &Physical) -> Result<()> {
        match self.handles.get(&physical.raw()) {
            Some(&(bytes, _)) if bytes == physical.bytes() => Ok(()),
            _ => Err(Error::invalid_argument(format!(
                "no live allocation {:#x} of {} bytes in this driver",
                physical.raw(),
                physical.bytes()
            ))),
        }
    }
}

/// Lets the device of `cx` read and write a mapping. Says which two devices cannot reach each
/// other, where that is why it failed.
fn allow_access(cx: &Context, address: u64, bytes: u64, handle: u64) -> Result<()> {
    let desc = AccessDesc::read_write(cx.device);
    // SAFETY: the range is mapped; reads one descriptor through a valid pointer.
    let code = unsafe { (cx.api.set_access)(address, size(bytes)?, &raw const desc, 1) };
    if code.0 == 0 {
        return Ok(());
    }
    if let Some(owner) = unreachable_owner(cx, handle) {
        return Err(Error::unsupported(format!(
            "CUDA device {} cannot access the memory of its peer, {owner} \
             (cuDeviceCanAccessPeer says no): {}",
            label(cx.api, cx.device),
            cx.api.describe(code)
        )));
    }
    if code.0 == sys::cudaError_enum::CUDA_ERROR_INVALID_DEVICE as c_uint {
        return Err(Error::unsupported(format!(
            "CUDA device {} cannot access memory of a peer's device: {}",
            label(cx.api, cx.device),
            cx.api.describe(code)
        )));
    }
    cx.api.check(code, || {
        format!("giving CUDA device {} access to {bytes} bytes at {address:#x}", cx.device)
    })
}

/// The device that backs `handle`, where that is known and `cx`'s device cannot reach it.
fn unreachable_owner(cx: &Context, handle: u64) -> Option<String> {
    let mut prop = AllocationProp::pinned(0, 0, false);
    // SAFETY: the handle is live; writes one structure, of integers only, through a valid pointer.
    let code = unsafe { (cx.api.properties)(&raw mut prop, handle) };
    let owner = prop.location.as_device().filter(|&owner| code.0 == 0 && owner != cx.device)?;
    let mut can: c_int = 1;
    // SAFETY: writes one int through a valid pointer.
    let code = unsafe { (cx.api.device_can_access_peer)(&raw mut can, cx.device, owner) };
    (code.0 == 0 && can == 0).then(|| format!("CUDA device {}", label(cx.api, owner)))
}

fn label(api: &Api, device: c_int) -> String {
    match probe::name(api, device) {
        Ok(name) => format!("{device} ({name})"),
        Err(_) => device.to_string(),
    }
}

pub(super) fn create(api: &Api, bytes: u64, prop: &AllocationProp) -> Result<u64> {
    let mut handle = 0;
    // SAFETY: reads a valid structure and writes one handle through a valid pointer.
    let code = unsafe { (api.create)(&raw mut handle, size(bytes)?, prop, 0) };
    if code.0 == 0 {
        return Ok(handle);
    }
    let info = probe::memory_info(api).ok();
    let state = match info {
        Some((free, total)) => format!("{free} of {total} bytes are free"),
        None => "how much is free is unknown".to_owned(),
    };
    // More than the device has is out of memory, whatever a driver calls it.
    let too_large = info.is_some_and(|(_, total)| bytes > total);
    if code.is_out_of_memory() || too_large {
        return Err(Error::out_of_memory(format!(
            "allocating {bytes} bytes on CUDA device {}: {}; {state}",
            prop.location.id,
            api.describe(code)
        )));
    }
    api.check(code, || {
        format!("allocating {bytes} bytes on CUDA device {} ({state})", prop.location.id)
    })?;
    Ok(handle)
}

pub(super) fn release(api: &Api, handle: u64) -> Result<()> {
    // SAFETY: the caller holds the handle and gives it up.
    let code = unsafe { (api.release)(handle) };
    api.check(code, || "releasing an allocation".to_owned())
}

pub(super) fn export_fd(api: &Api, handle: u64) -> Result<OwnedFd> {
    let mut fd: c_int = -1;
    // SAFETY: for this handle type one int is written, and the pointer is to an int.
    let code = unsafe { (api.export)((&raw mut fd).cast(), handle, POSIX_FD, 0) };
    api.check(code, || "exporting memory as a POSIX file descriptor".to_owned())?;
    if fd < 0 {
        return Err(Error::system("exporting memory", format!("CUDA gave descriptor {fd}")));
    }
    // SAFETY: CUDA made this descriptor for the caller, so nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // Segments must not leak into programs that this one starts.
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)
        .map_err(|errno| Error::system("setting close-on-exec on an exported segment", errno))?;
    Ok(fd)
}

pub(super) fn export_fabric(api: &Api, handle: u64) -> Result<[u8; FABRIC_HANDLE_BYTES]> {
    let mut bytes = [0u8; FABRIC_HANDLE_BYTES];
    // SAFETY: for this handle type 64 bytes are written, and the array has 64.
    let code = unsafe { (api.export)(bytes.as_mut_ptr().cast(), handle, FABRIC, 0) };
    api.check(code, || "exporting memory as a FABRIC handle".to_owned())?;
    Ok(bytes)
}

fn import_fd(api: &Api, fd: &OwnedFd, bytes: u64) -> Result<u64> {
    // The descriptor itself is passed in the pointer's place.
    let number = usize::try_from(fd.as_raw_fd())
        .map_err(|_| Error::invalid_argument("a negative file descriptor"))?;
    let mut handle = 0;
    // SAFETY: for this handle type the second argument is a number, not followed; one handle is
    // written through a valid pointer.
    let code = unsafe {
        (api.import)(&raw mut handle, std::ptr::without_provenance_mut(number), POSIX_FD)
    };
    imported(api, code, handle, bytes)
}

fn import_fabric(api: &Api, shared: &mut [u8; FABRIC_HANDLE_BYTES], bytes: u64) -> Result<u64> {
    let mut handle = 0;
    // SAFETY: for this handle type 64 bytes are read through the second argument, and the array
    // has 64; one handle is written through a valid pointer.
    let code = unsafe { (api.import)(&raw mut handle, shared.as_mut_ptr().cast(), FABRIC) };
    imported(api, code, handle, bytes)
}

fn imported(api: &Api, code: Code, handle: u64, bytes: u64) -> Result<u64> {
    api.check(code, || {
        format!(
            "importing {bytes} bytes of a peer's memory (the handle must come from CUDA, and the \
             peer's device must be visible here: see CUDA_VISIBLE_DEVICES)"
        )
    })?;
    Ok(handle)
}

/// Reserves a range in which `bytes` bytes begin at a multiple of `align`: as large as asked where
/// CUDA aligns it, larger by `align` where it does not (large alignments).
fn reserve_aligned(api: &Api, bytes: u64, align: u64) -> Result<(u64, u64)> {
    let first = address_reserve(api, bytes, align);
    if let Ok(base) = first {
        if base.is_multiple_of(align) {
            return Ok((base, bytes));
        }
        address_free(api, base, bytes)?;
    }
    let Some(padded) = bytes.checked_add(align) else {
        return Err(no_addresses(bytes, align, "more than there are addresses"));
    };
    match (address_reserve(api, padded, 0), first) {
        (Ok(base), _) => Ok((base, padded)),
        (Err(_), Err(error)) | (Err(error), Ok(_)) => Err(error),
    }
}

fn address_reserve(api: &Api, bytes: u64, align: u64) -> Result<u64> {
    let mut base = 0;
    let (length, alignment) = (size(bytes)?, size(align)?);
    // SAFETY: writes one address through a valid pointer; address 0 lets CUDA choose.
    let code = unsafe { (api.address_reserve)(&raw mut base, length, alignment, 0, 0) };
    // Sizes and alignments that make no sense were refused before: what CUDA calls invalid here
    // is too large for it.
    if code.is_out_of_memory() || code.is_invalid_value() {
        return Err(no_addresses(bytes, align, &api.describe(code)));
    }
    api.check(code, || format!("reserving {bytes} bytes of address space aligned to {align}"))?;
    Ok(base)
}

fn no_addresses(bytes: u64, align: u64, why: &str) -> Error {
    Error::out_of_memory(format!(
        "cannot reserve {} of device addresses aligned to {}: {why}; lower the stride of the heap \
         or the number of ranks",
        Amount(bytes),
        Amount(align)
    ))
}

fn address_free(api: &Api, base: u64, bytes: u64) -> Result<()> {
    // SAFETY: the range came from `address_reserve` and nothing is mapped in it, which `Mappings`
    // has checked.
    let code = unsafe { (api.address_free)(base, size(bytes)?) };
    api.check(code, || format!("giving back {bytes} bytes of address space at {base:#x}"))
}

fn map(api: &Api, address: u64, bytes: u64, handle: u64) -> Result<()> {
    // SAFETY: the range lies in a live reservation and nothing is mapped there, which `Mappings`
    // has checked; the handle is live.
    let code = unsafe { (api.map)(address, size(bytes)?, 0, handle, 0) };
    api.check(code, || format!("mapping {bytes} bytes at {address:#x}"))
}

fn unmap(api: &Api, address: u64, bytes: u64) -> Result<()> {
    // SAFETY: the range is one whole mapping, which `Mappings` has checked. Work of
    // the device that still uses it is a fault on the device, not here.
    let code = unsafe { (api.unmap)(address, size(bytes)?) };
    api.check(code, || format!("unmapping {bytes} bytes at {address:#x}"))
}

/// A length as CUDA takes it.
pub(super) fn size(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| {
        Error::invalid_argument(format!("{bytes} bytes are more than an address can tell apart"))
    })
}
