//! A rank that cannot make its part of a pool: all ranks get the reason at once, and the next pool of the group can be
//! made, because all of them have counted this one.

use std::time::{Duration, Instant};

use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::{Driver, Error, Group, Pool, PoolBuilder};
use symmpool_tests::launch::Job;
use symmpool_tests::rank_process::{PATIENCE, RankProcess};

/// How soon all ranks must return, which is far less than their timeout.
const SOON: Duration = Duration::from_secs(5);

const WORLD: u32 = 3;

/// Causes that keep one rank from making a pool, each with a part of the error's text.
const REFUSALS: [(&str, &str); 5] = [
    ("device", "rank 1 failed in the handshake"),
    ("other failure", "nothing is configured here"),
    ("stride", "stride"),
    ("lanes", "two lanes are called \"twice\""),
    ("ranges", "do not fit in a stride"),
];

/// The test function that every rank runs.
#[test]
fn rank() {
    let Some(process) = RankProcess::from_env() else { return };
    let member = process.join();
    let group = member.group.clone().with_timeout(PATIENCE);
    let started = Instant::now();
    let error = attempt(&group, &process).map(drop).unwrap_err();
    process.report("after", started.elapsed().as_millis());
    process.report("says", &error);
    // The next pool, which all ranks can make.
    let pool = Pool::builder(group).driver(Driver::host().unwrap()).build();
    match pool {
        Ok(pool) => process.report("next", pool.group().name()),
        Err(error) => process.report("next", error),
    }
}

fn attempt(group: &Group, process: &RankProcess) -> Result<Pool, Error> {
    let well = |group| Pool::builder(group).driver(Driver::host().unwrap());
    let twice = || LaneConfig::symmetric("twice");
    let builder: PoolBuilder = match process.scenario.as_str() {
        _ if process.rank != 1 => well(group.clone()),
        "device" => Pool::builder(group.clone()).driver_or_failure(Driver::cuda(1000)),
        "other failure" => Pool::builder(group.clone())
            .driver_or_failure(Err(Error::invalid_argument("nothing is configured here"))),
        "stride" => well(group.clone()).stride(1 << 20),
        "lanes" => well(group.clone()).lane(twice()).lane(twice()),
        "ranges" => well(group.clone()).lane(twice().range(1 << 31)).stride(1 << 30),
        other => panic!("a scenario: {other:?}"),
    };
    builder.build()
}

#[test]
fn what_one_rank_refuses_fails_on_all_at_once_and_the_next_pool_is_made() {
    if RankProcess::from_env().is_some() {
        return;
    }
    for (refusal, says) in REFUSALS {
        let reports = Job::new("rank", refusal, WORLD).run();
        for report in &reports {
            let context = || format!("{refusal}, rank {}: {:#?}", report.rank, report.values);
            assert!(report.status.success(), "{:?} {}", report.status, context());
            let text = report.value("says");
            assert!(text.contains("rank 1 failed in the handshake"), "{}", context());
            assert!(text.contains(says), "{}", context());
            assert_eq!(text, reports[0].value("says"), "{}", context());
            let after: u128 = report.value("after").parse().unwrap();
            assert!(after < SOON.as_millis(), "{}", context());
            assert_eq!(report.value("next"), "symmpool/pool.1", "{}", context());
        }
    }
}
