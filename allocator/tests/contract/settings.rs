//! Ranks with different settings, and stores that cannot be used.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use symmpool_allocator::lane::{LaneConfig, WindowPolicy};
use symmpool_allocator::store::tcp::{Secret, TcpOptions};
use symmpool_allocator::store::{MAX_VALUE, MemoryStore, Store, TcpServer, TcpStore};
use symmpool_allocator::{Deadline, Driver, Error, Group, Pool};

use crate::ranks::{HandlePath, PATIENCE, each, ranks, same_error};

/// Builds a pool whose settings differ on rank 1; returns the error that all ranks get.
fn rank_1_differs(
    build: impl Fn(symmpool_allocator::PoolBuilder, bool) -> symmpool_allocator::PoolBuilder + Sync,
) -> Error {
    same_error(ranks(3, |group| {
        let odd = group.rank() == 1;
        let builder = Pool::builder(group).driver(Driver::sim(1)).stride(1 << 32);
        build(builder, odd).build().unwrap_err()
    }))
}

/// Rule D8.
#[test]
fn settings_that_change_placement_are_compared() {
    let lane = || LaneConfig::symmetric("weights").range(1 << 30);
    let differences: [(&str, Error); 7] = [
        ("stride", rank_1_differs(|b, odd| b.stride(if odd { 1 << 33 } else { 1 << 32 }))),
        (
            "range",
            rank_1_differs(|b, odd| b.lane(lane().range(if odd { 2 << 20 } else { 4 << 20 }))),
        ),
        (
            "limit",
            rank_1_differs(|b, odd| b.lane(if odd { lane().limit(77 << 20) } else { lane() })),
        ),
        (
            "per-segment",
            rank_1_differs(|b, odd| {
                let policy = if odd { WindowPolicy::PerSegment } else { WindowPolicy::Contiguous };
                b.lane(lane().window_policy(policy))
            }),
        ),
        (
            "local",
            rank_1_differs(|b, odd| {
                b.lane(if odd { LaneConfig::local("weights").range(1 << 30) } else { lane() })
            }),
        ),
        (
            "another name",
            rank_1_differs(|b, odd| {
                let name = if odd { "another name" } else { "weights" };
                b.lane(LaneConfig::symmetric(name))
            }),
        ),
        (
            "one more",
            rank_1_differs(|b, odd| {
                let b = b.lane(lane());
                if odd { b.lane(LaneConfig::symmetric("one more")) } else { b }
            }),
        ),
    ];
    for (what, error) in differences {
        assert!(error.is_diverged(), "{what}: {error}");
        let text = error.to_string();
        for word in [what, "rank 1 ", "where rank 0 has [", "same settings on every rank"] {
            assert!(text.contains(word), "{what}: {word:?} is missing in: {text}");
        }
    }
}

#[test]
fn invalid_settings_of_one_rank_are_reported_to_all() {
    let started = Instant::now();
    let twice = rank_1_differs(|b, odd| {
        let b = b.lane(LaneConfig::symmetric("weights"));
        if odd { b.lane(LaneConfig::symmetric("weights")) } else { b }
    });
    let large = rank_1_differs(|b, odd| b.stride(if odd { 1 << 63 } else { 1 << 32 }));
    assert!(started.elapsed() < PATIENCE, "nobody waits for rank 1");
    for (error, why) in [(twice, "two lanes are called"), (large, "lower the stride")] {
        assert!(error.is_invalid_argument(), "{error}");
        let text = error.to_string();
        assert!(text.contains("rank 1 failed in the handshake") && text.contains(why), "{text}");
    }
}

#[test]
fn kinds_of_memory_are_compared() {
    let error = same_error(ranks(3, |group| {
        let memory = if group.rank() == 2 { HandlePath::Host } else { HandlePath::Sim };
        Pool::builder(group).driver(memory.driver(1)).stride(1 << 32).build().unwrap_err()
    }));
    assert!(error.is_diverged(), "{error}");
    let text = error.to_string();
    for word in ["\"host\"", "\"sim\"", "rank 2", "ranks 0, 1", "same driver"] {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
}

#[test]
fn invalid_settings_are_refused() {
    let build = |change: fn(symmpool_allocator::PoolBuilder) -> symmpool_allocator::PoolBuilder| {
        // The other rank never joins; the error is that of this rank all the same.
        let group = Group::in_process(2).unwrap().remove(0);
        let builder = Pool::builder(group).driver(Driver::sim(1)).stride(1 << 32);
        change(builder.deadline(Deadline::after(Duration::from_millis(50)))).build().unwrap_err()
    };
    let errors = [
        (build(|b| b.lane(LaneConfig::symmetric(""))), "lane name"),
        (build(|b| b.lane(LaneConfig::local("a")).lane(LaneConfig::local("a"))), "\"a\""),
        (build(|b| b.lane(LaneConfig::symmetric("a").range(1 << 40))), "raise the stride"),
        (build(|b| b.stride(2 << 20)), "raise it"),
        (build(|b| b.lane(LaneConfig::symmetric("a").range(0))), "range of 0"),
    ];
    for (error, word) in errors {
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains(word), "{word:?} is missing in: {error}");
    }
}

#[test]
fn a_heap_that_one_rank_cannot_reserve_is_everyones_error() {
    let error = same_error(ranks(2, |group| {
        Pool::builder(group).driver(Driver::sim(1)).stride(1 << 60).build().unwrap_err()
    }));
    assert!(error.is_out_of_memory() || error.is_invalid_argument(), "{error}");
    assert!(error.to_string().contains("failed in the handshake"), "{error}");
}

#[test]
fn groups_that_cannot_be() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    for (rank, world, word) in [(0, 0, "group of 0"), (4, 4, "rank 4"), (u32::MAX, 2, "of 2 ranks")]
    {
        let error = Group::new(rank, world, store.clone()).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
    assert!(Group::in_process(0).unwrap_err().is_invalid_argument());
}

#[test]
fn two_ranks_with_one_number() {
    let store = MemoryStore::new();
    let errors = each([0, 1, 1], |rank| {
        let group = Group::new(rank, 3, Arc::new(store.clone())).unwrap().with_timeout(PATIENCE);
        Pool::builder(group).driver(Driver::sim(1)).stride(1 << 32).build().unwrap_err()
    });
    for error in errors {
        assert!(error.is_diverged(), "{error}");
        assert!(error.to_string().contains("two ranks with number 1"), "{error}");
    }
    // A TCP server notices it before anything is gathered.
    let server = TcpServer::bind("127.0.0.1:0", TcpOptions::default()).unwrap();
    let connect = || {
        let options = TcpOptions::default();
        TcpStore::connect_as(server.local_addr(), options, 1, Deadline::after(PATIENCE))
    };
    let _first = connect().unwrap();
    let error = connect().unwrap_err();
    assert!(error.is_refused(), "{error}");
    assert!(error.to_string().contains("two ranks with number 1"), "{error}");
}

#[test]
fn worlds_that_differ() {
    let store = MemoryStore::new();
    let errors = each([(0, 2), (1, 3)], |(rank, world)| {
        let group = Group::new(rank, world, Arc::new(store.clone())).unwrap();
        let group = group.with_timeout(PATIENCE);
        Pool::builder(group).driver(Driver::sim(1)).stride(1 << 32).build().unwrap_err()
    });
    for error in errors {
        assert!(error.is_diverged(), "{error}");
        assert!(error.to_string().contains("world"), "{error}");
    }
}

#[test]
fn a_store_that_nobody_serves() {
    let probe = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = probe.local_addr().unwrap();
    drop(probe);
    let options = TcpOptions { hosted_by: Some(0), ..TcpOptions::default() };
    let limit = Duration::from_millis(500);
    let started = Instant::now();
    let error = TcpStore::connect_as(address, options, 1, Deadline::after(limit)).unwrap_err();
    assert!(error.is_timeout() && error.ranks() == [0], "{error}");
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    assert!(started.elapsed() < limit + Duration::from_secs(2));
}

#[test]
fn a_store_with_another_secret() {
    let options = |secret: Option<&str>| TcpOptions {
        secret: secret.map(|secret| Secret::new(secret).unwrap()),
        ..TcpOptions::default()
    };
    let server = TcpServer::bind("127.0.0.1:0", options(Some("right"))).unwrap();
    for wrong in [Some("wrong"), None] {
        let deadline = Deadline::after(PATIENCE);
        let error =
            TcpStore::connect_as(server.local_addr(), options(wrong), 1, deadline).unwrap_err();
        assert!(error.is_refused(), "{error}");
        assert!(error.to_string().contains("secret"), "{error}");
    }
}

#[test]
fn a_value_that_is_too_long() {
    let server = TcpServer::bind("127.0.0.1:0", TcpOptions::default()).unwrap();
    let deadline = Deadline::after(PATIENCE);
    let tcp = TcpStore::connect(server.local_addr(), TcpOptions::default(), deadline).unwrap();
    let stores: [Arc<dyn Store>; 2] = [Arc::new(MemoryStore::new()), Arc::new(tcp)];
    for store in stores {
        let group = Group::new(0, 1, store).unwrap();
        let long = vec![0; MAX_VALUE + 1];
        let error = group.all_gather("long", &long, deadline).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains(&MAX_VALUE.to_string()), "{error}");
        assert!(group.all_gather("long", &long[..MAX_VALUE], deadline).is_ok());
    }
}
