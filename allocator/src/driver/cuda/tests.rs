//! Tests without a GPU, and tests with one, which print why they are skipped where there is none.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::super::Driver;
use super::super::conformance::conformance;
use super::*;

const MIB: u64 = 1 << 20;

/// The first device; without one, prints that the test is skipped.
fn device() -> Option<CudaDriver> {
    match CudaDriver::new(0) {
        Ok(driver) => Some(driver),
        Err(error) if error.is_unsupported() => {
            eprintln!("skipped: no CUDA device: {error}");
            None
        }
        Err(error) => panic!("a CUDA device that cannot be used: {error}"),
    }
}

fn invalid<T>(result: Result<T>, why: &str) {
    let error = result.err().expect(why);
    assert!(error.is_invalid_argument(), "{error}");
    assert!(error.to_string().contains(why), "{error} does not say {why:?}");
}

#[test]
fn without_cuda_every_way_in_is_refused_and_says_what_was_tried() {
    let refusal = match CudaDriver::device_count() {
        Err(refusal) => refusal,
        // The other tests run instead.
        Ok(count) => return eprintln!("not without CUDA: there are {count} devices here"),
    };
    assert!(refusal.is_unsupported(), "{refusal}");
    assert!(refusal.to_string().contains("CUDA"), "{refusal}");
    let fabric = CudaOptions { prefer_fabric: true, gpu_direct_rdma: false };
    for error in [
        CudaDriver::new(0).unwrap_err(),
        CudaDriver::new(u32::MAX).unwrap_err(),
        CudaDriver::with_options(0, fabric).unwrap_err(),
        CudaDriver::from_env().unwrap_err(),
        Driver::cuda(3).unwrap_err(),
    ] {
        assert!(error.is_unsupported(), "{error}");
    }
}

#[test]
fn local_rank_names_a_device() {
    assert_eq!(ordinal_from(None).unwrap(), 0);
    assert_eq!(ordinal_from(Some("3")).unwrap(), 3);
    for wrong in ["", "-1", "one", "4294967296"] {
        invalid(ordinal_from(Some(wrong)), "LOCAL_RANK");
    }
}

#[test]
fn an_ordinal_out_of_range_names_the_count() {
    if device().is_none() {
        return;
    }
    let count = CudaDriver::device_count().unwrap();
    invalid(CudaDriver::new(count), &format!("{count} visible"));
    invalid(CudaDriver::new(u32::MAX), &format!("{count} visible"));
}

#[test]
fn conforms() {
    if device().is_some() {
        conformance(|| Driver::cuda(0).unwrap());
    }
}

#[test]
fn memory_mapped_twice_is_one_memory() {
    let Some(driver) = device() else { return };
    let granule = driver.granularity();
    assert!(granule.is_power_of_two() && granule >= 2 * MIB);
    let range = driver.reserve(4 * granule, granule).unwrap();
    let own = driver.create(granule).unwrap();
    driver.map(&range, 0, &own).unwrap();
    let peer = driver.import(driver.export(&own).unwrap(), granule).unwrap();
    driver.map(&range, 2 * granule, &peer).unwrap();
    let written: Vec<u8> = (0..granule).map(|i| (i % 251) as u8).collect();
    let mut read = vec![0u8; written.len()];
    // SAFETY: a granule is mapped at the base, and only this test uses it.
    unsafe { driver.copy_from_host(range.base(), &written) }.unwrap();
    // SAFETY: a granule is mapped there, and only this test uses it.
    unsafe { driver.copy_to_host(&mut read, range.base() + 2 * granule) }.unwrap();
    assert_eq!(read, written);

    // Mappings keep the memory alive without the handles.
    driver.release(own).unwrap();
    driver.release(peer).unwrap();
    driver.unmap(&range, 0, granule).unwrap();
    read.fill(0);
    // SAFETY: the second granule is still mapped, though the handles are released, and only this test uses it.
    unsafe { driver.copy_to_host(&mut read, range.base() + 2 * granule) }.unwrap();
    assert_eq!(read, written);
    driver.unmap(&range, 2 * granule, granule).unwrap();
    driver.unreserve(range).unwrap();
}

/// A handle that no driver has given.
fn forged(raw: u64, bytes: u64) -> Physical {
    // SAFETY: it is only passed where it is refused.
    unsafe { Physical::new(raw, bytes) }
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    let Some(driver) = device() else { return };
    let granule = driver.granularity();
    invalid(driver.reserve(0, granule), "multiples");
    invalid(driver.create(granule + 1), "multiples");
    let range = driver.reserve(2 * granule, granule).unwrap();
    let physical = driver.create(granule).unwrap();
    driver.map(&range, 0, &physical).unwrap();
    invalid(driver.map(&range, 0, &physical), "overlaps");
    invalid(driver.map(&range, 2 * granule, &physical), "beyond the reservation");
    invalid(driver.unmap(&range, granule, granule), "nothing is mapped");
    invalid(driver.map(&range, granule, &forged(1, granule)), "no live allocation");
    invalid(driver.release(forged(1, granule)), "no live allocation");
    invalid(driver.import(Exported::Bytes(vec![0; 63]), granule), "63 bytes");
    invalid(driver.import(Exported::Derived, granule), "simulation");
    // SAFETY: no event has this handle, and it is only passed where it is refused.
    let unasked = unsafe { Event::from_raw(1) };
    invalid(driver.wait_event(Stream::DEFAULT, &unasked), "no live event");
    invalid(driver.wait_event(Stream::DEFAULT, &Event::numbered(1)), "no live event");
    invalid(driver.record_event(Stream::numbered(7)), "stream number 7");
    assert!(!driver.is_capturing(Stream::numbered(7)));
    // SAFETY: it is refused, as something is mapped in the range.
    let twin = unsafe { Reservation::new(range.base(), range.bytes()) };
    let early = driver.unreserve(twin).unwrap_err();
    assert!(early.is_invalid_state(), "{early}");
    driver.unmap(&range, 0, granule).unwrap();
    driver.release(physical).unwrap();
    driver.unreserve(range).unwrap();
}

#[test]
fn a_descriptor_that_is_not_memory_of_cuda_is_refused() {
    let Some(driver) = device() else { return };
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let number = null.as_raw_fd();
    let error = driver.import(Exported::Fd(null), driver.granularity()).unwrap_err();
    assert!(error.to_string().contains("CUDA_ERROR"), "descriptor {number}: {error}");
}

#[test]
fn running_out_names_what_is_free_and_leaves_the_driver_usable() {
    let Some(driver) = device() else { return };
    let error = driver.create(10 << 40).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(error.to_string().contains("are free"), "{error}");
    let physical = driver.create(driver.granularity()).unwrap();
    driver.release(physical).unwrap();
}

// D4
#[test]
fn events_order_streams_without_the_host() {
    let Some(driver) = device() else { return };
    let event = driver.record_event(Stream::DEFAULT).unwrap();
    driver.wait_event(Stream::DEFAULT, &event).unwrap();
    driver.synchronize().unwrap();
    assert!(!driver.is_capturing(Stream::DEFAULT));
    driver.release_event(event);
}

/// Makes calls on an emulated device stop until a test lets them go on.
struct EmulatedDriver {
    stop: unsafe extern "C" fn(c_int, c_int) -> c_int,
    stopped: unsafe extern "C" fn(c_int) -> c_int,
}

const MAP: c_int = 0;
const SYNCHRONIZE: c_int = 1;

impl EmulatedDriver {
    /// `None` on real devices, and without any.
    fn find() -> Option<Self> {
        let (Ok(stop), Ok(stopped)) =
            (CudaDriver::function("emulatedStop"), CudaDriver::function("emulatedStopped"))
        else {
            eprintln!("skipped: no emulated device (see tests/emulator)");
            return None;
        };
        // SAFETY: the emulator's functions of these names have these types.
        let stop = unsafe {
            std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn(_, _) -> _>(stop)
        };
        // SAFETY: the emulator's function of this name has this type.
        let stopped = unsafe {
            std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn(_) -> _>(stopped)
        };
        Some(Self { stop, stopped })
    }

    /// The next such call on `device` stops.
    fn stop(&self, kind: c_int, device: c_int) {
        // SAFETY: takes two numbers.
        unsafe { (self.stop)(kind, device) };
    }

    /// Waits until a call has stopped.
    fn await_stopped(&self, kind: c_int) {
        let started = Instant::now();
        // SAFETY: takes a number.
        while unsafe { (self.stopped)(kind) } == 0 {
            assert!(started.elapsed() < Duration::from_secs(20), "no call stopped");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn let_go(&self, kind: c_int) {
        self.stop(kind, -1);
    }
}

/// Rule D7: while CUDA maps for one thread, others make, map, hand over and give back memory.
#[test]
fn d7_memory_is_made_and_mapped_while_another_thread_maps() {
    let Some(emulated) = EmulatedDriver::find() else { return };
    // A device of this test's own, so that no other test's calls stop.
    let driver = CudaDriver::new(6).unwrap();
    let granule = driver.granularity();
    let range = driver.reserve(4 * granule, granule).unwrap();
    let slow = driver.create(granule).unwrap();
    emulated.stop(MAP, 6);
    thread::scope(|scope| {
        let mapping = scope.spawn(|| driver.map(&range, 0, &slow));
        emulated.await_stopped(MAP);
        let (done, reported) = mpsc::channel();
        let (driver, range) = (&driver, &range);
        scope.spawn(move || {
            let own = driver.create(granule).unwrap();
            driver.map(range, granule, &own).unwrap();
            drop(driver.export(&own).unwrap());
            invalid(driver.map(range, 0, &own), "overlaps");
            driver.unmap(range, granule, granule).unwrap();
            driver.release(own).unwrap();
            done.send(()).unwrap();
        });
        let apart = reported.recv_timeout(Duration::from_secs(10));
        emulated.let_go(MAP);
        mapping.join().unwrap().unwrap();
        apart.expect("a thread waited for another's mapping");
    });
    driver.unmap(&range, 0, granule).unwrap();
    driver.release(slow).unwrap();
    driver.unreserve(range).unwrap();
}

#[test]
fn a_device_that_does_not_finish_is_waited_for_until_the_deadline() {
    let Some(emulated) = EmulatedDriver::find() else { return };
    let driver = CudaDriver::new(7).unwrap();
    emulated.stop(SYNCHRONIZE, 7);
    let started = Instant::now();
    let late = driver.synchronize_by(Deadline::after(Duration::from_millis(200)));
    let waited = started.elapsed();
    emulated.let_go(SYNCHRONIZE);
    let error = late.unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert!(error.to_string().contains("CUDA device 7"), "{error}");
    assert!(waited >= Duration::from_millis(200) && waited < Duration::from_secs(10), "{waited:?}");
    driver.synchronize_by(Deadline::seconds(20)).unwrap();
}
