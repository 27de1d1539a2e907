//! One rank process, which measures and reports the results.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use symmpool_allocator::driver::{CudaDriver, HostDriver, HostOptions};
use symmpool_allocator::lane::{LaneConfig, WindowPolicy};
use symmpool_allocator::store::TcpStore;
use symmpool_allocator::store::tcp::TcpOptions;
use symmpool_allocator::{Block, Deadline, Driver, Error, Group, Lane, Pool, PoolBuilder, Result};

use crate::CommitBenchOptions;
use crate::figures::micros;
use crate::phases::{Notebook, RecordedDriver, RoundPart};

const MIB: u64 = 1 << 20;

/// How often the check whether a commit is due is called.
const CHECKS: u32 = 1_000_000;

/// One kind of commit to measure.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) policy: WindowPolicy,
    pub(crate) lanes: usize,
    /// How many blocks each lane allocates before a commit. Each of them makes the lane grow.
    blocks: usize,
    block_mib: u64,
    /// How many windows one commit makes of them.
    pub(crate) segments: u64,
    /// Whether pages are allocated. Sharing a segment does not access them, so 1,000 segments of 48 MiB can
    /// be shared even if they do not fit in memory.
    pub(crate) populate: bool,
    /// Whether another window stays throughout. Without one, peers' devices are connected anew for every
    /// commit, which takes longer than all the rest.
    pub(crate) keep_window: bool,
    /// Upper bounds for the median time of a commit, in milliseconds: for host memory, and for devices.
    /// `None` if it is not measured.
    pub(crate) bar_ms: [Option<f64>; 2],
}

impl Scenario {
    /// The scenarios for host memory or for devices, each with its bound in milliseconds.
    pub(crate) fn all(cuda: bool) -> impl Iterator<Item = (&'static Self, f64)> {
        SCENARIOS.iter().filter_map(move |each| Some((each, each.bar_ms[usize::from(cuda)]?)))
    }
}

const SCENARIOS: [Scenario; 5] = [
    Scenario {
        name: "one segment of 64 MiB",
        policy: WindowPolicy::PerSegment,
        lanes: 1,
        blocks: 1,
        block_mib: 64,
        segments: 1,
        populate: true,
        keep_window: true,
        bar_ms: [Some(3.0), Some(2.0)],
    },
    Scenario {
        name: "64 MiB of a contiguous lane",
        policy: WindowPolicy::Contiguous,
        lanes: 1,
        blocks: 1,
        block_mib: 64,
        segments: 1,
        populate: true,
        keep_window: true,
        bar_ms: [Some(3.0), Some(2.0)],
    },
    Scenario {
        name: "64 blocks of 8 MiB",
        policy: WindowPolicy::Contiguous,
        lanes: 1,
        blocks: 64,
        block_mib: 8,
        // Segments of 16 to 48 MiB, because the growth increases with the lane.
        segments: 14,
        populate: false,
        keep_window: true,
        bar_ms: [Some(20.0), Some(20.0)],
    },
    Scenario {
        name: "64 MiB, and no other window",
        policy: WindowPolicy::PerSegment,
        lanes: 1,
        blocks: 1,
        block_mib: 64,
        segments: 1,
        populate: true,
        keep_window: false,
        bar_ms: [None, Some(60.0)],
    },
    // A lane of 125 segments of 48 MiB is still too small to grow by more at a time.
    Scenario {
        name: "1000 segments of 48 MiB",
        policy: WindowPolicy::Contiguous,
        lanes: 8,
        blocks: 125,
        block_mib: 48,
        segments: 1000,
        populate: false,
        keep_window: false,
        bar_ms: [Some(250.0), None],
    },
];

/// Measures everything as `rank`, together with the other ranks at `address`.
pub(crate) fn run(
    rank: u32,
    address: &str,
    options: &CommitBenchOptions,
    deadline: Deadline,
) -> Result<Value> {
    let notes = Notebook::new();
    let store = TcpStore::connect_as(address, TcpOptions::default(), rank, deadline)?;
    let mut group =
        Group::new(rank, options.ranks, Arc::new(store))?.with_timeout(deadline.remaining());
    if options.hosts > 1 {
        let host = rank / (options.ranks / options.hosts);
        group = group.with_host_id(format!("pretended-{host}"));
    }
    let mut scenarios = Vec::new();
    for (scenario, _) in Scenario::all(options.cuda) {
        scenarios.push(measure(&group, scenario, options, &notes)?);
    }
    let (check_ns, empty) = nothing_due(&group, options)?;
    let gather = store_gathers(&group, options)?;
    // No rank may leave before the others have finished.
    group.all_gather("end", b"", deadline)?;
    Ok(json!({
        "scenarios": scenarios,
        "check_ns": check_ns,
        "empty_commit_us": empty,
        "store_gather_us": gather,
    }))
}

/// The driver of this rank: for host memory, or for a device.
fn driver(group: &Group, options: &CommitBenchOptions, populate: bool) -> Result<Driver> {
    if options.cuda {
        return Driver::cuda(group.rank() % CudaDriver::device_count()?.max(1));
    }
    let options = HostOptions { populate, ..HostOptions::default() };
    Ok(Driver::new(HostDriver::with_options(options)?))
}

fn measure(
    group: &Group,
    scenario: &Scenario,
    options: &CommitBenchOptions,
    notes: &Notebook,
) -> Result<Value> {
    let inner = driver(group, options, scenario.populate)?;
    let watched = RecordedDriver { inner, notes: notes.clone() };
    let lanes = (0..scenario.lanes)
        .map(|lane| LaneConfig::symmetric(format!("lane {lane}")).window_policy(scenario.policy));
    let builder = Pool::builder(group.clone())
        .driver(Driver::new(watched))
        .allow_shared_device()
        .lane(LaneConfig::symmetric("kept"));
    let pool = lanes.fold(builder, PoolBuilder::lane).build()?;
    let lanes: Vec<Lane> = pool.lanes().skip(1).take(scenario.lanes).collect();
    let _kept = if scenario.keep_window { Some(pool.alloc::<u8>(1)?) } else { None };
    pool.commit()?;
    let start = group.child("start");
    let (mut allocs, mut commits, mut releases) = (Vec::new(), Vec::new(), Vec::new());
    let mut traffic = json!(null);
    // The first round is not counted, because page tables and socket buffers are made in it.
    for round in 0..=options.repeats {
        if round <= 1 {
            notes.forget();
        }
        notes.begin(RoundPart::Allocate);
        let began = Instant::now();
        let blocks = fill(&lanes, scenario)?;
        allocs.push(micros(began.elapsed()));
        start.all_gather("commit", b"", group.deadline())?;
        let before = pool.stats()?.store;
        notes.begin(RoundPart::Commit);
        let began = Instant::now();
        let report = pool.commit()?;
        commits.push(micros(began.elapsed()));
        notes.end_commit();
        let after = pool.stats()?.store;
        if report.windows_added != scenario.segments {
            return Err(Error::invalid_state(format!(
                "{}: {} windows were made, expected {}",
                scenario.name, report.windows_added, scenario.segments
            )));
        }
        traffic = json!({
            "round_trips": after.round_trips - before.round_trips,
            "bytes_sent": after.bytes_sent - before.bytes_sent,
            "bytes_received": after.bytes_received - before.bytes_received,
        });
        drop(blocks);
        for lane in &lanes {
            lane.trim()?;
        }
        start.all_gather("release", b"", group.deadline())?;
        notes.begin(RoundPart::GiveBack);
        let began = Instant::now();
        pool.commit()?;
        releases.push(micros(began.elapsed()));
    }
    let mut seen = notes.report();
    seen["alloc_us"] = json!(allocs[1..]);
    seen["commit_us"] = json!(commits[1..]);
    seen["release_us"] = json!(releases[1..]);
    seen["traffic"] = traffic;
    Ok(seen)
}

fn fill(lanes: &[Lane], scenario: &Scenario) -> Result<Vec<Block<u8>>> {
    let bytes = (scenario.block_mib * MIB) as usize;
    let each = |lane| (0..scenario.blocks).map(move |_| Lane::alloc(lane, bytes));
    lanes.iter().flat_map(each).collect()
}

/// Microseconds of round trips of the store in which all ranks take part: the steps of which commits over hosts are made.
fn store_gathers(group: &Group, options: &CommitBenchOptions) -> Result<Vec<f64>> {
    let start = group.child("trips");
    let mut times = Vec::new();
    for trip in 0..=options.repeats {
        start.all_gather("begin", b"", group.deadline())?;
        let began = Instant::now();
        start.all_gather("trip", &[0; 64], group.deadline())?;
        if trip > 0 {
            times.push(micros(began.elapsed()));
        }
    }
    Ok(times)
}

/// Times of the check whether a commit is due when none is, in nanoseconds, and of commits without new memory,
/// in microseconds.
fn nothing_due(group: &Group, options: &CommitBenchOptions) -> Result<(f64, Vec<f64>)> {
    let driver = driver(group, options, true)?;
    let pool = Pool::builder(group.clone()).driver(driver).allow_shared_device().build()?;
    let _block = pool.alloc::<u8>(1)?;
    pool.commit()?;
    let began = Instant::now();
    for _ in 0..CHECKS {
        if black_box(&pool).commit_if_due()?.is_some() {
            return Err(Error::invalid_state("a commit was due though nothing had grown"));
        }
    }
    let check = began.elapsed().as_nanos() as f64 / f64::from(CHECKS);
    let start = group.child("start");
    let mut empty = Vec::new();
    for _ in 0..options.repeats {
        start.all_gather("empty", b"", group.deadline())?;
        let began = Instant::now();
        pool.commit()?;
        empty.push(micros(began.elapsed()));
    }
    Ok((check, empty))
}
