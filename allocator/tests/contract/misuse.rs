//! Bad arguments, wrong owners and calls at the wrong time: each gives a typed error that names rank and value
//! and says what to do, and leaves the pool as it was.

use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use symmpool_allocator::driver::{
    DriverCall, FaultAction, FaultDriver, FaultPlan, SimDriver, Step,
};
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::{Deadline, Driver, Error, Group, Pool, Stream};

use crate::ranks::{each, ranks, same_error};

/// A pool of one rank on simulated memory, with two lanes.
fn alone() -> Pool {
    let group = Group::in_process(1).unwrap().remove(0);
    Pool::builder(group)
        .driver(Driver::sim(3))
        .stride(1 << 33)
        .lane(LaneConfig::symmetric("default").range(1 << 32))
        .lane(LaneConfig::local("scratch").range(1 << 30))
        .build()
        .unwrap()
}

/// Asserts that the message of `error` contains all of `words`.
fn says(error: &Error, words: &[&str]) {
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
}

#[test]
fn sizes_that_overflow() {
    let pool = alone();
    let before = pool.default_lane().digest().unwrap();
    let error = pool.alloc::<u64>(usize::MAX).unwrap_err();
    assert!(error.is_invalid_argument(), "{error}");
    says(&error, &["18446744073709551615 elements of 8 bytes"]);
    let error = pool.alloc::<u64>(usize::MAX / 8).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    says(&error, &["rank 0", "\"default\"", "longer range"]);
    let error = pool.default_lane().reserve(u64::MAX).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert_eq!(pool.default_lane().digest().unwrap(), before, "D1: a refused call is no event");
}

#[test]
fn alignments_that_cannot_be_served() {
    let pool = alone();
    let lane = pool.default_lane();
    for align in [0, 3, 513, 4 << 20, u64::MAX] {
        let error = lane.alloc_bytes(64, align, Stream::DEFAULT).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        let served = ["power of two of at most 2 MiB", "granularity", "\"default\""];
        says(&error, &["rank 0", &format!("alignment {align};"), served[0], served[1], served[2]]);
    }
    assert_eq!(lane.counter().unwrap(), 0);
    for align in [1, 512, 4096, 2 << 20] {
        let block = lane.alloc_bytes(700, align, Stream::DEFAULT).unwrap();
        assert!(block.address().is_multiple_of(align));
    }
}

#[test]
fn addresses_that_are_no_blocks_of_the_lane() {
    let outcomes = ranks(2, |group| {
        let pool = Pool::builder(group)
            .driver(Driver::sim(3))
            .stride(1 << 32)
            .lane(LaneConfig::symmetric("default"))
            .lane(LaneConfig::local("scratch"))
            .build()
            .unwrap();
        let (lane, other) = (pool.default_lane(), pool.lane("scratch").unwrap());
        let peer = 1 - pool.rank();
        let address = lane.alloc::<u64>(100).unwrap().into_address();
        pool.commit().unwrap();
        let elsewhere = Box::new(7u64);
        let refused = [
            (lane.free_address(&raw const *elsewhere as u64), "outside the heap"),
            (lane.free_address(0), "outside the heap"),
            (lane.free_address(u64::MAX), "outside the heap"),
            (lane.free_address(pool.peer_ptr(peer, address).unwrap()), "only that rank frees"),
            (other.free_address(address), "another lane"),
            (lane.free_address(address + 8), "no live block begins there"),
            (lane.free_address(address + 512), "no live block begins there"),
            (lane.free_address_unordered(address + 512), "no live block begins there"),
        ];
        let events = lane.counter().unwrap();
        for (outcome, why) in refused {
            let error = outcome.unwrap_err();
            assert!(error.is_invalid_argument(), "{error}");
            says(&error, &[why, &format!("rank {}", pool.rank()), "0x", "not a live block"]);
        }
        assert_eq!(lane.counter().unwrap(), events);
        lane.free_address(address).unwrap();
        let twice = lane.free_address(address).unwrap_err();
        assert!(twice.is_invalid_argument(), "{twice}");
        says(&twice, &["freed before", "\"default\""]);
        let after = lane.alloc::<u64>(10).unwrap().into_address();
        lane.free_address_unordered(after).unwrap();
        let twice = lane.free_address(after).unwrap_err();
        assert!(twice.is_invalid_argument(), "{twice}");
        pool.commit().map(|report| report.blocks_returned)
    });
    for outcome in outcomes {
        assert_eq!(outcome.unwrap(), 1, "D5: the one freed without order, once");
    }
}

#[test]
fn addresses_and_ranks_that_windows_do_not_have() {
    let pool = alone();
    let fresh = pool.alloc::<u8>(100).unwrap();
    let error = pool.peer_ptr(0, fresh.address()).unwrap_err();
    assert!(error.is_invalid_argument(), "{error}");
    says(&error, &["in no window of rank 0", "commit"]);
    pool.commit().unwrap();
    assert_eq!(pool.peer_ptr(0, fresh.address()).unwrap(), fresh.address());
    let outcomes = [
        pool.peer_ptr(1, fresh.address()).err(),
        fresh.peer_ptr(u32::MAX).err(),
        pool.device(1).err(),
    ];
    for error in outcomes {
        let error = error.expect("there is one rank");
        assert!(error.is_invalid_argument(), "{error}");
        says(&error, &["of a group of 1"]);
    }
    let error = pool.lane("nonesuch").unwrap_err();
    assert!(error.is_invalid_argument(), "{error}");
    says(&error, &["nonesuch", "default", "scratch"]);
}

/// Rule D3.
#[test]
fn too_many_streams() {
    // A lane can know 64 streams.
    let pool = alone();
    let lane = pool.default_lane();
    let streams = || (0..).map(|n| Stream::numbered(0x1000 + n));
    let blocks: Vec<_> =
        streams().take(64).map(|stream| lane.alloc_on::<u8>(8, stream).unwrap()).collect();
    let one_more = streams().nth(64).unwrap();
    let events = lane.counter().unwrap();
    for error in [
        lane.alloc_on::<u8>(8, one_more).unwrap_err(),
        blocks[0].record_stream(one_more).unwrap_err(),
    ] {
        assert!(error.is_invalid_argument(), "{error}");
        says(&error, &["0x1040", "64", "another lane"]);
    }
    assert_eq!(lane.counter().unwrap(), events);
    // Another lane has its own count.
    pool.lane("scratch").unwrap().alloc_on::<u8>(8, one_more).unwrap();
}

#[test]
fn values_that_do_not_fit_their_block() {
    let group = Group::in_process(1).unwrap().remove(0);
    let host =
        Pool::builder(group).driver(Driver::host().unwrap()).stride(1 << 30).build().unwrap();
    let block = host.alloc::<u32>(4).unwrap();
    let error = block.write(&[1, 2, 3, 4, 5]).unwrap_err();
    assert!(error.is_invalid_argument(), "{error}");
    says(&error, &["5 elements", "block of 4"]);
    block.write(&[9, 8]).unwrap();
    assert_eq!(block.read().unwrap(), [9, 8, 0, 0]);
    // Memory that the CPU cannot access is refused.
    let sim = alone();
    let block = sim.alloc::<u32>(4).unwrap();
    assert!(block.write(&[1]).unwrap_err().is_unsupported());
    assert!(block.read().unwrap_err().is_unsupported());
}

/// Rules D6 and D8.
#[test]
fn a_lanes_limit_is_reached_on_every_rank_alike() {
    // The limit is part of the configuration, so reaching it is not a divergence.
    ranks(3, |group| {
        let lane = LaneConfig::symmetric("small").limit(8 << 20);
        let driver = Driver::sim(u64::from(group.rank()));
        let pool = Pool::builder(group).driver(driver).stride(1 << 36).lane(lane).build().unwrap();
        let kept = pool.alloc::<u8>(4 << 20).unwrap();
        let error = pool.alloc::<u8>(64 << 20).unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        says(&error, &[&format!("rank {}", pool.rank()), "\"small\"", "limit of 8 MiB"]);
        pool.commit().unwrap();
        assert!(pool.is_window(kept.address(), kept.bytes()));
        let rest = pool.alloc::<u8>(4 << 20).unwrap();
        assert_eq!(pool.default_lane().stats().unwrap().reserved, 8 << 20);
        pool.commit().unwrap();
        drop((kept, rest));
    });
}

#[test]
fn more_memory_than_there_is() {
    let errors = ranks(2, |group| {
        // Rank 1's device has less memory than the program needs.
        let limit = if group.rank() == 1 { 16 << 20 } else { 1 << 30 };
        let driver = Driver::new(SimDriver::with_limit(5, limit));
        let pool = Pool::builder(group).driver(driver).stride(1 << 36).build().unwrap();
        let _small = pool.alloc::<u8>(4 << 20).unwrap();
        let _large = pool.alloc::<u8>(64 << 20);
        pool.commit().unwrap_err()
    });
    let error = same_error(errors);
    assert!(error.is_out_of_memory(), "{error}");
    says(&error, &["rank 1 failed in event 1"]);
    // The host driver refuses before the system's out-of-memory killer would act.
    let group = Group::in_process(1).unwrap().remove(0);
    let pool =
        Pool::builder(group).driver(Driver::host().unwrap()).stride(1 << 44).build().unwrap();
    let error = pool.alloc::<u8>(1 << 42).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    says(&error, &["rank 0"]);
    assert_eq!(pool.default_lane().stats().unwrap().reserved, 0);
}

#[test]
fn a_commit_while_another_is_under_way() {
    let groups = Group::in_process(2).unwrap();
    let (inside, entered) = channel();
    let inside = Mutex::new(inside);
    let notify = FaultAction::Notify(std::sync::Arc::new(move || {
        // The test may have stopped receiving.
        let _ = inside.lock().unwrap().send(());
    }));
    let plan = FaultPlan::new().at_step(Step::CommitPublish, 1, notify);
    let driver = Driver::new(FaultDriver::new(Driver::sim(1), plan));
    let pools = each(groups.into_iter().zip([driver, Driver::sim(2)]), |(group, driver)| {
        Pool::builder(group).driver(driver).stride(1 << 32).build().unwrap()
    });
    let [first, second] = &pools[..] else { panic!("two ranks") };
    std::thread::scope(|scope| {
        let under_way = scope.spawn(|| first.commit());
        entered.recv().unwrap();
        // Rank 1 has not called yet, so the commit cannot have ended.
        let error = first.commit().unwrap_err();
        assert!(error.is_invalid_state(), "{error}");
        says(&error, &["rank 0", "another thread", "one at a time"]);
        assert_eq!(second.commit().unwrap().number, 1);
        assert_eq!(under_way.join().unwrap().unwrap().number, 1);
    });
    each(&pools, |pool| assert_eq!(pool.commit().unwrap().number, 2));
}

#[test]
fn a_commit_that_one_rank_does_not_call() {
    let limit = Duration::from_millis(600);
    let errors = ranks(3, |group| {
        let rank = group.rank();
        let pool = Pool::builder(group).driver(Driver::sim(1)).stride(1 << 32).build().unwrap();
        let _block = pool.alloc::<u8>(10).unwrap();
        if rank == 1 {
            return None;
        }
        assert!(pool.can_commit());
        let started = Instant::now();
        let error = pool.commit_by(Deadline::after(limit)).unwrap_err();
        assert!(started.elapsed() >= limit, "{error}");
        // A rank whose wait failed cannot know what the others do next.
        let started = Instant::now();
        let again = pool.commit().unwrap_err();
        assert!(started.elapsed() < limit, "at once");
        assert!(!pool.can_commit());
        assert_eq!((again.is_timeout(), again.ranks()), (true, &[1][..]), "{again}");
        says(&again, &["cannot commit any more", "build a new one", "rank 1"]);
        assert!(pool.alloc::<u8>(1 << 24).is_ok(), "allocation still works");
        Some(error)
    });
    for error in errors.into_iter().flatten() {
        assert!(error.is_timeout(), "{error}");
        assert_eq!(error.ranks(), [1], "{error}");
        says(&error, &["commit 1", "600.0ms", "no answer from rank 1"]);
    }
}

#[test]
fn ranks_at_different_places_of_the_program() {
    // One rank calls resync where the others commit. Their gathers do not match, and each error names the
    // ranks that are missing.
    let limit = Duration::from_millis(600);
    let errors = ranks(3, |group| {
        let odd = group.rank() == 2;
        let group = group.with_timeout(limit);
        let pool = Pool::builder(group).driver(Driver::sim(1)).stride(1 << 32).build().unwrap();
        if odd { pool.resync().map(drop) } else { pool.commit().map(drop) }.unwrap_err()
    });
    for (rank, error) in errors.iter().enumerate() {
        assert!(error.is_timeout(), "{error}");
        let expected: &[u32] = if rank == 2 { &[0, 1] } else { &[2] };
        assert_eq!(error.ranks(), expected, "{error}");
    }
}

#[test]
fn blocks_outlive_their_pool() {
    let survivors = ranks(2, |group| {
        let driver = FaultDriver::new(Driver::host().unwrap(), FaultPlan::new());
        let rank = u64::from(group.rank());
        let pool = Pool::builder(group.clone())
            .driver(Driver::new(driver.clone()))
            .stride(1 << 30)
            .build()
            .unwrap();
        let block = pool.alloc::<u64>(1000).unwrap();
        pool.commit().unwrap();
        block.write(&[rank + 5]).unwrap();
        group.all_gather("written", b"", group.deadline()).unwrap();
        drop(pool);
        // The peer's copy is still mapped, although the peer has dropped its pool.
        group.all_gather("dropped", b"", group.deadline()).unwrap();
        let peer = block.peer_ptr(1 - group.rank()).unwrap() as *const u64;
        // SAFETY: the block was made a window, and keeps its heap with all mappings alive.
        assert_eq!(unsafe { peer.read_volatile() }, 6 - rank);
        assert_eq!(block.read().unwrap()[0], rank + 5);
        assert!(driver.counts().leaks().is_some(), "a live block keeps the heap");
        block.free().unwrap();
        driver
    });
    for driver in survivors {
        assert_eq!(driver.counts().leaks(), None);
        assert_eq!(driver.counts().made(DriverCall::Reserve), 1);
    }
}

#[test]
fn lanes_outlive_their_pool() {
    let driver = FaultDriver::new(Driver::sim(1), FaultPlan::new());
    let group = Group::in_process(1).unwrap().remove(0);
    let pool =
        Pool::builder(group).driver(Driver::new(driver.clone())).stride(1 << 32).build().unwrap();
    let (lane, windows) = (pool.default_lane(), pool.windows());
    drop(pool);
    let block = lane.alloc::<u8>(1 << 20).unwrap();
    assert!(windows.find(block.address()).is_none());
    drop((lane, block));
    assert_eq!(driver.counts().leaks(), None);
}
