//! Forked children: what they do with copies of their parent's objects does not affect the parent.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use symmpool_allocator::driver::{DriverCall, FaultAction, FaultDriver, FaultPlan, Step};
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::store::tcp::TcpOptions;
use symmpool_allocator::store::{Store, TcpServer, TcpStore};
use symmpool_allocator::testing::in_child;
use symmpool_allocator::{Block, Deadline, Driver, Error, Group, Pool, Result, Stream};

#[test]
fn a_child_leaves_its_parents_store_alone() {
    let ample = || Deadline::seconds(20);
    let mut server = Some(TcpServer::bind("127.0.0.1:0", TcpOptions::default()).unwrap());
    let addr = server.as_ref().unwrap().local_addr();
    let client = TcpStore::connect(addr, TcpOptions::default(), ample()).unwrap();
    client.set("k", b"v", ample()).unwrap();
    assert!(in_child(|| {
        drop(server.take());
        true
    }));
    assert_eq!(client.get("k", ample()).unwrap(), b"v");
    TcpStore::connect(addr, TcpOptions::default(), ample()).unwrap();
}

#[test]
fn commits_are_refused_in_a_child() {
    let group = Group::in_process(1).unwrap().remove(0);
    let pool =
        Pool::builder(group).driver(Driver::host().unwrap()).stride(1 << 30).build().unwrap();
    let _block = pool.alloc::<u8>(100).unwrap();
    assert!(in_child(|| {
        [pool.commit().map(drop), pool.resync().map(drop)].into_iter().all(|refused| {
            refused.is_err_and(|error| {
                error.is_invalid_state() && error.to_string().contains("forked from it")
            })
        })
    }));
    assert_eq!(pool.commit().unwrap().number, 1);
}

#[test]
fn a_child_is_given_none_of_its_parents_memory() {
    let group = Group::in_process(1).unwrap().remove(0);
    let pool =
        Pool::builder(group).driver(Driver::host().unwrap()).stride(1 << 30).build().unwrap();
    let lane = pool.lane("default").unwrap();
    assert!(in_child(|| {
        [
            pool.alloc::<u8>(100).map(drop),
            lane.alloc_bytes(100, 1, Stream::DEFAULT).map(drop),
            lane.try_alloc_bytes(100, 1, Stream::DEFAULT).map(drop),
            lane.reserve(100),
        ]
        .into_iter()
        .all(|refused| refused.is_err_and(|error| error.is_invalid_state()))
    }));
    assert_eq!(lane.counter().unwrap(), 0);
    pool.alloc::<u8>(100).unwrap();
}

/// A place where a thread stops: it signals its arrival, and waits until it may continue.
type StopChannel = (mpsc::Receiver<()>, mpsc::Sender<()>);

/// A pool of one rank. Its driver stops one thread at a step of a commit, and another in the third call that
/// makes memory. Both signal their arrival and wait.
fn a_pool_that_stops() -> (Pool, [StopChannel; 2]) {
    let stop = || {
        let (arrive, arrived) = mpsc::channel();
        let (leave, left) = mpsc::channel::<()>();
        let left = Mutex::new(left);
        let stop = move || {
            arrive.send(()).unwrap();
            // Waits until the test lets it continue, or has ended.
            let _ = left.lock().unwrap().recv();
        };
        (FaultAction::Notify(Arc::new(stop)), (arrived, leave))
    };
    let ((in_commit, commit), (in_growth, growth)) = (stop(), stop());
    let plan = FaultPlan::new().at_step(Step::CommitPublish, 1, in_commit).at_call(
        DriverCall::Create,
        3,
        in_growth,
    );
    let driver = FaultDriver::new(Driver::host().unwrap(), plan);
    let group = Group::in_process(1).unwrap().remove(0);
    let pool = Pool::builder(group)
        .driver(Driver::new(driver))
        .stride(1 << 32)
        .lane(LaneConfig::symmetric("default"))
        .lane(LaneConfig::local("local"));
    (pool.build().unwrap(), [commit, growth])
}

fn refused<T>(outcome: Result<T>) -> bool {
    let says = |error: Error| error.is_invalid_state() && error.to_string().contains("forked");
    outcome.err().is_some_and(says)
}

/// All calls that take a lane's lock; whether each returns in a forked child as it must.
fn a_child_is_answered(pool: &Pool, name: &str, blocks: &mut Vec<Block<u8>>) -> bool {
    let lane = pool.lane(name).unwrap();
    let address = blocks[0].address();
    let calls = [
        refused(blocks[0].record_stream(Stream::DEFAULT)),
        refused(blocks.pop().unwrap().free()),
        refused(blocks.pop().unwrap().free_unordered()),
        blocks.pop().unwrap().into_address() != 0,
        refused(lane.free_address(address)),
        refused(lane.free_address_sized(address)),
        refused(lane.free_address_unordered(address)),
        refused(lane.record_stream_address(address, Stream::DEFAULT)),
        refused(lane.trim()),
        refused(lane.reserve(100)),
        refused(lane.try_alloc_bytes(100, 1, Stream::DEFAULT)),
        refused(lane.stats()),
        refused(lane.reserved()),
        refused(lane.live_blocks()),
        refused(lane.counter()),
        refused(lane.digest()),
        refused(lane.map()),
        refused(pool.stats()),
        !pool.can_commit(),
        !pool.has_left(0),
        pool.windows().list().is_empty(),
    ];
    lane.note_failure(&Error::invalid_state("not reported to anybody"));
    blocks.clear();
    calls.into_iter().all(|good| good)
}

#[test]
fn a_child_waits_for_no_lock_that_another_thread_held() {
    let (pool, [commit, growth]) = a_pool_that_stops();
    let blocks_of = |name: &str| -> Vec<Block<u8>> {
        let lane = pool.lane(name).unwrap();
        (0..5).map(|_| lane.alloc(100).unwrap()).collect()
    };
    // Two segments are made here, the third by the thread that stops.
    let mut symmetric = blocks_of("default");
    let mut local = blocks_of("local");
    let mut parent = Some(pool.clone());
    thread::scope(|scope| {
        scope.spawn(|| pool.commit().unwrap());
        scope.spawn(|| pool.lane("local").unwrap().alloc::<u8>(1 << 30).unwrap());
        for (arrived, _) in [&commit, &growth] {
            arrived.recv_timeout(Duration::from_secs(20)).unwrap();
        }
        let answered = in_child(|| {
            let pool = parent.take().unwrap();
            a_child_is_answered(&pool, "default", &mut symmetric)
                && a_child_is_answered(&pool, "local", &mut local)
        });
        for (_, leave) in [commit, growth] {
            leave.send(()).unwrap();
        }
        assert!(answered);
    });
    // Nothing that the child did was done to the parent's.
    assert_eq!(pool.stats().unwrap().lanes[0].1.live_blocks, 5);
    assert_eq!(pool.commit().unwrap().number, 2);
    drop((symmetric, local));
    assert_eq!(pool.stats().unwrap().allocated(), 0);
}

#[test]
fn a_child_drops_a_pool_whose_driver_another_thread_was_using() {
    let driver = Driver::host().unwrap();
    let group = Group::in_process(1).unwrap().remove(0);
    let pool = Pool::builder(group).driver(driver.clone()).stride(1 << 30).build().unwrap();
    let block = pool.alloc::<u8>(100).unwrap();
    pool.commit().unwrap();
    let (mut pool, mut block) = (Some(pool), Some(block));
    let busy = AtomicBool::new(true);
    let children = thread::scope(|scope| {
        // The driver's lock is held nearly all of the time.
        for _ in 0..2 {
            scope.spawn(|| {
                while busy.load(Ordering::Relaxed) {
                    driver.release(driver.create(2 << 20).unwrap()).unwrap();
                }
            });
        }
        let child = |_| {
            in_child(|| {
                drop((block.take(), pool.take()));
                true
            })
        };
        let children = (0..50).all(child);
        busy.store(false, Ordering::Relaxed);
        children
    });
    assert!(children);
    let (pool, block) = (pool.unwrap(), block.unwrap());
    block.write(&[1; 100]).unwrap();
    assert_eq!(block.read().unwrap(), [1; 100]);
    assert_eq!(pool.commit().unwrap().number, 2);
}
