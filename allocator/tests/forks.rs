//! Forked children: what they do with copies of their parent's objects does nothing to the parent.

#![allow(unsafe_code)] // forks

use std::os::raw::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use symmpool_allocator::store::tcp::TcpOptions;
use symmpool_allocator::store::{Store, TcpServer, TcpStore};
use symmpool_allocator::{Deadline, Driver, Group, Pool, Stream};

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
    while started.elapsed() < Duration::from_secs(20) {
        match waitpid(Some(pid), WaitOptions::NOHANG).unwrap() {
            Some((_, status)) => return status.exit_status() == Some(0),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    kill_process(pid, Signal::KILL).unwrap();
    waitpid(Some(pid), WaitOptions::empty()).unwrap();
    false
}

#[test]
fn a_child_leaves_its_parents_store_alone() {
    let ample = || Deadline::seconds(20);
    let mut server = Some(TcpServer::bind("127.0.0.1:0", TcpOptions::default()).unwrap());
    let addr = server.as_ref().unwrap().local_addr();
    let client = TcpStore::connect(addr, TcpOptions::default(), ample()).unwrap();
    client.set("k", b"v", ample()).unwrap();
    assert!(in_child(|| {
        drop(server.take());
        true
    }));
    assert_eq!(client.get("k", ample()).unwrap(), b"v");
    TcpStore::connect(addr, TcpOptions::default(), ample()).unwrap();
}

#[test]
fn commits_are_refused_in_a_child() {
    let group = Group::in_process(1).unwrap().remove(0);
    let pool =
        Pool::builder(group).driver(Driver::host().unwrap()).stride(1 << 30).build().unwrap();
    let _block = pool.alloc::<u8>(100).unwrap();
    assert!(in_child(|| {
        [pool.commit().map(drop), pool.resync().map(drop)].into_iter().all(|refused| {
            refused.is_err_and(|error| {
                error.is_invalid_state() && error.to_string().contains("forked from it")
            })
        })
    }));
    assert_eq!(pool.commit().unwrap().number, 1);
}

#[test]
fn a_child_is_given_none_of_its_parents_memory() {
    let group = Group::in_process(1).unwrap().remove(0);
    let pool =
        Pool::builder(group).driver(Driver::host().unwrap()).stride(1 << 30).build().unwrap();
    let lane = pool.lane("default").unwrap();
    assert!(in_child(|| {
        [
            pool.alloc::<u8>(100).map(drop),
            lane.alloc_bytes(100, 1, Stream::DEFAULT).map(drop),
            lane.try_alloc_bytes(100, 1, Stream::DEFAULT).map(drop),
            lane.reserve(100),
        ]
        .into_iter()
        .all(|refused| refused.is_err_and(|error| error.is_invalid_state()))
    }));
    assert_eq!(lane.counter(), 0);
    pool.alloc::<u8>(100).unwrap();
}
