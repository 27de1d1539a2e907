//! A rank that cannot do what the others do: all ranks get its error, nothing stays half done, and the pool
//! works again once the cause is gone.

use std::sync::atomic::{AtomicBool, Ordering};

use symmpool_allocator::driver::{
    CallCounts, DriverCall, FaultAction, FaultDriver, FaultPlan, Step,
};
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::{Driver, Error, Group, Pool, PoolBuilder, Result};

use crate::ranks::{HandlePath, each, ranks, same_error};

const WORLD: u32 = 3;

/// The rank that fails.
const FAILING: u32 = 1;

const MIB: usize = 1 << 20;

/// More than is left of a lane's first growth after an allocation of 1 MiB.
const MORE: usize = 16 * MIB;

/// The step or call that fails, and its occurrence.
#[derive(Clone, Copy, Debug)]
enum At {
    Step(Step, u64),
    DriverCall(DriverCall, u64),
}

/// The driver of a rank. On the failing rank it runs out of memory as planned.
fn driver(memory: HandlePath, rank: u32, at: At) -> FaultDriver {
    let inner = memory.driver(u64::from(rank));
    let failure = FaultAction::Fail(Error::out_of_memory("none left, as planned"));
    let plan = match at {
        _ if rank != FAILING => FaultPlan::new(),
        At::Step(step, nth) => FaultPlan::new().at_step(step, nth, failure),
        At::DriverCall(call, nth) => FaultPlan::new().at_call(call, nth, failure),
    };
    FaultDriver::new(inner, plan)
}

fn build(group: &Group, driver: &FaultDriver) -> Result<Pool> {
    Pool::builder(group.clone()).driver(Driver::new(driver.clone())).stride(1 << 30).build()
}

/// Number of present mappings.
fn mappings(counts: &CallCounts) -> u64 {
    counts.succeeded(DriverCall::Map) - counts.succeeded(DriverCall::Unmap)
}

/// A failure in the second commit, which is then repeated.
fn fails_in_the_second_commit(memory: HandlePath, at: At) {
    let errors = ranks(WORLD, |group| {
        let rank = group.rank();
        let driver = driver(memory, rank, at);
        let pool = build(&group, &driver).unwrap();
        let first = pool.alloc::<u8>(MIB).unwrap();
        assert_eq!(pool.commit().unwrap().windows_added, 1);
        let windows = pool.windows();
        let second = pool.alloc::<u8>(MORE).unwrap();
        let mapped = mappings(&driver.counts());
        let error = pool.commit().expect_err("one rank failed");
        // Nothing has changed on any rank, and older memory is still a window.
        assert_eq!(mappings(&driver.counts()), mapped, "{memory:?} {at:?} rank {rank}");
        assert_eq!(pool.windows().list(), windows.list());
        assert!(pool.is_window(first.address(), first.bytes()));
        assert!(!pool.is_window(second.address(), second.bytes()));
        assert!(pool.is_commit_due());
        let report = pool.commit().unwrap_or_else(|error| panic!("{memory:?} {at:?}: {error}"));
        assert_eq!((report.number, report.windows_added), (2, 1));
        assert!(pool.is_window(second.address(), second.bytes()));
        assert!(!pool.is_commit_due());
        drop((first, second, pool, group));
        assert_eq!(driver.counts().leaks(), None, "{memory:?} {at:?} rank {rank}");
        error
    });
    let error = same_error(errors);
    assert!(error.is_out_of_memory(), "{memory:?} {at:?}: {error}");
    let text = error.to_string();
    assert!(text.contains("rank 1 failed in "), "{memory:?} {at:?}: {text}");
    assert!(!text.contains("so did"), "only one rank failed: {text}");
    assert!(text.contains("none left, as planned"), "{memory:?} {at:?}: {text}");
}

#[test]
fn a_failed_step_of_a_commit_is_everyones_error_and_is_undone() {
    let steps = Step::ALL
        .into_iter()
        .filter(|step| (Step::CommitPublish..Step::CommitFinish).contains(step));
    for step in steps {
        each(HandlePath::ALL, |memory| fails_in_the_second_commit(memory, At::Step(step, 2)));
    }
}

#[test]
fn a_failed_call_of_a_commit_is_everyones_error_and_is_undone() {
    // A rank maps its own segment when it grows, and one segment of each peer in a commit. Those of the
    // second commit are the fifth and sixth mapping, and the third and fourth import.
    let calls = [At::DriverCall(DriverCall::Import, 3), At::DriverCall(DriverCall::Import, 4)];
    for at in calls
        .into_iter()
        .chain([At::DriverCall(DriverCall::Map, 5), At::DriverCall(DriverCall::Map, 6)])
    {
        each(HandlePath::ALL, |memory| fails_in_the_second_commit(memory, at));
    }
    // The simulated driver makes no handles.
    for memory in [HandlePath::Host, HandlePath::Bytes] {
        fails_in_the_second_commit(memory, At::DriverCall(DriverCall::Export, 2));
    }
}

#[test]
fn a_rank_that_cannot_finish_a_commit_reports_it_at_the_next() {
    // Without growth the commit ends with the agreement: a later failure concerns only this rank.
    for (step, grows) in [(Step::CommitFinish, true), (Step::CommitAgree, false)] {
        let errors = ranks(WORLD, |group| {
            let driver = driver(HandlePath::Host, group.rank(), At::Step(step, 2));
            let pool = build(&group, &driver).unwrap();
            let _block = pool.alloc::<u8>(MIB).unwrap();
            pool.commit().unwrap();
            let _more = grows.then(|| pool.alloc::<u8>(MORE).unwrap());
            let second = pool.commit();
            assert_eq!(second.is_err(), group.rank() == FAILING, "{second:?}");
            assert_eq!(pool.can_commit(), second.is_ok(), "as far as this rank knows");
            let third = pool.commit().expect_err("the ranks are not alike any more");
            let again = pool.commit().expect_err("and stay so");
            assert!(!pool.can_commit());
            [third, again]
        });
        // The others get the report immediately, and every later commit repeats it.
        for error in errors.into_iter().flatten() {
            assert!(error.is_invalid_state(), "{error}");
            let text = error.to_string();
            assert!(text.contains("rank 1 gave up: an earlier commit"), "{text}");
            assert!(text.contains("none left, as planned"), "{text}");
            assert!(text.contains("build a new pool"), "{text}");
        }
    }
}

#[test]
fn a_failed_step_of_the_handshake_is_everyones_error_and_the_next_pool_is_made() {
    let steps = [Step::HandshakePublish, Step::HandshakeConnect, Step::HandshakeConfirm];
    let points = steps
        .map(|step| At::Step(step, 1))
        .into_iter()
        .chain([At::DriverCall(DriverCall::Reserve, 1)]);
    for at in points {
        each(HandlePath::ALL, |memory| {
            let errors = ranks(WORLD, |group| {
                let driver = driver(memory, group.rank(), at);
                let error = build(&group, &driver).expect_err("one rank failed");
                assert_eq!(driver.counts().leaks(), None, "{memory:?} {at:?}");
                let pool = build(&group, &driver).unwrap();
                let _block = pool.alloc::<u8>(MIB).unwrap();
                assert_eq!(pool.commit().unwrap().windows_added, 1);
                error
            });
            let error = same_error(errors);
            assert!(error.is_out_of_memory(), "{memory:?} {at:?}: {error}");
            assert!(error.to_string().contains("rank 1 failed in the handshake"), "{error}");
        });
    }
}

#[test]
fn an_allocation_that_fails_on_one_rank_is_reported_to_all_and_can_be_repeated() {
    // D6: a growth that fails is not part of the rank's sequence.
    for at in [At::DriverCall(DriverCall::Create, 2), At::DriverCall(DriverCall::Map, 4)] {
        each(HandlePath::ALL, |memory| {
            let errors = ranks(WORLD, |group| {
                let failing = group.rank() == FAILING;
                let driver = driver(memory, group.rank(), at);
                let pool = build(&group, &driver).unwrap();
                let first = pool.alloc::<u8>(MIB).unwrap();
                pool.commit().unwrap();
                let mapped = mappings(&driver.counts());
                let attempt = pool.alloc::<u8>(MORE);
                if failing {
                    assert!(attempt.as_ref().is_err_and(Error::is_out_of_memory), "{attempt:?}");
                    assert_eq!(mappings(&driver.counts()), mapped, "undone");
                }
                let error = pool.commit().expect_err("one rank failed");
                // The rank repeats the allocation, and all ranks are alike.
                let second = if failing { pool.alloc::<u8>(MORE) } else { attempt }.unwrap();
                assert_eq!(pool.commit().unwrap().windows_added, 1);
                assert!(pool.is_window(second.address(), second.bytes()));
                let digest = pool.default_lane().digest().unwrap();
                drop((first, second, pool, group));
                assert_eq!(driver.counts().leaks(), None, "{memory:?} {at:?}");
                (error, digest)
            });
            assert!(errors.iter().all(|(_, digest)| *digest == errors[0].1));
            let error = same_error(errors.into_iter().map(|(error, _)| error).collect());
            assert!(error.is_out_of_memory(), "{memory:?} {at:?}: {error}");
            assert!(error.to_string().contains("rank 1 failed in event 1"), "{error}");
        });
    }
}

#[test]
fn a_growth_that_fails_half_way_is_undone_wherever_the_lane_lies() {
    let group = Group::in_process(1).unwrap().remove(0);
    let failure = || FaultAction::Fail(Error::out_of_memory("none left, as planned"));
    // Making the third segment also moves the first; the sixth is the second segment of its block.
    let plan = FaultPlan::new().at_call(DriverCall::Create, 3, failure());
    let plan = plan.at_call(DriverCall::Create, 6, failure());
    let driver = FaultDriver::new(Driver::sim(1), plan);
    let lanes = ["first", "second"].map(LaneConfig::symmetric);
    let builder = Pool::builder(group).driver(Driver::new(driver.clone()));
    let pool = lanes.into_iter().fold(builder, PoolBuilder::lane).build().unwrap();
    let lane = pool.lane("second").unwrap();
    let (low, high) = (lane.alloc::<u8>(64 * MIB).unwrap(), lane.alloc::<u8>(MIB).unwrap());
    drop(low);
    let mut blocks = vec![high];
    for (bytes, made) in [(100 * MIB, 2), (200 * MIB, 3)] {
        let before = mappings(&driver.counts());
        let error = lane.alloc::<u8>(bytes).expect_err("as planned");
        assert!(error.is_out_of_memory(), "{error}");
        assert_eq!(mappings(&driver.counts()), before, "undone");
        assert_eq!(lane.stats().unwrap().segments_made, made);
        blocks.push(lane.alloc::<u8>(bytes).unwrap());
    }
    assert_eq!(lane.stats().unwrap().segments_moved, 1);
    drop((blocks, lane, pool));
    assert_eq!(driver.counts().leaks(), None);
}

#[test]
fn looking_at_a_pool_does_not_disturb_its_commits() {
    let done = AtomicBool::new(false);
    let groups = Group::in_process(2).unwrap();
    let pools = each(groups, |group| {
        Pool::builder(group).driver(Driver::sim(1)).stride(1 << 30).build().unwrap()
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let _ = (pools[0].stats(), pools[0].lost_peers());
            }
        });
        let outcomes = each(&pools, |pool| (0..2000).try_for_each(|_| pool.commit().map(drop)));
        done.store(true, Ordering::Relaxed);
        for outcome in outcomes {
            outcome.unwrap();
        }
    });
}

/// A large block takes many segments. The driver is asked first whether there is memory for all of them.
#[test]
fn a_block_that_does_not_fit_is_refused_before_memory_is_made() {
    let group = Group::in_process(1).unwrap().remove(0);
    let driver = FaultDriver::new(Driver::host().unwrap(), FaultPlan::new());
    let pool = Pool::builder(group).driver(Driver::new(driver.clone())).build().unwrap();
    let error = pool.alloc::<u8>(1 << 39).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert_eq!(driver.counts().made(DriverCall::Create), 0, "{error}");
}
