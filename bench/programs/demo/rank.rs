//! One rank: it runs the tensor program with both kinds of memory, then the timings.

use std::time::Duration;

use symmpool_allocator::{Deadline, Driver, Group, Pool, Result};
use symmpool_collectives::{Communicator, CommunicatorOptions};

use crate::address_ordered::AddressOrdered;
use crate::clutter::Clutter;
use crate::report::{Order, Report};
use crate::symmetric::{Symmetric, check_map};
use crate::{program, timing};

const TIMEOUT: Duration = Duration::from_secs(30);

/// Runs a rank, which the environment describes.
pub(crate) fn run(same_holes: bool) -> bool {
    let outcome = run_all(same_holes);
    if let Err(error) = &outcome {
        Report::Failed(error.to_string()).send();
    }
    outcome.is_ok()
}

fn run_all(same_holes: bool) -> Result<()> {
    let group = Group::from_env(Deadline::after(TIMEOUT))?.with_timeout(TIMEOUT);
    let ranks = (group.rank(), group.world());
    let mut clutter = Clutter::new(if same_holes { 0 } else { group.rank() })?;

    let pool = Pool::builder(group.clone()).driver(Driver::host()?).build()?;
    let options = CommunicatorOptions { timeout: TIMEOUT, ..CommunicatorOptions::default() };
    let comm = Communicator::with_options(&pool, &options)?;

    let mut address_ordered = AddressOrdered::new(&group, &comm, &mut clutter)?;
    program::run(&mut address_ordered, Order::Address, ranks, || clutter.churn())?;
    drop(address_ordered);

    let mut symmetric = Symmetric { pool: &pool, comm: &comm, numbers: Vec::new() };
    program::run(&mut symmetric, Order::Counter, ranks, || clutter.churn())?;
    check_map(&pool)?;

    timing::run(&pool, &comm)?;
    // Rank 0 serves the store, so it must not end before the others.
    comm.barrier(&symmpool_allocator::Stream::DEFAULT)
}
