//! Tests of one device's life cycle and misuse, in one process.

use std::os::fd::OwnedFd;
use std::time::Instant;

use cudarc::driver::sys;
use serde_json::{Value, json};
use symmpool_allocator::Stream;
use symmpool_allocator::driver::{
    CudaDriver, CudaOptions, Event, Exported, MemoryDriver, Physical, Reservation,
};
use symmpool_allocator::topology::{Topology, TopologyKind};

use super::{CheckOptions, text};

type Outcome = Result<(), String>;
type Check = fn(&CudaDriver) -> Outcome;

const CHECKS: [(&str, Check); 13] = [
    ("facts make sense", facts),
    ("an ordinal out of range names the count", ordinals),
    ("the caller's context is left alone", contexts),
    ("reservations are aligned as asked", alignment),
    ("more than 100 segments are one range", many_segments),
    ("memory mapped twice is one memory", aliases),
    ("memory keeps its address and contents over unmap and remap", remap),
    ("mappings keep memory alive without handles", without_handles),
    ("misuse is refused and changes nothing", misuse),
    ("a descriptor that is not CUDA's is refused", foreign_descriptor),
    ("running out is typed, and the driver goes on", out_of_memory),
    ("events order streams", events),
    ("a graph is captured around the driver's calls", capture),
];

/// Runs all checks on device 0 and returns the report.
pub(crate) fn run(options: &CheckOptions) -> Value {
    let with = CudaOptions { prefer_fabric: options.prefer_fabric, ..CudaOptions::default() };
    let driver = match CudaDriver::with_options(0, with) {
        Ok(driver) => driver,
        Err(error) => return json!({ "ok": false, "error": error.to_string() }),
    };
    println!("{driver:?}");
    let before = driver.memory_info();
    let mut rows = Vec::new();
    let mut ok = true;
    for (name, check) in CHECKS {
        let start = Instant::now();
        let outcome = check(&driver);
        let millis = start.elapsed().as_secs_f64() * 1e3;
        match &outcome {
            Ok(()) => println!("ok      {millis:9.2} ms  {name}"),
            Err(error) => println!("FAILED  {millis:9.2} ms  {name}: {error}"),
        }
        ok &= outcome.is_ok();
        rows.push(json!({ "name": name, "ms": millis, "error": outcome.err() }));
    }
    // Only printed, because other processes may use the device too.
    let free = [before, driver.memory_info()].map(|info| info.map(|(free, _)| free).ok());
    println!("free bytes before and after: {free:?}");
    json!({
        "mode": "self-test",
        "ok": ok,
        "checks": rows,
        "free_bytes": free,
        "device": driver.device(),
        "facts": format!("{:?}", driver.facts()),
    })
}

fn facts(driver: &CudaDriver) -> Outcome {
    let facts = driver.facts();
    require(facts.driver_version >= 12_040, || format!("driver {}", facts.driver_version))?;
    require(facts.granularity >= 2 << 20 && facts.granularity.is_power_of_two(), || {
        format!("granularity {}", facts.granularity)
    })?;
    require(facts.uuid.len() == 40 && facts.uuid.starts_with("GPU-"), || facts.uuid.clone())?;
    let (free, total) = driver.memory_info().map_err(text)?;
    require(free <= total && total == facts.total_bytes, || format!("{free} of {total}"))?;
    let alone = Topology::detect(&[driver.device()]).map_err(text)?;
    let expected = TopologyKind::FullyConnected { links: 0 };
    require(alone.kind() == expected, || alone.to_string())
}

fn ordinals(_: &CudaDriver) -> Outcome {
    let count = CudaDriver::device_count().map_err(text)?;
    for ordinal in [count, u32::MAX] {
        invalid(CudaDriver::new(ordinal), &format!("{count} visible"))?;
    }
    Ok(())
}

fn contexts(driver: &CudaDriver) -> Outcome {
    let current = || {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle through a valid pointer; the library is loaded.
        let code = unsafe { sys::cuCtxGetCurrent(&raw mut context) };
        (code, context)
    };
    let before = current();
    let physical = driver.create(driver.granularity()).map_err(text)?;
    driver.release(physical).map_err(text)?;
    driver.synchronize().map_err(text)?;
    require(driver.create(1).is_err(), || "one byte was allocated".to_owned())?;
    let after = current();
    require(before == after, || format!("{before:?} became {after:?}"))
}

fn alignment(driver: &CudaDriver) -> Outcome {
    let granule = driver.granularity();
    for align in [granule, 1 << 30, 1 << 36, 1 << 40] {
        let range = driver.reserve(3 * granule, align).map_err(text)?;
        let base = range.base();
        let physical = driver.create(granule).map_err(text)?;
        driver.map(&range, 2 * granule, &physical).map_err(text)?;
        driver.unmap(&range, 2 * granule, granule).map_err(text)?;
        driver.release(physical).map_err(text)?;
        driver.unreserve(range).map_err(text)?;
        require(base.is_multiple_of(align), || format!("{base:#x} asked for {align:#x}"))?;
    }
    Ok(())
}

fn many_segments(driver: &CudaDriver) -> Outcome {
    const COUNT: u64 = 130;
    let granule = driver.granularity();
    let range = driver.reserve(COUNT * granule, granule).map_err(text)?;
    let mut segments = Vec::new();
    for i in 0..COUNT {
        let physical = driver.create(granule).map_err(text)?;
        driver.map(&range, i * granule, &physical).map_err(text)?;
        segments.push(physical);
    }
    for i in 0..COUNT {
        // SAFETY: a granule is mapped there, and only this check uses it.
        unsafe { driver.fill(range.base() + i * granule, 1000 + i as u32, granule / 4) }
            .map_err(text)?;
    }
    // Copies across segments work, because to the device they are one range.
    let written: Vec<u8> = (0..granule).map(|i| (i % 253) as u8).collect();
    let across = range.base() + 64 * granule + granule / 2;
    write(driver, across, &written)?;
    require(read(driver, across, granule)? == written, || "across a boundary".to_owned())?;
    for i in (0..COUNT).filter(|i| ![64, 65].contains(i)) {
        let wanted = (1000 + i as u32).to_le_bytes().repeat(granule as usize / 4);
        let found = read(driver, range.base() + i * granule, granule)?;
        require(found == wanted, || format!("segment {i} holds something else"))?;
    }
    // Out of order, as a pool may do it.
    for i in (0..COUNT).step_by(2).chain((1..COUNT).step_by(2)) {
        driver.unmap(&range, i * granule, granule).map_err(text)?;
    }
    for physical in segments {
        driver.release(physical).map_err(text)?;
    }
    driver.unreserve(range).map_err(text)
}

fn aliases(driver: &CudaDriver) -> Outcome {
    let granule = driver.granularity();
    let range = driver.reserve(8 * granule, granule).map_err(text)?;
    let own = driver.create(2 * granule).map_err(text)?;
    driver.map(&range, 0, &own).map_err(text)?;
    let mut imports = Vec::new();
    for at in [2, 4] {
        let exported = driver.export(&own).map_err(text)?;
        let import = driver.import(exported, 2 * granule).map_err(text)?;
        driver.map(&range, at * granule, &import).map_err(text)?;
        imports.push(import);
    }
    let written: Vec<u8> = (0..2 * granule).map(|i| (i % 249) as u8).collect();
    write(driver, range.base() + 2 * granule, &written)?;
    for at in [0, 4] {
        let found = read(driver, range.base() + at * granule, 2 * granule)?;
        require(found == written, || format!("the mapping at granule {at} differs"))?;
    }
    for at in [0, 2, 4] {
        driver.unmap(&range, at * granule, 2 * granule).map_err(text)?;
    }
    for physical in imports.into_iter().chain([own]) {
        driver.release(physical).map_err(text)?;
    }
    driver.unreserve(range).map_err(text)
}

fn remap(driver: &CudaDriver) -> Outcome {
    let granule = driver.granularity();
    let range = driver.reserve(2 * granule, granule).map_err(text)?;
    let base = range.base();
    let [a, b] = [driver.create(granule), driver.create(granule)];
    let (a, b) = (a.map_err(text)?, b.map_err(text)?);
    for (physical, fill) in [(&a, 0xaaaa_0001u32), (&b, 0xbbbb_0002)] {
        driver.map(&range, 0, physical).map_err(text)?;
        // SAFETY: a granule is mapped at the base, and only this check uses it.
        unsafe { driver.fill(base, fill, granule / 4) }.map_err(text)?;
        driver.unmap(&range, 0, granule).map_err(text)?;
    }
    for round in 0..20 {
        let offset = if round % 2 == 0 { 0 } else { granule };
        driver.map(&range, offset, &a).map_err(text)?;
        driver.map(&range, granule - offset, &b).map_err(text)?;
        let found = (read(driver, base + offset, 4)?, read(driver, base + granule - offset, 4)?);
        let wanted = (0xaaaa_0001u32.to_le_bytes().to_vec(), 0xbbbb_0002u32.to_le_bytes().to_vec());
        require(found == wanted, || format!("round {round}: {found:x?}"))?;
        driver.unmap(&range, 0, granule).map_err(text)?;
        driver.unmap(&range, granule, granule).map_err(text)?;
    }
    driver.release(a).map_err(text)?;
    driver.release(b).map_err(text)?;
    driver.unreserve(range).map_err(text)
}

fn without_handles(driver: &CudaDriver) -> Outcome {
    let granule = driver.granularity();
    let range = driver.reserve(granule, granule).map_err(text)?;
    let physical = driver.create(granule).map_err(text)?;
    driver.map(&range, 0, &physical).map_err(text)?;
    driver.release(physical).map_err(text)?;
    let written: Vec<u8> = (0..granule).map(|i| (i % 241) as u8).collect();
    write(driver, range.base(), &written)?;
    require(read(driver, range.base(), granule)? == written, || "contents differ".to_owned())?;
    driver.unmap(&range, 0, granule).map_err(text)?;
    driver.unreserve(range).map_err(text)
}

/// A handle that no driver has made.
fn forged(raw: u64, bytes: u64) -> Physical {
    // SAFETY: it is only passed to calls that refuse it.
    unsafe { Physical::new(raw, bytes) }
}

fn misuse(driver: &CudaDriver) -> Outcome {
    let granule = driver.granularity();
    invalid(driver.reserve(0, granule), "multiples")?;
    invalid(driver.reserve(granule, 3 * granule), "powers of two")?;
    invalid(driver.create(0), "multiples")?;
    invalid(driver.create(granule + 1), "multiples")?;
    let range = driver.reserve(4 * granule, granule).map_err(text)?;
    let physical = driver.create(2 * granule).map_err(text)?;
    driver.map(&range, granule, &physical).map_err(text)?;
    invalid(driver.map(&range, 0, &physical), "overlaps")?;
    invalid(driver.map(&range, 2 * granule, &physical), "overlaps")?;
    invalid(driver.map(&range, 3 * granule, &physical), "beyond the reservation")?;
    invalid(driver.map(&range, 1, &physical), "multiples")?;
    invalid(driver.map(&range, 0, &forged(7, granule)), "no live allocation")?;
    invalid(driver.unmap(&range, granule, granule), "undone whole")?;
    invalid(driver.unmap(&range, 0, granule), "nothing is mapped")?;
    invalid(driver.export(&forged(7, granule)), "no live allocation")?;
    invalid(driver.release(forged(physical.raw(), granule)), "no live allocation")?;
    // SAFETY: these are only passed to calls that refuse them.
    let stranger = |base, bytes| unsafe { Reservation::new(base, bytes) };
    match driver.unreserve(stranger(range.base(), range.bytes())) {
        Err(early) if early.is_invalid_state() => {}
        other => return Err(format!("giving a range back with a mapping in it: {other:?}")),
    }
    invalid(driver.unreserve(stranger(granule, granule)), "no live reservation")?;
    invalid(driver.import(Exported::Derived, granule), "simulation")?;
    invalid(driver.import(Exported::Bytes(vec![0; 3]), granule), "3 bytes")?;
    invalid(driver.wait_event(Stream::DEFAULT, &Event::numbered(3)), "no live event")?;
    driver.unmap(&range, granule, 2 * granule).map_err(text)?;
    let raw = (physical.raw(), physical.bytes());
    driver.release(physical).map_err(text)?;
    invalid(driver.release(forged(raw.0, raw.1)), "no live allocation")?;
    driver.unreserve(range).map_err(text)
}

fn foreign_descriptor(driver: &CudaDriver) -> Outcome {
    let file = std::fs::File::open("/dev/null").map_err(|error| error.to_string())?;
    match driver.import(Exported::Fd(OwnedFd::from(file)), driver.granularity()) {
        Ok(_) => Err("CUDA took /dev/null for memory".to_owned()),
        Err(error) => {
            println!("        (says: {error})");
            require(error.to_string().contains("CUDA_ERROR"), || error.to_string())
        }
    }
}

fn out_of_memory(driver: &CudaDriver) -> Outcome {
    for bytes in [10 << 40, driver.facts().total_bytes.next_multiple_of(driver.granularity())] {
        match driver.create(bytes) {
            Ok(_) => return Err(format!("{bytes} bytes were allocated")),
            Err(error) => {
                println!("        (says: {error})");
                let typed = error.is_out_of_memory() && error.to_string().contains("are free");
                require(typed, || error.to_string())?;
            }
        }
    }
    aliases(driver)
}

fn events(driver: &CudaDriver) -> Outcome {
    let event = driver.record_event(Stream::DEFAULT).map_err(text)?;
    driver.wait_event(Stream::DEFAULT, &event).map_err(text)?;
    driver.synchronize().map_err(text)?;
    require(!driver.is_capturing(Stream::DEFAULT), || "nothing is being captured".to_owned())?;
    // SAFETY: it is only passed to a call that refuses it, because the event is released.
    let again = unsafe { Event::from_raw(event.raw()) };
    driver.release_event(event);
    invalid(driver.wait_event(Stream::DEFAULT, &again), "no live event")
}

/// Checks that during a capture in the strictest mode memory can be made and mapped, that synchronizing is
/// refused, and that the capture succeeds.
fn capture(driver: &CudaDriver) -> Outcome {
    let ordinal = i32::try_from(driver.facts().ordinal).map_err(|error| error.to_string())?;
    let mut context = std::ptr::null_mut();
    // SAFETY: writes one handle through a valid pointer; ordinals and devices are the same number.
    let code = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, ordinal) };
    cuda(code, "cuDevicePrimaryCtxRetain")?;
    // SAFETY: the context was just retained.
    let code = unsafe { sys::cuCtxSetCurrent(context) };
    cuda(code, "cuCtxSetCurrent")?;
    let outcome = captured(driver);
    // SAFETY: having no current context is always allowed.
    let code = unsafe { sys::cuCtxSetCurrent(std::ptr::null_mut()) };
    cuda(code, "cuCtxSetCurrent")?;
    // SAFETY: releases the context that was retained above.
    let code = unsafe { sys::cuDevicePrimaryCtxRelease_v2(ordinal) };
    cuda(code, "cuDevicePrimaryCtxRelease")?;
    outcome
}

fn captured(driver: &CudaDriver) -> Outcome {
    let granule = driver.granularity();
    let mut raw = std::ptr::null_mut();
    // SAFETY: writes one handle through a valid pointer; flags 0 make a blocking stream.
    let code = unsafe { sys::cuStreamCreate(&raw mut raw, 0) };
    cuda(code, "cuStreamCreate")?;
    // SAFETY: the stream was just made, and is destroyed after its last use.
    let stream = unsafe { Stream::from_raw(raw as u64) };
    require(!driver.is_capturing(stream), || "capturing before the start".to_owned())?;
    let before = driver.record_event(stream).map_err(text)?;
    driver.synchronize().map_err(text)?;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: the stream was just made.
    let code = unsafe { sys::cuStreamBeginCapture_v2(raw, mode) };
    cuda(code, "cuStreamBeginCapture")?;
    let during = (|| {
        require(driver.is_capturing(stream), || "the capture is not noticed".to_owned())?;
        let error = driver.synchronize().err().ok_or("synchronize succeeded")?;
        require(error.is_invalid_state(), || error.to_string())?;
        let range = driver.reserve(granule, granule).map_err(text)?;
        let physical = driver.create(granule).map_err(text)?;
        driver.map(&range, 0, &physical).map_err(text)?;
        let exported = driver.export(&physical).map_err(text)?;
        let import = driver.import(exported, granule).map_err(text)?;
        driver.release(import).map_err(text)?;
        // An event from before the capture is complete, so the driver does not wait for it, which a
        // capture could not do. An event in the graph may not be queried for completion.
        driver.wait_event(stream, &before).map_err(text)?;
        require(driver.is_event_done(&before).map_err(text)?, || "not done".to_owned())?;
        let event = driver.record_event(stream).map_err(text)?;
        driver.wait_event(stream, &event).map_err(text)?;
        require(!driver.is_event_done(&event).map_err(text)?, || "done in a graph".to_owned())?;
        driver.unmap(&range, 0, granule).map_err(text)?;
        driver.release(physical).map_err(text)?;
        driver.unreserve(range).map_err(text)?;
        Ok(event)
    })();
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream is live; writes one handle through a valid pointer.
    let ended = unsafe { sys::cuStreamEndCapture(raw, &raw mut graph) };
    if !graph.is_null() {
        // SAFETY: the graph was just made, and is not used after this.
        let code = unsafe { sys::cuGraphDestroy(graph) };
        cuda(code, "cuGraphDestroy")?;
    }
    let after = during.and_then(|event| {
        let (waited, done) = (driver.wait_event(stream, &event), driver.is_event_done(&event));
        driver.release_event(event);
        waited.map_err(text)?;
        require(!done.map_err(text)?, || "done behind the capture".to_owned())
    });
    driver.release_event(before);
    // SAFETY: the stream is live, and is not used after this.
    let code = unsafe { sys::cuStreamDestroy_v2(raw) };
    after?;
    cuda(ended, "cuStreamEndCapture: the capture was invalidated")?;
    cuda(code, "cuStreamDestroy")?;
    driver.synchronize().map_err(text)
}

fn write(driver: &CudaDriver, address: u64, bytes: &[u8]) -> Outcome {
    // SAFETY: the checks pass addresses alone that they have mapped for this driver's device, and use them in one
    // thread.
    unsafe { driver.copy_from_host(address, bytes) }.map_err(text)
}

fn read(driver: &CudaDriver, address: u64, bytes: u64) -> Result<Vec<u8>, String> {
    let mut out = vec![0; bytes as usize];
    // SAFETY: the checks pass addresses alone that they have mapped for this driver's device, and use them in one
    // thread.
    unsafe { driver.copy_to_host(&mut out, address) }.map_err(text)?;
    Ok(out)
}

fn require(holds: bool, otherwise: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(otherwise()) }
}

fn invalid<T>(result: symmpool_allocator::Result<T>, why: &str) -> Outcome {
    match result {
        Ok(_) => Err(format!("accepted, but expected to be refused with {why:?}")),
        Err(error) => {
            require(error.is_invalid_argument() && error.to_string().contains(why), || {
                format!("{error}, where an invalid argument ({why:?}) was expected")
            })
        }
    }
}

fn cuda(code: sys::CUresult, what: &str) -> Outcome {
    require(code == sys::CUresult::CUDA_SUCCESS, || format!("{what}: {code:?}"))
}
