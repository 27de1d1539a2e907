//! The functions that torch's pluggable allocator calls.
//!
//! Their types are those of C++ functions: a `std::pair` of two numbers is passed in two registers, and a
//! `std::function` as a pointer to the caller's object.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use symmpool_allocator::{Error, Result};

use super::{device, owner, used};
use crate::guard::{Status, guarded, last, status};

/// The type of torch's function that throws, which takes function, file, line and message.
type Throw = extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char) -> !;

static THROW: OnceLock<Throw> = OnceLock::new();

/// Sets the address of torch's `c10::detail::torchCheckFail`, which throws.
///
/// torch would use a NULL that the process's allocator returned as memory, so errors must be C++ exceptions, which
/// unwind through this library.
///
/// # Safety
///
/// `address` is NULL (an error) or that function's, of the torch that calls the allocator.
#[unsafe(no_mangle)]
unsafe extern "C" fn symmpool_process_throw_by(address: *mut c_void) -> Status {
    status(|| {
        if address.is_null() {
            return Err(Error::invalid_argument("the address of the function that throws is NULL"));
        }
        // SAFETY: not NULL; the caller promised that it is this function.
        let throw = unsafe { std::mem::transmute::<*mut c_void, Throw>(address) };
        THROW.get_or_init(|| throw);
        Ok(())
    })
}

/// torch's identifier of a graph's memory, a `std::pair`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Id(u64, u64);

/// Allocates on a device. On failure it throws as torch does, or returns NULL if `symmpool_process_throw_by` was not
/// called.
#[unsafe(no_mangle)]
extern "C-unwind" fn symmpool_process_alloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    let work = || super::alloc(size, device, stream as u64).map(|at| at as *mut c_void);
    let pointer = guarded(work, |_| std::ptr::null_mut());
    if pointer.is_null()
        && let Some(throw) = THROW.get()
    {
        // The message lies in memory that stays, because nothing in this frame is dropped by the exception. torch
        // copies the message.
        thread_local! {
            static MESSAGE: RefCell<CString> = RefCell::new(CString::default());
        }
        let text = last(|status, text| {
            // torch's own message begins like this.
            let out = status == Status::OutOfMemory;
            format!("{}{}", if out { "CUDA out of memory. " } else { "" }, text.to_string_lossy())
        });
        let text = CString::new(text.unwrap_or_default()).unwrap_or_default();
        let message = MESSAGE.with(|message| {
            *message.borrow_mut() = text;
            message.borrow().as_ptr()
        });
        throw(c"symmpool".as_ptr(), c"libsymmpool".as_ptr(), 0, message);
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
#[unsafe(no_mangle)]
extern "C" fn symmpool_process_record_stream(pointer: *mut c_void, stream: *mut c_void) {
    log_errors("record_stream", || super::record_stream(pointer as u64, stream as u64));
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
/// `Device::begin`.
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
