//! Calls that make no sense are refused, and change nothing.

#![allow(unsafe_code)] // makes values that drivers have to refuse

use super::memory::{check_contents, fill};
use super::{Driver, create, reserve};
use crate::driver::{Exported, Reservation};
use crate::{Error, Result};

/// Panics unless the call was refused with `is_invalid_argument`.
fn refused<T>(what: &str, result: Result<T>) {
    match result {
        Ok(_) => panic!("{what}: accepted"),
        Err(error) => assert!(error.is_invalid_argument(), "{what}: {error}"),
    }
}

/// Checks like [`refused`], for sizes so large that a driver may also report that it is out of memory.
fn refused_or_too_much<T>(what: &str, result: Result<T>) {
    let expected = |e: &Error| e.is_invalid_argument() || e.is_out_of_memory();
    assert!(result.as_ref().is_err_and(expected), "{what}: {:?}", result.err());
}

pub(super) fn sizes(driver: &Driver) {
    let unit = driver.granularity();
    for bytes in [0, 1, unit - 1, unit + 1, u64::MAX] {
        refused("create", driver.create(bytes));
        refused("reserve", driver.reserve(bytes, unit));
    }
    for align in [0, 1, unit / 2, unit + 1, 3 * unit, u64::MAX] {
        refused("align", driver.reserve(unit, align));
    }
    let largest = u64::MAX - (unit - 1);
    refused_or_too_much("create all", driver.create(largest));
    refused_or_too_much("reserve all", driver.reserve(largest, unit));
    refused_or_too_much("reserve all, aligned", driver.reserve(largest, 1 << 63));
    refused_or_too_much("align to half of everything", driver.reserve(unit, 1 << 63));
}

pub(super) fn ranges(driver: &Driver) {
    let unit = driver.granularity();
    let range = reserve(driver, 8);
    let physical = create(driver, 2);
    let bytes = 2 * unit;
    for offset in [1, unit / 2, unit + 1, 7 * unit, 8 * unit, u64::MAX, u64::MAX - (unit - 1)] {
        refused("map", driver.map(&range, offset, &physical));
        refused("unmap", driver.unmap(&range, offset, bytes));
    }
    let at = 3 * unit;
    driver.map(&range, at, &physical).expect("nonsense changed nothing");
    fill(driver, range.base() + at, bytes, 9);
    for offset in [2 * unit, 3 * unit, 4 * unit] {
        refused("map over", driver.map(&range, offset, &physical));
    }
    for (offset, bytes) in [
        (at, unit),
        (at, 3 * unit),
        (at, 0),
        (at, 1),
        (at, u64::MAX),
        (at + unit, unit),
        (at - unit, bytes),
        (at + unit, bytes),
        (0, unit),
        (0, 8 * unit),
    ] {
        refused("unmap what was not mapped so", driver.unmap(&range, offset, bytes));
    }
    check_contents(driver, range.base() + at, bytes, 9);
    // There is room right next to it.
    driver.map(&range, at - bytes, &physical).expect("room before");
    driver.map(&range, at + bytes, &physical).expect("room after");
    for offset in [at - bytes, at, at + bytes] {
        check_contents(driver, range.base() + offset, bytes, 9);
        driver.unmap(&range, offset, bytes).expect("unmapping");
        refused("unmap twice", driver.unmap(&range, offset, bytes));
    }
    driver.release(physical).expect("releasing");
    driver.unreserve(range).expect("nothing is mapped");
}

/// Reservations and handles that the driver has not made.
pub(super) fn strangers(driver: &Driver) {
    let unit = driver.granularity();
    let range = reserve(driver, 4);
    let physical = create(driver, 1);
    driver.map(&range, unit, &physical).expect("mapping");
    fill(driver, range.base() + unit, unit, 4);
    for (base, bytes) in [
        (range.base() + unit, unit),
        (range.base(), unit),
        (range.base(), 8 * unit),
        (0, 4 * unit),
        (u64::MAX - (unit - 1), 4 * unit),
    ] {
        // SAFETY: these are only passed where they are refused.
        let stranger = || unsafe { Reservation::new(base, bytes) };
        refused("map into a stranger", driver.map(&stranger(), 0, &physical));
        refused("unmap from a stranger", driver.unmap(&stranger(), 0, unit));
        refused("unreserve a stranger", driver.unreserve(stranger()));
    }
    refused("import rubbish", driver.import(Exported::Bytes(vec![0; 7]), unit));
    for bytes in [0, 1, unit + 1] {
        let exported = driver.export(&physical).expect("exporting");
        refused("import an odd size", driver.import(exported, bytes));
    }
    check_contents(driver, range.base() + unit, unit, 4);
    driver.unmap(&range, unit, unit).expect("unmapping");
    driver.release(physical).expect("releasing");
    driver.unreserve(range).expect("nothing is mapped");
}

/// A reservation in which something is mapped cannot be given back, and stays as it is.
pub(super) fn giving_back_too_early(driver: &Driver) {
    let unit = driver.granularity();
    let range = reserve(driver, 4);
    let (base, bytes) = (range.base(), range.bytes());
    let physical = create(driver, 1);
    driver.map(&range, unit, &physical).expect("mapping");
    fill(driver, base + unit, unit, 5);
    let error = driver.unreserve(range).expect_err("something is mapped in it");
    assert!(error.is_invalid_state(), "{error}");
    check_contents(driver, base + unit, unit, 5);
    // SAFETY: the range is still reserved, and the value for it was given up above.
    let range = unsafe { Reservation::new(base, bytes) };
    driver.unmap(&range, unit, unit).expect("unmapping");
    driver.release(physical).expect("releasing");
    driver.unreserve(range).expect("nothing is mapped any more");
}
