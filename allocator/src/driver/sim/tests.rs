//! Simulated memory: addresses, limits, and what is refused.

use super::super::conformance::conformance;
use super::super::{Driver, DriverCall, FaultDriver, FaultPlan};
use super::*;

const UNIT: u64 = 2 << 20;
const MEMORY: u64 = 1 << 36;

#[test]
fn conforms() {
    conformance(|| Driver::new(SimDriver::with_limit(7, MEMORY)));
    conformance(|| Driver::new(SimDriver::with_granularity(8, MEMORY, 64).unwrap()));
}

#[test]
fn conforms_behind_a_fault_driver_and_leaks_nothing() {
    let inner = Driver::new(SimDriver::with_limit(9, MEMORY));
    let fault = FaultDriver::new(inner, FaultPlan::new());
    conformance(|| Driver::new(fault.clone()));
    let counts = fault.counts();
    assert_eq!(counts.leaks(), None);
    assert!(
        counts.succeeded(DriverCall::Import) > 0
            && counts.made(DriverCall::Map) > counts.succeeded(DriverCall::Map)
    );
}

// D1: addresses differ from rank to rank, so nothing may follow from them.
#[test]
fn addresses_follow_from_the_seed_and_are_spread() {
    let bases = |seed| {
        let driver = SimDriver::new(seed);
        let mut all = Vec::new();
        for _ in 0..50 {
            all.push(driver.reserve(1 << 42, 1 << 30).unwrap().base());
        }
        all
    };
    assert_eq!(bases(3), bases(3));
    let mut firsts: Vec<u64> = (0..1000).map(|seed| bases(seed)[0]).collect();
    firsts.sort_unstable();
    firsts.dedup();
    assert_eq!(firsts.len(), 1000);
    // No quarter of the address space is left out.
    for quarter in 0..4 {
        let range = (quarter << 54)..((quarter + 1) << 54);
        assert!(firsts.iter().filter(|base| range.contains(*base)).count() > 150);
    }
}

#[test]
fn memory_is_in_use_until_the_last_mapping_goes() {
    let driver = SimDriver::with_limit(1, 4 * UNIT);
    let range = driver.reserve(16 * UNIT, UNIT).unwrap();
    let held = driver.create(3 * UNIT).unwrap();
    driver.map(&range, 0, &held).unwrap();
    driver.release(held).unwrap();
    let error = driver.create(2 * UNIT).unwrap_err();
    assert!(error.is_out_of_memory() && error.to_string().contains("6 MiB of"), "{error}");
    // A peer's memory is not ours to count.
    let peer = driver.import(Exported::Derived, 9 * UNIT).unwrap();
    driver.map(&range, 3 * UNIT, &peer).unwrap();
    driver.unmap(&range, 0, 3 * UNIT).unwrap();
    driver.release(driver.create(4 * UNIT).unwrap()).unwrap();
    driver.release(peer).unwrap();
}

#[test]
fn releasing_what_was_never_imported_is_refused() {
    // SAFETY: it is refused.
    let forged = unsafe { Physical::new(IMPORTED, UNIT) };
    let error = SimDriver::new(1).release(forged).unwrap_err();
    assert!(error.is_invalid_argument(), "{error}");
}

#[test]
fn odd_granularities_are_refused() {
    for granularity in [0, 3, UNIT + 1, 1 << 63] {
        assert!(SimDriver::with_granularity(1, MEMORY, granularity).is_err());
    }
}

/// One rank of 4096, as many peers' segments as it maps in one commit.
#[test]
fn a_large_group_maps_its_peers() {
    const WORLD: u64 = 4096;
    let driver = SimDriver::new(5);
    let stride = 1 << 38;
    let range = driver.reserve(WORLD * stride, stride).unwrap();
    for peer in 0..WORLD {
        let physical = driver.import(Exported::Derived, 16 * UNIT).unwrap();
        driver.map(&range, peer * stride, &physical).unwrap();
        driver.release(physical).unwrap();
    }
    for peer in 0..WORLD {
        driver.unmap(&range, peer * stride, 16 * UNIT).unwrap();
    }
    driver.unreserve(range).unwrap();
}
