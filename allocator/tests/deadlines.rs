//! Waits that may never be satisfied end at their deadline: for a device that does not finish, and for a name
//! that does not resolve.

#![allow(unsafe_code)] // takes the place of a function of the C library

use std::ffi::{c_char, c_int, c_void};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::driver::{FaultDriver, FaultPlan};
use symmpool_allocator::store::TcpStore;
use symmpool_allocator::store::tcp::TcpOptions;
use symmpool_allocator::{Deadline, Driver, Error, Group, Pool};

/// How long ranks wait for each other, and for their devices.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// Replaces the C library's function in this program, so that resolving any name never returns.
#[unsafe(no_mangle)]
extern "C" fn getaddrinfo(
    _: *const c_char,
    _: *const c_char,
    _: *const c_void,
    _: *mut c_void,
) -> c_int {
    loop {
        thread::park();
    }
}

/// Runs `body` on a thread and returns its result. The thread is left behind if it takes too long.
fn in_time<T: Send + 'static>(what: &str, body: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, outcome) = mpsc::channel();
    thread::spawn(move || done.send(body()));
    let outcome = outcome.recv_timeout(PATIENCE);
    outcome.unwrap_or_else(|_| panic!("{what}: not over after {PATIENCE:?}, or it panicked"))
}

/// Runs `body` as both ranks of a group; the device of rank 0 follows `plan`.
fn two_ranks<T: Send + 'static>(
    what: &str,
    plan: &'static str,
    body: fn(&Pool) -> Result<T, Error>,
) -> Vec<Result<T, Error>> {
    let groups = Group::in_process(2).expect("a small group");
    let ranks: Vec<_> = groups
        .into_iter()
        .map(|group| {
            let (done, outcome) = mpsc::channel();
            thread::spawn(move || {
                let rank = group.rank();
                let plan = if rank == 0 { plan } else { "delay-1us@synchronize:*" };
                let plan = FaultPlan::parse(plan).expect("a plan");
                let driver = FaultDriver::new(Driver::host().expect("memory"), plan);
                let group = group.with_timeout(TIMEOUT);
                let pool = Pool::builder(group).driver(Driver::new(driver)).build().expect("built");
                let outcome = body(&pool);
                // No abandoned wait holds a lane's lock any more.
                let again = pool.alloc::<u8>(64);
                drop(again.expect("the lane is free"));
                done.send(outcome).expect("the test waits");
                // The plan does not cover dropping the pool.
                std::mem::forget(pool);
            });
            outcome
        })
        .collect();
    let ranks = ranks.into_iter().map(|outcome| outcome.recv_timeout(PATIENCE));
    ranks
        .map(|outcome| outcome.unwrap_or_else(|_| panic!("{what}: not over after {PATIENCE:?}")))
        .collect()
}

#[test]
fn a_resync_waits_for_a_device_until_its_deadline() {
    let started = Instant::now();
    for error in two_ranks("a resync", "hang@synchronize", |pool| pool.resync().map(drop)) {
        let error = error.expect_err("the device of rank 0 never finished");
        assert!(error.is_timeout(), "{error}");
        assert!(error.to_string().contains("rank 0 failed in resync"), "{error}");
        assert!(error.to_string().contains("for the device"), "{error}");
    }
    assert!(started.elapsed() < 3 * TIMEOUT, "{:?}", started.elapsed());
}

#[test]
fn a_commit_waits_for_a_device_until_its_deadline() {
    let started = Instant::now();
    let outcomes = two_ranks("a commit", "hang@synchronize", |pool| {
        let block = pool.alloc::<u8>(40 << 20)?;
        pool.commit()?;
        block.free()?;
        pool.default_lane().trim()?;
        pool.commit().map(drop)
    });
    let [stuck, other] = &outcomes[..] else { panic!("{outcomes:?}") };
    let error = stuck.as_ref().expect_err("the device of rank 0 never finished");
    assert!(error.is_timeout() && error.to_string().contains("for the device"), "{error}");
    // All ranks had confirmed by then, so the other rank completed the commit.
    assert!(other.is_ok(), "{other:?}");
    assert!(started.elapsed() < 3 * TIMEOUT, "{:?}", started.elapsed());
}

#[test]
fn a_block_that_kernels_may_use_returns_when_the_device_is_done() {
    let returned = |plan| {
        two_ranks("a commit", plan, |pool| {
            let block = pool.alloc::<u8>(1 << 20)?;
            pool.commit()?;
            // Nothing waits here: a stream may be being captured.
            let started = Instant::now();
            block.free_after_device()?;
            assert!(started.elapsed() < TIMEOUT / 8, "{:?}", started.elapsed());
            let report = pool.commit()?;
            // The other rank may come so late that rank 0's device is nearly done.
            let waited = pool.rank() != 0 || started.elapsed() >= TIMEOUT / 4;
            assert!(waited, "the device was not waited for");
            Ok(report.blocks_returned)
        })
    };
    for outcome in returned("delay-500ms@synchronize") {
        assert_eq!(outcome.expect("the device finished in time"), 1);
    }
    for outcome in returned("hang@synchronize") {
        let error = outcome.expect_err("the device of rank 0 never finished");
        assert!(error.is_timeout() && error.to_string().contains("for the device"), "{error}");
    }
}

#[test]
fn a_slow_device_is_waited_for_as_long_as_there_is_time() {
    for outcome in two_ranks("a resync", "delay-300ms@synchronize", |pool| pool.resync().map(drop))
    {
        outcome.expect("the device finished in time");
    }
}

#[test]
fn a_name_that_does_not_resolve_is_waited_for_until_the_deadline() {
    let brief = || Deadline::after(Duration::from_millis(300));
    let error = in_time("connecting to a store", move || {
        let options = TcpOptions { hosted_by: Some(0), ..TcpOptions::default() };
        TcpStore::connect("store.example:29500", options, brief()).expect_err("nobody is there")
    });
    assert!(error.is_timeout(), "{error}");
    assert!(error.to_string().contains("store.example"), "{error}");
    for rank in [0, 1] {
        let error = in_time("meeting at an address", move || {
            let met = Group::over_tcp(rank, 2, "store.example:29500", Some("a secret"), brief());
            met.expect_err("nobody is there")
        });
        assert!(error.is_timeout(), "rank {rank}: {error}");
        assert!(error.to_string().contains("store.example"), "rank {rank}: {error}");
    }
}
