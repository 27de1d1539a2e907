//! The functions that torch's pluggable allocator calls.
//!
//! Their types are those of C++ functions: a `std::pair` of two numbers comes in two registers, and
//! a `std::function` as a pointer to the caller's.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use symmpool_allocator::{Error, Result};

use super::{device, owner, used};
use crate::guard::{Status, guarded, last, status};

/// How torch throws: with the function, file, line and message.
type Throw = extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char) -> !;

static THROW: OnceLock<Throw> = OnceLock::new();

/// Gives the address of torch's `c10::detail::torchCheckFail`, which throws.
///
/// torch takes a NULL of the process's allocator for memory: the error must come as an exception
/// of C++, which passes through here.
///
/// # Safety
///
/// `address` is NULL (an error) or that function's, of the torch that calls the allocator.
#[unsafe(no_mangle)]
unsafe extern "C" fn symmpool_process_throw_by(address: *mut c_void) -> Status {
    status(|| {
        if address.is_null() {
            return Err(Error::invalid_argument("no function that throws"));
        }
        // SAFETY: not NULL; the caller promised that it is this function.
        let throw = unsafe { std::mem::transmute::<*mut c_void, Throw>(address) };
        THROW.get_or_init(|| throw);
        Ok(())
    })
}

/// torch's name of a graph's memory, a `std::pair`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Id(u64, u64);

/// Allocates on a device. Where it cannot, it throws as torch does, or returns NULL if it was not
/// told how (`symmpool_process_throw_by`).
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
        // In memory that stays: nothing of this frame is dropped when it is thrown through. torch
        // copies the message.
        thread_local! {
            static MESSAGE: RefCell<CString> = RefCell::new(CString::default());
        }
        let text = last(|status, text| {
            // As torch's own begins.
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

/// Frees what symmpool_process_alloc gave, on whatever device.
#[unsafe(no_mangle)]
extern "C" fn symmpool_process_free(
    pointer: *mut c_void,
    _size: usize,
    _device: c_int,
    _stream: *mut c_void,
) {
    told("a free", || super::free(pointer as u64));
}

/// Notes that memory is used on another stream.
#[unsafe(no_mangle)]
extern "C" fn symmpool_process_record_stream(pointer: *mut c_void, stream: *mut c_void) {
    told("record_stream", || super::record_stream(pointer as u64, stream as u64));
}

/// torch empties its cache.
#[unsafe(no_mangle)]
extern "C" fn symmpool_process_reset() {
    told("empty_cache", || match super::trim() {
        // torch's own does nothing then, too.
        Err(error) if error.is_invalid_state() => Ok(()),
        outcome => outcome.map(drop),
    });
}

/// torch limits itself to a part of a device's memory.
#[unsafe(no_mangle)]
extern "C" fn symmpool_process_memory_fraction(fraction: f64, ordinal: c_int) {
    told("set_per_process_memory_fraction", || device(ordinal)?.set_fraction(fraction));
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

/// A capture begins. The filter, which says of a stream whether it is part of it, is not kept: see
/// `Device::begin`.
#[unsafe(no_mangle)]
extern "C" fn symmpool_process_begin(ordinal: c_int, id: Id, _filter: *const c_void) {
    told("beginning a capture", || device(ordinal)?.begin((id.0, id.1)));
}

/// A capture ends.
#[unsafe(no_mangle)]
extern "C" fn symmpool_process_end(ordinal: c_int, id: Id) {
    told("ending a capture", || device(ordinal)?.end((id.0, id.1)));
}

/// A graph is gone.
#[unsafe(no_mangle)]
extern "C" fn symmpool_process_release(ordinal: c_int, id: Id) {
    told("letting go of a graph", || device(ordinal)?.release((id.0, id.1)));
}

/// These have nobody to return an error to.
fn told(doing: &str, work: impl FnOnce() -> Result<()>) {
    let work =
        || work().inspect_err(|error| tracing::error!(%error, devices = used().count(), "{doing}"));
    guarded(work, |_| ());
}
