//! The boundary to C: no panic crosses it, and errors are kept so that C code can query them.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use symmpool_allocator::{Error, Result};

/// The result of a call. There is one value for each kind of error that callers may handle differently.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// An argument is invalid, such as NULL; nothing was changed.
    InvalidArgument = 1,
    /// Memory, address range or a limit is exhausted.
    OutOfMemory = 2,
    /// Ranks made different calls, or were configured differently.
    Diverged = 3,
    /// A deadline passed before the other ranks arrived.
    Timeout = 4,
    /// A peer's process has ended.
    PeerLost = 5,
    /// This machine, library or build cannot do it.
    Unsupported = 6,
    /// Wrong secret, protocol version or user.
    Refused = 7,
    /// The call is not possible in the current state, such as a commit within a commit.
    InvalidState = 8,
    /// The operating system or a device library failed.
    System = 9,
    /// A bug of this library; the error's text says where.
    Internal = 10,
    /// A rank has no room for all that it was sent; the last of it was not written.
    Overflow = 11,
}

impl Status {
    /// The status that stands for an error.
    pub fn of(error: &Error) -> Self {
        let kinds = [
            (error.is_invalid_argument(), Self::InvalidArgument),
            (error.is_out_of_memory(), Self::OutOfMemory),
            (error.is_diverged(), Self::Diverged),
            (error.is_timeout(), Self::Timeout),
            (error.is_peer_lost(), Self::PeerLost),
            (error.is_unsupported(), Self::Unsupported),
            (error.is_refused(), Self::Refused),
            (error.is_invalid_state(), Self::InvalidState),
            (error.is_overflow(), Self::Overflow),
        ];
        kinds.into_iter().find(|(is, _)| *is).map_or(Self::System, |(_, status)| status)
    }
}

thread_local! {
    static LAST: RefCell<(Status, CString)> = RefCell::new((Status::Ok, CString::default()));
}

fn remember(status: Status, text: &str) {
    // A C string ends at a NUL. Error texts have none; one that did would be cut there.
    let text = text.split('\0').next().unwrap_or_default();
    let text = CString::new(text).unwrap_or_default();
    // This fails only while the thread ends, when nothing can query the error any more.
    let _ = LAST.try_with(|last| *last.borrow_mut() = (status, text));
}

/// Keeps an error as this thread's last one.
pub(crate) fn note(error: &Error) -> Status {
    let status = Status::of(error);
    remember(status, &error.to_string());
    status
}

/// This thread's last error.
pub(crate) fn last<R>(show: impl FnOnce(Status, &CString) -> R) -> Option<R> {
    LAST.try_with(|last| {
        let last = last.borrow();
        show(last.0, &last.1)
    })
    .ok()
}

fn panicked(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("symmpool: a defect of the library: {}", text.unwrap_or("a panic without a message"))
}

/// Runs the work of an exported function. After an error or a panic, the result is what `failed` returns.
pub(crate) fn guarded<R>(work: impl FnOnce() -> Result<R>, failed: impl FnOnce(Status) -> R) -> R {
    // Shared state is behind locks that can be taken after a panic (`lock`).
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => value,
        Ok(Err(error)) => failed(note(&error)),
        Err(panic) => {
            remember(Status::Internal, &panicked(&*panic));
            // The payload is leaked, because dropping it might panic.
            std::mem::forget(panic);
            failed(Status::Internal)
        }
    }
}

/// [`guarded`] for functions that return a status.
pub(crate) fn status(work: impl FnOnce() -> Result<()>) -> Status {
    guarded(|| work().map(|()| Status::Ok), |status| status)
}

/// Locks `mutex`, even if another thread panicked while it held it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_status_with_its_message() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let got = status(|| panic!("no such {}", "thing"));
        std::panic::set_hook(hook);
        assert_eq!(got, Status::Internal);
        let text = last(|status, text| (status, text.to_str().unwrap().to_owned())).unwrap();
        assert_eq!(
            text,
            (Status::Internal, "symmpool: a defect of the library: no such thing".into())
        );
    }

    #[test]
    fn each_kind_of_error_has_its_status() {
        let second = std::time::Duration::from_secs(1);
        let kinds = [
            (Error::invalid_argument("x"), Status::InvalidArgument),
            (Error::out_of_memory("x"), Status::OutOfMemory),
            (Error::mismatch("x"), Status::Diverged),
            (Error::timeout("x", second, vec![]), Status::Timeout),
            (Error::peer_lost(vec![1], "x"), Status::PeerLost),
            (Error::unsupported("x"), Status::Unsupported),
            (Error::refused("x"), Status::Refused),
            (Error::invalid_state("x"), Status::InvalidState),
            (Error::overflow("x"), Status::Overflow),
            (Error::system("x", "y"), Status::System),
        ];
        for (error, status) in kinds {
            assert_eq!(Status::of(&error), status, "{error}");
        }
    }
}
