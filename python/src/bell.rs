//! How a thread of Python waits for calls that it is to make, if nobody else makes them first.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use symmpool_allocator::ProcessId;

/// How long the thread leaves a call to whoever began it: most programs wait for a small call at once, and then make it
/// themselves, which takes less time than a thread needs to come to it and to hand its end back.
const LEAVE: Duration = Duration::from_micros(60);

/// Counts calls that are to be made. Its waits take place without the interpreter, so a call that is answered in time
/// costs the program no switch of threads there.
#[pyclass(frozen, module = "symmpool._symmpool")]
pub(crate) struct CallWakeup {
    calls: Mutex<OpenCalls>,
    rung: Condvar,
    /// In a forked child, which has no thread that waits here, the lock may be held for ever.
    maker: ProcessId,
}

#[derive(Default)]
struct OpenCalls {
    /// Those that were begun, less those that somebody has taken.
    open: u64,
    /// Whether the thread has to be woken for the next one.
    asleep: bool,
}

impl CallWakeup {
    /// `None` in a forked child.
    fn lock(&self) -> Option<MutexGuard<'_, OpenCalls>> {
        let lock = || self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        self.maker.is_here().then(lock)
    }

    /// Sleeps until there is a call, then leaves it alone for a while. Returns whether there is one still.
    fn wait_once(&self) -> bool {
        let Some(mut calls) = self.lock() else { return true };
        while calls.open == 0 {
            calls.asleep = true;
            calls = self.rung.wait(calls).unwrap_or_else(PoisonError::into_inner);
        }
        drop(calls);
        std::thread::sleep(LEAVE);
        self.lock().is_none_or(|calls| calls.open > 0)
    }
}

#[pymethods]
impl CallWakeup {
    #[new]
    fn new() -> Self {
        Self { calls: Mutex::default(), rung: Condvar::new(), maker: ProcessId::here() }
    }

    /// A call was begun.
    fn ring(&self) {
        let Some(mut calls) = self.lock() else { return };
        calls.open += 1;
        let asleep = std::mem::take(&mut calls.asleep);
        drop(calls);
        if asleep {
            self.rung.notify_one();
        }
    }

    /// Somebody has taken a call.
    fn answer(&self) {
        if let Some(mut calls) = self.lock() {
            calls.open = calls.open.saturating_sub(1);
        }
    }

    /// Waits until there is a call that nobody has taken for a while.
    fn wait(&self, py: Python<'_>) {
        py.detach(|| while !self.wait_once() {});
    }
}
