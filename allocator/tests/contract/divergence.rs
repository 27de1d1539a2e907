//! Programs that break symmetry, each in one way: every rank gets the same error, which names the lane, the
//! event, and what each rank did there. Rules D1 to D6 say what must be equal.

use symmpool_allocator::lane::{Divergence, LaneConfig};
use symmpool_allocator::{Driver, Error, Group, Pool, PoolBuilder, Stream};

use crate::ranks::{ranks, same_error};

const WORLD: u32 = 4;

/// The rank that does something different.
const ODD: u32 = 2;

const MIB: usize = 1 << 20;

fn pool(group: Group) -> Pool {
    let driver = Driver::sim(u64::from(group.rank()) * 7);
    Pool::builder(group).driver(driver).stride(1 << 36).build().unwrap()
}

/// Runs `body` on every rank after ten equal allocations and a commit, commits again, and asserts that every
/// rank gets an error that names an event of the default lane.
fn diverges(body: impl Fn(&Pool, bool) + Sync) -> Divergence {
    let errors = ranks(WORLD, |group| {
        let odd = group.rank() == ODD;
        let pool = pool(group);
        let blocks: Vec<_> = (0..10).map(|_| pool.alloc::<u8>(MIB).unwrap()).collect();
        pool.commit().unwrap();
        for block in blocks {
            // Blocks are kept by address, because the body frees some of them.
            let _ = block.into_address();
        }
        let windows = pool.windows();
        body(&pool, odd);
        let error = pool.commit().expect_err("the ranks differ");
        assert_eq!(pool.windows().list(), windows.list(), "nothing is mapped");
        error
    });
    let error = same_error(errors);
    assert!(error.is_diverged() && error.ranks() == [ODD], "{error}");
    let text = error.to_string();
    assert!(text.contains("rank 2: ") && text.contains("ranks 0, 1, 3: "), "{text}");
    assert!(text.contains("resync"), "{text}");
    let found = error.divergence().expect("a place").clone();
    assert_eq!((found.lane.as_str(), found.until), ("default", None));
    assert_eq!(found.sides.len(), 2);
    found
}

/// Events of most ranks, and of the odd rank.
fn sides(found: &Divergence) -> (&str, &str) {
    (&found.sides[0].did, &found.sides[1].did)
}

/// The address of the block that was allocated by this event.
fn address(pool: &Pool, counter: u64) -> u64 {
    let (_, blocks) = pool.default_lane().map().unwrap();
    let base = pool.default_lane().range().0;
    let block = blocks.iter().find(|block| block.counter == counter).expect("a live block");
    let layout = pool.layout();
    layout.address(layout.rank, base + block.offset)
}

#[test]
fn an_allocation_that_is_missing() {
    let found = diverges(|pool, odd| {
        if !odd {
            pool.alloc::<u8>(3000).unwrap().into_address();
        }
        pool.alloc::<u8>(5 * MIB).unwrap().into_address();
    });
    assert_eq!(found.counter, 10);
    assert_eq!(
        sides(&found),
        ("alloc 2.93 KiB (3000 bytes) on stream 0", "alloc 5 MiB on stream 0")
    );
    assert!(found.sides[0].site.as_ref().unwrap().contains("divergence.rs:"), "{found}");
}

#[test]
fn a_sequence_that_ends_before_the_others() {
    let found = diverges(|pool, odd| {
        pool.alloc::<u8>(700).unwrap().into_address();
        if !odd {
            pool.alloc::<u8>(800).unwrap().into_address();
        }
    });
    assert_eq!(found.counter, 11);
    assert_eq!(sides(&found).0, "alloc 800 bytes on stream 0");
    assert!(sides(&found).1.contains("its sequence ends before"), "{found}");
}

#[test]
fn another_size() {
    let found = diverges(|pool, odd| {
        pool.alloc::<f32>(if odd { 6 << 18 } else { 8 << 18 }).unwrap().into_address();
    });
    assert_eq!(found.counter, 10);
    assert_eq!(sides(&found), ("alloc 8 MiB on stream 0", "alloc 6 MiB on stream 0"));
}

#[test]
fn another_size_in_the_same_place() {
    // Requested sizes are compared, even if they are rounded to the same size.
    let found = diverges(|pool, odd| {
        pool.alloc::<u8>(if odd { 511 } else { 512 }).unwrap().into_address();
    });
    assert_eq!(sides(&found), ("alloc 512 bytes on stream 0", "alloc 511 bytes on stream 0"));
}

#[test]
fn another_size_that_reads_the_same_when_rounded() {
    let found = diverges(|pool, odd| {
        pool.alloc::<u8>((8 << 20) + if odd { 700 } else { 1 }).unwrap().into_address();
    });
    let expected = (
        "alloc 8.00 MiB (8388609 bytes) on stream 0",
        "alloc 8.00 MiB (8389308 bytes) on stream 0",
    );
    assert_eq!(sides(&found), expected);
}

#[test]
fn another_stream() {
    // D3: handles may differ from rank to rank, but ordinals must not.
    let found = diverges(|pool, odd| {
        let handle = |n: u64| Stream::numbered(n * 1000 + u64::from(pool.rank()));
        let lane = pool.default_lane();
        lane.alloc_on::<u8>(64, handle(1)).unwrap().into_address();
        lane.alloc_on::<u8>(64, handle(if odd { 2 } else { 1 })).unwrap().into_address();
    });
    assert_eq!(found.counter, 11);
    assert_eq!(sides(&found), ("alloc 64 bytes on stream 1", "alloc 64 bytes on stream 2"));
}

#[test]
fn another_alignment() {
    let found = diverges(|pool, odd| {
        let align = if odd { 4096 } else { 8192 };
        let block = pool.default_lane().alloc_bytes(64, align, Stream::DEFAULT).unwrap();
        block.into_address();
    });
    assert!(sides(&found).1.contains("aligned to 4096"), "{found}");
}

#[test]
fn a_free_that_others_did_not_do() {
    let found = diverges(|pool, odd| {
        if odd {
            pool.default_lane().free_address(address(pool, 3)).unwrap();
        }
        pool.alloc::<u8>(100).unwrap().into_address();
    });
    assert_eq!(found.counter, 10);
    assert_eq!(sides(&found), ("alloc 100 bytes on stream 0", "free of the block of event 3"));
}

#[test]
fn a_free_that_only_one_did_not_do() {
    let found = diverges(|pool, odd| {
        if !odd {
            pool.default_lane().free_address(address(pool, 3)).unwrap();
        }
        pool.default_lane().free_address(address(pool, 4)).unwrap();
    });
    assert_eq!(sides(&found), ("free of the block of event 3", "free of the block of event 4"));
}

#[test]
fn frees_in_another_order() {
    // D5: blocks that each rank frees in another order must be freed without order.
    let found = diverges(|pool, odd| {
        let lane = pool.default_lane();
        for counter in if odd { [5, 4] } else { [4, 5] } {
            lane.free_address(address(pool, counter)).unwrap();
        }
    });
    assert_eq!(found.counter, 10);
}

#[test]
fn a_trim_that_is_missing() {
    // D6: releasing memory is part of the sequence.
    let found = diverges(|pool, odd| {
        let lane = pool.default_lane();
        for counter in 0..10 {
            lane.free_address(address(pool, counter)).unwrap();
        }
        if !odd {
            assert!(lane.trim().unwrap() > 0);
        }
    });
    assert_eq!(found.counter, 20);
    assert!(sides(&found).0.starts_with("trim of "), "{found}");
}

#[test]
fn a_recorded_stream_that_is_missing() {
    // D4: what a reuse waits for is part of the sequence.
    let found = diverges(|pool, odd| {
        let block = pool.alloc::<u8>(100).unwrap();
        if !odd {
            block.record_stream(Stream::numbered(9)).unwrap();
        }
        block.free().unwrap();
    });
    assert_eq!(found.counter, 11);
    assert_eq!(
        sides(&found),
        ("use of the block of event 10 on stream 1", "free of the block of event 10")
    );
}

#[test]
fn another_reserve() {
    let found = diverges(|pool, odd| {
        pool.default_lane().reserve(if odd { 64 << 20 } else { 32 << 20 }).unwrap();
    });
    assert_eq!(sides(&found), ("reserve 32 MiB on stream 0", "reserve 64 MiB on stream 0"));
}

#[test]
fn of_several_lanes_the_first_is_named() {
    let errors = ranks(WORLD, |group| {
        let odd = group.rank() == ODD;
        let driver = Driver::sim(u64::from(group.rank()));
        let lanes = ["a", "b", "c"].map(LaneConfig::symmetric);
        let builder = Pool::builder(group).driver(driver).stride(1 << 36);
        let pool = lanes.into_iter().fold(builder, PoolBuilder::lane);
        let pool = pool.build().unwrap();
        // Lane c diverges first in time, but lanes have no order between them (D7).
        for name in ["c", "b", "a"] {
            let lane = pool.lane(name).unwrap();
            let common = lane.alloc::<u8>(600).unwrap();
            let differs = odd && name != "a";
            lane.alloc::<u8>(if differs { 700 } else { 800 }).unwrap().into_address();
            common.into_address();
        }
        pool.commit().expect_err("two lanes differ")
    });
    let error = same_error(errors);
    let found = error.divergence().expect("a place");
    assert_eq!((found.lane.as_str(), found.counter, found.ranks()), ("b", 1, &[ODD][..]));
}

/// Event `odd` differs on one rank. It comes after event `agreed`, at which the ranks commit, and is older than
/// the lane's history when they commit again at event `last`. Returns the range of events that the error names.
fn bracket(agreed: u64, odd: u64, last: u64) -> (u64, u64) {
    let outcomes = ranks(WORLD, |group| {
        let is_odd = group.rank() == ODD;
        let driver = Driver::sim(u64::from(group.rank()));
        let lane = LaneConfig::symmetric("short").history(16);
        let pool = Pool::builder(group).driver(driver).stride(1 << 36).lane(lane).build().unwrap();
        for event in 0..last {
            if event == agreed {
                pool.commit().unwrap();
            }
            let bytes = if event == odd && is_odd { 900 } else { 1000 };
            pool.alloc::<u8>(bytes).unwrap().into_address();
        }
        let before = pool.stats().unwrap().store;
        let error = pool.commit().expect_err("an event differs");
        (error, pool.stats().unwrap().store.round_trips - before.round_trips)
    });
    let rounds = outcomes.iter().map(|(_, rounds)| *rounds).max().unwrap();
    // All ranks use one store, which counts their round trips together: for the proposal, the extent of the
    // histories, the event, and the digests of 64 prefixes at a time.
    assert!(rounds <= 8 * u64::from(WORLD), "{rounds} round trips");
    let error = same_error(outcomes.into_iter().map(|(error, _)| error).collect::<Vec<Error>>());
    let found = error.divergence().expect("a place");
    assert_eq!(found.ranks(), [ODD]);
    assert!(error.to_string().contains("older than the lane's history"), "{error}");
    (found.counter, found.until.expect("only a range of events"))
}

#[test]
fn a_divergence_older_than_the_history_is_located_roughly_in_few_rounds() {
    // It lies between two checkpoints, here 1024 events apart, or after the last commit.
    assert_eq!(bracket(0, 100, 5101), (0, 1023));
    assert_eq!(bracket(2500, 6100, 9 * 1024 + 19), (5 * 1024, 6 * 1024 - 1));
    assert_eq!(bracket(2500, 2600, 5000), (2500, 3071));
}
