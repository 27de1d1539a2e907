//! Growths that meet each other: of two communicators, in threads or in captures, whose order is another one on each rank.

use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::{Error, Result, Stream};
use symmpool_collectives::{Communicator, CommunicatorOptions, ReduceOp};

use super::{DTYPE, GrowingCall, GrowthChecks, MANY, SMALL};
use crate::cuda::{CallGraph, download, stream, upload};
use crate::{MAX_LATE, expect_error};

/// How long ranks may wait where none comes.
const TIMEOUT: Duration = Duration::from_secs(3);

impl GrowthChecks<'_> {
    pub(super) fn crosses(&mut self) -> Result<()> {
        for captured in [true, false] {
            for turn in 0..2 {
                self.two_threads(captured, turn)?;
            }
        }
        self.captures_of_two_in_another_order()
    }

    /// Each of two threads makes the first large call of a communicator of its own, on ranks at other times. Both grow, or stay as
    /// they are, on all ranks alike.
    fn two_threads(&mut self, captured: bool, turn: u32) -> Result<()> {
        // Kernels of both run at once, beside the one that the other checks have.
        let options = CommunicatorOptions { concurrent: Some(3), ..self.options.clone() };
        let pool = self.pool;
        let comms = [
            Communicator::with_options(pool, &options)?,
            Communicator::with_options(pool, &options)?,
        ];
        let streams = [stream(pool)?, stream(pool)?];
        let blocks = [&self.input, &self.output];
        let number = |rank: u32| rank as f32 + 1.5;
        for block in blocks {
            upload(pool, block.address(), &number(pool.rank()).to_le_bytes().repeat(MANY))?;
        }
        let swaps = turn % 2 == 1 && pool.rank() == 0;
        let ends: Vec<Result<bool>> = thread::scope(|scope| {
            let threads = [0, 1].map(|which| {
                let (comm, stream, at) = (&comms[which], streams[which], blocks[which].address());
                scope.spawn(move || {
                    if (which == 0) == swaps {
                        thread::sleep(Duration::from_millis(3 * u64::from(turn)));
                    }
                    let call = || {
                        let (to, from) = (at as *mut u8, at as *const u8);
                        // SAFETY: the block is longer, and no other thread uses it.
                        unsafe { comm.all_reduce_at(to, from, MANY, DTYPE, ReduceOp::Sum, &stream) }
                    };
                    if captured {
                        let graph = CallGraph::capture_of_thread(pool, stream, call)?;
                        graph.launch(pool, stream)?;
                    } else {
                        call()?;
                    }
                    Ok(comm.memory().total > SMALL)
                })
            });
            threads.into_iter().map(|each| each.join().expect("no panic")).collect()
        });
        for (comm, stream) in comms.iter().zip(&streams) {
            comm.synchronize(stream)?;
        }
        let sum: f32 = (0..pool.world()).map(number).sum();
        for (block, end) in blocks.into_iter().zip(ends) {
            let found = download(pool, block.address(), 4 * MANY)?;
            let right = found.chunks_exact(4).all(|four| four == sum.to_le_bytes());
            let what = format!("two threads, captured: {captured}, turn {turn}: {end:?}");
            // Ranks that differed in it would not have come to the sum.
            self.cases += 1;
            if !right || end.is_err() {
                self.wrong += 1;
                println!("rank {}: not so: {what}", pool.rank());
            }
        }
        Ok(())
    }

    /// One thread captures the first large calls of two communicators, in another order on one rank: a timeout on all.
    fn captures_of_two_in_another_order(&mut self) -> Result<()> {
        let (pool, options) = (self.pool, &self.options);
        let comms = [
            Communicator::with_options(pool, options)?,
            Communicator::with_options(pool, options)?,
        ];
        comms.iter().try_for_each(|comm| comm.set_timeout(TIMEOUT))?;
        let swaps = usize::from(pool.rank() == 0);
        let begun = Instant::now();
        let call = |comm: &Communicator, stream: &Stream| {
            let (to, from) = (self.output.as_ptr(), self.input.as_ptr().cast_const());
            // SAFETY: both blocks are longer, and nothing else uses them.
            unsafe { comm.all_reduce_at(to, from, MANY, DTYPE, ReduceOp::Sum, stream) }
        };
        let mut called = Ok(());
        let captured = CallGraph::capture(pool, self.stream, || {
            called = call(&comms[swaps], &self.stream)
                .and_then(|()| call(&comms[1 - swaps], &self.stream));
            Ok(())
        });
        self.check("there is no graph", captured.is_err());
        let error = expect_error(called, "captures in another order")?;
        let in_time = begun.elapsed() < 2 * TIMEOUT + MAX_LATE;
        let typed = Error::is_timeout(&error) && !error.ranks().is_empty();
        self.check(&format!("in another order: {error}"), typed && in_time);
        self.check("the pool still commits", self.pool.can_commit());
        self.renew()?;
        self.case(GrowingCall::AllReduce, MANY)
    }
}
