//! Host memory between processes, and in processes with tight limits.

use std::fs;

use rustix::process::{Resource, Rlimit, setrlimit};

use super::super::child;
use super::super::conformance::conformance;
use super::super::conformance::memory::{check_contents, fill};
use super::super::{Driver, Exported};
use super::*;

const BYTES: u64 = 4 * GRANULARITY;

/// A driver with a mapped segment; the reservation is twice as large.
fn mapped(make: impl FnOnce(&Driver) -> Physical) -> (Driver, Reservation, Physical) {
    let driver = Driver::host().unwrap();
    let range = driver.reserve(2 * BYTES, GRANULARITY).unwrap();
    let physical = make(&driver);
    driver.map(&range, GRANULARITY, &physical).unwrap();
    (driver, range, physical)
}

fn fd(driver: &Driver, physical: &Physical) -> OwnedFd {
    match driver.export(physical).unwrap() {
        Exported::Fd(fd) => fd,
        other => panic!("host memory exported as {other:?}"),
    }
}

#[test]
fn processes_see_what_the_other_writes() {
    if let Some(mut parent) = child::parent() {
        let received = parent.receive();
        let (driver, range, _) = mapped(|d| d.import(Exported::Fd(received), BYTES).unwrap());
        check_contents(&driver, range.base() + GRANULARITY, BYTES, 1);
        fill(&driver, range.base() + GRANULARITY, BYTES, 2);
        parent.signal();
        return;
    }
    let (driver, range, physical) = mapped(|d| d.create(BYTES).unwrap());
    fill(&driver, range.base() + GRANULARITY, BYTES, 1);
    let (mut child, mut socket) =
        child::start("host::processes::processes_see_what_the_other_writes");
    socket.send(&fd(&driver, &physical));
    socket.wait().unwrap();
    check_contents(&driver, range.base() + GRANULARITY, BYTES, 2);
    assert!(child.wait().unwrap().success());
}

#[test]
fn memory_outlives_a_killed_owner() {
    if let Some(mut parent) = child::parent() {
        let (driver, range, physical) = mapped(|d| d.create(BYTES).unwrap());
        fill(&driver, range.base() + GRANULARITY, BYTES, 3);
        parent.send(&fd(&driver, &physical));
        let _ = parent.wait();
        unreachable!("the parent kills this process while it waits");
    }
    let (mut child, socket) = child::start("host::processes::memory_outlives_a_killed_owner");
    let received = socket.receive();
    let (driver, range, physical) = mapped(|d| d.import(Exported::Fd(received), BYTES).unwrap());
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success());
    let start = range.base() + GRANULARITY;
    check_contents(&driver, start, BYTES, 3);
    fill(&driver, start, BYTES, 4);
    driver.release(physical).unwrap();
    check_contents(&driver, start, BYTES, 4);
    driver.unmap(&range, GRANULARITY, BYTES).unwrap();
    driver.unreserve(range).unwrap();
}

#[test]
fn nothing_is_left_open_or_mapped() {
    if child::parent().is_some() {
        let open = || fs::read_dir("/proc/self/fd").unwrap().count();
        let segments = || {
            let maps = fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().filter(|line| line.contains("memfd:symmpool")).count()
        };
        let before = open();
        conformance(|| Driver::host().unwrap());
        assert_eq!((open(), segments()), (before, 0), "after the suite");
        let held = mapped(|d| d.create(BYTES).unwrap());
        assert_eq!((open(), segments()), (before + 1, 1), "while held");
        drop(held);
        assert_eq!((open(), segments()), (before, 0), "after dropping a driver in use");
        return;
    }
    child::run("host::processes::nothing_is_left_open_or_mapped");
}

/// Lets this process have `more` bytes of addresses on top of those it has.
fn limit_addresses(more: u64) {
    let pages: u64 = {
        let statm = fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').next().unwrap().parse().unwrap()
    };
    let current = Some(pages * rustix::param::page_size() as u64 + more);
    setrlimit(Resource::As, Rlimit { current, maximum: None }).unwrap();
}

#[test]
fn too_few_addresses_are_out_of_memory() {
    if child::parent().is_some() {
        let driver = Driver::host().unwrap();
        limit_addresses(32 << 20);
        let error = driver.reserve(1 << 36, GRANULARITY).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        let message = error.to_string();
        assert!(message.contains("64 GiB") && message.contains("ulimit -v"), "{message}");
        // Too few to map the segment while committing it, which must happen all the same.
        let physical = driver.create(64 << 20).unwrap();
        let blocks = rustix::fs::fstat(fd(&driver, &physical)).unwrap().st_blocks;
        assert_eq!(blocks * 512, 64 << 20);
        let range = driver.reserve(8 << 20, GRANULARITY).unwrap();
        driver.unreserve(range).unwrap();
        driver.release(physical).unwrap();
        return;
    }
    child::run("host::processes::too_few_addresses_are_out_of_memory");
}

#[test]
fn files_beyond_their_limit_are_out_of_memory() {
    if child::parent().is_some() {
        let limit = Rlimit { current: Some(3 * GRANULARITY / 2), maximum: None };
        setrlimit(Resource::Fsize, limit).unwrap();
        let driver = Driver::host().unwrap();
        let error = driver.create(BYTES).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert!(error.to_string().contains("RLIMIT_FSIZE (ulimit -f)"), "{error}");
        driver.release(driver.create(GRANULARITY).unwrap()).unwrap();
        return;
    }
    child::run("host::processes::files_beyond_their_limit_are_out_of_memory");
}

#[test]
fn descriptors_are_used_up_to_the_hard_limit() {
    if child::parent().is_some() {
        let limit = Rlimit { current: Some(40), maximum: Some(80) };
        setrlimit(Resource::Nofile, limit).unwrap();
        let options = HostOptions { populate: false, ..HostOptions::default() };
        let driver = HostDriver::with_options(options).unwrap();
        let mut held = Vec::new();
        let error = loop {
            match driver.create(GRANULARITY) {
                Ok(physical) => held.push(physical),
                Err(error) => break error,
            }
            assert!(held.len() < 80);
        };
        assert!(held.len() > 60, "{} segments: {error}", held.len());
        assert!(error.is_out_of_memory() && error.to_string().contains("limit is 80"), "{error}");
        driver.release(held.remove(7)).unwrap();
        held.push(driver.create(GRANULARITY).unwrap());
        for physical in held {
            driver.release(physical).unwrap();
        }
        return;
    }
    child::run("host::processes::descriptors_are_used_up_to_the_hard_limit");
}
