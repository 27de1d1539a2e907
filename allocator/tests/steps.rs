//! Steps that all ranks of a pool make together, or none (`Pool::commit_together`). Ranks are threads of one process.

use std::thread;
use std::time::Duration;

use symmpool_allocator::driver::{FaultDriver, FaultPlan};
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::testing::on_ranks;
use symmpool_allocator::{Block, Deadline, Driver, Error, Group, JointBlock, Pool, Result};

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

/// A pool of host memory with a lane "a", where `rank` fails as `plan` says.
fn pool_that_fails(group: Group, rank: u32, plan: &str) -> Pool {
    let plan =
        if group.rank() == rank { FaultPlan::parse(plan).unwrap() } else { FaultPlan::new() };
    let driver = Driver::new(FaultDriver::new(Driver::host().unwrap(), plan));
    Pool::builder(group).driver(driver).lane(LaneConfig::symmetric("a")).build().unwrap()
}

const JOINT: JointBlock = JointBlock { bytes: 3 << 20, align: 4096, subject: 1, captures: false };

fn allocate(pool: &Pool, joint: JointBlock, ready: Result<()>) -> Result<Block<u8>> {
    let deadline = Deadline::after(Duration::from_secs(20));
    let fill = |block: &Block<u8>| block.write(&vec![7; block.len()]);
    pool.alloc_together(&pool.lane("a").unwrap(), joint, ready, deadline, fill).unwrap()
}

/// A block that one rank cannot make, fill or map is on no rank, and costs later calls nothing (rule D6): no commit is due for
/// it, its memory returns, and the next block is made.
#[test]
fn a_block_that_one_rank_cannot_have_is_on_no_rank() {
    for (plan, captures) in ["fail-oom@create:1", "fail-oom@map:2", "fail-oom@step:commit-map:1"]
        .into_iter()
        .flat_map(|plan| [(plan, false), (plan, true)])
    {
        let outcomes = ranks(3, |group| {
            let pool = pool_that_fails(group, 1, plan);
            let joint = JointBlock { captures, ..JOINT };
            let error = allocate(&pool, joint, Ok(())).unwrap_err();
            let lane = pool.lane("a").unwrap();
            assert_eq!(pool.is_commit_due(), captures, "{plan}");
            if captures {
                pool.commit().unwrap();
            }
            assert_eq!(lane.stats().unwrap().reserved, 0, "{plan}");
            let block = allocate(&pool, joint, Ok(())).unwrap();
            assert!(pool.is_window(block.address(), block.bytes()) && !pool.is_commit_due());
            let at_last = pool.peer_ptr((pool.rank() + 1) % 3, block.address() + block.bytes() - 1);
            // SAFETY: a window, whose owner filled it before this rank could map it.
            assert_eq!(unsafe { (at_last.unwrap() as *const u8).read() }, 7);
            assert!(pool.can_commit());
            (error, block.offset(), lane.digest().unwrap())
        });
        for (error, offset, digest) in &outcomes {
            assert!(error.is_out_of_memory() && error.ranks() == [1], "{plan}: {error}");
            assert_eq!((offset, digest), (&outcomes[0].1, &outcomes[0].2), "{plan}");
        }
    }
}

/// Nor is it where a rank is not ready, or cannot fill it. It leaves other lanes' commits as they are.
#[test]
fn a_block_of_all_ranks_leaves_due_what_was_due() {
    ranks(2, |group| {
        let pool = pool_that_fails(group, 9, "fail-oom@create:1");
        let (rank, lane) = (pool.rank(), pool.lane("a").unwrap());
        let deadline = Deadline::after(Duration::from_secs(20));
        let before = lane.counter().unwrap();
        let no_room = Error::out_of_memory("nothing is left");
        let ready = if rank == 0 { Err(no_room.clone()) } else { Ok(()) };
        assert!(allocate(&pool, JOINT, ready).unwrap_err().is_out_of_memory());
        assert_eq!(lane.counter().unwrap(), before);
        let fill = |_: &Block<u8>| if rank == 1 { Err(no_room.clone()) } else { Ok(()) };
        let filled = pool.alloc_together(&lane, JOINT, Ok(()), deadline, fill).unwrap();
        assert!(filled.is_err_and(|why| why.is_out_of_memory() && why.ranks() == [1]));
        assert!(!pool.is_commit_due());
        // A block of the program, of which no commit has heard, in the same lane or another one.
        let other = pool.alloc::<u8>(1 << 20).unwrap();
        assert!(pool.is_commit_due());
        let block = allocate(&pool, JOINT, Ok(())).unwrap();
        assert!(pool.is_window(block.address(), block.bytes()));
        assert!(pool.is_commit_due(), "a commit of all lanes is still to come");
        pool.commit().unwrap();
        assert!(pool.is_window(other.address(), other.bytes()) && !pool.is_commit_due());
    });
}

/// Where a step of all ranks cannot map what it allocated, that is not tried again by each later commit.
#[test]
fn a_step_that_cannot_map_its_memory_leaves_nothing_due() {
    ranks(2, |group| {
        let pool = pool_that_fails(group, 1, "fail-oom@step:commit-map:1");
        let deadline = || Deadline::after(Duration::from_secs(20));
        let allocate = || pool.lane("a").unwrap().alloc::<u8>(3 << 20);
        let made = pool.reclaim_and_commit_together(1, Ok(()), deadline(), allocate).unwrap();
        assert!(made.is_err_and(|why| why.is_out_of_memory() && why.ranks() == [1]));
        assert!(!pool.is_commit_due() && pool.can_commit());
        assert_eq!(pool.lane("a").unwrap().stats().unwrap().reserved, 0);
        let made = pool.reclaim_and_commit_together(1, Ok(()), deadline(), allocate).unwrap();
        let block = made.unwrap();
        assert!(pool.is_window(block.address(), block.bytes()));
    });
}
