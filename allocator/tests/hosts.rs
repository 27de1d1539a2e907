//! Pools whose ranks are on several hosts, which are pretended. Ranks are threads of one process.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use symmpool_allocator::driver::{DriverCall, FaultAction, FaultDriver, FaultPlan, Step};
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::testing::on_ranks;
use symmpool_allocator::{Deadline, Driver, Error, Group, Pool, Result};

/// Runs `body` as every rank of a group whose ranks are on the hosts of these names; returns their results in rank order.
fn on_hosts<R: Send>(hosts: &[&str], body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    on_ranks(hosts.len() as u32, |group| {
        let id = hosts[group.rank() as usize];
        body(group.with_timeout(Duration::from_secs(20)).with_host_id(id))
    })
}

fn pool(group: Group) -> Result<Pool> {
    Pool::builder(group).driver(Driver::host()?).build()
}

fn failure() -> FaultAction {
    FaultAction::Fail(Error::out_of_memory("a test took it"))
}

#[test]
fn a_pool_has_a_heap_on_each_host() {
    let hosts = ["b", "a", "b", "a", "b"];
    on_hosts(&hosts, |group| {
        let rank = group.rank();
        let pool = pool(group).unwrap();
        assert_eq!((pool.rank(), pool.world()), (rank, 5));
        let found: Vec<_> = pool.hosts().iter().collect();
        assert_eq!(found, [&[0, 2, 4][..], &[1, 3]]);
        let here = pool.hosts().here(rank);
        let near = pool.on_host();
        let own = here.iter().position(|&other| other == rank).unwrap() as u32;
        assert_eq!((near.rank(), near.world()), (own, here.len() as u32));
        assert_eq!((pool.layout().rank, pool.layout().world), (near.rank(), near.world()));
        assert_eq!((near.hosts().count(), near.topology().world()), (1, near.world()));

        let block = pool.alloc::<u64>(1000).unwrap();
        // Whichever of the two commits, all ranks of all hosts take part.
        let committer = if rank % 2 == 0 { &near } else { &pool };
        assert_eq!(committer.commit().unwrap().windows_added, 1);
        block.write(&vec![u64::from(rank) + 7; 1000]).unwrap();
        pool.commit().unwrap();
        for peer in 0..5 {
            if !here.contains(&peer) {
                let errors = [
                    block.peer_ptr(peer).map(drop).unwrap_err(),
                    pool.peer_ptr(peer, block.address()).map(drop).unwrap_err(),
                ];
                assert!(errors.iter().all(Error::is_invalid_argument), "{errors:?}");
                let text = errors[1].to_string();
                let there =
                    format!("rank {peer} is on host {} (SYMMPOOL_HOST_ID)", hosts[peer as usize]);
                assert!(text.contains(&there), "{text}");
                continue;
            }
            let at = block.peer_ptr(peer).unwrap();
            assert_eq!(pool.peer_ptr(peer, block.address()).unwrap(), at as u64);
            let slot = pool.slot_of(peer).unwrap();
            assert_eq!(near.peer_ptr(slot, block.address()).unwrap(), at as u64);
            // SAFETY: the block is a window, so the peer's copy is mapped; the commit after the writes ordered them
            // before this.
            let value = unsafe { at.wrapping_add(999).read_volatile() };
            assert_eq!(value, u64::from(peer) + 7);
        }
        assert_eq!(pool.peer_pid(rank), Some(std::process::id()));
        assert_eq!(near.peer_pid(near.world()), None);
        assert!(pool.slot_of(5).unwrap_err().is_invalid_argument());
        pool.commit().unwrap();
    });
}

#[test]
fn offsets_are_equal_on_all_hosts() {
    let offsets = on_hosts(&["a", "a", "b", "c"], |group| {
        let pool = pool(group).unwrap();
        let mut all = Vec::new();
        for round in 1..20 {
            let block = pool.alloc::<u8>(round * 300_000).unwrap();
            all.push(block.offset());
            if round % 3 == 0 {
                block.free_unordered().unwrap();
            } else {
                drop(block);
            }
            pool.commit_if_due().unwrap();
        }
        pool.commit().unwrap();
        (all, pool.stats().unwrap().reserved())
    });
    assert!(offsets.iter().all(|other| *other == offsets[0]), "{offsets:?}");
}

#[test]
fn a_divergence_on_another_host_is_named_as_one_here() {
    let errors = on_hosts(&["a", "b", "a"], |group| {
        let rank = group.rank();
        let pool = pool(group).unwrap();
        let first = pool.alloc::<u8>(1000).unwrap();
        let block = pool.alloc::<u8>(if rank == 1 { 5000 } else { 1000 }).unwrap();
        let error = pool.commit().unwrap_err();
        drop(block);
        assert!(pool.resync().unwrap());
        pool.commit().unwrap();
        assert!(pool.is_window(first.address(), first.bytes()));
        error
    });
    for error in &errors {
        assert!(error.is_diverged() && error.to_string().contains("rank 1"), "{error}");
        assert!(error.to_string().contains("hosts.rs"), "the call site: {error}");
    }
}

#[test]
fn configurations_are_compared_across_hosts() {
    let errors = on_hosts(&["a", "b"], |group| {
        let name = format!("lane{}", group.rank());
        let builder = Pool::builder(group).driver(Driver::host().unwrap());
        builder.lane(LaneConfig::symmetric(&name)).build().map(drop).unwrap_err()
    });
    assert!(errors.iter().all(|error| error.is_diverged() && error.ranks() == [1]), "{errors:?}");
}

#[test]
fn a_failure_of_one_rank_is_the_error_of_all_hosts() {
    for (step, text) in [
        (Step::HandshakeConnect, "the handshake"),
        (Step::CommitExport, "mapping peers' memory"),
        (Step::CommitPublish, ""),
    ] {
        let errors = on_hosts(&["a", "b", "a", "b"], |group| {
            let rank = group.rank();
            let plan = match rank {
                1 => FaultPlan::new().at_step(step, 1, failure()),
                _ => FaultPlan::new(),
            };
            let driver = Driver::new(FaultDriver::new(Driver::host().unwrap(), plan));
            let made = Pool::builder(group).driver(driver).build();
            made.and_then(|pool| {
                let _block = pool.alloc::<u8>(1000)?;
                pool.commit().map(drop)
            })
            .unwrap_err()
        });
        for error in &errors {
            assert!(error.ranks().contains(&1), "{step:?}: {error}");
            assert!(error.to_string().contains(text), "{step:?}: {error}");
        }
    }
}

#[test]
fn a_slot_that_cannot_be_reserved_is_the_error_of_all_hosts() {
    let errors = on_hosts(&["a", "b", "a"], |group| {
        let plan = match group.rank() {
            2 => FaultPlan::new().at_call(DriverCall::Reserve, 1, failure()),
            _ => FaultPlan::new(),
        };
        let driver = Driver::new(FaultDriver::new(Driver::host().unwrap(), plan));
        Pool::builder(group).driver(driver).build().map(drop).unwrap_err()
    });
    assert!(errors.iter().all(|error| error.ranks() == [2]), "{errors:?}");
}

#[test]
fn a_rank_that_leaves_is_named_with_its_host() {
    let outcomes = on_hosts(&["a", "b", "a", "b"], |group| {
        let rank = group.rank();
        let pool = pool(group).unwrap();
        pool.commit().unwrap();
        if rank == 3 {
            return None;
        }
        let begin = Instant::now();
        let error = pool.commit_by(Deadline::seconds(4)).unwrap_err();
        assert!(!pool.can_commit());
        Some((error, begin.elapsed()))
    });
    for (rank, outcome) in outcomes.iter().enumerate() {
        let Some((error, took)) = outcome else { continue };
        assert!(error.ranks().contains(&3), "rank {rank}: {error}");
        assert!(error.to_string().contains("host b (SYMMPOOL_HOST_ID)"), "rank {rank}: {error}");
        assert!(*took < Duration::from_secs(10), "rank {rank} after {took:?}");
        // The rank of its host sees the closed connection.
        if rank == 1 {
            assert!(
                error.is_peer_lost() && *took < Duration::from_secs(4),
                "{error} after {took:?}"
            );
        }
    }
}

#[test]
fn survivors_make_a_new_pool() {
    let gone = Barrier::new(3);
    on_hosts(&["a", "b", "a"], |group| {
        let rank = group.rank();
        let before = pool(group.clone()).unwrap();
        before.commit().unwrap();
        drop(before);
        gone.wait();
        if rank == 1 {
            return;
        }
        let store = group.store().clone();
        let rest = Group::new(rank / 2, 2, store).unwrap().with_name("rest").with_host_id("a");
        let pool = pool(rest).unwrap();
        assert_eq!(pool.hosts().count(), 1);
        pool.commit().unwrap();
    });
}

#[test]
fn a_commit_costs_two_round_trips_of_the_store() {
    on_hosts(&["a", "b", "a", "b"], |group| {
        let pool = pool(group).unwrap();
        let _block = pool.alloc::<u8>(1000).unwrap();
        let before = pool.stats().unwrap().store.round_trips;
        pool.commit().unwrap();
        let after = pool.stats().unwrap().store.round_trips;
        // One gather to compare, and one to confirm, though each may be asked for again while others are late.
        assert!((2..=4).contains(&(after - before)), "{before} to {after}");
        let again = pool.commit().unwrap();
        assert_eq!(again.windows_added, 0);
    });
}

#[test]
fn names_that_are_none_are_refused_on_every_rank() {
    let errors = on_ranks(2, |group| {
        let id = if group.rank() == 1 { "two words" } else { "a" };
        pool(group.with_timeout(Duration::from_secs(20)).with_host_id(id)).unwrap_err()
    });
    for error in &errors {
        assert!(error.is_invalid_argument() && error.ranks() == [1], "{error}");
        assert!(error.to_string().contains("\"two words\""), "{error}");
    }
}

#[test]
fn nested_pools_are_made_on_one_host() {
    on_hosts(&["a", "b", "a"], |group| {
        let rank = group.rank();
        let pool = pool(group.clone()).unwrap();
        let near = pool.on_host();
        let part = Group::new(near.rank(), near.world(), group.store().clone()).unwrap();
        let part = part.with_name(format!("part of host {}", pool.hosts().of(rank)));
        let ranks: Vec<u32> = (0..near.world()).collect();
        let error = pool.nested(&part, &ranks, 64 << 20, 0).unwrap_err();
        assert!(error.is_unsupported() || error.is_invalid_argument(), "{error}");
        let nested = near.nested(&part, &ranks, 64 << 20, 0).unwrap();
        nested.commit().unwrap();
        pool.commit().unwrap();
    });
}
