//! Ranks that are threads of one process, each with a pool in host memory.

use std::time::Duration;

use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::testing::on_ranks;
use symmpool_allocator::{Driver, Group, Pool};

/// How long ranks wait for each other where nothing is expected to fail.
const TIMEOUT: Duration = Duration::from_secs(20);

/// This rank's pool, with a symmetric lane and a local one, `own`.
pub(crate) fn pool(group: Group) -> Pool {
    Pool::builder(group.with_timeout(TIMEOUT))
        .driver(Driver::host().unwrap())
        .lane(LaneConfig::symmetric("default"))
        .lane(LaneConfig::local("own"))
        .build()
        .unwrap()
}

/// Runs `body` as every rank of a pool. If a rank panics, so does this.
pub(crate) fn ranks(world: u32, body: impl Fn(&Pool) + Sync) {
    on_ranks(world, |group| body(&pool(group)));
}
