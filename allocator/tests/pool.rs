//! Pools of ranks that are threads of one process.

use std::collections::VecDeque;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use symmpool_allocator::driver::{DriverCall, FaultAction, FaultDriver, FaultPlan, Step};
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::testing::on_ranks;
use symmpool_allocator::{Block, Driver, Error, Group, Pool, PoolBuilder, Result, Stream};

/// Runs `body` as every rank of a group of `world`; returns their results in rank order.
fn ranks<R: Send>(world: u32, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    on_ranks(world, |group| body(group.with_timeout(Duration::from_secs(20))))
}

fn pool(group: Group, driver: Driver) -> Result<Pool> {
    Pool::builder(group).driver(driver).build()
}

/// A pool of simulated memory with the lanes "a" and "b".
fn pool_of_two_lanes(group: Group) -> Pool {
    let driver = Driver::sim(u64::from(group.rank()));
    let builder = Pool::builder(group).driver(driver);
    ["a", "b"]
        .map(LaneConfig::symmetric)
        .into_iter()
        .fold(builder, PoolBuilder::lane)
        .build()
        .unwrap()
}

#[test]
fn memory_written_by_one_rank_is_read_by_the_others() {
    ranks(4, |group| {
        let rank = group.rank();
        let pool = pool(group, Driver::host().unwrap()).unwrap();
        let block = pool.alloc::<u64>(1000).unwrap();
        assert!(pool.is_commit_due());
        let report = pool.commit().unwrap();
        assert_eq!((report.number, report.windows_added), (1, 1));
        assert!(!pool.is_commit_due());
        assert!(pool.is_window(block.address(), block.bytes()));
        block.write(&vec![u64::from(rank) + 7; 1000]).unwrap();
        pool.commit().unwrap();
        for peer in 0..4 {
            let at = block.peer_ptr(peer).unwrap();
            let last = at.wrapping_add(999);
            assert_eq!(pool.peer_ptr(peer, block.address()).unwrap(), at as u64);
            // SAFETY: the block is a window, so the peer's copy is mapped; the commit after the
            // writes ordered them before this.
            let value = unsafe { last.read_volatile() };
            assert_eq!(value, u64::from(peer) + 7);
        }
        pool.commit().unwrap();
    });
}

#[test]
fn reserved_memory_belongs_to_its_stream() {
    // D3
    let groups = Group::in_process(1).unwrap();
    let pool = pool(groups[0].clone(), Driver::sim(1)).unwrap();
    let (lane, stream) = (pool.default_lane(), Stream::numbered(0x70));
    lane.reserve_on(40 << 20, stream).unwrap();
    let made = lane.stats().unwrap().segments_made;
    assert!(made > 0);
    let there = lane.alloc_on::<u8>(40 << 20, stream).unwrap();
    assert_eq!(lane.stats().unwrap().segments_made, made);
    let other = lane.alloc::<u8>(40 << 20).unwrap();
    assert!(lane.stats().unwrap().segments_made > made, "another stream has its own memory");
    assert_ne!(there.offset(), other.offset());
    lane.reserve(1 << 20).unwrap();
    assert!(lane.reserve_on(u64::MAX, stream).unwrap_err().is_out_of_memory());
}

#[test]
fn forgotten_streams_make_room_for_others() {
    // D3, D5: also if blocks return by commits, or outlive their stream.
    ranks(2, |group| {
        let rank = u64::from(group.rank());
        let pool = pool(group, Driver::sim(rank)).unwrap();
        let mut kept = Vec::new();
        for n in 0..200 {
            // Handles differ from rank to rank.
            let stream = Stream::numbered(1 + 1000 * rank + n);
            let block = pool.default_lane().alloc_on::<u8>(1 << 20, stream).unwrap();
            if n % 50 == 0 {
                kept.push(block);
            } else {
                block.free_unordered().unwrap();
            }
            pool.forget_stream(stream).unwrap();
            pool.commit().unwrap();
        }
        assert!(
            pool.default_lane().reserved().unwrap() <= 32 << 20,
            "memory goes from stream to stream"
        );
        drop(kept);
        pool.commit().unwrap();
    });
}

#[test]
fn a_stream_that_only_one_rank_forgets_is_a_divergence_which_resync_ends() {
    // D3: ordinals depend on which streams were forgotten.
    ranks(2, |group| {
        let rank = u64::from(group.rank());
        let pool = pool(group, Driver::sim(rank)).unwrap();
        let lane = pool.default_lane();
        let [old, new] = [1, 2].map(|n| Stream::numbered(n + 10 * rank));
        lane.alloc_on::<u8>(100, old).unwrap().free().unwrap();
        pool.commit().unwrap();
        if rank == 0 {
            pool.forget_stream(old).unwrap();
        }
        lane.alloc_on::<u8>(100, new).unwrap().free().unwrap();
        let error = pool.commit().unwrap_err();
        assert!(error.to_string().contains("end of stream 0"), "{error}");
        assert!(pool.resync().unwrap());
        for stream in [new, old] {
            lane.alloc_on::<u8>(100, stream).unwrap().free().unwrap();
        }
        pool.commit().unwrap();
    });
}

#[test]
fn diverged_ranks_learn_where() {
    let errors = ranks(4, |group| {
        let rank = group.rank();
        let pool = pool(group, Driver::sim(u64::from(rank))).unwrap();
        let blocks: Vec<_> = (0..100).map(|n| pool.alloc::<u8>(1000 + n).unwrap()).collect();
        pool.commit().unwrap();
        drop(blocks);
        let _wrong = pool.alloc::<f32>(if rank == 2 { 6 << 20 } else { 8 << 20 }).unwrap();
        pool.commit().unwrap_err()
    });
    println!("{}", errors[0]);
    for error in &errors {
        let divergence = error.divergence().expect("a divergence");
        assert_eq!(divergence.counter, 200);
        assert_eq!(divergence.ranks(), [2]);
    }
}

#[test]
fn ranks_that_diverged_go_on_after_a_resync() {
    let digests = ranks(3, |group| {
        let rank = group.rank();
        let pool = pool(group, Driver::host().unwrap()).unwrap();
        let lane = pool.default_lane();
        let kept = pool.alloc::<u32>(5000).unwrap();
        kept.write(&vec![rank; 5000]).unwrap();
        let half = pool.alloc::<u32>(5000).unwrap();
        pool.commit().unwrap();
        // Rank 1 diverges: another size, a growth of its own, and a free that others lack.
        let stray = pool.alloc::<u8>(if rank == 1 { 40 << 20 } else { 100 }).unwrap();
        let half = if rank == 1 { half.free().map(|()| None).unwrap() } else { Some(half) };
        assert!(pool.commit().unwrap_err().is_diverged());
        let error = pool.resync().unwrap_err();
        assert!(error.is_invalid_state(), "{error}");
        assert!(error.to_string().contains("rank 0: 1, rank 1: 1, rank 2: 1"), "{error}");
        stray.free().unwrap();
        assert!(pool.resync().unwrap());
        assert!(!pool.resync().unwrap(), "nothing differs any more");
        pool.commit().unwrap();
        assert_eq!(kept.read().unwrap(), vec![rank; 5000]);
        assert_eq!(
            lane.stats().unwrap().deferred > 0,
            rank == 1,
            "others still hold what rank 1 freed"
        );
        // D5: the block returns once all ranks have freed it.
        drop(half);
        assert_eq!(pool.commit().unwrap().blocks_returned, 1);
        let again = pool.alloc::<u8>(50 << 20).unwrap();
        pool.commit().unwrap();
        assert!(pool.is_window(again.address(), again.bytes()));
        let places = (again.offset(), kept.offset());
        // A block that all ranks hold is freed in order, as usual.
        kept.free().unwrap();
        assert_eq!(lane.stats().unwrap().deferred, 0);
        (lane.digest().unwrap(), places)
    });
    assert!(digests.iter().all(|digest| *digest == digests[0]), "{digests:?}");
}

#[test]
fn a_growth_that_fails_on_one_rank_makes_the_commit_due_on_all() {
    let errors = ranks(3, |group| {
        let rank = group.rank();
        let driver = Driver::sim(u64::from(rank));
        let failing =
            FaultDriver::new(driver.clone(), FaultPlan::parse("fail-oom@create:1").unwrap());
        let driver = if rank == 1 { Driver::new(failing) } else { driver };
        let pool = pool(group, driver).unwrap();
        let block = pool.alloc::<u8>(1000);
        assert_eq!(block.is_err(), rank == 1);
        assert!(pool.is_commit_due(), "the others wait in a commit");
        pool.commit_if_due().unwrap_err()
    });
    for error in errors {
        assert!(error.is_out_of_memory(), "{error}");
        assert!(error.to_string().contains("rank 1 failed in event 0 of lane"), "{error}");
    }
}

#[test]
fn frees_without_order_do_not_wait_for_a_commit() {
    // D5
    ranks(2, |group| {
        let rank = group.rank();
        let begun = Arc::new(Barrier::new(2));
        let freed = Arc::new(Barrier::new(2));
        let (in_commit, go_on) = (begun.clone(), freed.clone());
        let stop = FaultAction::Notify(Arc::new(move || {
            in_commit.wait();
            go_on.wait();
        }));
        let plan = FaultPlan::new().at_step(Step::CommitAgree, 2, stop);
        let driver = Driver::new(FaultDriver::new(Driver::sim(u64::from(rank)), plan));
        let pool = pool(group, driver).unwrap();
        let blocks: Vec<_> = (0..2).map(|_| pool.alloc::<u8>(1000).unwrap()).collect();
        pool.commit().unwrap();
        thread::scope(|scope| {
            let committing = scope.spawn(|| pool.commit().unwrap());
            begun.wait();
            for block in blocks {
                block.free_unordered().unwrap();
            }
            freed.wait();
            assert_eq!(committing.join().unwrap().blocks_returned, 0);
        });
        assert_eq!(pool.commit().unwrap().blocks_returned, 2);
        assert_eq!(pool.default_lane().stats().unwrap().live_blocks, 0);
    });
}

#[test]
fn blocks_that_one_rank_never_frees_do_not_delay_others() {
    // D5: more blocks than one commit can report, and older ones.
    const KEPT: usize = 1 << 16;
    let returned = ranks(2, |group| {
        let rank = group.rank();
        let pool = pool(group, Driver::sim(u64::from(rank))).unwrap();
        let old: Vec<_> = (0..KEPT).map(|_| pool.alloc::<u8>(1).unwrap()).collect();
        let new: Vec<_> = (0..5).map(|_| pool.alloc::<u8>(1).unwrap()).collect();
        pool.commit().unwrap();
        let mut kept = Some(old);
        if rank == 0 {
            kept.take().into_iter().flatten().for_each(|block| block.free_unordered().unwrap());
        }
        new.into_iter().for_each(|block| block.free_unordered().unwrap());
        let returned = || pool.commit().unwrap().blocks_returned;
        let early = [returned(), returned(), returned()];
        kept.take().into_iter().flatten().for_each(|block| block.free_unordered().unwrap());
        (
            early,
            returned(),
            pool.default_lane().stats().unwrap().live_blocks,
            pool.default_lane().digest().unwrap(),
        )
    });
    let (early, late, live, _) = returned[0];
    assert_eq!((early, late, live), ([0, 5, 0], KEPT as u64, 0));
    assert_eq!(returned[0], returned[1]);
}

#[test]
fn every_byte_of_a_block_is_copied_whatever_its_length() {
    let groups = Group::in_process(1).unwrap();
    let pool = pool(groups[0].clone(), Driver::host().unwrap()).unwrap();
    for len in [0, 1, 7, 8, 9, 511, 512, 1000, 4099] {
        let block = pool.alloc::<u8>(len).unwrap();
        let values: Vec<u8> = (0..len).map(|n| (n * 7 + len) as u8).collect();
        block.write(&values).unwrap();
        assert_eq!(block.read().unwrap(), values);
    }
    let wide = pool.alloc::<[u16; 3]>(11).unwrap();
    let values: Vec<[u16; 3]> = (0..11).map(|n| [n, n * 2, n * 3]).collect();
    wide.write(&values).unwrap();
    assert_eq!(wide.read().unwrap(), values);
}

#[test]
fn a_block_used_on_another_stream_is_waited_for_on_the_device() {
    // D4
    let group = Group::in_process(1).unwrap().remove(0);
    let driver = FaultDriver::new(Driver::sim(1), FaultPlan::new());
    let pool = pool(group, Driver::new(driver.clone())).unwrap();
    let calls = [DriverCall::RecordEvent, DriverCall::WaitEvent, DriverCall::ReleaseEvent];
    for reuses in 0..3 {
        let block = pool.alloc::<u8>(1000).unwrap();
        assert_eq!(block.offset(), 0);
        block.record_stream(Stream::numbered(7)).unwrap();
        block.free().unwrap();
        // Each reuse has waited for the use before it; only the latest event is kept.
        let counts = driver.counts();
        assert_eq!(calls.map(|call| counts.succeeded(call)), [reuses + 1, reuses, reuses]);
    }
    drop(pool);
    assert_eq!(driver.counts().leaks(), None, "the last event goes with the lane");
}

#[test]
fn a_use_on_one_rank_alone_is_waited_for_there_and_ranks_do_not_differ() {
    // D1, D4
    let outcomes = ranks(2, |group| {
        let rank = group.rank();
        let driver = FaultDriver::new(Driver::sim(u64::from(rank)), FaultPlan::new());
        let pool = pool(group, Driver::new(driver.clone())).unwrap();
        let mut offsets = Vec::new();
        for round in 0..4 {
            let block = pool.alloc::<u8>(1 << 20).unwrap();
            offsets.push(block.offset());
            if rank == 1 {
                block.record_use(Stream::numbered(70 + round)).unwrap();
                let inside = block.address() + 1000;
                assert!(pool.record_use_address(inside, Stream::numbered(7)).unwrap());
            }
            block.free_unordered().unwrap();
            pool.commit().unwrap();
        }
        assert!(!pool.record_use_address(8, Stream::numbered(7)).unwrap());
        let counts = driver.counts();
        let digest = pool.default_lane().digest().unwrap();
        drop(pool);
        assert_eq!(driver.counts().leaks(), None);
        (offsets, digest, counts.succeeded(DriverCall::WaitEvent))
    });
    assert_eq!(outcomes[0].0, outcomes[1].0);
    assert_eq!(outcomes[0].1, outcomes[1].1);
    assert_eq!((outcomes[0].2, outcomes[1].2), (0, 6), "each reuse waits for both streams");
}

#[test]
fn blocks_dropped_in_every_step_return_and_the_lane_stops_growing() {
    // D5: commits are due at the same places on all ranks, whenever each of them frees.
    const STEPS: usize = 1000;
    let outcomes = ranks(2, |group| {
        let kept = 3 * group.rank() as usize;
        let driver = Driver::sim(u64::from(group.rank()));
        let pool = pool(group, driver).unwrap();
        let mut blocks = VecDeque::new();
        let mut due = Vec::new();
        for _ in 0..STEPS {
            blocks.push_back(pool.alloc::<u8>(4 << 20).unwrap());
            due.push(pool.is_commit_due());
            pool.commit_if_due().unwrap();
            while blocks.len() > kept {
                blocks.pop_front().unwrap().free_unordered().unwrap();
            }
        }
        (due, pool.default_lane().stats().unwrap().reserved)
    });
    assert_eq!(outcomes[0], outcomes[1]);
    let (due, reserved) = &outcomes[0];
    assert!(*reserved <= 256 << 20, "{reserved} bytes for a few blocks of 4 MiB");
    let commits = due.iter().filter(|due| **due).count();
    assert!(commits < STEPS / 16, "{commits} commits in {STEPS} steps");
}

#[test]
fn a_commit_is_due_on_a_rank_whose_allocation_fails_there() {
    let failure = FaultAction::Fail(Error::refused("planned"));
    let plan = FaultPlan::new().at_call(DriverCall::WaitEvent, 1, failure);
    let driver = Driver::new(FaultDriver::new(Driver::sim(1), plan));
    let pool = pool(Group::in_process(1).unwrap().remove(0), driver).unwrap();
    let block = pool.alloc::<u8>(256 << 20).unwrap();
    block.record_stream(Stream::numbered(7)).unwrap();
    block.free_unordered().unwrap();
    assert_eq!(pool.commit().unwrap().blocks_returned, 1);
    // The returned bytes are as many as make a commit due. The reuse has to wait, and that fails.
    assert!(pool.alloc::<u8>(256 << 20).unwrap_err().to_string().contains("planned"));
    assert!(pool.is_commit_due());
    // The only rank has failed, so ranks do not differ.
    pool.commit().unwrap();
    assert!(!pool.is_commit_due());
}

#[test]
fn memory_is_unmapped_after_waiting_for_the_device() {
    // Kernels that use it may still run.
    let calls = Arc::new(Mutex::new(Vec::new()));
    let plan = [DriverCall::Synchronize, DriverCall::Unmap].into_iter().fold(
        FaultPlan::new(),
        |plan, call| {
            let calls = Arc::clone(&calls);
            let note = move || calls.lock().unwrap().push(call);
            plan.at_call(call, 0, FaultAction::Notify(Arc::new(note)))
        },
    );
    let driver = Driver::new(FaultDriver::new(Driver::sim(1), plan));
    let group = Group::in_process(1).unwrap().remove(0);
    let lanes = [LaneConfig::symmetric("shared"), LaneConfig::local("own")];
    let builder = Pool::builder(group).driver(driver);
    let pool = lanes.into_iter().fold(builder, PoolBuilder::lane).build().unwrap();
    for name in ["shared", "own"] {
        let lane = pool.lane(name).unwrap();
        let block = lane.alloc::<u8>(1000).unwrap();
        pool.commit().unwrap();
        block.free().unwrap();
        calls.lock().unwrap().clear();
        assert!(lane.trim().unwrap() > 0);
        pool.commit().unwrap();
        let calls = calls.lock().unwrap();
        assert_eq!(calls.first(), Some(&DriverCall::Synchronize), "{name}");
        assert!(calls.contains(&DriverCall::Unmap), "{name}: {calls:?}");
    }
}

#[test]
fn only_shared_segments_count_as_removed_windows() {
    ranks(2, |group| {
        let rank = group.rank();
        let pool = pool(group, Driver::sim(u64::from(rank))).unwrap();
        let release = |block: Block<u8>| {
            block.free().unwrap();
            assert!(pool.default_lane().trim().unwrap() > 0);
        };
        let committed = || {
            let report = pool.commit().unwrap();
            let windows = pool.windows().list().len();
            (report.windows_added, report.windows_removed, windows)
        };
        release(pool.alloc(1000).unwrap());
        assert_eq!(committed(), (0, 0, 0));
        let block = pool.alloc(1000).unwrap();
        assert_eq!(committed(), (1, 0, 1));
        release(block);
        assert_eq!(committed(), (0, 1, 0));
    });
}

#[test]
fn statistics_of_lanes_add_up_to_those_of_the_pool() {
    let group = Group::in_process(1).unwrap().remove(0);
    let pool = pool_of_two_lanes(group);
    let [a, b] = ["a", "b"].map(|name| pool.lane(name).unwrap());
    let blocks = [&a, &b, &b].map(|lane| lane.alloc::<u8>(5000).unwrap());
    for (lane, live) in [(&a, 1), (&b, 2)] {
        let stats = lane.stats().unwrap();
        assert_eq!((lane.live_blocks().unwrap(), stats.live_blocks), (live, live));
        assert_eq!((lane.counter().unwrap(), stats.events), (live, live));
        assert_eq!(lane.reserved().unwrap(), stats.reserved);
        assert!(lane.reserved().unwrap() >= stats.allocated && stats.allocated >= live * 5000);
    }
    let (all, (a, b)) = (pool.stats().unwrap(), (a.stats().unwrap(), b.stats().unwrap()));
    assert_eq!(all.allocated(), a.allocated + b.allocated);
    assert_eq!(all.reserved(), a.reserved + b.reserved);
    // D7: each lane has its own range.
    let (a, b) = (pool.lane("a").unwrap().range(), pool.lane("b").unwrap().range());
    assert!(a.0 + a.1 <= b.0, "{a:?} {b:?}");
    for (block, (base, length)) in blocks.iter().zip([a, b, b]) {
        assert!((base..base + length).contains(&block.offset()));
    }
}

#[test]
fn a_window_is_found_by_the_address_of_a_block() {
    ranks(3, |group| {
        let pool = pool_of_two_lanes(group);
        let block = pool.lane("b").unwrap().alloc::<u8>(4096).unwrap();
        pool.commit().unwrap();
        let window = pool.window_of(block.address()).unwrap();
        assert_eq!((window.lane.as_str(), window.offset), ("b", block.offset()));
        assert_eq!(pool.window_of(pool.layout().base - 1), None);
    });
}

#[test]
fn other_ranks_notice_that_a_rank_has_dropped_its_pool() {
    let (made, left, seen) = (Barrier::new(3), Barrier::new(3), Barrier::new(3));
    ranks(3, |group| {
        let rank = group.rank();
        let pool = pool(group, Driver::host().unwrap()).unwrap();
        pool.commit().unwrap();
        assert!(pool.can_commit() && pool.lost_peers().is_empty() && !pool.has_left(2));
        made.wait();
        let pool = (rank != 2).then_some(pool);
        left.wait();
        let found =
            pool.as_ref().map(|pool| (pool.lost_peers(), [0, 1, 2].map(|r| pool.has_left(r))));
        seen.wait();
        assert_eq!(found, (rank != 2).then(|| (vec![2], [false, false, true])));
    });
}

/// Rule D7: lanes that a commit does not compare go on while it maps peers' memory.
#[test]
fn d7_another_lane_allocates_and_grows_while_a_commit_maps() {
    ranks(2, |group| {
        let rank = group.rank();
        // Rank 0's commit stops where it is about to map its peer's segment.
        let together = Arc::new(Barrier::new(2));
        let (until, stop) = (together.clone(), together.clone());
        let stops = FaultAction::Notify(Arc::new(move || {
            // The first wait reports that the commit is here, the second lets it continue.
            stop.wait();
            stop.wait();
        }));
        let plan = match rank {
            0 => FaultPlan::new().at_step(Step::CommitMap, 1, stops),
            _ => FaultPlan::new(),
        };
        let driver = Driver::new(FaultDriver::new(Driver::host().unwrap(), plan));
        let pool = Pool::builder(group)
            .driver(driver)
            .lane(LaneConfig::symmetric("shared"))
            .lane(LaneConfig::local("own"))
            .build()
            .unwrap();
        let (shared, own) = (pool.lane("shared").unwrap(), pool.lane("own").unwrap());
        let block = shared.alloc::<u8>(1 << 20).unwrap();
        thread::scope(|scope| {
            let commit = scope.spawn(|| pool.commit().map(drop));
            if rank == 0 {
                until.wait();
                let made = own.stats().unwrap().segments_made;
                let kept: Vec<_> = (0..20).map(|_| own.alloc::<u8>(8 << 20).unwrap()).collect();
                assert!(own.stats().unwrap().segments_made > made, "it grew");
                drop(kept);
                own.trim().unwrap();
                assert!(!commit.is_finished(), "the commit is still stopped");
                until.wait();
            }
            commit.join().unwrap().unwrap();
        });
        assert!(pool.is_window(block.address(), block.bytes()));
    });
}
