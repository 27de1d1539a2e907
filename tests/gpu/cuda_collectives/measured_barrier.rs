//! Checks barriers that measure how long they wait for each rank, with another rank that is late each time.

use std::time::Duration;

use symmpool_allocator::{Pool, Result};
use symmpool_collectives::Communicator;

use crate::cuda::{CallGraph, download, stream, upload};
use crate::{ORDINARY, Options};

const LATE: Duration = Duration::from_millis(200);
/// Least cycles that a wait for a late rank takes: devices have more than 500 million cycles a second.
const CYCLES: i64 = 50_000_000;

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let (rank, world) = (pool.rank(), pool.world());
    let comm = Communicator::with_options(pool, &options.communicator())?;
    let (stream, bytes) = (stream(pool)?, 8 * world as usize);
    let waits = pool.lane(ORDINARY)?.alloc::<i64>(world as usize)?;
    pool.commit()?;
    // SAFETY: the block has a number for each rank, and lives until the streams are past the calls.
    let barrier = || unsafe { comm.measured_barrier_at(waits.as_ptr(), &stream) };
    // The kernel is loaded before the capture.
    barrier()?;
    comm.synchronize(&stream)?;
    let graph = CallGraph::capture(pool, stream, barrier)?;
    let (mut cases, mut wrong) = (0, 0);
    for late in 0..world {
        upload(pool, waits.address(), &vec![0; bytes])?;
        for captured in [false, true] {
            comm.barrier(&stream)?;
            comm.synchronize(&stream)?;
            if rank == late {
                std::thread::sleep(LATE);
            }
            if captured {
                graph.launch(pool, stream)?;
            } else {
                barrier()?;
            }
            comm.synchronize(&stream)?;
        }
        let found = download(pool, waits.address(), bytes)?;
        let found: Vec<i64> =
            found.chunks_exact(8).map(|it| i64::from_ne_bytes(it.try_into().unwrap())).collect();
        let longest = found.iter().copied().max().unwrap_or(0);
        let right = found[rank as usize] == 0
            && found.iter().all(|cycles| *cycles >= 0)
            && (rank == late || (found[late as usize] == longest && longest > 2 * CYCLES));
        cases += 1;
        if !right {
            wrong += 1;
            println!("rank {rank}: with rank {late} late, waits of {found:?} cycles");
        }
    }
    graph.destroy(pool)?;
    if rank == 0 {
        println!("measured barriers: {cases} cases, {wrong} wrong");
    }
    Ok((cases, wrong))
}
