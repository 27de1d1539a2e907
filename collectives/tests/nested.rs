//! Communicators of some of a communicator's ranks, which meet in its memory.

mod pool_ranks;

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use pool_ranks::ranks;
use symmpool_allocator::{Group, Pool, Stream};
use symmpool_collectives::{
    Arrivals, Communicator, CommunicatorOptions, GroupKey, GroupOffer, ReduceOp,
};

const STREAM: &Stream = &Stream::DEFAULT;
const LONG: Duration = Duration::from_secs(20);

fn around(pool: &Pool) -> Communicator {
    let options = CommunicatorOptions { serves_subgroups: true, ..Default::default() };
    Communicator::with_options(pool, &options).unwrap()
}

fn offer(comm: &Communicator, some: &[u32], key: GroupKey) -> Option<GroupOffer> {
    comm.offer(some, key, &CommunicatorOptions { timeout: LONG, ..Default::default() }).unwrap()
}

/// This rank's member of a group of `some` of its pool's ranks, in that order.
fn members(pool: &Pool, some: &[u32], what: &str) -> Group {
    let me = some.iter().position(|rank| *rank == pool.rank()).unwrap() as u32;
    let store = pool.group().store().clone();
    Group::new(me, some.len() as u32, store).unwrap().with_name(what).with_timeout(LONG)
}

fn made(
    comm: &Communicator,
    pool: &Pool,
    some: &[u32],
    number: u64,
) -> Option<(Pool, Communicator)> {
    let mut offer = offer(comm, some, [number, 7])?;
    assert_eq!(offer.wait(LONG), Arrivals::All);
    let made = offer.accept(&members(pool, some, &format!("group {number}"))).unwrap();
    made.1.barrier(STREAM).unwrap();
    made.1.all_are_here();
    Some(made)
}

/// A sum of some ranks, in ordinary memory.
fn sum(comm: &Communicator, mine: u32) -> u32 {
    let mut data = [mine as i32; 3];
    comm.all_reduce_slice(&mut data, ReduceOp::Sum, STREAM).unwrap();
    data[0] as u32
}

#[test]
fn some_ranks_meet_without_a_store_and_in_any_order() {
    ranks(4, |pool| {
        let (comm, me) = (around(pool), pool.rank());
        let before = pool.stats().unwrap().store;
        let rows = if me < 2 { [0, 1] } else { [3, 2] };
        let columns = if me % 2 == 0 { [0, 2] } else { [1, 3] };
        let row = made(&comm, pool, &rows, u64::from(me / 2)).unwrap().1;
        let column = made(&comm, pool, &columns, 10 + u64::from(me % 2)).unwrap().1;
        let all = made(&comm, pool, &[2, 0, 1, 3], 20).unwrap().1;
        assert_eq!(row.rank(), rows.iter().position(|rank| *rank == me).unwrap() as u32);
        for _ in 0..20 {
            assert_eq!(sum(&row, me), rows.iter().sum::<u32>());
            assert_eq!(sum(&column, me), columns.iter().sum::<u32>());
            assert_eq!(sum(&all, me), 6);
        }
        let mut first = [me as i32];
        all.broadcast_slice(&mut first, 1, STREAM).unwrap();
        assert_eq!(first, [0], "rank 1 is rank 0 there");
        let after = pool.stats().unwrap().store;
        assert_eq!(format!("{before:?}"), format!("{after:?}"), "nothing went through the store");
    });
}

#[test]
fn a_pool_of_some_ranks_connects_when_it_first_commits() {
    ranks(3, |pool| {
        let comm = around(pool);
        if pool.rank() == 1 {
            return;
        }
        let (inner, nested) = made(&comm, pool, &[2, 0], 1).unwrap();
        assert!(inner.windows().list().is_empty());
        let block = inner.alloc::<i32>(1000).unwrap();
        block.write(&[pool.rank() as i32; 1000]).unwrap();
        nested.all_reduce(&block, ReduceOp::Sum, STREAM).unwrap();
        assert_eq!(block.read().unwrap(), [2; 1000]);
        assert!(inner.is_window(block.address(), 4000));
        // A pool within a pool within a pool, and a communicator of its own on it.
        let other = Communicator::new(&inner).unwrap();
        assert_eq!(sum(&other, 5), 10);
        nested.barrier(STREAM).unwrap();
    });
}

#[test]
fn who_has_let_go_is_lost_at_once_and_its_memory_is_used_again() {
    ranks(2, |pool| {
        let comm = around(pool);
        // More than there is room for at once.
        for number in 0..300 {
            let (_, nested) = made(&comm, pool, &[0, 1], number).unwrap();
            assert_eq!(sum(&nested, 1), 2, "the memory of group {number} had something in it");
            comm.barrier(STREAM).unwrap();
        }
        let (_, nested) = made(&comm, pool, &[0, 1], 1000).unwrap();
        if pool.rank() == 0 {
            drop(nested);
        } else {
            let begun = Instant::now();
            let error = nested.barrier(STREAM).unwrap_err();
            assert!(error.is_peer_lost() && error.ranks() == [0], "{error}");
            assert!(begun.elapsed() < LONG / 2);
        }
        comm.barrier(STREAM).unwrap();
    });
}

#[test]
fn without_room_there_is_none() {
    ranks(2, |pool| {
        let comm = around(pool);
        let mut kept = Vec::new();
        for number in 0.. {
            match made(&comm, pool, &[0, 1], number) {
                Some(found) => kept.push(found),
                None => break,
            }
        }
        assert!(kept.len() > 50, "{}", kept.len());
        kept.clear();
        comm.barrier(STREAM).unwrap();
        assert!(made(&comm, pool, &[0, 1], 5000).is_some());
        let plain = Communicator::new(pool).unwrap();
        assert!(offer(&plain, &[0, 1], [0, 0]).is_none());
        comm.barrier(STREAM).unwrap();
    });
}

#[test]
fn a_rank_that_comes_another_way_takes_the_others_along() {
    let turns = Barrier::new(3);
    ranks(3, |pool| {
        let comm = around(pool);
        let key = [1, 1];
        match pool.rank() {
            0 => {
                let mut offer = offer(&comm, &[0, 1, 2], key).unwrap();
                assert_eq!(offer.wait(Duration::from_millis(5)), Arrivals::Some);
                assert_eq!(offer.missing(), [1, 2]);
                offer.decline();
                turns.wait();
            }
            1 => {
                // It comes first to see the offer, and then the refusal.
                turns.wait();
                assert!(offer(&comm, &[0, 1, 2], key).is_none());
            }
            _ => {
                turns.wait();
                assert!(offer(&comm, &[0, 1, 2], key).is_none(), "a later try too");
            }
        }
        comm.barrier(STREAM).unwrap();
        let mine = offer(&comm, &[0, 1, 2], [2, 2]).unwrap();
        comm.barrier(STREAM).unwrap();
        if pool.rank() == 0 {
            mine.decline();
        }
        comm.barrier(STREAM).unwrap();
        let mut mine = mine;
        assert_eq!(mine.wait(LONG), Arrivals::Declined, "also of ranks that were there before");
        comm.barrier(STREAM).unwrap();
    });
}

#[test]
fn threads_make_groups_at_once() {
    ranks(2, |pool| {
        let comm = around(pool);
        thread::scope(|scope| {
            for thread in 0..4 {
                let comm = &comm;
                scope.spawn(move || {
                    for number in 0..20 {
                        let (_, nested) = made(comm, pool, &[1, 0], thread * 100 + number).unwrap();
                        assert_eq!(sum(&nested, 3), 6);
                    }
                });
            }
        });
        comm.barrier(STREAM).unwrap();
    });
}

#[test]
fn groups_that_make_no_sense_are_refused() {
    ranks(2, |pool| {
        let comm = around(pool);
        let (others, plain) = (1 - pool.rank(), CommunicatorOptions::default());
        for some in [&[][..], &[0, 1, 1], &[0, 2], &[others]] {
            let error = comm.offer(some, [1, 1], &plain).err().expect("refused");
            assert!(
                error.is_invalid_argument() && error.to_string().contains("ranks ["),
                "{error}"
            );
        }
        let never = CommunicatorOptions { timeout: Duration::ZERO, ..plain };
        assert!(comm.offer(&[0, 1], [1, 1], &never).err().unwrap().is_invalid_argument());
        let group = members(pool, &[0, 1], "wrong");
        for some in [&[0][..], &[1, 0], &[0, 5]] {
            let error = pool.nested(&group, some, 1 << 30, 0).expect_err("refused");
            assert!(error.is_invalid_argument(), "{error}");
        }
        comm.barrier(STREAM).unwrap();
    });
}
