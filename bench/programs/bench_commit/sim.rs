//! The protocol of a commit on thousands of ranks, which are threads with simulated memory.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use symmpool_allocator::lane::{LaneConfig, WindowPolicy};
use symmpool_allocator::store::StoreTraffic;
use symmpool_allocator::{Deadline, Driver, Error, Group, Pool, Result};

/// Stack size of a rank's thread: enough for the handshake, and small enough for thousands of threads.
const STACK: usize = 256 << 10;

/// Measurements of one rank in one commit.
struct CommitCost {
    traffic: StoreTraffic,
    time: Duration,
}

/// Commits one segment and several, on few ranks and on `ranks`. The number of round trips must be the same in
/// all cases.
pub(crate) fn run(ranks: u32, deadline: Deadline) -> Result<Value, String> {
    let mut results = Vec::new();
    let mut expected = None;
    for (world, segments) in [(ranks.min(16), 1), (ranks.min(256), 1), (ranks, 1), (ranks, 4)] {
        let built = Instant::now();
        let (seen, total) = world_of(world, segments, deadline).map_err(|e| e.to_string())?;
        let all = built.elapsed();
        let trips = seen[0].traffic.round_trips;
        let expected = *expected.get_or_insert(trips);
        if let Some(rank) = seen.iter().position(|seen| seen.traffic.round_trips != expected) {
            return Err(format!(
                "rank {rank} of {world} needed {} round trips to commit {segments} segments; \
                 others {expected}",
                seen[rank].traffic.round_trips
            ));
        }
        let sum =
            |of: fn(&StoreTraffic) -> u64| seen.iter().map(|seen| of(&seen.traffic)).sum::<u64>();
        let (sent, received) = (sum(|t| t.bytes_sent), sum(|t| t.bytes_received));
        println!(
            "{world:>5} ranks, {segments} segments: {trips} store round trips per rank, {sent} bytes \
             sent and {received} received in total, commit {:.1} ms (slowest rank {:.1} ms), \
             {:.1} s including building the pools",
            total.as_secs_f64() * 1e3,
            seen.iter().map(|seen| seen.time).max().unwrap_or_default().as_secs_f64() * 1e3,
            all.as_secs_f64(),
        );
        results.push(json!({
            "ranks": world,
            "segments": segments,
            "round_trips_per_rank": trips,
            "bytes_sent_total": sent,
            "bytes_received_total": received,
            "commit_ms": total.as_secs_f64() * 1e3,
            "with_building_s": all.as_secs_f64(),
        }));
    }
    Ok(json!({ "simulated": results }))
}

/// The measurements of each rank, and the time from the first rank's begin of the commit to the last one's end.
fn world_of(world: u32, segments: u64, deadline: Deadline) -> Result<(Vec<CommitCost>, Duration)> {
    let groups = Group::in_process(world)?;
    let outcomes: Vec<Result<(CommitCost, Instant, Instant)>> = thread::scope(|scope| {
        let mut threads = Vec::new();
        for group in groups {
            let group = group.with_timeout(deadline.remaining());
            let spawned = thread::Builder::new()
                .stack_size(STACK)
                .spawn_scoped(scope, move || rank(&group, segments, deadline));
            // If a rank cannot be started, the others end at the deadline.
            threads.push(spawned.map_err(|error| Error::system("starting a rank", error)));
        }
        let join = |thread: Result<thread::ScopedJoinHandle<'_, _>>| {
            let joined = thread?.join();
            joined.unwrap_or_else(|_| Err(Error::invalid_state("a rank's thread panicked")))
        };
        threads.into_iter().map(join).collect()
    });
    let seen = outcomes.into_iter().collect::<Result<Vec<_>>>()?;
    let first = seen.iter().map(|(_, began, _)| *began).min();
    let last = seen.iter().map(|(_, _, ended)| *ended).max();
    let total = first.zip(last).map(|(first, last)| last - first).unwrap_or_default();
    Ok((seen.into_iter().map(|(seen, ..)| seen).collect(), total))
}

fn rank(
    group: &Group,
    segments: u64,
    deadline: Deadline,
) -> Result<(CommitCost, Instant, Instant)> {
    let driver = Driver::sim(u64::from(group.rank()));
    let lane = LaneConfig::symmetric("default").window_policy(WindowPolicy::PerSegment);
    let pool = Pool::builder(group.clone()).driver(driver).lane(lane).build()?;
    let lane = pool.default_lane();
    // Each block is as large as the largest segment, so it is one segment.
    let blocks = (0..segments).map(|_| lane.alloc::<u8>(1 << 30)).collect::<Result<Vec<_>>>()?;
    group.all_gather("start", b"", deadline)?;
    let before = group.store().traffic();
    let began = Instant::now();
    let report = pool.commit_by(deadline)?;
    let ended = Instant::now();
    let after = group.store().traffic();
    if report.windows_added != segments {
        return Err(Error::invalid_state(format!(
            "{} windows were made, expected {segments}",
            report.windows_added
        )));
    }
    drop(blocks);
    let traffic = StoreTraffic {
        round_trips: after.round_trips - before.round_trips,
        bytes_sent: after.bytes_sent - before.bytes_sent,
        bytes_received: after.bytes_received - before.bytes_received,
    };
    Ok((CommitCost { traffic, time: ended - began }, began, ended))
}
