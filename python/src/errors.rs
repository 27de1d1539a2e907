//! Rust errors as the package's exceptions.
//!
//! The classes are Python's (`symmpool/errors.py`), because each derives from two others.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use symmpool_allocator::Error;

/// The name of the class that stands for an error's predicate.
fn class_of(error: &Error) -> &'static str {
    let classes = [
        (error.is_out_of_memory(), "OutOfMemoryError"),
        (error.is_diverged(), "DivergedError"),
        (error.is_timeout(), "TimeoutError"),
        (error.is_peer_lost(), "PeerLostError"),
        (error.is_unsupported(), "UnsupportedError"),
        (error.is_invalid_argument(), "InvalidArgumentError"),
        (error.is_refused(), "RefusedError"),
        (error.is_overflow(), "OverflowError"),
        (error.is_invalid_state(), "InvalidStateError"),
    ];
    classes.into_iter().find(|(is, _)| *is).map_or("Error", |(_, name)| name)
}

/// The exception for `error`.
#[cold]
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let make = || {
        let instance =
            py.import("symmpool.errors")?.getattr(class_of(error))?.call1((error.to_string(),))?;
        instance.setattr("ranks", PyTuple::new(py, error.ranks())?)?;
        PyResult::Ok(PyErr::from_value(instance))
    };
    make().unwrap_or_else(|broken| broken)
}

/// Whether the program is ending: what its threads wait for does not matter any more.
pub(crate) static ENDING: AtomicBool = AtomicBool::new(false);

/// Whether Ctrl-C asks the call that this thread is in to stop, where that is what Ctrl-C does. It is
/// then raised when the call is back.
///
/// No handler runs meanwhile: what Python code does might need what the call holds. So a program's own
/// handlers run after the call, and do not end it.
#[allow(unsafe_code)] // asks the interpreter
pub(crate) fn is_interrupted() -> bool {
    if ENDING.load(Ordering::Relaxed) {
        return true;
    }
    // Python handles signals on its main thread. No other thread may wait for the interpreter here: it would
    // be ended where it is when the interpreter ends.
    if rustix::thread::gettid() != rustix::process::getpid() {
        return false;
    }
    // The module in C is asked: Python code must not run here, as it would handle the signals.
    let ends_calls = |py: Python<'_>| -> PyResult<bool> {
        let signal = py.import("_signal")?;
        let handler = signal.getattr("getsignal")?.call1((signal.getattr("SIGINT")?,))?;
        Ok(handler.is(&signal.getattr("default_int_handler")?))
    };
    let asked = |py: Python<'_>| {
        // SAFETY: this thread is attached to the interpreter, which is all that is wanted.
        if unsafe { pyo3::ffi::PyOS_InterruptOccurred() } == 0 {
            return false;
        }
        let asked = ends_calls(py).unwrap_or(false);
        // SAFETY: it may be called anywhere. Asking took the signal, and this gives it back.
        unsafe { pyo3::ffi::PyErr_SetInterrupt() };
        asked
    };
    Python::try_attach(asked).unwrap_or(false)
}

thread_local! {
    /// Exception that ended a call of this thread from within a program's own function, and the text of the call's
    /// error. It is no error of a program, but for instance `KeyboardInterrupt` or `SystemExit`.
    static STOPPED: RefCell<Option<(PyErr, String)>> = const { RefCell::new(None) };
}

/// The error of a call in which a program's function raised `error`. If that is to end more than the function, as
/// `KeyboardInterrupt` is, the call is interrupted and raises it ([`raised`]).
#[cold]
pub(crate) fn from_within(py: Python<'_>, error: PyErr) -> Error {
    let text = error.to_string();
    if error.is_instance_of::<PyException>(py) {
        return Error::invalid_state(text);
    }
    STOPPED.set(Some((error, text.clone())));
    Error::interrupted(text)
}

/// Exception that a call raises. Ctrl-C during the call comes before the call's own error: often the other ranks were
/// interrupted too, and a program that catches the package's errors would go on. The call's error becomes the
/// cause: it says for which rank the call waited.
#[cold]
pub(crate) fn raised(py: Python<'_>, error: &Error) -> PyErr {
    let within = if error.is_interrupted() { STOPPED.take() } else { None };
    // An error that another thread's wait has raised is not raised again by a later call.
    let within = within.filter(|(_, text)| error.to_string().contains(text.as_str()));
    match within.map(|(stop, _)| stop).map_or_else(|| py.check_signals(), Err) {
        Ok(()) => exception(py, error),
        Err(signal) => {
            // A handler's own exception may have a cause of its own.
            if signal.cause(py).is_none() {
                signal.set_cause(py, Some(exception(py, error)));
            }
            signal
        }
    }
}

/// An argument that cannot be served, as an exception.
#[cold]
pub(crate) fn invalid(py: Python<'_>, message: impl Into<String>) -> PyErr {
    exception(py, &Error::invalid_argument(message))
}

/// The reason that is reported to other ranks, of an exception that keeps this one from taking part.
#[cold]
pub(crate) fn reason(py: Python<'_>, why: &PyErr) -> Error {
    let text = why.value(py).to_string();
    Error::invalid_argument(text.trim_start_matches("symmpool: "))
}

/// Results of the crates below, with exceptions.
pub(crate) trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for symmpool_allocator::Result<T> {
    #[inline]
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raised(py, &error))
    }
}

/// A time in seconds that somebody may wait.
pub(crate) fn seconds(py: Python<'_>, what: &str, value: f64) -> PyResult<Duration> {
    if value > 0.0 && value <= 1e9 {
        let time = Duration::from_secs_f64(value);
        // A shorter time than half a nanosecond would become zero.
        if !time.is_zero() {
            return Ok(time);
        }
    }
    Err(invalid(py, format!("{what}={value:?}: a number of seconds from 1e-9 to 1e9")))
}
