//! Two threads of each rank with one communicator, in host memory: in one order on all ranks, and in none.

mod pool_ranks;

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use pool_ranks::ranks;
use symmpool_allocator::Stream;
use symmpool_collectives::{Communicator, ReduceOp};

const STREAM: &Stream = &Stream::DEFAULT;
const CALLS: u64 = 300;

/// A call, the same for the same seed on all ranks. Returns whether the result is right.
fn call(comm: &Communicator, seed: u64, odd: usize) -> symmpool_allocator::Result<bool> {
    let (me, world) = (u64::from(comm.rank()), u64::from(comm.world()));
    // No two calls of a round have the same length.
    let count = 2 * (seed % 1000) as usize + odd;
    let value = |rank: u64| seed * 10 + rank;
    match seed % 4 {
        0 => comm.barrier(STREAM).map(|()| true),
        1 => {
            let mut data = vec![value(me) as i64; count];
            comm.all_reduce_slice(&mut data, ReduceOp::Sum, STREAM)?;
            let sum: u64 = (0..world).map(value).sum();
            Ok(data.iter().all(|each| *each == sum as i64))
        }
        2 => {
            let mut data = vec![0_i64; count * world as usize];
            comm.all_gather_slice(&mut data, &vec![value(me) as i64; count], STREAM)?;
            let part = |rank: u64| &data[rank as usize * count..][..count];
            Ok((0..world).all(|rank| part(rank).iter().all(|each| *each == value(rank) as i64)))
        }
        _ => {
            let mut data = vec![value(me) as i64; count];
            comm.broadcast_slice(&mut data, 1, STREAM)?;
            Ok(data.iter().all(|each| *each == value(1) as i64))
        }
    }
}

#[test]
fn threads_that_agree_on_an_order_get_what_one_thread_gets() {
    ranks(3, |pool| {
        let comm = Communicator::new(pool).unwrap();
        // Whichever thread comes next makes the next call. The lock is held until it is made.
        let next = Mutex::new(0);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    loop {
                        let mut next = next.lock().unwrap();
                        if *next == CALLS {
                            return;
                        }
                        assert!(call(&comm, *next, 0).unwrap(), "call {next}");
                        *next += 1;
                    }
                });
            }
        });
    });
}

/// All calls differ in their lengths, so what ranks call at the same time without being the same is an error, on all of them,
/// and nothing else is wrong. (Equal calls could not be told apart.)
#[test]
fn threads_without_an_order_get_right_results_or_errors() {
    const EACH: u64 = 30;
    let began = Instant::now();
    for round in 0..20 {
        ranks(2, |pool| {
            let comm = &Communicator::new(pool).unwrap();
            thread::scope(|scope| {
                for odd in [0, 1] {
                    scope.spawn(move || {
                        for seed in
                            (1000 * round..).filter(|seed| seed % 4 != 0).take(EACH as usize)
                        {
                            match call(comm, seed, odd) {
                                Ok(right) => assert!(right, "call {seed} of thread {odd}"),
                                Err(error) => assert!(error.is_diverged(), "{error}"),
                            }
                        }
                    });
                }
            });
            // All ranks make as many calls, whatever became of them.
            assert!(call(comm, 1, 0).unwrap());
        });
    }
    assert!(began.elapsed() < Duration::from_secs(300), "no rank waits for a timeout");
}

/// A watchdog asks while the thread that it watches is in a call.
#[test]
fn a_failure_is_told_while_another_thread_is_in_a_call() {
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        if comm.rank() == 1 {
            // Too late for that call, and in time for the ranks to end together.
            thread::sleep(Duration::from_secs(4));
            return;
        }
        comm.set_timeout(Duration::from_secs(2)).unwrap();
        thread::scope(|scope| {
            let call = scope.spawn(|| comm.barrier(STREAM));
            thread::sleep(Duration::from_millis(300));
            while !call.is_finished() {
                let asked = Instant::now();
                let failure = comm.failure();
                assert!(asked.elapsed() < Duration::from_millis(200), "{:?}", asked.elapsed());
                assert!(failure.is_none_or(|why| why.is_timeout()));
                thread::sleep(Duration::from_millis(20));
            }
            let ended = call.join().unwrap().expect_err("rank 1 does not come");
            assert!(ended.is_timeout() && comm.failure().is_some_and(|why| why.ranks() == [1]));
        });
    });
}
