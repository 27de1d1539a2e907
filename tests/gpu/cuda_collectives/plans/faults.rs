//! Ranks that run different plans, or none: all get the same typed error, in bounded time.

use std::time::{Duration, Instant};

use symmpool_allocator::{Pool, Result, Stream};
use symmpool_collectives::{Algorithm, Communicator, CommunicatorOptions, DType, Request};

use super::all;
use crate::cuda::stream;
use crate::{MAX_LATE, expect_error};

/// Programs that wait in every way: for all, for a neighbour, at barriers, and for data in LL.
const NAMES: [&str; 4] = ["two_shot", "ring", "two_shot_pull", "two_shot_in_scratch_ll"];

pub(crate) fn run(pool: &Pool, timeout: Duration) -> Result<u32> {
    let block = pool.alloc::<u8>(1 << 20)?;
    pool.commit()?;
    let (rank, last) = (pool.rank(), pool.world() - 1);
    let stream = stream(pool)?;
    let algorithms: Vec<Algorithm> = all(pool.world())
        .into_iter()
        .filter(|plan| NAMES.contains(&plan.name.as_str()))
        .map(|plan| Algorithm::from_plan(plan).expect("a right program"))
        .collect();
    let call = |comm: &Communicator, algorithm: &Algorithm, stream: &Stream| {
        let at = block.address();
        let (to, from) = (at as *mut u8, at as *const u8);
        // SAFETY: the block is longer.
        unsafe { comm.call(&Request::at(algorithm, to, from, 10_000, DType::F32), stream) }
    };
    let mut wrong = 0;
    let usual = CommunicatorOptions { timeout, ..Default::default() };
    let patient = CommunicatorOptions { timeout: 20 * timeout, ..usual.clone() };
    for (nth, algorithm) in algorithms.iter().enumerate() {
        let other = &algorithms[(nth + 1) % algorithms.len()];
        // Compiles kernels before anything is timed.
        let first = Communicator::with_options(pool, &patient)?;
        call(&first, algorithm, &stream)?;
        call(&first, other, &stream)?;
        first.synchronize(&stream)?;

        let comm = Communicator::with_options(pool, &usual)?;
        let began = Instant::now();
        let which = if rank == last { other } else { algorithm };
        let result = call(&comm, which, &stream).and_then(|()| comm.synchronize(&stream));
        let error = expect_error(result, "another plan")?;
        let took = began.elapsed();
        if !error.is_diverged() || took > timeout + MAX_LATE {
            wrong += 1;
            println!("rank {rank}: {}: another plan, after {took:?}: {error}", algorithm.name());
        }

        let comm = Communicator::with_options(pool, &usual)?;
        if rank == last {
            std::thread::sleep(timeout + Duration::from_millis(500));
            continue;
        }
        let began = Instant::now();
        let result = call(&comm, algorithm, &stream).and_then(|()| comm.synchronize(&stream));
        let error = expect_error(result, "a plan without a peer")?;
        let took = began.elapsed();
        // A rank may be told of a peer that gave up, which waited for the missing one.
        let is_named = error.ranks().contains(&last) || error.to_string().contains("gave up");
        if !error.is_timeout() || !is_named || took > timeout + MAX_LATE {
            wrong += 1;
            println!("rank {rank}: {}: alone, after {took:?}: {error}", algorithm.name());
        }
    }
    Ok(wrong)
}
