//! Ranks that wait for each other on the host (`Pool::host_barrier`), over sockets and through a store. Ranks are threads of one process.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::testing::on_ranks;
use symmpool_allocator::{Deadline, Driver, Error, Group, Pool, Result};

const SOON: Duration = Duration::from_millis(300);
const ID: (u64, u64) = (5, 1);

/// Pools of host memory, whose ranks have sockets, and simulated ones, whose ranks have a store alone.
fn pools<R: Send>(world: u32, body: impl Fn(Pool, bool) -> R + Sync) -> Vec<Vec<R>> {
    let with = |has_sockets: bool| {
        on_ranks(world, |group| {
            body(pool(group.with_timeout(Duration::from_secs(20)), has_sockets), has_sockets)
        })
    };
    vec![with(true), with(false)]
}

fn pool(group: Group, has_sockets: bool) -> Pool {
    let driver = match has_sockets {
        true => Driver::host().unwrap(),
        false => Driver::sim(u64::from(group.rank())),
    };
    Pool::builder(group).driver(driver).lane(LaneConfig::symmetric("a")).build().unwrap()
}

fn barrier(pool: &Pool, id: (u64, u64), limit: Duration) -> Result<()> {
    pool.host_barrier(id, b"the same", Deadline::after(limit), |rank, brings| match brings {
        b"the same" => Ok(()),
        _ => Err(Error::invalid_argument(format!("rank {rank} brings something else"))),
    })
}

/// The pool makes windows as before.
fn commits(pool: &Pool) {
    let block = pool.alloc::<u8>(1000).unwrap();
    pool.commit().unwrap();
    assert!(pool.is_window(block.address(), block.bytes()));
}

#[test]
fn ranks_wait_until_all_have_come() {
    let come: [AtomicBool; 6] = Default::default();
    pools(3, |pool, _| {
        for (nth, late) in (0..6).zip([0, 1, 2, 0, 1, 2]) {
            if pool.rank() == late {
                thread::sleep(Duration::from_millis(40));
                come[nth as usize].store(true, Ordering::SeqCst);
            }
            barrier(&pool, (1, nth), Duration::from_secs(20)).unwrap();
            assert!(come[nth as usize].load(Ordering::SeqCst));
        }
        commits(&pool);
    });
}

#[test]
fn a_rank_that_comes_late_goes_on_with_nobody_and_pools_still_commit() {
    let outcomes = pools(3, |pool, has_sockets| {
        let late = pool.rank() == 2;
        if late {
            thread::sleep(3 * SOON);
        }
        let begun = Instant::now();
        let error = barrier(&pool, ID, SOON).unwrap_err();
        assert!(begun.elapsed() < 2 * SOON);
        // Whoever comes late hears at once that others have left.
        assert!(!late || !has_sockets || begun.elapsed() < SOON / 2, "{error}");
        barrier(&pool, (5, 2), Duration::from_secs(20)).unwrap();
        commits(&pool);
        error
    });
    for error in outcomes.iter().flatten() {
        assert!(error.is_timeout() && !error.ranks().is_empty(), "{error}");
    }
    // Those that were in time name who was not.
    assert!(outcomes.iter().all(|ranks| ranks[..2].iter().all(|error| error.ranks() == [2])));
}

#[test]
fn what_a_rank_brings_is_judged_by_all_others() {
    let outcomes = pools(3, |pool, _| {
        let brings: &[u8] = if pool.rank() == 1 { b"another" } else { b"usual" };
        let error = pool
            .host_barrier(ID, brings, Deadline::after(Duration::from_secs(20)), |rank, theirs| {
                match theirs == brings {
                    true => Ok(()),
                    false => Err(Error::invalid_argument(format!("not so on rank {rank}"))),
                }
            })
            .unwrap_err();
        commits(&pool);
        error
    });
    for error in outcomes.iter().flatten() {
        assert!(error.to_string().contains("not so on rank"), "{error}");
    }
}

#[test]
fn a_rank_that_comes_in_another_way_is_seen() {
    ranks_over_sockets(2, |pool| {
        let deadline = || Deadline::after(Duration::from_secs(20));
        if pool.rank() == 0 {
            pool.come_elsewhere(ID, b"elsewhere", deadline()).unwrap();
            let begun = Instant::now();
            let found = loop {
                let found = pool.have_come(ID);
                if !found.is_empty() || begun.elapsed() > Duration::from_secs(20) {
                    break found;
                }
            };
            assert_eq!(found, [(1, b"the same".to_vec())]);
        } else {
            let error = barrier(&pool, ID, Duration::from_secs(20)).unwrap_err();
            assert!(error.to_string().contains("rank 0 brings something else"), "{error}");
        }
        commits(&pool);
    });
}

fn ranks_over_sockets(world: u32, body: impl Fn(Pool) + Sync) {
    on_ranks(world, |group| body(pool(group.with_timeout(Duration::from_secs(20)), true)));
}

/// Commits of other threads, on which ranks wait for each other, come in between in another order on each rank.
#[test]
fn commits_of_other_threads_pass() {
    pools(2, |pool, _| {
        for turn in 0..20 {
            thread::scope(|scope| {
                let other = scope.spawn(|| {
                    thread::sleep(Duration::from_micros(if pool.rank() == 1 { 700 } else { 0 }));
                    pool.commit().unwrap();
                });
                if pool.rank() == 0 {
                    thread::sleep(Duration::from_micros(500));
                }
                barrier(&pool, (2, turn), Duration::from_secs(20)).unwrap();
                other.join().unwrap();
            });
        }
    });
}

#[test]
fn a_rank_that_goes_ends_the_wait_of_the_others() {
    ranks_over_sockets(3, |pool| {
        if pool.rank() == 2 {
            thread::sleep(Duration::from_millis(50));
            return;
        }
        let begun = Instant::now();
        let error = barrier(&pool, ID, Duration::from_secs(20)).unwrap_err();
        assert!(error.is_peer_lost() && error.ranks().contains(&2), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(2));
    });
}

#[test]
fn an_interrupt_ends_the_wait_and_others_are_told() {
    let interrupted = AtomicBool::new(false);
    let interrupted: &'static AtomicBool = Box::leak(Box::new(interrupted));
    let errors = on_ranks(3, |group| {
        let rank = group.rank();
        let group = group.with_timeout(Duration::from_secs(20));
        let group = match rank {
            0 => group.with_interrupt(|| interrupted.load(Ordering::Relaxed)),
            _ => group,
        };
        let pool = pool(group, true);
        if rank == 2 {
            thread::sleep(SOON);
            interrupted.store(true, Ordering::Relaxed);
            thread::sleep(SOON);
        }
        let begun = Instant::now();
        let error = barrier(&pool, ID, Duration::from_secs(20)).unwrap_err();
        assert!(begun.elapsed() < 3 * SOON, "{error}");
        interrupted.store(false, Ordering::Relaxed);
        barrier(&pool, (5, 2), Duration::from_secs(20)).unwrap();
        commits(&pool);
        error
    });
    assert!(errors[0].is_interrupted(), "{}", errors[0]);
    for error in &errors[1..] {
        assert!(error.is_peer_lost() && error.ranks() == [0], "{error}");
    }
}

/// Another thread's commit holds what is said to others, until rank 1 commits too.
#[test]
fn an_interrupt_ends_a_wait_to_say_something() {
    // The thread that is interrupted: the one that meets, not the one that commits.
    let interrupted: &'static Mutex<Option<ThreadId>> = Box::leak(Box::default());
    on_ranks(2, |group| {
        let rank = group.rank();
        let group = group.with_timeout(Duration::from_secs(20));
        let group = match rank {
            0 => group
                .with_interrupt(|| *interrupted.lock().unwrap() == Some(thread::current().id())),
            _ => group,
        };
        let pool = pool(group, true);
        if rank == 1 {
            thread::sleep(5 * SOON);
            return commits(&pool);
        }
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                let block = pool.alloc::<u8>(1000).unwrap();
                let committed = pool.commit();
                drop(block);
                committed.map(drop)
            });
            thread::sleep(SOON);
            let begun = Instant::now();
            let barrier = scope.spawn(|| barrier(&pool, ID, Duration::from_secs(20)));
            thread::sleep(SOON);
            *interrupted.lock().unwrap() = Some(barrier.thread().id());
            let error = barrier.join().unwrap().unwrap_err();
            assert!(error.is_interrupted() && begun.elapsed() < 3 * SOON, "{error}");
            other.join().unwrap().unwrap();
        });
    });
}

#[test]
fn what_is_too_much_to_bring_is_refused_on_its_rank() {
    pools(2, |pool, _| {
        let much = vec![0; (16 << 10) + 1];
        let deadline = Deadline::after(Duration::from_secs(20));
        let error = pool.host_barrier(ID, &much, deadline, |_, _| Ok(())).unwrap_err();
        assert!(
            error.is_invalid_argument() && error.to_string().contains("16385 bytes"),
            "{error}"
        );
        let error = pool.come_elsewhere(ID, &much, deadline).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        // The longest message that is allowed arrives whole.
        let most = &much[1..];
        pool.host_barrier((5, 3), most, deadline, |_, brings| match brings == most {
            true => Ok(()),
            false => Err(Error::invalid_argument("something else is brought")),
        })
        .unwrap();
        commits(&pool);
    });
}
