//! The C API; `ffi/include/symmpool.h` is made from this folder.
//!
//! Handles are numbers that are never used twice: one that was destroyed, or never was, is an
//! error and not a crash. Functions may be called from any thread. Each says in its result what
//! came of it; what was wrong is kept for the thread that called.

pub mod comm;
pub mod group;
pub mod memory;
pub mod pool;
pub mod slot;
pub mod window;

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use symmpool_allocator::{Error, Result, Stream};

use crate::guard::{Status, guarded, last, lock};

/// The library's version, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn symmpool_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// What this thread's latest failed call came to, and, if `text` is not NULL, why. The text is
/// valid until the thread's next call fails.
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

/// Things that C holds by number.
pub(crate) struct Handles<T> {
    what: &'static str,
    held: Mutex<BTreeMap<u64, Arc<T>>>,
}

/// One count for all kinds, so that a handle of one is none of another.
static NEXT: AtomicU64 = AtomicU64::new(1);

impl<T> Handles<T> {
    pub(crate) const fn new(what: &'static str) -> Self {
        Self { what, held: Mutex::new(BTreeMap::new()) }
    }

    pub(crate) fn insert(&self, value: T) -> u64 {
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        lock(&self.held).insert(handle, Arc::new(value));
        handle
    }

    pub(crate) fn get(&self, handle: u64) -> Result<Arc<T>> {
        lock(&self.held).get(&handle).cloned().ok_or_else(|| self.unknown(handle))
    }

    /// Calls under way in other threads keep the value until they end.
    pub(crate) fn remove(&self, handle: u64) -> Result<()> {
        let gone = lock(&self.held).remove(&handle);
        gone.map(drop).ok_or_else(|| self.unknown(handle))
    }

    fn unknown(&self, handle: u64) -> Error {
        Error::invalid_argument(format!("{handle} is no {} (destroyed before?)", self.what))
    }
}

/// Where a result goes.
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

    /// The same of a result that is not wanted where `pointer` is NULL.
    ///
    /// # Safety
    ///
    /// As [`Self::new`].
    pub(crate) unsafe fn if_wanted(pointer: *mut T, name: &str) -> Result<Option<Self>> {
        if pointer.is_null() {
            return Ok(None);
        }
        // SAFETY: the caller's promise.
        unsafe { Self::new(pointer, name) }.map(Some)
    }

    pub(crate) fn put(self, value: T) {
        // SAFETY: `new` was promised that it can be written to.
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

/// # Safety
///
/// `stream` is NULL or a stream that lives as [`Stream::from_raw`] says.
pub(super) unsafe fn on(stream: *mut c_void) -> Stream {
    // SAFETY: the caller's promise.
    unsafe { Stream::from_raw(stream as u64) }
}

/// A time in seconds that somebody may wait.
pub(crate) fn seconds(value: f64, name: &str) -> Result<Duration> {
    if value > 0.0 && value <= 1e9 {
        let time = Duration::from_secs_f64(value);
        // What is less than half a nanosecond would be no time.
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
    fn times_that_are_none_are_refused() {
        for (value, time) in [(1e-9, Duration::from_nanos(1)), (1e9, Duration::from_secs(1 << 30))]
        {
            assert!(seconds(value, "timeout").is_ok_and(|seconds| seconds <= time));
        }
        for value in [0.0, -1.0, 1e-300, 1e-10, 1.1e9, f64::NAN, f64::INFINITY] {
            let error = seconds(value, "timeout").expect_err("no time to wait");
            assert!(
                error.is_invalid_argument() && error.to_string().contains("timeout="),
                "{error}"
            );
        }
    }
}
