//! Tests that run again in a process of their own, or in a forked child.

#![allow(unsafe_code)] // forks

use std::env;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

const ROLE: &str = "SYMMPOOL_TEST_ROLE";

/// How long a forked child may take.
const LONGEST: Duration = Duration::from_secs(20);

unsafe extern "C" {
    fn fork() -> c_int;
    fn _exit(status: c_int) -> !;
}

/// This test program again, running the test `name` alone, with `role` to tell it apart. For what threads
/// cannot stand in for: processes that are killed, and counts of open files.
pub fn this_test_as(name: &str, role: &str) -> Command {
    let mut command = Command::new(env::current_exe().expect("a test program has a path"));
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(ROLE, role);
    command
}

/// The role given by [`this_test_as`]; `None` in the test itself.
pub fn role() -> Option<String> {
    env::var(ROLE).ok()
}

/// Runs `body` in a forked child; whether it returned true there within 20 seconds. `body` must take no lock that another
/// thread may hold: in the child nobody releases it, so the child is killed after that time.
pub fn in_child(body: impl FnOnce() -> bool) -> bool {
    // SAFETY: `fork` accesses no memory of Rust's. The child runs `body` and ends below, so it returns to no caller.
    let pid = unsafe { fork() };
    if pid == 0 {
        let good = catch_unwind(AssertUnwindSafe(body)).unwrap_or(false);
        // SAFETY: `_exit` may be called anywhere. It runs no destructor and no handler of `exit`, which may need other threads.
        unsafe { _exit(c_int::from(!good)) };
    }
    let pid = Pid::from_raw(pid).expect("a child");
    let started = Instant::now();
    while started.elapsed() < LONGEST {
        match waitpid(Some(pid), WaitOptions::NOHANG).expect("a child of this process") {
            Some((_, status)) => return status.exit_status() == Some(0),
            None => thread::sleep(Duration::from_millis(5)),
        }
    }
    kill_process(pid, Signal::KILL).expect("a child of this process");
    waitpid(Some(pid), WaitOptions::empty()).expect("a child of this process");
    false
}
