//! Checks two threads of each rank with one communicator, each on a stream of its own: in one order on all ranks, where all is
//! right, and in none, where what is not right is an error on all ranks.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::{Block, Error, Pool, Result, Stream};
use symmpool_collectives::{Communicator, DType, ReduceOp};

use crate::Options;
use crate::cuda::{download, stream, upload};
use crate::tally::Tally;

/// Elements of the longest call.
const ROOM: usize = 40_000;
/// Calls of both threads in order, and of each without.
const CALLS: usize = 60;
const EACH: usize = 12;
/// How long ranks may wait where none is late.
const AT_ONCE: Duration = Duration::from_secs(60);

/// Objects that a thread makes calls with.
struct Worker<'a> {
    pool: &'a Pool,
    comm: &'a Communicator,
    stream: Stream,
    blocks: &'a [Block<u8>; 2],
}

impl Worker<'_> {
    /// Makes an all-reduce in place of so many elements of a block, which is the same on all ranks for the same number. Returns whether
    /// it is right.
    fn call(&self, block: usize, count: usize, number: usize) -> Result<bool> {
        let value = |rank: u32| (number % 50) as f32 + rank as f32;
        let at = self.blocks[block].address();
        upload(self.pool, at, &value(self.pool.rank()).to_le_bytes().repeat(count))?;
        let (to, from, dtype) = (at as *mut u8, at as *const u8, DType::F32);
        // SAFETY: the block is longer, and nothing else uses it.
        unsafe { self.comm.all_reduce_at(to, from, count, dtype, ReduceOp::Sum, &self.stream) }?;
        self.comm.synchronize(&self.stream)?;
        let sum: f32 = (0..self.pool.world()).map(value).sum();
        let found = download(self.pool, at, 4 * count)?;
        Ok(found.chunks_exact(4).all(|four| four == sum.to_le_bytes()))
    }
}

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let mut tally = Tally::new(pool);
    let blocks = &[pool.alloc(4 * ROOM)?, pool.alloc(4 * ROOM)?];
    pool.commit()?;
    let streams = [stream(pool)?, stream(pool)?];

    let comm = Communicator::with_options(pool, &options.communicator())?;
    let next = Mutex::new(0);
    let wrong = thread::scope(|scope| {
        let threads = streams.map(|stream| {
            let (worker, next) = (Worker { pool, comm: &comm, stream, blocks }, &next);
            scope.spawn(move || -> Result<u64> {
                let mut wrong = 0;
                loop {
                    // Whichever thread comes next makes the next call. The lock is held until it is made.
                    let mut next = next.lock().expect("no panic");
                    if *next == CALLS {
                        return Ok(wrong);
                    }
                    wrong += u64::from(!worker.call(*next % 2, 1 + *next * 601 % ROOM, *next)?);
                    *next += 1;
                }
            })
        });
        threads.into_iter().map(|each| each.join().expect("no panic")).sum::<Result<u64>>()
    })?;
    tally.cases += CALLS as u64;
    tally.wrong += wrong;

    // No two calls have the same length, so ranks can tell them apart.
    let comm = Communicator::with_options(pool, &options.communicator())?;
    let began = Instant::now();
    let ends: Vec<Result<bool>> = thread::scope(|scope| {
        let threads = [0, 1].map(|odd| {
            let worker = Worker { pool, comm: &comm, stream: streams[odd], blocks };
            scope.spawn(move || {
                for nth in 0..EACH {
                    match worker.call(odd, 100 + 2 * nth + odd, nth) {
                        Ok(true) => {}
                        end => return end,
                    }
                }
                Ok(true)
            })
        });
        threads.into_iter().map(|each| each.join().expect("no panic")).collect()
    });
    for end in ends {
        let right = match &end {
            Ok(right) => *right,
            // A rank that stops at an error is missed by the others.
            Err(error) => error.is_diverged() || is_missed(error),
        };
        tally.expect(&format!("threads without an order: {end:?}"), right);
    }
    tally.expect("threads without an order wait", began.elapsed() < AT_ONCE);
    if pool.rank() == 0 {
        println!("threads: {} cases, {} wrong", tally.cases, tally.wrong);
    }
    Ok(tally.counts())
}

fn is_missed(error: &Error) -> bool {
    error.is_timeout() || error.is_peer_lost()
}
