//! Early handles, for drivers whose handles are slow: made together with segments, kept until peers have
//! confirmed, closed by a thread, and none left over. These tests have a process of their own, so that
//! descriptors can be counted.

use std::fs;
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::driver::{
    DriverCall, DriverWrapper, FaultAction, FaultDriver, FaultPlan, HostDriver, HostOptions,
    MemoryDriver, Step,
};
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::{Block, Deadline, Driver, Error, Group, Pool};

const WORLD: u32 = 2;
const MIB: usize = 1 << 20;
/// The growth of a lane that has some memory: each block of this size is a segment.
const SEGMENT: usize = 48 * MIB;

/// The host driver, which reports its handles as slow.
struct Slow(HostDriver);

// SAFETY: every call is forwarded to the wrapped driver, with the same values.
unsafe impl DriverWrapper for Slow {
    fn inner(&self) -> &dyn MemoryDriver {
        &self.0
    }

    fn has_slow_handles(&self) -> bool {
        true
    }
}

/// One rank's pool, and the means to observe it.
struct Rank {
    rank: u32,
    pool: Pool,
    driver: FaultDriver,
    together: Arc<Barrier>,
}

impl Rank {
    fn alloc(&self, segments: usize) -> Block<u8> {
        self.pool.alloc(segments * SEGMENT).unwrap()
    }

    fn commit(&self) -> u64 {
        self.pool.commit().unwrap().windows_added
    }

    /// How often the driver was called for a handle.
    fn exports(&self) -> u64 {
        self.driver.counts().made(DriverCall::Export)
    }

    /// How many memory files the process has open while both ranks are here: one for each segment of both
    /// ranks, and one for each handle.
    fn open(&self) -> usize {
        open_together(&self.together)
    }

    /// Waits for the closing threads, until exactly `expected` memory files are open.
    fn wait_for_open(&self, expected: usize) {
        self.together.wait();
        let began = Instant::now();
        while open() > expected && began.elapsed() < Duration::from_secs(20) {
            thread::yield_now();
        }
        assert_eq!(open(), expected);
        self.together.wait();
    }
}

fn open_together(together: &Barrier) -> usize {
    together.wait();
    let open = open();
    together.wait();
    open
}

fn open() -> usize {
    let links = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let links = links.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("/memfd:symmpool")).count()
}

/// Runs `body` as two ranks whose drivers follow `plan`, and asserts that nothing is left open.
fn ranks(slow: bool, plan: impl Fn(u32, &Arc<Barrier>) -> FaultPlan + Sync, body: fn(&Rank)) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let together = Arc::new(Barrier::new(WORLD as usize));
    thread::scope(|scope| {
        for group in Group::in_process(WORLD).unwrap() {
            let (plan, together) = (&plan, together.clone());
            scope.spawn(move || {
                let rank = group.rank();
                let options = HostOptions { populate: false, ..HostOptions::default() };
                let host = HostDriver::with_options(options).unwrap();
                let host = if slow { Driver::new(Slow(host)) } else { Driver::new(host) };
                let driver = FaultDriver::new(host, plan(rank, &together));
                let pool = Pool::builder(group.with_timeout(Duration::from_secs(30)))
                    .driver(Driver::new(driver.clone()))
                    .lane(LaneConfig::symmetric("default"))
                    .lane(LaneConfig::local("local"))
                    .stride(1 << 33)
                    .build()
                    .unwrap();
                let rank = Rank { rank, pool, driver, together };
                body(&rank);
                // The pool is dropped with all that the test has left in it.
                let Rank { pool, driver, together, .. } = rank;
                drop(pool);
                assert_eq!(open_together(&together), 0, "the last is closed with the pool");
                assert_eq!(driver.counts().leaks(), None);
            });
        }
    });
}

fn no_faults(_: u32, _: &Arc<Barrier>) -> FaultPlan {
    FaultPlan::new()
}

fn failure() -> FaultAction {
    FaultAction::Fail(Error::out_of_memory("none left, as planned"))
}

/// Asserts that each rank still has a segment and its handle open when all peers have mapped it.
fn open_at_confirmation(_: u32, together: &Arc<Barrier>) -> FaultPlan {
    let together = together.clone();
    let look = move || assert_eq!(open_together(&together), 4, "kept for peers");
    FaultPlan::new().at_step(Step::CommitConfirm, 1, FaultAction::Notify(Arc::new(look)))
}

#[test]
fn slow_handles_are_made_with_segments_and_closed_after_the_confirmation() {
    ranks(true, open_at_confirmation, |rank| {
        let block = rank.alloc(1);
        assert_eq!((rank.exports(), rank.open()), (1, 4));
        assert_eq!((rank.commit(), rank.exports()), (1, 1));
        assert!(rank.pool.is_window(block.address(), block.bytes()));
        rank.wait_for_open(2);
        // Memory that a commit gives back is free on return: none of its descriptors is open then.
        let other = rank.alloc(2);
        rank.commit();
        drop((block, other));
        rank.pool.default_lane().trim().unwrap();
        rank.commit();
        assert_eq!(rank.open(), 0);
    });
}

#[test]
fn quick_handles_are_made_and_closed_in_the_commit() {
    ranks(false, open_at_confirmation, |rank| {
        let _block = rank.alloc(1);
        assert_eq!((rank.exports(), rank.open()), (0, 2));
        assert_eq!((rank.commit(), rank.exports()), (1, 1));
        assert_eq!(rank.open(), 2);
    });
}

#[test]
fn handles_beyond_the_limit_are_made_in_the_commit() {
    ranks(true, no_faults, |rank| {
        let mut blocks: Vec<_> = (0..70).map(|_| rank.alloc(1)).collect();
        assert_eq!(rank.exports(), 64);
        assert_eq!(rank.open(), 2 * (70 + 64));
        assert_eq!((rank.commit(), rank.exports()), (70, 70));
        // After the commit there may be early handles again.
        blocks.push(rank.alloc(1));
        assert_eq!(rank.exports(), 71);
        assert_eq!((rank.commit(), rank.exports()), (1, 71));
    });
}

#[test]
fn a_handle_that_cannot_be_made_early_is_left_to_the_commit() {
    let plan = |rank, _: &Arc<Barrier>| match rank {
        1 => FaultPlan::new().at_call(DriverCall::Export, 1, failure()),
        _ => FaultPlan::new(),
    };
    ranks(true, plan, |rank| {
        let block = rank.alloc(1);
        assert_eq!(rank.exports(), 1);
        assert_eq!(rank.commit(), 1);
        assert_eq!(rank.exports(), 1 + u64::from(rank.rank));
        assert!(rank.pool.is_window(block.address(), block.bytes()));
    });
}

#[test]
fn a_commit_that_failed_leaves_handles_to_the_next() {
    // The first handle of rank 1 is made in the commit, and closed when the commit fails.
    let plan = |rank, _: &Arc<Barrier>| match rank {
        1 => FaultPlan::new().at_call(DriverCall::Export, 1, failure()).at_call(
            DriverCall::Import,
            2,
            failure(),
        ),
        _ => FaultPlan::new(),
    };
    ranks(true, plan, |rank| {
        let _blocks = [rank.alloc(1), rank.alloc(1)];
        let error = rank.pool.commit().unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert_eq!(rank.exports(), 2 + u64::from(rank.rank));
        assert_eq!(rank.commit(), 2);
        assert_eq!(rank.exports(), 2 + 2 * u64::from(rank.rank));
    });
}

#[test]
fn a_commit_that_others_never_came_to_leaves_nothing() {
    ranks(true, no_faults, |rank| {
        let _block = rank.alloc(1);
        if rank.rank == 0 {
            let error = rank.pool.commit_by(Deadline::after(Duration::from_millis(50)));
            assert!(error.unwrap_err().is_timeout());
        }
        assert_eq!(rank.open(), 4);
    });
}

#[test]
fn handles_of_segments_that_go_before_their_commit_are_closed() {
    ranks(true, no_faults, |rank| {
        let (_kept, block) = (rank.alloc(1), rank.alloc(1));
        assert_eq!((rank.exports(), rank.open()), (2, 8));
        drop(block);
        assert_eq!(rank.pool.default_lane().trim().unwrap(), SEGMENT as u64);
        assert_eq!((rank.commit(), rank.exports()), (1, 2));
        // The commit that gives the memory back closes the handle too.
        let block = rank.alloc(1);
        drop(block);
        rank.pool.default_lane().trim().unwrap();
        assert_eq!(rank.commit(), 0);
        assert_eq!(rank.open(), 2);
    });
}

#[test]
fn handles_move_with_their_segments() {
    ranks(true, no_faults, |rank| {
        let lane = rank.pool.default_lane();
        let (first, second) = (rank.alloc(1), rank.alloc(1));
        drop(first);
        let large = rank.alloc(2);
        assert_eq!(lane.stats().unwrap().segments_moved, 1, "{:?}", lane.stats().unwrap());
        // Two segments were made, of which one moved with its handle, and then one more.
        assert_eq!((rank.exports(), rank.open()), (3, 12));
        assert_eq!((rank.commit(), rank.exports()), (3, 3));
        // A segment that a commit has shared is shared again after it has moved.
        drop(second);
        let _larger = rank.alloc(3);
        assert_eq!(lane.stats().unwrap().segments_moved, 2, "{:?}", lane.stats().unwrap());
        assert_eq!(rank.exports(), 6, "one for the moved segment, and two for the rest");
        assert_eq!((rank.commit(), rank.exports()), (3, 6));
        assert!(rank.pool.is_window(large.address(), large.bytes()));
    });
}

#[test]
fn a_resync_closes_what_it_takes_back() {
    ranks(true, no_faults, |rank| {
        let lane = rank.pool.default_lane();
        let (first, _second) = (rank.alloc(1), rank.alloc(1));
        assert_eq!(rank.commit(), 2);
        drop(first);
        let before = rank.exports();
        let stray = (rank.rank == 1).then(|| rank.alloc(2));
        assert_eq!(lane.stats().unwrap().segments_moved, u64::from(rank.rank));
        assert_eq!(rank.exports(), before + 2 * u64::from(rank.rank));
        assert!(rank.pool.commit().unwrap_err().is_diverged());
        drop(stray);
        assert!(rank.pool.resync().unwrap());
        rank.wait_for_open(4);
        let large = rank.alloc(2);
        rank.commit();
        assert!(rank.pool.is_window(large.address(), large.bytes()));
    });
}

#[test]
fn segments_of_local_lanes_get_no_handles() {
    ranks(true, no_faults, |rank| {
        let lane = rank.pool.lane("local").unwrap();
        let block = lane.alloc::<u8>(8 * MIB).unwrap();
        assert_eq!((rank.exports(), rank.open()), (0, 2));
        drop(block);
        lane.trim().unwrap();
        assert_eq!((rank.commit(), rank.exports()), (0, 0));
    });
}
