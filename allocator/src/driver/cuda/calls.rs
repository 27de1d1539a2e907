//! The calls that manage memory, one CUDA call in each function: they convert sizes and errors, and keep no
//! state.
#![allow(unsafe_code)] // FFI: the calls that manage memory.

use std::ffi::{CStr, c_int, c_uint};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cudarc::driver::sys;

use super::api::{AllocationProp, CudaResult, DriverApi, FABRIC_HANDLE_BYTES};
use crate::byte_size::ByteSize;
use crate::{Error, Result};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(super) const POSIX_FD: c_uint =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;

/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub(super) const FABRIC: c_uint = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC.0;

/// A device's model name.
pub(super) fn name(api: &DriverApi, device: c_int) -> Result<String> {
    let mut buffer = [0u8; 256];
    let length = buffer.len() as c_int;
    // SAFETY: writes at most `length` bytes, NUL included, into a buffer of that length.
    let code = unsafe { (api.device_name)(buffer.as_mut_ptr().cast(), length, device) };
    api.check(code, || format!("asking for the name of CUDA device {device}"))?;
    let name = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(name.to_string_lossy().into_owned())
}

/// Free and total bytes of the device whose context is current.
pub(super) fn memory_info(api: &DriverApi) -> Result<(u64, u64)> {
    let mut free = 0;
    let mut total = 0;
    // SAFETY: writes two sizes through valid pointers.
    let code = unsafe { (api.memory_info)(&raw mut free, &raw mut total) };
    api.check(code, || "asking for free device memory".to_owned())?;
    Ok((free as u64, total as u64))
}

pub(super) fn create(api: &DriverApi, bytes: u64, prop: &AllocationProp) -> Result<u64> {
    let mut handle = 0;
    // SAFETY: reads a valid structure and writes one handle through a valid pointer.
    let code = unsafe { (api.create)(&raw mut handle, size(bytes)?, prop, 0) };
    if code.0 == 0 {
        return Ok(handle);
    }
    let info = memory_info(api).ok();
    let state = match info {
        Some((free, total)) => format!("{free} of {total} bytes are free"),
        None => "how much is free is unknown".to_owned(),
    };
    // A request larger than the device's memory is out of memory, whatever the error code is.
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

/// Gives up a handle of memory.
///
/// # Safety
///
/// You must hold the handle, and use it no more.
pub(super) unsafe fn release(api: &DriverApi, handle: u64) -> Result<()> {
    // SAFETY: the caller promised to hold the handle, and gives it up.
    let code = unsafe { (api.release)(handle) };
    api.check(code, || "releasing an allocation".to_owned())
}

/// Makes a descriptor by which other processes import the memory.
///
/// # Safety
///
/// You must hold the handle.
pub(super) unsafe fn export_fd(api: &DriverApi, handle: u64) -> Result<OwnedFd> {
    let mut fd: c_int = -1;
    // SAFETY: the caller promised to hold the handle. For this handle type one int is written, and the pointer is to an int.
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

/// Makes a FABRIC handle by which processes of other machines import the memory.
///
/// # Safety
///
/// You must hold the handle.
pub(super) unsafe fn export_fabric(
    api: &DriverApi,
    handle: u64,
) -> Result<[u8; FABRIC_HANDLE_BYTES]> {
    let mut bytes = [0u8; FABRIC_HANDLE_BYTES];
    // SAFETY: the caller promised to hold the handle. For this handle type 64 bytes are written, and the array has 64.
    let code = unsafe { (api.export)(bytes.as_mut_ptr().cast(), handle, FABRIC, 0) };
    api.check(code, || "exporting memory as a FABRIC handle".to_owned())?;
    Ok(bytes)
}

pub(super) fn import_fd(api: &DriverApi, fd: &OwnedFd, bytes: u64) -> Result<u64> {
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

pub(super) fn import_fabric(
    api: &DriverApi,
    shared: &mut [u8; FABRIC_HANDLE_BYTES],
    bytes: u64,
) -> Result<u64> {
    let mut handle = 0;
    // SAFETY: for this handle type 64 bytes are read through the second argument, and the array
    // has 64; one handle is written through a valid pointer.
    let code = unsafe { (api.import)(&raw mut handle, shared.as_mut_ptr().cast(), FABRIC) };
    imported(api, code, handle, bytes)
}

fn imported(api: &DriverApi, code: CudaResult, handle: u64, bytes: u64) -> Result<u64> {
    api.check(code, || {
        format!(
            "importing {bytes} bytes of a peer's memory (the handle must come from CUDA, and the \
             peer's device must be visible here: see CUDA_VISIBLE_DEVICES)"
        )
    })?;
    Ok(handle)
}

/// Reserves a range in which `bytes` bytes begin at a multiple of `align`; returns its base and length. If
/// CUDA does not align it (large alignments), it is larger by `align`.
pub(super) fn reserve_aligned(api: &DriverApi, bytes: u64, align: u64) -> Result<(u64, u64)> {
    let first = address_reserve(api, bytes, align);
    if let Ok(base) = first {
        if base.is_multiple_of(align) {
            return Ok((base, bytes));
        }
        // SAFETY: the range was reserved two lines above, and nothing has been mapped in it.
        unsafe { address_free(api, base, bytes) }?;
    }
    let Some(padded) = bytes.checked_add(align) else {
        return Err(no_addresses(bytes, align, "more than there are addresses"));
    };
    match (address_reserve(api, padded, 0), first) {
        (Ok(base), _) => Ok((base, padded)),
        (Err(_), Err(error)) | (Err(error), Ok(_)) => Err(error),
    }
}

fn address_reserve(api: &DriverApi, bytes: u64, align: u64) -> Result<u64> {
    let mut base = 0;
    let (length, alignment) = (size(bytes)?, size(align)?);
    // SAFETY: writes one address through a valid pointer; address 0 lets CUDA choose.
    let code = unsafe { (api.address_reserve)(&raw mut base, length, alignment, 0, 0) };
    // Invalid sizes and alignments were refused before, so what CUDA calls invalid here is too large for it.
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
        ByteSize(bytes),
        ByteSize(align)
    ))
}

/// Gives back a range of addresses.
///
/// # Safety
///
/// You must pass a whole range that `reserve_aligned` has returned, in which nothing is mapped, and use it no more.
pub(super) unsafe fn address_free(api: &DriverApi, base: u64, bytes: u64) -> Result<()> {
    // SAFETY: the caller promised a reserved range in which nothing is mapped.
    let code = unsafe { (api.address_free)(base, size(bytes)?) };
    api.check(code, || format!("giving back {bytes} bytes of address space at {base:#x}"))
}

/// Maps memory at an address.
///
/// # Safety
///
/// You must pass a range of a live reservation in which nothing is mapped, and a handle that you hold, of `bytes` bytes.
pub(super) unsafe fn map(api: &DriverApi, address: u64, bytes: u64, handle: u64) -> Result<()> {
    // SAFETY: the caller promised a free range of a live reservation, and a handle of as many bytes that it holds.
    let code = unsafe { (api.map)(address, size(bytes)?, 0, handle, 0) };
    api.check(code, || format!("mapping {bytes} bytes at {address:#x}"))
}

/// Removes a mapping.
///
/// # Safety
///
/// You must pass one whole mapping, which nothing accesses from now on.
pub(super) unsafe fn unmap(api: &DriverApi, address: u64, bytes: u64) -> Result<()> {
    // SAFETY: the caller promised a whole mapping that nothing accesses any more. Work of the device that still does is a
    // fault on the device, not here.
    let code = unsafe { (api.unmap)(address, size(bytes)?) };
    api.check(code, || format!("unmapping {bytes} bytes at {address:#x}"))
}

/// A length as CUDA takes it.
pub(super) fn size(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| {
        Error::invalid_argument(format!("{bytes} bytes are more than an address can tell apart"))
    })
}
