//! Groups and their gathers.

use super::env::{Launch, StoreAddress};
use super::*;
use crate::testing::on_ranks;

#[test]
fn a_store_serves_the_largest_group_there_can_be() {
    let (rank, world) = (Group::MAX_WORLD - 1, Group::MAX_WORLD);
    store::check_gather("key", rank, world, b"value").unwrap();
    let error = Group::in_process(world + 1).unwrap_err();
    assert!(error.is_invalid_argument());
    assert!(error.to_string().contains("65537 ranks; groups have 1 to 65536"), "{error}");
}

#[test]
fn impossible_groups_are_refused() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    for (rank, world) in [(0, 0), (1, 1), (9, 8), (0, Group::MAX_WORLD + 1)] {
        let error = Group::new(rank, world, store.clone()).unwrap_err();
        assert!(error.is_invalid_argument(), "{rank} of {world}");
    }
    let group = Group::new(7, 8, store).unwrap();
    assert_eq!((group.rank(), group.world(), group.local_rank()), (7, 8, None));
    assert_eq!(group.timeout(), Duration::from_secs(300));
}

#[test]
fn everybody_gets_everybodys_part() {
    on_ranks(3, |group| {
        for round in 0..3 {
            let mine = format!("{round}:{}", group.rank());
            let all = group.all_gather("part", mine.as_bytes(), group.deadline()).unwrap();
            for (rank, part) in all.parts().enumerate() {
                assert_eq!(part, format!("{round}:{rank}").as_bytes());
            }
        }
    });
}

#[test]
fn children_do_not_meet_each_other_or_their_parent() {
    on_ranks(2, |group| {
        let (first, second) = (group.child("pool"), group.child("pool"));
        assert_ne!(first.name(), second.name());
        // Ranks use the three in different orders; each keeps its own count.
        let mut order = [&group, &first, &second];
        if group.rank() == 1 {
            order.rotate_left(1);
        }
        std::thread::scope(|scope| {
            for member in order {
                scope.spawn(|| {
                    let name = member.name().as_bytes();
                    let all = member.all_gather("x", name, group.deadline()).unwrap();
                    assert!(all.is_uniform());
                });
            }
        });
    });
}

#[test]
fn clones_count_together() {
    on_ranks(2, |group| {
        let clone = group.clone();
        for member in [&group, &clone, &group] {
            assert!(member.all_gather("x", b"same", group.deadline()).unwrap().is_uniform());
        }
    });
}

#[test]
fn a_missing_rank_is_named_with_the_group() {
    let store = Arc::new(MemoryStore::new());
    let group = Group::new(1, 3, store).unwrap().with_name("trainer");
    let error =
        group.all_gather("hello", b"", Deadline::after(Duration::from_millis(20))).unwrap_err();
    assert!(error.is_timeout());
    assert_eq!(error.ranks(), [0, 2]);
    assert!(error.to_string().contains("group \"trainer\", rank 1 of 3"), "{error}");
}

#[test]
fn groups_from_a_launcher_meet_over_tcp() {
    // A port that is free now; no other test asks for this one.
    let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = probe.local_addr().unwrap().port();
    drop(probe);
    std::thread::scope(|scope| {
        for rank in 0..3 {
            scope.spawn(move || {
                let launch = Launch {
                    launcher: "a test",
                    rank,
                    world: 3,
                    local_rank: Some(rank),
                    store: StoreAddress::Tcp("127.0.0.1".into(), port),
                    one_machine: true,
                    secret: Some("a secret of this test".into()),
                };
                let group = Group::from_launch(&launch, Deadline::seconds(60), None).unwrap();
                assert_eq!(group.local_rank(), Some(rank));
                let child = group.child("pool");
                drop(group);
                let all = child.all_gather("rank", &[rank as u8], Deadline::seconds(60));
                assert_eq!(all.unwrap().parts().flatten().copied().collect::<Vec<_>>(), [0, 1, 2]);
                // Rank 0 goes when all have their parts.
                let _ = child.all_gather("bye", b"", Deadline::seconds(60));
            });
        }
    });
}

#[test]
fn ranks_meet_at_an_address() {
    let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = probe.local_addr().unwrap().to_string();
    drop(probe);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let address = &address;
            scope.spawn(move || {
                let deadline = Deadline::seconds(60);
                let group = Group::over_tcp(rank, 2, address, Some("a secret here"), deadline);
                let all = group.unwrap().all_gather("rank", &[rank as u8], deadline).unwrap();
                assert_eq!(all.parts().flatten().copied().collect::<Vec<_>>(), [0, 1]);
            });
        }
    });
    for wrong in ["", "127.0.0.1", ":1", "127.0.0.1:0", "127.0.0.1:65536", "host:x"] {
        let error = Group::over_tcp(0, 1, wrong, None, Deadline::seconds(5)).unwrap_err();
        assert!(error.is_invalid_argument(), "{wrong}: {error}");
    }
    let error = Group::over_tcp(2, 2, &address, None, Deadline::seconds(5)).unwrap_err();
    assert!(error.is_invalid_argument(), "{error}");
}

#[test]
fn a_store_for_the_network_needs_a_secret() {
    let launch = Launch {
        launcher: "a test",
        rank: 0,
        world: 2,
        local_rank: None,
        store: StoreAddress::Tcp("0.0.0.0".into(), 1),
        one_machine: false,
        secret: None,
    };
    let error = Group::from_launch(&launch, Deadline::seconds(5), None).unwrap_err();
    assert!(error.is_invalid_argument(), "{error}");
    assert!(error.to_string().contains("SYMMPOOL_SECRET"), "{error}");
}

#[test]
fn a_rank_that_is_seen_to_be_gone_is_not_waited_for() {
    let ends = on_ranks(3, |group| {
        if group.rank() == 1 {
            return None;
        }
        let started = std::time::Instant::now();
        // Others are gone, too, which does not matter here: they are not missing.
        let gone = || vec![0, 1, 2];
        let deadline = Deadline::seconds(60);
        let error = group.all_gather_from_living("part", b"x", deadline, gone).unwrap_err();
        assert!(error.is_peer_lost(), "{error}");
        assert!(started.elapsed() < Duration::from_secs(20), "{error}");
        Some(error.ranks().to_vec())
    });
    assert_eq!(ends, [Some(vec![1]), None, Some(vec![1])]);
}

#[test]
fn those_who_live_are_waited_for_until_the_deadline() {
    let mut groups = Group::in_process(2).unwrap();
    let deadline = Deadline::after(Duration::from_millis(1500));
    let late = groups.remove(1);
    std::thread::scope(|scope| {
        let (none, groups) = (Vec::new, &groups);
        let error = groups[0].all_gather_from_living("part", b"x", deadline, none).unwrap_err();
        assert!(error.is_timeout() && error.ranks() == [1], "{error}");
        assert!(error.to_string().contains("after 1.5s"), "{error}");
        // The part was taken back each time, so that a later gather is complete.
        let soon = || Deadline::seconds(30);
        let first = scope.spawn(move || groups[0].all_gather_from_living("p", b"0", soon(), none));
        std::thread::sleep(Duration::from_millis(1200));
        let gathered = {
            late.all_gather_from_living("part", b"1", deadline, none).unwrap_err();
            late.all_gather_from_living("p", b"1", soon(), none).unwrap()
        };
        assert_eq!(gathered.parts().collect::<Vec<_>>(), [b"0", b"1"]);
        assert_eq!(first.join().unwrap().unwrap().world(), 2);
    });
}
