//! Calls for allocator hooks: they wait for no commit, and the next commit reports their failures.

use std::sync::{Arc, Barrier, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use symmpool_allocator::driver::{FaultAction, FaultDriver, FaultPlan, Step};
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::{Block, Driver, Error, Group, Lane, Pool, PoolBuilder, Stream};

fn pair(drivers: [Driver; 2], lanes: &[LaneConfig]) -> [Pool; 2] {
    let groups = Group::in_process(2).unwrap();
    let pools: Vec<Pool> = thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .zip(drivers)
            .map(|(group, driver)| {
                scope.spawn(move || {
                    let group = group.with_timeout(Duration::from_secs(20));
                    let builder = Pool::builder(group).driver(driver);
                    lanes.iter().cloned().fold(builder, PoolBuilder::lane).build().unwrap()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    pools.try_into().unwrap()
}

#[test]
fn an_allocation_during_a_commit_is_refused_and_does_not_wait() {
    let [a, b] = pair(
        [Driver::sim(1), Driver::sim(2)],
        &[LaneConfig::symmetric("x"), LaneConfig::local("y")],
    );
    a.alloc::<u8>(1).unwrap();
    b.alloc::<u8>(1).unwrap();
    thread::scope(|scope| {
        let commit = scope.spawn(|| a.commit());
        // Rank 1 does not commit yet, so rank 0's commit stays under way.
        let refused = loop {
            match a.default_lane().try_alloc_bytes(8, 512, Stream::DEFAULT) {
                // An ordered free would wait for the commit, which waits for this thread.
                Ok(block) => block.free_unordered().unwrap(),
                Err(error) => break error,
            }
        };
        assert!(refused.is_invalid_state() && refused.to_string().contains("commit"), "{refused}");
        // A local lane takes no part in commits.
        let local = a.lane("y").unwrap();
        let block = local.try_alloc_bytes(8, 512, Stream::DEFAULT).unwrap();
        local.record_stream_address(block.address(), Stream::numbered(5)).unwrap();
        drop(block);
        // The commit ends, with success or not, once rank 1 commits.
        let _ = (b.commit(), commit.join().unwrap());
    });
}

#[test]
fn a_failure_of_one_rank_is_reported_to_all_even_if_the_caller_goes_on() {
    let [a, b] = pair([Driver::sim(1), Driver::sim(2)], &[]);
    let from_hook = |pool: &Pool, bytes| {
        pool.default_lane().try_alloc_bytes(bytes, 512, Stream::DEFAULT).map(Block::into_address)
    };
    from_hook(&a, 1 << 20).unwrap();
    assert!(from_hook(&b, 1 << 60).unwrap_err().is_out_of_memory());
    assert!(a.is_commit_due() && b.is_commit_due());
    let errors = thread::scope(|scope| {
        [&a, &b]
            .map(|pool| scope.spawn(|| pool.commit().unwrap_err()))
            .map(|rank| rank.join().unwrap())
    });
    for error in errors {
        assert!(error.is_out_of_memory(), "{error}");
    }
}

#[test]
fn a_failure_on_every_rank_is_no_divergence() {
    let [a, b] = pair([Driver::sim(1), Driver::sim(2)], &[]);
    for pool in [&a, &b] {
        pool.default_lane().try_alloc_bytes(1 << 60, 512, Stream::DEFAULT).unwrap_err();
        assert!(pool.is_commit_due());
    }
    thread::scope(|scope| {
        [&a, &b].map(|pool| scope.spawn(|| pool.commit().unwrap())).map(|rank| rank.join().unwrap())
    });
    assert!(!a.is_commit_due() && !b.is_commit_due());
}

#[test]
fn a_noted_failure_is_reported_if_others_went_on() {
    let [a, b] = pair([Driver::sim(1), Driver::sim(2)], &[]);
    let commits = || {
        thread::scope(|scope| {
            [&a, &b].map(|pool| scope.spawn(|| pool.commit())).map(|rank| rank.join().unwrap())
        })
    };
    let failure = Error::unsupported("no such device, as planned");
    for pool in [&a, &b] {
        pool.default_lane().note_failure(&failure);
    }
    assert!(a.is_commit_due() && b.is_commit_due());
    // Neither rank went on, so they do not differ.
    for commit in commits() {
        commit.unwrap();
    }
    assert!(!a.is_commit_due() && !b.is_commit_due());
    a.alloc::<u8>(1).unwrap().into_address();
    b.default_lane().note_failure(&failure);
    assert!(b.is_commit_due());
    for error in commits().map(Result::unwrap_err) {
        assert!(error.is_unsupported(), "{error}");
        assert!(error.to_string().contains("rank 1 failed in event 0 of lane"), "{error}");
        assert!(error.to_string().contains("as planned"), "{error}");
    }
}

#[test]
fn threads_that_share_a_lane_wait_for_each_other_only() {
    let group = Group::in_process(1).unwrap().pop().unwrap();
    let pool = Pool::builder(group).driver(Driver::sim(3)).build().unwrap();
    let start = Barrier::new(4);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                start.wait();
                for _ in 0..2000 {
                    let lane = pool.default_lane();
                    let block = lane.try_alloc_bytes(4096, 512, Stream::DEFAULT).unwrap();
                    lane.free_address(block.into_address()).unwrap();
                }
            });
        }
    });
    assert_eq!(pool.default_lane().stats().unwrap().live_blocks, 0);
}

/// A pool of one rank, which calls `meanwhile` in the middle of its first commit.
fn alone(meanwhile: impl Fn() + Send + Sync + 'static) -> Pool {
    let plan = FaultPlan::new();
    let plan = plan.at_step(Step::CommitPublish, 1, FaultAction::Notify(Arc::new(meanwhile)));
    let driver = Driver::new(FaultDriver::new(Driver::sim(1), plan));
    let group = Group::in_process(1).unwrap().remove(0);
    Pool::builder(group).driver(driver).stride(1 << 32).build().unwrap()
}

#[test]
fn a_free_during_a_commit_frees_the_block_that_was_there() {
    // D5
    let meant: Arc<OnceLock<(Lane, u64)>> = Arc::default();
    let seen = Arc::clone(&meant);
    let pool = alone(move || {
        let (lane, address) = seen.get().unwrap();
        // The block, the same block again, and an address without a block.
        for address in [*address, *address, address + 1536] {
            lane.free_address_unordered(address).unwrap();
        }
    });
    let lane = pool.default_lane();
    let address = lane.alloc::<u8>(1000).unwrap().into_address();
    let _ = meant.set((lane.clone(), address));
    pool.commit().unwrap();
    let again = lane.free_address(address).unwrap_err();
    assert!(again.is_invalid_argument(), "{again}");
    assert_ne!(lane.alloc::<u8>(1000).unwrap().address(), address, "not before a commit");
    assert_eq!(pool.commit().unwrap().blocks_returned, 1);
    let new = lane.alloc::<u8>(1000).unwrap();
    assert_eq!(new.address(), address);
    assert_eq!(
        pool.commit().unwrap().blocks_returned,
        0,
        "the address belongs to a new block by now"
    );
    new.free().unwrap();
    assert_eq!(lane.stats().unwrap().live_blocks, 0);
}

#[test]
fn memory_that_a_block_owns_is_not_freed_by_its_address() {
    let meant: Arc<OnceLock<(Lane, u64)>> = Arc::default();
    let seen = Arc::clone(&meant);
    let pool = alone(move || {
        let (lane, held) = seen.get().unwrap();
        lane.free_address_unordered(*held).unwrap();
    });
    let lane = pool.default_lane();
    let held = lane.alloc::<u64>(1000).unwrap();
    let _ = meant.set((lane.clone(), held.address()));
    // During a commit the free is queued, and refused later.
    pool.commit().unwrap();
    let events = lane.counter().unwrap();
    for refused in [
        lane.free_address(held.address()),
        lane.free_address_sized(held.address()).map(drop),
        lane.free_address_unordered(held.address()),
    ] {
        let error = refused.unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains("held by a Block"), "{error}");
    }
    assert_eq!(lane.counter().unwrap(), events);
    assert_eq!((lane.stats().unwrap().live_blocks, lane.stats().unwrap().unordered_frees), (1, 0));
    let address = held.into_address();
    lane.free_address(address).unwrap();
    // The next block at the same place has another owner.
    let next = lane.alloc::<u64>(1000).unwrap();
    assert_eq!(next.address(), address);
    assert!(lane.free_address(address).unwrap_err().is_invalid_argument());
    next.free().unwrap();
}

#[test]
fn into_address_does_not_wait_for_a_commit() {
    let given: Arc<Mutex<Option<Block<u8>>>> = Arc::default();
    let (lane_of, seen) = (Arc::new(OnceLock::<Lane>::new()), Arc::clone(&given));
    let lane_seen = Arc::clone(&lane_of);
    let pool = alone(move || {
        let address = seen.lock().unwrap().take().unwrap().into_address();
        lane_seen.get().unwrap().free_address_unordered(address).unwrap();
    });
    let lane = pool.default_lane();
    let _ = lane_of.set(lane.clone());
    *given.lock().unwrap() = Some(lane.alloc::<u8>(1000).unwrap());
    pool.commit().unwrap();
    assert_eq!(lane.stats().unwrap().unordered_frees, 1);
    assert_eq!(pool.commit().unwrap().blocks_returned, 1);
}
