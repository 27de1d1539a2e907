//! Tests of host memory, within a process and between processes.

use std::fs;

use rustix::fs::{MemfdFlags, SealFlags};

use super::super::conformance::conformance;
use super::super::{Driver, FaultDriver, FaultPlan};
use super::*;

#[test]
fn conforms() {
    conformance(|| Driver::host().unwrap());
}

#[test]
fn conforms_without_committing_memory() {
    // The check of available memory stays on: without it and without committing, nothing would refuse any size.
    let options = HostOptions { populate: false, huge_pages: false, ..HostOptions::default() };
    conformance(|| Driver::new(HostDriver::with_options(options).unwrap()));
}

#[test]
fn conforms_behind_a_fault_driver_and_leaks_nothing() {
    let fault = FaultDriver::new(Driver::host().unwrap(), FaultPlan::new());
    conformance(|| Driver::new(fault.clone()));
    assert_eq!(fault.counts().leaks(), None);
}

/// A driver whose memory comes with its first accesses.
struct Lazy(HostDriver);

#[allow(unsafe_code)] // passes on another driver's promise
// SAFETY: all that it does to memory, the inner driver does.
unsafe impl super::super::DriverWrapper for Lazy {
    fn inner(&self) -> &dyn MemoryDriver {
        &self.0
    }

    fn create(&self, bytes: u64) -> Result<Physical> {
        self.0.create_lazily(bytes)
    }
}

#[test]
fn conforms_where_memory_comes_with_its_first_access() {
    conformance(|| Driver::new(Lazy(HostDriver::new().unwrap())));
    let driver = HostDriver::new().unwrap();
    let pages = |create: fn(&HostDriver, u64) -> Result<Physical>| {
        let physical = create(&driver, GRANULARITY).unwrap();
        let Exported::Fd(fd) = driver.export(&physical).unwrap() else { panic!("a descriptor") };
        driver.release(physical).unwrap();
        rustix::fs::fstat(&fd).unwrap().st_blocks
    };
    assert_eq!(pages(MemoryDriver::create_lazily), 0);
    assert_eq!(pages(MemoryDriver::create) as u64 * 512, GRANULARITY);
}

#[test]
fn more_memory_than_is_available_is_refused_before_any_is_taken() {
    let there = available::available(&available::Sources::system()).unwrap().bytes;
    let bytes = (there + there / 4).next_multiple_of(GRANULARITY);
    let error = HostDriver::new().unwrap().create(bytes).unwrap_err();
    assert!(error.is_out_of_memory() && error.to_string().contains("available"), "{error}");
}

/// A memory file with these seals.
fn file(bytes: u64, seals: SealFlags) -> Exported {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("test", flags).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    Exported::Fd(fd)
}

#[test]
fn only_sealed_files_of_the_right_size_are_taken_from_peers() {
    let driver = HostDriver::new().unwrap();
    let right = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let import = |exported| driver.import(exported, GRANULARITY);
    driver.release(import(file(GRANULARITY, right)).unwrap()).unwrap();
    for (bytes, seals) in [
        (GRANULARITY, SealFlags::empty()),
        (GRANULARITY, SealFlags::SHRINK | SealFlags::GROW),
        (GRANULARITY, SealFlags::GROW | SealFlags::SEAL),
        (GRANULARITY, right | SealFlags::WRITE),
        (GRANULARITY, right | SealFlags::FUTURE_WRITE),
        (GRANULARITY - 4096, right),
        (2 * GRANULARITY, right),
        (0, right),
    ] {
        let error = import(file(bytes, seals)).unwrap_err();
        assert!(error.is_refused(), "{bytes} {seals:?}: {error}");
    }
    let not_memory = Exported::Fd(fs::File::open("/dev/null").unwrap().into());
    assert!(import(not_memory).unwrap_err().is_refused());
    assert!(import(Exported::Derived).unwrap_err().is_invalid_argument());
}

#[test]
fn an_exported_segment_cannot_be_resized_or_unsealed() {
    let driver = HostDriver::new().unwrap();
    let physical = driver.create(GRANULARITY).unwrap();
    let Exported::Fd(fd) = driver.export(&physical).unwrap() else { panic!("not a descriptor") };
    for bytes in [0, GRANULARITY - 1, GRANULARITY + 1] {
        assert!(rustix::fs::ftruncate(&fd, bytes).is_err());
    }
    assert!(rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE).is_err());
    driver.release(physical).unwrap();
}

#[test]
fn memory_is_committed_when_made_and_only_then_if_asked() {
    let committed = |populate| {
        let options = HostOptions { populate, ..HostOptions::default() };
        let driver = HostDriver::with_options(options).unwrap();
        let physical = driver.create(8 * GRANULARITY).unwrap();
        let Exported::Fd(fd) = driver.export(&physical).unwrap() else { panic!("no descriptor") };
        let blocks = rustix::fs::fstat(&fd).unwrap().st_blocks as u64;
        driver.release(physical).unwrap();
        blocks * 512
    };
    assert_eq!(committed(true), 8 * GRANULARITY);
    assert_eq!(committed(false), 0);
}

#[test]
fn segments_of_another_driver_are_strangers() {
    let (one, other) = (HostDriver::new().unwrap(), HostDriver::new().unwrap());
    let physical = one.create(GRANULARITY).unwrap();
    let range = other.reserve(GRANULARITY, GRANULARITY).unwrap();
    assert!(other.map(&range, 0, &physical).unwrap_err().is_invalid_argument());
    assert!(other.export(&physical).unwrap_err().is_invalid_argument());
    // SAFETY: these are only passed where they are refused.
    let forged = |raw, bytes| unsafe { Physical::new(raw, bytes) };
    assert!(one.map(&range, 0, &physical).unwrap_err().is_invalid_argument());
    assert!(
        one.release(forged(physical.raw(), 2 * GRANULARITY)).unwrap_err().is_invalid_argument()
    );
    assert!(one.release(forged(u64::MAX, GRANULARITY)).is_err());
    one.release(physical).unwrap();
    other.unreserve(range).unwrap();
}

/// Whether any mapping of this process begins inside `[base, base + bytes)`.
fn mapped(base: u64, bytes: u64) -> bool {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let start = |line: &str| u64::from_str_radix(line.split('-').next()?, 16).ok();
    maps.lines().filter_map(start).any(|start| (base..base + bytes).contains(&start))
}

#[test]
fn dropping_the_driver_gives_everything_back() {
    // Freed addresses are handed out again from the top; this looks near the bottom of so many
    // that no other test's mapping comes to lie there.
    const BYTES: u64 = 3 << 40;
    let driver = HostDriver::new().unwrap();
    let range = driver.reserve(BYTES, GRANULARITY).unwrap();
    let physical = driver.create(GRANULARITY).unwrap();
    driver.map(&range, 5 * GRANULARITY, &physical).unwrap();
    let place = (range.base() + 5 * GRANULARITY, GRANULARITY);
    assert!(mapped(place.0, place.1));
    drop(driver);
    assert!(!mapped(place.0, place.1));
}

/// The line of `/proc/self/maps` for the mapping that begins at `base`, cut after its access.
fn access(base: u64) -> Option<String> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.starts_with(&format!("{base:x}-")))?;
    Some(line.split(' ').take(2).collect::<Vec<_>>().join(" "))
}

#[test]
fn addresses_are_trimmed_to_what_was_asked_for_and_accessible_only_while_mapped() {
    let driver = HostDriver::new().unwrap();
    let range = driver.reserve(GRANULARITY, 1 << 40).unwrap();
    let (base, end) = (range.base(), range.base() + GRANULARITY);
    assert_eq!(access(base), Some(format!("{base:x}-{end:x} ---p")));
    let physical = driver.create(GRANULARITY).unwrap();
    driver.map(&range, 0, &physical).unwrap();
    assert_eq!(access(base), Some(format!("{base:x}-{end:x} rw-s")));
    driver.unmap(&range, 0, GRANULARITY).unwrap();
    assert_eq!(access(base), Some(format!("{base:x}-{end:x} ---p")));
    driver.release(physical).unwrap();
    driver.unreserve(range).unwrap();
}

#[test]
fn descriptors_do_not_pass_to_programs_started_later() {
    let driver = HostDriver::new().unwrap();
    let inherited = {
        let Exported::Fd(fd) = file(GRANULARITY, memfd::SEALS) else { panic!("not a descriptor") };
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty()).unwrap();
        driver.import(Exported::Fd(fd), GRANULARITY).unwrap()
    };
    let made = driver.create(GRANULARITY).unwrap();
    let Exported::Fd(exported) = driver.export(&made).unwrap() else { panic!("no descriptor") };
    for raw in [inherited.raw(), made.raw(), exported.as_raw_fd() as u64] {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{raw}")).unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
        let flags = u32::from_str_radix(flags.trim(), 8).unwrap();
        assert_ne!(flags & rustix::fs::OFlags::CLOEXEC.bits(), 0, "descriptor {raw}: {info}");
    }
    driver.release(inherited).unwrap();
    driver.release(made).unwrap();
}

/// Bytes of the mapping that begins at `base` that this process can touch without a fault.
fn resident(base: u64) -> u64 {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let lines = smaps.lines().skip_while(|line| !line.starts_with(&format!("{base:x}-")));
    let rss = lines.filter_map(|line| line.strip_prefix("Rss:")).next().unwrap();
    1024 * rss.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
}

#[test]
fn a_makers_mappings_come_with_their_page_tables_and_a_peers_do_not() {
    let driver = HostDriver::new().unwrap();
    let range = driver.reserve(8 * GRANULARITY, GRANULARITY).unwrap();
    let bytes = 2 * GRANULARITY;
    let own = driver.create(bytes).unwrap();
    let peers = driver.import(driver.export(&own).unwrap(), bytes).unwrap();
    // Apart from each other, so that the system does not make one mapping of them.
    let expected = [(0, &own, bytes), (3, &own, bytes), (6, &peers, 0)];
    for (at, physical, there) in expected {
        driver.map(&range, at * GRANULARITY, physical).unwrap();
        assert_eq!(resident(range.base() + at * GRANULARITY), there, "at {at}");
    }
    for (at, ..) in expected {
        driver.unmap(&range, at * GRANULARITY, bytes).unwrap();
    }
    driver.release(own).unwrap();
    driver.release(peers).unwrap();
    driver.unreserve(range).unwrap();
}
