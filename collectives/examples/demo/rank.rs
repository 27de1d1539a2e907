//! One rank: both runs of the tensor program, then the timings.

use std::time::Duration;

use symmpool_allocator::{Deadline, Driver, Group, Pool, Result};
use symmpool_collectives::{Communicator, CommunicatorOptions};

use crate::address_ordered::ByAddress;
use crate::clutter::Clutter;
use crate::report::{Order, Report};
use crate::symmetric::{Symmetric, check_map};
use crate::{program, timing};

const TIMEOUT: Duration = Duration::from_secs(30);

/// Runs a rank; the environment says which.
pub(crate) fn run(same_holes: bool) -> bool {
    let outcome = whole(same_holes);
    if let Err(error) = &outcome {
        Report::Failed(error.to_string()).send();
    }
    outcome.is_ok()
}

fn whole(same_holes: bool) -> Result<()> {
    let group = Group::from_env(Deadline::after(TIMEOUT))?.with_timeout(TIMEOUT);
    let ranks = (group.rank(), group.world());
    let mut clutter = Clutter::new(if same_holes { 0 } else { group.rank() })?;

    let pool = Pool::builder(group.clone()).driver(Driver::host()?).build()?;
    let options = CommunicatorOptions { timeout: TIMEOUT, ..CommunicatorOptions::default() };
    let comm = Communicator::with_options(&pool, &options)?;

    let mut address_ordered = ByAddress::new(&group, &comm, &mut clutter)?;
    program::run(&mut address_ordered, Order::Address, ranks, || clutter.churn())?;
    drop(address_ordered);

    let mut symmetric = Symmetric { pool: &pool, comm: &comm, numbers: Vec::new() };
    program::run(&mut symmetric, Order::Counter, ranks, || clutter.churn())?;
    check_map(&pool)?;

    timing::run(&pool, &comm)?;
    // Rank 0 serves the store: it stays until all are done.
    comm.barrier(&symmpool_allocator::Stream::DEFAULT)
}
