//! The C API; `ffi/include/symmpool.h` is generated from this folder.
//!
//! | file | holds |
//! | --- | --- |
//! | `group` | groups of ranks |
//! | `pool` | pools: creation, commits, statistics |
//! | `memory` | a pool's blocks and streams |
//! | `window` | a pool's windows, peers' addresses, windows of NCCL |
//! | `slot` | pools behind functions that take no pool |
//! | `comm` | communicators and collectives |
//! | `one_sided` | copies and signals between two ranks |
//! | `algorithm` | algorithms by name, plans, and functions that choose |
//! | `experts` | mixtures of experts: buffers, dispatch and combine |
//!
//! Handles are numbers that are never used twice: a handle that was destroyed, or never existed, is an error and not
//! a crash. Functions may be called from any thread. Each returns a status; the error's text is kept for the calling
//! thread.

pub mod algorithm;
pub mod comm;
pub mod experts;
pub mod group;
pub mod memory;
pub mod one_sided;
pub mod pool;
pub mod slot;
pub mod window;

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use symmpool_allocator::{Error, Result};

use crate::guard::{Status, guarded, last};
use crate::own::OfProcess;

/// The library's version, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// The status of this thread's latest failed call and, if `text` is not NULL, the error's text, which is valid until
/// the thread's next call fails.
///
/// # Safety
///
/// `text` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn symmpool_last_error(text: *mut *const c_char) -> Status {
    let work = || {
        let found = last(|status, message| (status, message.as_ptr()));
        let (status, message) = found.unwrap_or((Status::Ok, c"".as_ptr()));
        if !text.is_null() {
            // SAFETY: not NULL, so writable, which the caller promised.
            unsafe { text.write(message) };
        }
        Ok(status)
    };
    guarded(work, |status| status)
}

/// The objects of one kind that C code refers to by handle. A forked child has none of its parent's, and may make its own.
pub(crate) struct Handles<T> {
    what: &'static str,
    held: OfProcess<BTreeMap<u64, Arc<T>>>,
}

/// The next handle. All kinds share it, so that a handle of one kind is never a handle of another.
static NEXT: AtomicU64 = AtomicU64::new(1);

impl<T> Handles<T> {
    pub(crate) const fn new(what: &'static str) -> Self {
        Self { what, held: OfProcess::new() }
    }

    pub(crate) fn insert(&self, value: T) -> u64 {
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        self.held.lock().insert(handle, Arc::new(value));
        handle
    }

    pub(crate) fn get(&self, handle: u64) -> Result<Arc<T>> {
        let found = self.held.lock().get(&handle).cloned();
        found.ok_or_else(|| self.unknown(handle))
    }

    /// Calls in other threads keep the object until they return.
    pub(crate) fn remove(&self, handle: u64) -> Result<()> {
        let gone = self.held.lock().remove(&handle);
        gone.map(drop).ok_or_else(|| self.unknown(handle))
    }

    #[cold]
    fn unknown(&self, handle: u64) -> Error {
        if self.held.is_forked() {
            return Error::invalid_state(format!(
                "{handle} is no {} of process {}, which was forked: what its parent made is refused there; make a \
                 group, and what is needed on it, after the fork",
                self.what,
                std::process::id()
            ));
        }
        Error::invalid_argument(format!("{handle} is no {} (was it destroyed?)", self.what))
    }
}

/// A pointer that a function writes its result to.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// # Safety
    ///
    /// `pointer` is NULL, which is refused, or can be written to until the call returns.
    pub(crate) unsafe fn new(pointer: *mut T, name: &str) -> Result<Self> {
        if pointer.is_null() {
            return Err(Error::invalid_argument(format!("{name} is NULL")));
        }
        if !pointer.is_aligned() {
            return Err(Error::invalid_argument(format!("{name} is not aligned: {pointer:p}")));
        }
        Ok(Self(pointer))
    }

    /// Takes an optional result: `None` if `pointer` is NULL.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::new`].
    pub(crate) unsafe fn if_wanted(pointer: *mut T, name: &str) -> Result<Option<Self>> {
        if pointer.is_null() {
            return Ok(None);
        }
        // SAFETY: the caller promised that `pointer` can be written to until the call returns, as it is not NULL.
        unsafe { Self::new(pointer, name) }.map(Some)
    }

    pub(crate) fn put(self, value: T) {
        // SAFETY: the caller of `new` promised that it can be written to.
        unsafe { self.0.write(value) };
    }
}

/// A C string as text.
///
/// # Safety
///
/// `pointer` is NULL, which is refused, or a C string that lives until the call returns.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str> {
    if pointer.is_null() {
        return Err(Error::invalid_argument(format!("{name} is NULL")));
    }
    // SAFETY: not NULL, so a C string, which the caller promised.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| Error::invalid_argument(format!("{name} is not UTF-8: {text:?}")))
}

/// A timeout in seconds.
pub(crate) fn seconds(value: f64, name: &str) -> Result<Duration> {
    if value > 0.0 && value <= 1e9 {
        let time = Duration::from_secs_f64(value);
        // Less than half a nanosecond is rounded to zero.
        if !time.is_zero() {
            return Ok(time);
        }
    }
    Err(Error::invalid_argument(format!("{name}={value:?}: a number of seconds from 1e-9 to 1e9")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_out_of_range_are_refused() {
        for (value, time) in [(1e-9, Duration::from_nanos(1)), (1e9, Duration::from_secs(1 << 30))]
        {
            assert!(seconds(value, "timeout").is_ok_and(|seconds| seconds <= time));
        }
        for value in [0.0, -1.0, 1e-300, 1e-10, 1.1e9, f64::NAN, f64::INFINITY] {
            let error = seconds(value, "timeout").expect_err("not a timeout");
            assert!(
                error.is_invalid_argument() && error.to_string().contains("timeout="),
                "{error}"
            );
        }
    }
}
