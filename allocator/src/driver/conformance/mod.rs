//! The conformance suite: duties of every driver, as tests.
//!
//! A driver that passes [`conformance`] does what the rest of symmpool relies on. For drivers whose memory
//! the CPU can reach, the contents of memory are checked as well. The suite gives everything back that it
//! takes, so a driver's own leak checks can follow it. It panics at the first broken rule.

pub(super) mod memory;
mod misuse;

use super::{Driver, Event, Physical, Reservation, Stream};
use memory::{check_contents, fill};

/// More than any device has.
const TOO_MUCH: u64 = 1 << 60;

/// Runs the whole suite. `make` returns a fresh driver of the same device at each call; drivers of
/// unlimited memory cannot pass.
pub fn conformance(make: impl Fn() -> Driver) {
    identity(&make());
    reservations(&make());
    life_cycle(&make());
    growth(&make());
    many_segments(&make());
    runs(&make());
    out_of_memory(&make());
    events(&make());
    sharing(&make(), &make());
    several_threads(&make());
    misuse::sizes(&make());
    misuse::ranges(&make());
    misuse::strangers(&make());
    misuse::giving_back_too_early(&make());
}

/// A reservation of `units` granules.
fn reserve(driver: &Driver, units: u64) -> Reservation {
    let unit = driver.granularity();
    driver.reserve(units * unit, unit).expect("a small reservation")
}

/// A segment of `units` granules.
fn create(driver: &Driver, units: u64) -> Physical {
    driver.create(units * driver.granularity()).expect("a small segment")
}

fn identity(driver: &Driver) {
    assert!(!driver.name().is_empty());
    assert!(driver.granularity().is_power_of_two());
    assert_eq!(driver.device(), driver.device());
    assert_eq!(driver.transport(), driver.transport());
}

fn reservations(driver: &Driver) {
    let unit = driver.granularity();
    let mut held: Vec<Reservation> = Vec::new();
    for (units, align) in [(1, unit), (3, unit), (5, 4 * unit), (1, 64 * unit), (4096, 1 << 30)] {
        let (bytes, align) = (units * unit, align.max(unit));
        let range = driver.reserve(bytes, align).expect("a reservation");
        assert_eq!(range.bytes(), bytes);
        assert!(range.base() != 0 && range.base().is_multiple_of(align), "{range:?} at {align}");
        for other in &held {
            let apart = range.base() + bytes <= other.base()
                || other.base() + other.bytes() <= range.base();
            assert!(apart, "{range:?} overlaps {other:?}");
        }
        held.push(range);
    }
    for range in held {
        driver.unreserve(range).expect("nothing is mapped");
    }
}

/// Memory outlives its handle, and the same place can be used again.
fn life_cycle(driver: &Driver) {
    let unit = driver.granularity();
    let range = reserve(driver, 8);
    for round in 0..3 {
        let physical = create(driver, 2);
        assert_eq!(physical.bytes(), 2 * unit);
        let at = (1 + round) * unit;
        driver.map(&range, at, &physical).expect("mapping into free space");
        fill(driver, range.base() + at, 2 * unit, round);
        driver.release(physical).expect("a segment may be released while mapped");
        check_contents(driver, range.base() + at, 2 * unit, round);
        driver.unmap(&range, at, 2 * unit).expect("unmapping what was mapped");
    }
    driver.unreserve(range).expect("nothing is mapped");
}

/// Checks that mappings keep their place and their contents while more is mapped around them.
fn growth(driver: &Driver) {
    let unit = driver.granularity();
    let range = reserve(driver, 64);
    let mut end = 0;
    let mut segments = Vec::new();
    for n in 0..6 {
        let physical = create(driver, 1 + n % 3);
        driver.map(&range, end, &physical).expect("mapping at the end");
        fill(driver, range.base() + end, physical.bytes(), n);
        segments.push((n, end, physical));
        end += (1 + n % 3) * unit;
        for (n, at, physical) in &segments {
            check_contents(driver, range.base() + at, physical.bytes(), *n);
        }
    }
    // Taking out one leaves its neighbours alone.
    let (_, at, physical) = segments.remove(2);
    driver.unmap(&range, at, physical.bytes()).expect("unmapping in the middle");
    driver.release(physical).expect("releasing");
    for (n, at, physical) in segments {
        check_contents(driver, range.base() + at, physical.bytes(), n);
        driver.unmap(&range, at, physical.bytes()).expect("unmapping");
        driver.release(physical).expect("releasing");
    }
    driver.unreserve(range).expect("nothing is mapped");
}

/// One segment a slot, as a group maps its peers', in an order that is not the ranks'.
fn many_segments(driver: &Driver) {
    const SLOTS: u64 = 48;
    let unit = driver.granularity();
    let range = reserve(driver, SLOTS * 16);
    let slot = |n: u64| (n * 29 % SLOTS) * 16 * unit;
    for n in 0..SLOTS {
        let physical = create(driver, 1);
        driver.map(&range, slot(n), &physical).expect("mapping a slot");
        fill(driver, range.base() + slot(n), unit, n);
        driver.release(physical).expect("releasing");
    }
    for n in 0..SLOTS {
        check_contents(driver, range.base() + slot(n), unit, n);
    }
    for n in (0..SLOTS).rev() {
        driver.unmap(&range, slot(n), unit).expect("unmapping a slot");
    }
    driver.unreserve(range).expect("nothing is mapped");
}

/// Several allocations by one call: one behind the other, each with a mapping of its own; none if one cannot
/// be mapped.
fn runs(driver: &Driver) {
    let unit = driver.granularity();
    let range = reserve(driver, 8);
    let three = [create(driver, 1), create(driver, 2), create(driver, 1)];
    driver.map_all(&range, unit, &three).expect("mapping three");
    driver.map_all(&range, unit, &[]).expect("mapping none");
    fill(driver, range.base() + unit, 4 * unit, 5);
    driver.unmap(&range, 2 * unit, 2 * unit).expect("unmapping the second");
    check_contents(driver, range.base() + unit, unit, 5);
    // The last is in the way, so the first two do not stay.
    let error = driver.map_all(&range, 2 * unit, &three).expect_err("there is another");
    assert!(error.is_invalid_argument(), "{error}");
    driver.map(&range, 2 * unit, &three[1]).expect("nothing has stayed");
    for (at, units) in [(1, 1), (2, 2), (4, 1)] {
        driver.unmap(&range, at * unit, units * unit).expect("unmapping");
    }
    for physical in three {
        driver.release(physical).expect("releasing");
    }
    driver.unreserve(range).expect("nothing is mapped");
}

fn out_of_memory(driver: &Driver) {
    let error = driver.create(TOO_MUCH).expect_err("no device has that much");
    assert!(error.is_out_of_memory(), "{error}");
    let error = driver.reserve(TOO_MUCH, driver.granularity()).expect_err("no address space");
    assert!(error.is_out_of_memory(), "{error}");
    // The driver still works.
    life_cycle(driver);
}

fn events(driver: &Driver) {
    let event: Event = driver.record_event(Stream::DEFAULT).expect("an event");
    driver.wait_event(Stream::DEFAULT, &event).expect("waiting for it");
    driver.synchronize().expect("no work is under way");
    assert!(driver.is_event_done(&event).expect("asking for it"));
    driver.release_event(event);
    assert!(!driver.is_capturing(Stream::DEFAULT));
}

/// Two drivers, as two ranks: what one writes the other reads, and the memory outlives its maker.
fn sharing(owner: &Driver, peer: &Driver) {
    let unit = owner.granularity();
    let bytes = 2 * unit;
    let physical = create(owner, 2);
    let exported = owner.export(&physical).expect("exporting");
    let imported = peer.import(exported, bytes).expect("importing");
    assert_eq!(imported.bytes(), bytes);
    let (ours, theirs) = (reserve(owner, 4), reserve(peer, 8));
    owner.map(&ours, unit, &physical).expect("mapping our own");
    peer.map(&theirs, 5 * unit, &imported).expect("mapping a peer's");
    let (here, there) = (ours.base() + unit, theirs.base() + 5 * unit);
    fill(owner, here, bytes, 1);
    check_contents(peer, there, bytes, 1);
    fill(peer, there, bytes, 2);
    check_contents(owner, here, bytes, 2);

    // A second handle to the same memory, after everything else of the owner is gone.
    let again = owner.export(&physical).expect("exporting again");
    owner.unmap(&ours, unit, bytes).expect("unmapping");
    owner.release(physical).expect("releasing");
    owner.unreserve(ours).expect("nothing is mapped");
    let again = peer.import(again, bytes).expect("importing again");
    peer.map(&theirs, 0, &again).expect("mapping it twice");
    check_contents(peer, theirs.base(), bytes, 2);
    for physical in [imported, again] {
        peer.release(physical).expect("releasing");
    }
    check_contents(peer, there, bytes, 2);
    peer.unmap(&theirs, 0, bytes).expect("unmapping");
    peer.unmap(&theirs, 5 * unit, bytes).expect("unmapping");
    peer.unreserve(theirs).expect("nothing is mapped");
}

/// Any thread may call; here each uses a part of one reservation.
fn several_threads(driver: &Driver) {
    let unit = driver.granularity();
    let range = reserve(driver, 4);
    std::thread::scope(|scope| {
        for n in 0..4 {
            let range = &range;
            scope.spawn(move || {
                for round in 0..4 {
                    let physical = create(driver, 1);
                    driver.map(range, n * unit, &physical).expect("mapping our part");
                    fill(driver, range.base() + n * unit, unit, n * 7 + round);
                    driver.release(physical).expect("releasing");
                    check_contents(driver, range.base() + n * unit, unit, n * 7 + round);
                    driver.unmap(range, n * unit, unit).expect("unmapping our part");
                }
            });
        }
    });
    driver.unreserve(range).expect("nothing is mapped");
}
