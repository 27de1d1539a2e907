//! The functions that torch's pluggable allocator calls.
//!
//! Their types are those of C++ functions: a `std::pair` of two numbers is passed in two registers, and a
//! `std::function` as a pointer to the caller's object.

use std::ffi::{c_int, c_void};

use symmpool_allocator::{Error, Result};

use super::exceptions::throw_last;
use super::{device, owner, used};
use crate::guard::guarded;
use crate::on;

/// torch's identifier of a graph's memory, a `std::pair`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Id(u64, u64);

/// Allocates on a device. On failure it throws as torch does, or returns NULL if `symmpool_process_throw_by` was not
/// called.
///
/// # Safety
///
/// You must pass NULL or a stream that lives as long as the process, as torch's do.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn symmpool_process_alloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller promised NULL, or a stream that lives.
    let stream = unsafe { on(stream) };
    let work = || super::alloc(size, device, stream).map(|at| at as *mut c_void);
    let pointer = guarded(work, |_| std::ptr::null_mut());
    if pointer.is_null() {
        throw_last();
    }
    pointer
}

/// Frees what symmpool_process_alloc returned, on any device.
#[unsafe(no_mangle)]
extern "C" fn symmpool_process_free(
    pointer: *mut c_void,
    _size: usize,
    _device: c_int,
    _stream: *mut c_void,
) {
    log_errors("a free", || super::free(pointer as u64));
}

/// Records that memory is used on another stream.
///
/// # Safety
///
/// You must pass NULL or a stream that lives as long as the process, as torch's do.
#[unsafe(no_mangle)]
unsafe extern "C" fn symmpool_process_record_stream(pointer: *mut c_void, stream: *mut c_void) {
    // SAFETY: the caller promised NULL, or a stream that lives.
    let stream = unsafe { on(stream) };
    log_errors("record_stream", || super::record_stream(pointer as u64, stream));
}

/// Called when torch empties its cache.
#[unsafe(no_mangle)]
extern "C" fn symmpool_process_reset() {
    log_errors("empty_cache", || match super::trim() {
        // A graph is being captured. torch's own allocator does nothing then, too.
        Err(error) if error.is_invalid_state() => Ok(()),
        outcome => outcome.map(drop),
    });
}

/// Called when torch limits itself to a part of a device's memory.
#[unsafe(no_mangle)]
extern "C" fn symmpool_process_memory_fraction(fraction: f64, ordinal: c_int) {
    log_errors("set_per_process_memory_fraction", || device(ordinal)?.set_fraction(fraction));
}

/// The physical segment that holds an address, and its length.
///
/// # Safety
///
/// `size` is NULL or can be written to.
#[unsafe(no_mangle)]
unsafe extern "C" fn symmpool_process_base_alloc(
    pointer: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    let work = || {
        let device = owner(pointer as u64).ok_or_else(|| {
            Error::invalid_argument(format!("{pointer:p} is no memory of this allocator"))
        })?;
        device.segment(pointer as u64)
    };
    let (start, bytes) = guarded(work, |_| (pointer as u64, 0));
    if !size.is_null() {
        // SAFETY: not NULL, so writable, which the caller promised.
        unsafe { size.write(bytes as usize) };
    }
    start as *mut c_void
}

/// Called when a capture begins. The filter, which says whether a stream is part of the capture, is not needed: see
/// `DeviceAllocator::begin`.
#[unsafe(no_mangle)]
extern "C" fn symmpool_process_begin(ordinal: c_int, id: Id, _filter: *const c_void) {
    log_errors("beginning a capture", || device(ordinal)?.begin((id.0, id.1)));
}

/// Called when a capture ends.
#[unsafe(no_mangle)]
extern "C" fn symmpool_process_end(ordinal: c_int, id: Id) {
    log_errors("ending a capture", || device(ordinal)?.end((id.0, id.1)));
}

/// Called when a graph is destroyed.
#[unsafe(no_mangle)]
extern "C" fn symmpool_process_release(ordinal: c_int, id: Id) {
    log_errors("releasing a graph's memory", || device(ordinal)?.release((id.0, id.1)));
}

/// Logs errors of functions that cannot return them.
fn log_errors(doing: &str, work: impl FnOnce() -> Result<()>) {
    let work =
        || work().inspect_err(|error| tracing::error!(%error, devices = used().count(), "{doing}"));
    guarded(work, |_| ());
}
