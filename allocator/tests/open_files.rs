//! The soft limit of open files does not limit a commit. This test changes the limits of its process, so it is
//! alone in it.

use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::testing::{on_each, on_ranks};
use symmpool_allocator::{Block, Driver, Group, Pool, PoolBuilder};

const LANES: usize = 20;

/// A pool with [`LANES`] lanes of one segment each.
fn pool(group: Group) -> (Pool, Vec<Block<u8>>) {
    let lane = |n| LaneConfig::symmetric(format!("lane {n}")).limit(2 << 20);
    let builder = Pool::builder(group.with_timeout(Duration::from_secs(20)))
        .driver(Driver::host().unwrap())
        .stride(1 << 32);
    let pool = (0..LANES).map(lane).fold(builder, PoolBuilder::lane).build().unwrap();
    let lanes = pool.lanes().take(LANES);
    let blocks = lanes.map(|lane| lane.alloc::<u8>(1 << 20).unwrap()).collect();
    (pool, blocks)
}

#[test]
fn a_commit_receives_handles_up_to_the_hard_limit() {
    let pools = on_ranks(2, pool);
    let used = std::fs::read_dir("/proc/self/fd").unwrap().count();
    // Enough for the handles that ranks send, which both have open before any is received, but not for those
    // that they receive.
    let soft = (used + 2 * LANES + LANES / 2) as u64;
    let limit = Rlimit { current: Some(soft), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let reports = on_each(&pools, |(pool, _)| pool.commit());
    for report in reports {
        assert_eq!(report.unwrap().windows_added, LANES as u64);
    }
}
