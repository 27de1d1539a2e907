//! State of a process that forked children do not share.
//!
//! A forked child has a copy of every lock, and one that another thread of its parent held stays locked there. So a
//! child never looks at its parent's state: it begins with a new one.

#![allow(unsafe_code)] // a pointer that is replaced in forked children

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard};

use symmpool_allocator::ProcessId;

use crate::guard::lock;

/// A value behind a lock, of which every process has its own.
pub(crate) struct OfProcess<T>(AtomicPtr<State<T>>);

struct State<T> {
    maker: ProcessId,
    value: Mutex<T>,
    /// Whether a process that this one was forked from had one.
    inherited: bool,
}

impl<T: Default> OfProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// The value of this process, locked.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        lock(&self.state().value)
    }

    /// Whether this process was forked from one that had a value of its own.
    pub(crate) fn is_forked(&self) -> bool {
        self.state().inherited
    }

    fn state(&self) -> &State<T> {
        loop {
            let found = self.0.load(Ordering::Acquire);
            // SAFETY: null, or made below from a box that nobody takes back.
            let known = unsafe { found.as_ref() };
            if let Some(state) = known.filter(|state| state.maker.is_here()) {
                return state;
            }
            // The parent's value is left as it is: whatever it holds may be locked, and is not the child's to drop.
            let (maker, inherited) = (ProcessId::here(), known.is_some());
            let made = Box::into_raw(Box::new(State { maker, value: Mutex::default(), inherited }));
            let (order, otherwise) = (Ordering::AcqRel, Ordering::Relaxed);
            if self.0.compare_exchange(found, made, order, otherwise).is_err() {
                // SAFETY: made above, and nobody else has seen it.
                drop(unsafe { Box::from_raw(made) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_int;

    use rustix::process::{Pid, WaitOptions, waitpid};

    use super::*;

    unsafe extern "C" {
        fn fork() -> c_int;
        fn _exit(status: c_int) -> !;
    }

    #[test]
    fn a_forked_child_does_not_wait_for_its_parents_lock() {
        static VALUE: OfProcess<Vec<u64>> = OfProcess::new();
        VALUE.lock().push(1);
        assert!(!VALUE.is_forked());
        // Another thread of the parent may hold it at any moment, as this one does now.
        let held = VALUE.lock();
        // SAFETY: the child uses its own copy of memory, and ends.
        let pid = unsafe { fork() };
        if pid == 0 {
            let good = VALUE.lock().is_empty() && VALUE.is_forked();
            VALUE.lock().push(2);
            let good = good && VALUE.lock()[..] == [2];
            // SAFETY: ends the process at once, as a child of a program with threads must.
            unsafe { _exit(c_int::from(!good)) };
        }
        let pid = Pid::from_raw(pid).expect("a child");
        let begun = std::time::Instant::now();
        let status = loop {
            if let Some((_, status)) = waitpid(Some(pid), WaitOptions::NOHANG).expect("ours") {
                break status.exit_status();
            }
            if begun.elapsed() > std::time::Duration::from_secs(20) {
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("ours");
                panic!("the child waits for a lock that its parent held");
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        };
        assert_eq!((status, &held[..]), (Some(0), &[1][..]));
    }
}
