//! A forked child makes no calls in its parent's name.

#![allow(unsafe_code)] // forks

use std::os::raw::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use symmpool_allocator::{Driver, Group, Pool, Result, Stream};
use symmpool_collectives::{Communicator, ReduceOp};

const STREAM: &Stream = &Stream::DEFAULT;

unsafe extern "C" {
    fn fork() -> c_int;
    fn _exit(status: c_int) -> !;
}

/// Whether `body`, in a forked child, comes to its end and says yes.
fn in_child(body: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `body`, whose locks no other thread of the parent holds, and ends.
    let pid = unsafe { fork() };
    if pid == 0 {
        let good = catch_unwind(AssertUnwindSafe(body)).unwrap_or(false);
        // SAFETY: ends the process at once, as a child of a program with threads must.
        unsafe { _exit(c_int::from(!good)) };
    }
    let pid = Pid::from_raw(pid).expect("a child");
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(10) {
        match waitpid(Some(pid), WaitOptions::NOHANG).unwrap() {
            Some((_, status)) => return status.exit_status() == Some(0),
            None => thread::sleep(Duration::from_millis(5)),
        }
    }
    kill_process(pid, Signal::KILL).unwrap();
    waitpid(Some(pid), WaitOptions::empty()).unwrap();
    false
}

#[test]
fn calls_are_refused_in_a_child() {
    let ranks = Group::in_process(2).unwrap().into_iter().map(|group| {
        thread::spawn(move || {
            let group = group.with_timeout(Duration::from_secs(20));
            let pool = Pool::builder(group).driver(Driver::host().unwrap()).build().unwrap();
            Communicator::new(&pool).unwrap()
        })
    });
    let ranks: Vec<_> = ranks.collect();
    let comms: Vec<Communicator> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    let first = &comms[0];
    assert!(in_child(|| {
        let calls: [Result<()>; 4] = [
            first.all_reduce_slice(&mut [100_i64; 1000], ReduceOp::Sum, STREAM),
            first.barrier(STREAM),
            first.signal(1, 0, STREAM),
            Communicator::new(first.pool()).map(drop),
        ];
        calls.into_iter().all(|refused| {
            refused.is_err_and(|error| {
                error.is_invalid_state() && error.to_string().contains("forked from it")
            })
        })
    }));
    thread::scope(|scope| {
        for comm in &comms {
            scope.spawn(move || {
                let mut values = [i64::from(comm.rank()) + 1; 1000];
                comm.all_reduce_slice(&mut values, ReduceOp::Sum, STREAM).unwrap();
                assert_eq!(values, [3; 1000]);
            });
        }
    });
}
