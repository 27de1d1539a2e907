//! Calls are refused in a forked child, whose signals would be taken for its parent's.

use std::thread;
use std::time::Duration;

use symmpool_allocator::testing::in_child;
use symmpool_allocator::{Driver, Group, Pool, Result, Stream};
use symmpool_collectives::{Communicator, ReduceOp};

const STREAM: &Stream = &Stream::DEFAULT;

#[test]
fn calls_are_refused_in_a_child() {
    let ranks = Group::in_process(2).unwrap().into_iter().map(|group| {
        thread::spawn(move || {
            let group = group.with_timeout(Duration::from_secs(20));
            let pool = Pool::builder(group).driver(Driver::host().unwrap()).build().unwrap();
            Communicator::new(&pool).unwrap()
        })
    });
    let ranks: Vec<_> = ranks.collect();
    let comms: Vec<Communicator> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    let first = &comms[0];
    assert!(in_child(|| {
        let calls: [Result<()>; 4] = [
            first.all_reduce_slice(&mut [100_i64; 1000], ReduceOp::Sum, STREAM),
            first.barrier(STREAM),
            first.signal(1, 0, STREAM),
            Communicator::new(first.pool()).map(drop),
        ];
        calls.into_iter().all(|refused| {
            refused.is_err_and(|error| {
                error.is_invalid_state() && error.to_string().contains("forked from it")
            })
        })
    }));
    thread::scope(|scope| {
        for comm in &comms {
            scope.spawn(move || {
                let mut values = [i64::from(comm.rank()) + 1; 1000];
                comm.all_reduce_slice(&mut values, ReduceOp::Sum, STREAM).unwrap();
                assert_eq!(values, [3; 1000]);
            });
        }
    });
}
