//! Steps that all ranks of a pool make together, or none (`Pool::commit_together`). Ranks are threads of one process.

use std::thread;
use std::time::Duration;

use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::testing::on_ranks;
use symmpool_allocator::{Deadline, Driver, Error, Group, Pool};

/// Runs `body` as every rank of a group of `world`; returns their results in rank order.
fn ranks<R: Send>(world: u32, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    on_ranks(world, |group| body(group.with_timeout(Duration::from_secs(20))))
}

/// A pool of simulated memory with a lane "a".
fn pool_of_a_lane(group: Group) -> Pool {
    let driver = Driver::sim(u64::from(group.rank()));
    Pool::builder(group).driver(driver).lane(LaneConfig::symmetric("a")).build().unwrap()
}

#[test]
fn a_step_that_a_rank_is_not_ready_for_changes_nothing_on_any() {
    let outcomes = ranks(3, |group| {
        let (rank, timeout) = (group.rank(), Duration::from_secs(20));
        let pool = pool_of_a_lane(group);
        let step = |subject, ready| {
            let allocate = || pool.lane("a").unwrap().alloc::<u8>(100);
            pool.commit_together(subject, ready, Deadline::after(timeout), allocate)
        };
        let before = step(7, Ok(())).unwrap().unwrap();
        assert!(pool.is_window(before.address(), before.bytes()));
        let refused = step(
            7,
            match rank {
                1 => Err(Error::out_of_memory("nothing is left")),
                _ => Ok(()),
            },
        );
        let differs = step(u64::from(rank), Ok(())).unwrap().unwrap_err();
        assert!(
            differs.is_invalid_state() && differs.to_string().contains("ranks 0 and 1"),
            "{differs}"
        );
        // Nothing was allocated meanwhile, by which ranks would differ.
        let block = step(8, Ok(())).unwrap().unwrap();
        assert!(pool.can_commit() && pool.is_window(block.address(), block.bytes()));
        refused.unwrap().unwrap_err()
    });
    for (error, rank) in outcomes.iter().zip(0..) {
        assert!(error.is_out_of_memory() && error.ranks() == [1], "{error}");
        let text = error.to_string();
        assert!(text.starts_with(&format!("symmpool: rank {rank}, ")), "{text}");
        assert!(text.ends_with("rank 1 failed in a vote: nothing is left"), "{text}");
    }
}

#[test]
fn a_step_without_a_rank_ends_in_time_and_ends_commits() {
    ranks(2, |group| {
        let rank = group.rank();
        let pool = pool_of_a_lane(group);
        if rank == 1 {
            return thread::sleep(Duration::from_millis(600));
        }
        let deadline = Deadline::after(Duration::from_millis(200));
        let error = pool.commit_together(1, Ok(()), deadline, || Ok(())).unwrap_err();
        assert!(error.is_timeout() && error.ranks() == [1], "{error}");
        assert!(!pool.can_commit());
    });
}

/// Threads that come to steps of two subjects in opposite orders on two ranks, over and over: either all ranks have made a
/// step, or none has, and blocks of one subject lie at one offset.
#[test]
fn steps_of_two_subjects_are_never_taken_for_each_other() {
    let outcomes = ranks(2, |group| {
        let rank = group.rank();
        let pool = pool_of_a_lane(group);
        let step = |subject: u64| {
            let allocate = || pool.lane("a").unwrap().alloc::<u8>(100 + subject as usize);
            let deadline = Deadline::after(Duration::from_secs(20));
            pool.commit_together(subject, Ok(()), deadline, allocate).unwrap().ok()
        };
        let mut found = Vec::new();
        for turn in 0..50_u32 {
            let (one, other) = thread::scope(|scope| {
                let swap = turn % 2 == 1 && rank == 1;
                let later = scope.spawn(move || {
                    thread::sleep(Duration::from_micros(if swap { 0 } else { 300 }));
                    step(1)
                });
                if swap {
                    thread::sleep(Duration::from_micros(300));
                }
                (step(0), later.join().unwrap())
            });
            found.push([one, other].map(|block| block.map(|block| block.offset())));
        }
        assert!(pool.can_commit());
        found
    });
    assert_eq!(outcomes[0], outcomes[1]);
    let made = outcomes[0].iter().flatten().flatten().count();
    assert!(made > 0, "{outcomes:?}");
}

/// A rank whose other thread commits meanwhile waits for that, and reports nothing of it as an answer of all.
#[test]
fn a_step_waits_for_another_threads_commit() {
    ranks(2, |group| {
        let pool = pool_of_a_lane(group);
        let deadline = Deadline::after(Duration::from_secs(20));
        thread::scope(|scope| {
            let step = scope.spawn(|| {
                // The other rank's thread comes to it behind its commit.
                thread::sleep(Duration::from_millis(if pool.rank() == 1 { 200 } else { 30 }));
                pool.commit_together(1, Ok(()), deadline, || Ok(())).unwrap().unwrap();
            });
            // The other rank comes later, so that the commit is under way when this rank's step begins.
            thread::sleep(Duration::from_millis(if pool.rank() == 1 { 60 } else { 0 }));
            pool.commit_by(deadline).unwrap();
            step.join().unwrap();
        });
    });
}

/// A step that commits first takes the place of a block that all ranks have dropped, and another one takes a new place.
#[test]
fn a_step_that_commits_first_reuses_what_ranks_have_dropped() {
    ranks(2, |group| {
        let pool = pool_of_a_lane(group);
        let deadline = || Deadline::after(Duration::from_secs(20));
        let allocate = || pool.lane("a").unwrap().alloc::<u8>(100);
        let first = pool.commit_together(1, Ok(()), deadline(), allocate).unwrap().unwrap();
        let place = first.offset();
        first.free_unordered().unwrap();
        let step = pool.reclaim_and_commit_together(1, Ok(()), deadline(), allocate);
        let again = step.unwrap().unwrap();
        assert_eq!(again.offset(), place);
        assert!(pool.is_window(again.address(), again.bytes()));
        again.free_unordered().unwrap();
        let other = pool.commit_together(1, Ok(()), deadline(), allocate).unwrap().unwrap();
        assert_ne!(other.offset(), place);
    });
}

/// Where a rank alone finds no room, no rank has a block, and all of them go on.
#[test]
fn a_rank_without_room_fails_a_step_that_commits_first_on_all() {
    ranks(2, |group| {
        let rank = group.rank();
        let pool = pool_of_a_lane(group);
        let lane = pool.lane("a").unwrap();
        let deadline = || Deadline::after(Duration::from_secs(20));
        for fails in [true, false] {
            let made = pool.reclaim_and_commit_together(1, Ok(()), deadline(), || {
                if fails && rank == 1 {
                    let why = Error::out_of_memory("nothing is left");
                    lane.note_failure(&why);
                    return Err(why);
                }
                lane.alloc::<u8>(100)
            });
            let made = made.unwrap();
            assert_eq!(made.as_ref().is_err_and(Error::is_out_of_memory), fails, "{made:?}");
            assert_eq!(made.is_ok(), !fails);
        }
        assert!(pool.can_commit());
    });
}
