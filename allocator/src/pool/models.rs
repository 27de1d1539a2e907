//! Models of a pool: threads that allocate, free and commit, in every interleaving.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::*;
use crate::driver::SimDriver;
use crate::lane::LaneConfig;
use crate::models::{AtomicBool, before, prove, thread};

/// Bytes of a segment, and of a block that fills one.
const SEGMENT: usize = 1 << 16;

fn built(group: Group) -> Pool {
    let driver = SimDriver::with_granularity(7, u64::MAX, SEGMENT as u64).unwrap();
    let lane = LaneConfig::symmetric("blocks");
    Pool::builder(group).driver(Driver::new(driver)).lane(lane).build().unwrap()
}

/// The pool of a group of one rank.
fn alone() -> Pool {
    built(Group::in_process(1).unwrap().remove(0))
}

/// The pools of two ranks.
fn pair() -> [Pool; 2] {
    before(|| {
        let [mine, theirs] = Group::in_process(2).unwrap().try_into().expect("two groups");
        let other = thread::spawn(move || built(theirs));
        [built(mine), other.join().unwrap()]
    })
}

/// A commit is due whenever a lane has memory that no commit has shared.
fn growth_meets_a_commit() {
    let pool = alone();
    let theirs = pool.clone();
    let grows = thread::spawn(move || theirs.alloc::<u8>(SEGMENT).unwrap());
    pool.commit().unwrap();
    let block = grows.join().unwrap();
    let shared = pool.is_window(block.address(), SEGMENT as u64);
    assert_eq!(pool.is_commit_due(), !shared, "due exactly when something is not shared");
}

/// A block that is freed while a commit holds the lane returns at a later commit, and no other.
fn a_late_free_meets_a_commit() {
    let pool = alone();
    let blocks = [0, 1].map(|_| pool.alloc::<u8>(SEGMENT).unwrap());
    pool.commit().unwrap();
    let frees = blocks.map(|block| thread::spawn(move || block.free_unordered().unwrap()));
    let first = pool.commit().unwrap().blocks_returned;
    frees.into_iter().for_each(|free| free.join().unwrap());
    let second = pool.commit().unwrap().blocks_returned;
    assert_eq!((first + second, pool.default_lane().live_blocks().unwrap()), (2, 0));
}

/// An allocator's hook never waits for a commit, which waits for another rank.
fn a_hook_meets_a_commit() {
    let [pool, other] = pair();
    let came = Arc::new((crate::models::Mutex::new(false), crate::models::Condvar::new()));
    let (theirs, goes_on) = (pool.clone(), came.clone());
    let hook = thread::spawn(move || {
        let lane = theirs.default_lane();
        let placed = lane.try_alloc_bytes(512, 512, Stream::DEFAULT);
        *goes_on.0.lock().unwrap() = true;
        goes_on.1.notify_all();
        // The block is part of rank 0's sequence alone, so it is gone before the next commit.
        placed
            .map(|block| block.free().unwrap())
            .map_err(|refused| assert!(refused.is_invalid_state(), "{refused}"))
    });
    let commits = thread::spawn(move || pool.commit().map(drop));
    let mut held = came.0.lock().unwrap();
    while !*held {
        held = came.1.wait(held).unwrap();
    }
    drop(held);
    let theirs = other.commit().map(drop);
    let _ = hook.join().unwrap();
    assert_eq!(theirs.is_ok(), commits.join().unwrap().is_ok());
}

/// The next commit comes behind one in the background, and makes windows that every thread then sees.
fn a_commit_meets_one_in_the_background() {
    let pool = alone();
    let block = pool.alloc::<u8>(SEGMENT).unwrap();
    pool.commit_in_background(Duration::ZERO);
    let report = pool.commit().unwrap();
    assert_eq!(report.number, 2);
    assert!(pool.is_window(block.address(), SEGMENT as u64) && !pool.is_commit_due());
}

/// A commit that returns a block which kernels may still use has waited for them.
fn a_free_behind_kernels_meets_a_commit() {
    let waited = Arc::new(AtomicBool::new(false));
    let driver = Waits {
        inner: SimDriver::with_granularity(7, u64::MAX, SEGMENT as u64).unwrap(),
        waited: waited.clone(),
    };
    let group = Group::in_process(1).unwrap().remove(0);
    let lane = LaneConfig::symmetric("blocks");
    let pool = Pool::builder(group).driver(Driver::new(driver)).lane(lane).build().unwrap();
    let block = pool.alloc::<u8>(SEGMENT).unwrap();
    pool.commit().unwrap();
    waited.store(false, Ordering::SeqCst);
    let frees = thread::spawn(move || block.free_after_device().unwrap());
    let returned = pool.commit().unwrap().blocks_returned;
    assert!(returned == 0 || waited.load(Ordering::SeqCst), "returned without a wait");
    frees.join().unwrap();
    let later = pool.commit().unwrap().blocks_returned;
    assert!(waited.load(Ordering::SeqCst) && returned + later == 1);
}

/// A driver that says whether it has waited for the device.
struct Waits {
    inner: SimDriver,
    waited: Arc<AtomicBool>,
}

#[allow(unsafe_code)] // a driver
mod waits {
    use super::{Ordering, Waits};
    use crate::driver::{DriverWrapper, MemoryDriver};
    use crate::{Deadline, Result};

    // SAFETY: all memory is the inner driver's.
    unsafe impl DriverWrapper for Waits {
        fn inner(&self) -> &dyn MemoryDriver {
            &self.inner
        }

        fn synchronize_by(&self, deadline: Deadline) -> Result<()> {
            self.waited.store(true, Ordering::SeqCst);
            self.inner.synchronize_by(deadline)
        }
    }
}

/// Blocks outlive their pool, and keep its memory until the last of them is gone.
fn use_meets_shutdown() {
    let pool = alone();
    let block = pool.alloc::<u8>(SEGMENT).unwrap();
    let driver = pool.driver().clone();
    let theirs = thread::spawn(move || {
        let lane = pool.default_lane();
        drop(pool);
        let _ = lane.alloc::<u8>(SEGMENT).unwrap();
    });
    block.free_unordered().unwrap();
    theirs.join().unwrap();
    drop(driver);
}

#[test]
fn loom_a_commit_is_due_for_all_that_is_not_shared() {
    prove(3, &["mutant_due_lowered_late"], growth_meets_a_commit);
}

#[test]
fn loom_late_frees_return_once() {
    let mutants = ["mutant_queued_unseen", "mutant_queue_forgotten"];
    prove(3, &mutants, a_late_free_meets_a_commit);
}

/// Rule D7.
#[test]
fn loom_hooks_wait_for_no_commit() {
    prove(2, &["mutant_hook_waits_for_commits"], a_hook_meets_a_commit);
}

#[test]
fn loom_commits_come_behind_one_in_the_background() {
    let mutants = ["mutant_background_unmarked", "mutant_background_ends_early"];
    prove(3, &mutants, a_commit_meets_one_in_the_background);
}

/// Rule D5.
#[test]
fn loom_frees_behind_kernels_return_behind_a_wait() {
    prove(3, &["mutant_free_before_its_wait"], a_free_behind_kernels_meets_a_commit);
}

#[test]
fn loom_blocks_outlive_their_pool() {
    prove(3, &[], use_meets_shutdown);
}
