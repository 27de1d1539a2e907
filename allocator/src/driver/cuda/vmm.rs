//! Virtual memory management: reservations, allocations, mappings and handles that travel.
//!
//! [`DriverMemory`] combines the calls: it refuses misuse before CUDA is called, and undoes earlier steps when a
//! later one fails.
#![allow(unsafe_code)] // FFI: the calls that manage memory.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::sync::Mutex;

use cudarc::driver::sys;

use super::api::{AccessDesc, AllocationProp, DriverApi, FABRIC_HANDLE_BYTES};
use super::calls::{
    address_free, create, export_fabric, export_fd, import_fabric, import_fd, map, name, release,
    reserve_aligned, size, unmap,
};
use super::context::Context;
use crate::driver::mappings::{Mappings, check_reserve, check_size};
use crate::driver::{Exported, Physical, Reservation};
use crate::sync::lock_leaf;
use crate::{Error, Result};

/// Memory of one driver. Nothing is locked during CUDA calls: threads wait for each other only inside CUDA (rule D7).
pub(super) struct DriverMemory {
    granularity: u64,
    mappings: Mappings,
    /// Base of a reservation to the range that CUDA gave, which is larger where CUDA would not
    /// align it.
    ranges: Mutex<BTreeMap<u64, (u64, u64)>>,
    /// Allocation handle to its size and how often it is held: CUDA may give the same handle
    /// again when a process imports its own memory.
    handles: Mutex<BTreeMap<u64, (u64, u32)>>,
}

impl DriverMemory {
    pub(super) fn new(granularity: u64) -> Self {
        Self {
            granularity,
            mappings: Mappings::new(granularity),
            ranges: Mutex::default(),
            handles: Mutex::default(),
        }
    }

    pub(super) fn reserve(&self, cx: &Context, bytes: u64, align: u64) -> Result<Reservation> {
        check_reserve(bytes, align, self.granularity)?;
        let _current = cx.enter_for_memory()?;
        let given = reserve_aligned(cx.api, bytes, align)?;
        let base = given.0.next_multiple_of(align);
        lock_leaf(&self.ranges).insert(base, given);
        Ok(self.mappings.reserve(base, bytes))
    }

    pub(super) fn unreserve(&self, cx: &Context, reservation: &Reservation) -> Result<()> {
        let base = reservation.base();
        self.mappings.unreserve(reservation, || {
            let _current = cx.enter_for_memory()?;
            // Removed before it is given back: after that, another reservation may have the same addresses.
            let given =
                lock_leaf(&self.ranges).remove(&base).unwrap_or((base, reservation.bytes()));
            // SAFETY: `reserve` noted the range as it was reserved, and it is in the table no more, so it is given back once.
            // `Mappings` has checked that nothing is mapped in it.
            unsafe { address_free(cx.api, given.0, given.1) }.inspect_err(|_| {
                lock_leaf(&self.ranges).insert(base, given);
            })
        })
    }

    pub(super) fn create(
        &self,
        cx: &Context,
        bytes: u64,
        prop: &AllocationProp,
    ) -> Result<Physical> {
        check_size("a segment", bytes, self.granularity)?;
        let _current = cx.enter_for_memory()?;
        let handle = create(cx.api, bytes, prop)?;
        // SAFETY: CUDA has just handed out the handle.
        Ok(unsafe { self.hold(handle, bytes) })
    }

    pub(super) fn import(&self, cx: &Context, exported: Exported, bytes: u64) -> Result<Physical> {
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
        // SAFETY: CUDA has just handed out the handle, or counted this process's own once more.
        Ok(unsafe { self.hold(handle, bytes) })
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
            // SAFETY: `check_held` found the handle among those of this driver, and the caller has `physical`, so it is held.
            let handle = unsafe { export_fabric(cx.api, physical.raw()) }?;
            Ok(Exported::Bytes(handle.to_vec()))
        } else {
            // SAFETY: `check_held` found the handle among those of this driver, and the caller has `physical`, so it is held.
            Ok(Exported::Fd(unsafe { export_fd(cx.api, physical.raw()) }?))
        }
    }

    /// Maps all, then gives access to the whole range in one call, because that call costs more than mapping.
    pub(super) fn map_all(
        &self,
        cx: &Context,
        reservation: &Reservation,
        offset: u64,
        physicals: &[Physical],
    ) -> Result<()> {
        let Some(first) = physicals.first() else { return Ok(()) };
        physicals.iter().try_for_each(|physical| self.check_held(physical))?;
        let _current = cx.enter_for_memory()?;
        let base = reservation.base();
        let (mut end, mut count, mut mapped) = (offset, 0, Ok(()));
        for physical in physicals {
            let bytes = physical.bytes();
            mapped = self.mappings.map(reservation, end, bytes, || {
                // SAFETY: `Mappings` has checked that the range lies in a live reservation and that nothing is mapped there.
                // `check_held` found the handle, of as many bytes, among those of this driver.
                unsafe { map(cx.api, base + end, bytes, physical.raw()) }
            });
            if mapped.is_err() {
                break;
            }
            (end, count) = (end + bytes, count + 1);
        }
        // SAFETY: all of the range has been mapped above, and `check_held` found the handle of its beginning.
        let allowed = || unsafe { allow_access(cx, base + offset, end - offset, first.raw()) };
        let mapped = mapped.and_then(|()| allowed());
        mapped.map_err(|error| {
            let mut at = offset;
            for physical in &physicals[..count] {
                let bytes = physical.bytes();
                let undone = self.mappings.unmap(reservation, at, bytes, || {
                    // SAFETY: the mapping was made above, whole, and nobody has been told of it.
                    unsafe { unmap(cx.api, base + at, bytes) }
                });
                if let Err(undo) = undone {
                    // CUDA goes on refusing these addresses, so nothing else is affected.
                    return error.context(format!(
                        "mapping {bytes} bytes at {:#x}, which could not be undone ({undo})",
                        base + at
                    ));
                }
                at += bytes;
            }
            error
        })
    }

    pub(super) fn unmap(
        &self,
        cx: &Context,
        reservation: &Reservation,
        offset: u64,
        bytes: u64,
    ) -> Result<()> {
        self.mappings.unmap(reservation, offset, bytes, || {
            let _current = cx.enter_for_memory()?;
            // SAFETY: `Mappings` has checked that the range is one whole mapping. Whoever unmaps uses it no more: pools do so
            // when no rank's work accesses the segment.
            unsafe { unmap(cx.api, reservation.base() + offset, bytes) }
        })
    }

    pub(super) fn release(&self, cx: &Context, physical: &Physical) -> Result<()> {
        let _current = cx.enter_for_memory()?;
        // Removed before it is given back: after that, CUDA may give the same handle to another allocation.
        self.drop_reference(physical)?;
        // SAFETY: `drop_reference` took this value's reference out of the table, where the handle was live.
        unsafe { release(cx.api, physical.raw()) }.inspect_err(|_| {
            // SAFETY: CUDA has not released the handle, whose reference is put back.
            unsafe { self.hold(physical.raw(), physical.bytes()) };
        })
    }

    /// Reservations, mappings and handles that are still held.
    pub(super) fn held(&self) -> (u64, u64, u64) {
        let (reservations, mappings) = self.mappings.counts();
        (reservations, mappings, lock_leaf(&self.handles).len() as u64)
    }

    /// Notes a reference to an allocation.
    ///
    /// # Safety
    ///
    /// You must pass a live handle of `bytes` bytes, and a reference to it that no other value stands for.
    unsafe fn hold(&self, handle: u64, bytes: u64) -> Physical {
        let mut handles = lock_leaf(&self.handles);
        let entry = handles.entry(handle).or_insert((bytes, 0));
        entry.1 += 1;
        // SAFETY: the caller promised a live handle, and a reference for this value alone.
        unsafe { Physical::new(handle, bytes) }
    }

    /// Removes one reference to an allocation.
    fn drop_reference(&self, physical: &Physical) -> Result<()> {
        let mut handles = lock_leaf(&self.handles);
        check_held(&handles, physical)?;
        if let Some((_, count)) = handles.get_mut(&physical.raw()) {
            *count -= 1;
            if *count == 0 {
                handles.remove(&physical.raw());
            }
        }
        Ok(())
    }

    fn check_held(&self, physical: &Physical) -> Result<()> {
        check_held(&lock_leaf(&self.handles), physical)
    }
}

fn check_held(handles: &BTreeMap<u64, (u64, u32)>, physical: &Physical) -> Result<()> {
    match handles.get(&physical.raw()) {
        Some(&(bytes, _)) if bytes == physical.bytes() => Ok(()),
        _ => Err(Error::invalid_argument(format!(
            "no live allocation {:#x} of {} bytes in this driver",
            physical.raw(),
            physical.bytes()
        ))),
    }
}

/// Lets the device of `cx` read and write a mapping. If that fails because two devices cannot reach each
/// other, the error names both.
///
/// # Safety
///
/// You must pass a range that is mapped, and the live handle of its beginning.
unsafe fn allow_access(cx: &Context, address: u64, bytes: u64, handle: u64) -> Result<()> {
    let desc = AccessDesc::read_write(cx.device);
    // SAFETY: the caller promised that the range is mapped; reads one descriptor through a valid pointer.
    let code = unsafe { (cx.api.set_access)(address, size(bytes)?, &raw const desc, 1) };
    if code.0 == 0 {
        return Ok(());
    }
    // SAFETY: the caller promised a live handle.
    if let Some(owner) = unsafe { unreachable_owner(cx, handle) } {
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
///
/// # Safety
///
/// You must pass a live handle.
unsafe fn unreachable_owner(cx: &Context, handle: u64) -> Option<String> {
    let mut prop = AllocationProp::pinned(0, 0, false);
    // SAFETY: the caller promised a live handle; writes one structure, of integers only, through a valid pointer.
    let code = unsafe { (cx.api.properties)(&raw mut prop, handle) };
    let owner = prop.location.as_device().filter(|&owner| code.0 == 0 && owner != cx.device)?;
    let mut can: c_int = 1;
    // SAFETY: writes one int through a valid pointer.
    let code = unsafe { (cx.api.device_can_access_peer)(&raw mut can, cx.device, owner) };
    (code.0 == 0 && can == 0).then(|| format!("CUDA device {}", label(cx.api, owner)))
}

fn label(api: &DriverApi, device: c_int) -> String {
    match name(api, device) {
        Ok(name) => format!("{device} ({name})"),
        Err(_) => device.to_string(),
    }
}
