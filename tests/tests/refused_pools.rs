//! A rank that cannot make its part of a pool: all are told why, at once, and the next pool of the
//! group is made, as all have counted this one.

use std::time::{Duration, Instant};

use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::{Driver, Error, Group, Pool, PoolBuilder};
use symmpool_tests::launch::Job;
use symmpool_tests::rank_process::{PATIENCE, Seat};

/// How soon all know: far less than what they were ready to wait.
const SOON: Duration = Duration::from_secs(5);

const WORLD: u32 = 3;

/// What keeps one rank from making a pool, and what the error says of it.
const REFUSALS: [(&str, &str); 5] = [
    ("device", "rank 1 failed in the handshake"),
    ("other failure", "nothing is configured here"),
    ("stride", "stride"),
    ("lanes", "two lanes are called \"twice\""),
    ("ranges", "do not fit a stride"),
];

/// The test function that every rank runs.
#[test]
fn rank() {
    let Some(seat) = Seat::from_env() else { return };
    let member = seat.join();
    let group = member.group.clone().with_timeout(PATIENCE);
    let started = Instant::now();
    let error = attempt(&group, &seat).map(drop).unwrap_err();
    seat.say("after", started.elapsed().as_millis());
    seat.say("says", &error);
    // One on which all agree.
    let pool = Pool::builder(group).driver(Driver::host().unwrap()).build();
    match pool {
        Ok(pool) => seat.say("next", pool.group().name()),
        Err(error) => seat.say("next", error),
    }
}

fn attempt(group: &Group, seat: &Seat) -> Result<Pool, Error> {
    let well = |group| Pool::builder(group).driver(Driver::host().unwrap());
    let twice = || LaneConfig::symmetric("twice");
    let builder: PoolBuilder = match seat.scenario.as_str() {
        _ if seat.rank != 1 => well(group.clone()),
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
fn what_one_rank_refuses_all_hear_at_once_and_the_next_pool_is_made() {
    if Seat::from_env().is_some() {
        return;
    }
    for (refusal, says) in REFUSALS {
        let reports = Job::new("rank", refusal, WORLD).run();
        for report in &reports {
            let told = || format!("{refusal}, rank {}: {:#?}", report.rank, report.said);
            assert!(report.status.success(), "{:?} {}", report.status, told());
            let heard = report.said("says");
            assert!(heard.contains("rank 1 failed in the handshake"), "{}", told());
            assert!(heard.contains(says), "{}", told());
            assert_eq!(heard, reports[0].said("says"), "{}", told());
            let after: u128 = report.said("after").parse().unwrap();
            assert!(after < SOON.as_millis(), "{}", told());
            assert_eq!(report.said("next"), "symmpool/pool.1", "{}", told());
        }
    }
}
