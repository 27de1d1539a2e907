//! A rank that did not complete what the others completed: from then on every rank gets an error that names
//! that rank and its reason, instead of errors that follow from it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use symmpool_allocator::driver::{DriverCall, FaultAction, FaultDriver, FaultPlan, Step};
use symmpool_allocator::store::{Gathered, MemoryStore, Store};
use symmpool_allocator::{Deadline, Driver, Error, Group, Pool, Result, Stream};

use crate::ranks::{HandlePath, PATIENCE, each, same_error};

const MIB: usize = 1 << 20;

/// When a rank's store fails in a gather.
#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    /// Before the others have received its value.
    Before,
    /// After the others have received its value, and before it has received theirs.
    After,
}

/// A store that returns an error to its rank in one gather.
struct FailingDriver {
    inner: MemoryStore,
    /// Name of the gather that fails, and when.
    next: Mutex<Option<(&'static str, When)>>,
}

impl FailingDriver {
    fn fail_in(&self, what: &'static str, when: When) {
        *self.next.lock().unwrap() = Some((what, when));
    }
}

impl Store for FailingDriver {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.inner.set(key, value, deadline)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.inner.get(key, deadline)
    }

    fn add(&self, key: &str, delta: i64, deadline: Deadline) -> Result<i64> {
        self.inner.add(key, delta, deadline)
    }

    fn delete(&self, key: &str, deadline: Deadline) -> Result<bool> {
        self.inner.delete(key, deadline)
    }

    fn all_gather_until(
        &self,
        key: &str,
        rank: u32,
        world: u32,
        value: &[u8],
        deadline: Deadline,
        _stop: Option<&dyn Fn() -> bool>,
    ) -> Result<Gathered> {
        let when = {
            let mut next = self.next.lock().unwrap();
            next.take_if(|(what, _)| key.contains(&format!("/{what}/"))).map(|(_, when)| when)
        };
        if when != Some(When::Before) {
            let gathered = self.inner.all_gather(key, rank, world, value, deadline);
            if when.is_none() {
                return gathered;
            }
        }
        Err(Error::system("opening a part", "too many open files"))
    }
}

/// Runs `body` as two ranks, with stores that can be made to fail.
fn two_ranks<R: Send>(
    timeout: Duration,
    body: impl Fn(&FailingDriver, Group) -> R + Sync,
) -> Vec<R> {
    let store = MemoryStore::new();
    each(0..2, |rank| {
        let store = Arc::new(FailingDriver { inner: store.clone(), next: Mutex::new(None) });
        let group = Group::new(rank, 2, store.clone()).unwrap().with_timeout(timeout);
        body(&store, group)
    })
}

fn build(group: Group, memory: HandlePath) -> Pool {
    let driver = memory.driver(u64::from(group.rank()));
    Pool::builder(group).driver(driver).stride(1 << 32).build().unwrap()
}

#[test]
fn a_store_that_fails_one_rank_after_the_others_agreed_is_named_by_all_from_then_on() {
    for memory in [HandlePath::Sim, HandlePath::Bytes] {
        for what in ["propose", "mapped"] {
            let errors = two_ranks(PATIENCE, |store, group| {
                let rank = group.rank();
                let pool = build(group, memory);
                let first = pool.alloc::<u8>(MIB).unwrap();
                pool.commit().unwrap();
                let mut blocks = vec![first];
                if what == "mapped" {
                    blocks.push(pool.alloc::<u8>(64 * MIB).unwrap());
                }
                if rank == 1 {
                    store.fail_in(what, When::After);
                    let error = pool.commit().unwrap_err();
                    assert!(error.to_string().contains("too many open files"), "{error}");
                } else {
                    assert_eq!(pool.commit().unwrap().number, 2);
                }
                assert!(pool.is_window(blocks[0].address(), 1), "earlier windows stay");
                let errors =
                    [pool.commit().map(drop), pool.resync().map(drop), pool.commit().map(drop)];
                errors.map(Result::unwrap_err)
            });
            for error in errors.concat() {
                assert!(error.is_invalid_state(), "{memory:?} {what}: {error}");
                let text = error.to_string();
                assert!(text.contains("rank 1 failed in "), "{memory:?} {what}: {text}");
                assert!(text.contains("half-way"), "{memory:?} {what}: {text}");
                assert!(text.contains("too many open files"), "{memory:?} {what}: {text}");
                assert!(text.contains("build a new pool"), "{memory:?} {what}: {text}");
            }
        }
    }
}

#[test]
fn a_store_that_fails_one_rank_while_handles_are_exchanged_is_an_error_of_all_and_passes() {
    let errors = two_ranks(PATIENCE, |store, group| {
        let rank = group.rank();
        let pool = build(group, HandlePath::Bytes);
        let block = pool.alloc::<u8>(MIB).unwrap();
        if rank == 1 {
            store.fail_in("handles", When::After);
        }
        let error = pool.commit().unwrap_err();
        assert!(!pool.is_window(block.address(), 1));
        // All ranks learned of it in the confirmation, so none completed the commit.
        assert_eq!(pool.commit().unwrap().number, 1);
        assert!(pool.is_window(block.address(), 1));
        error
    });
    for error in errors {
        assert!(error.to_string().contains("rank 1 failed in mapping"), "{error}");
        assert!(error.to_string().contains("too many open files"), "{error}");
    }
}

#[test]
fn a_store_that_fails_one_rank_in_a_resync_is_named_by_all_from_then_on() {
    for what in ["standing", "holdings"] {
        // The gather of standings comes first; that of holdings is last, and only if ranks differ.
        let differs = what == "holdings";
        let errors = two_ranks(PATIENCE, |store, group| {
            let rank = group.rank();
            let pool = build(group, HandlePath::Sim);
            let odd = usize::from(differs && rank == 1);
            drop(pool.alloc::<u8>(MIB * (1 + odd)).unwrap());
            assert_eq!(pool.commit().is_err(), differs);
            if rank == 1 {
                store.fail_in(what, When::After);
                let error = pool.resync().unwrap_err();
                assert!(error.to_string().contains("too many open files"), "{error}");
            } else {
                assert_eq!(pool.resync().unwrap(), differs);
            }
            pool.commit().unwrap_err()
        });
        let error = same_error(errors);
        let text = error.to_string();
        assert!(error.is_invalid_state() && text.contains("rank 1 failed in "), "{what}: {text}");
        assert!(
            text.contains("half-way") && text.contains("too many open files"),
            "{what}: {text}"
        );
    }
}

#[test]
fn a_rank_whose_store_failed_before_the_others_received_its_value_names_nobody_else() {
    let short = Duration::from_millis(400);
    let errors = two_ranks(short, |store, group| {
        let rank = group.rank();
        let pool = build(group, HandlePath::Sim);
        let _block = pool.alloc::<u8>(MIB).unwrap();
        if rank == 1 {
            store.fail_in("mapped", When::Before);
        }
        let first = pool.commit().unwrap_err();
        let began = Instant::now();
        let second = pool.commit().unwrap_err();
        // After the second commit both ranks know that no commit can succeed.
        let began_third = Instant::now();
        let third = pool.commit().unwrap_err();
        assert!(began_third.elapsed() < short / 2, "rank {rank}: {:?}", began.elapsed());
        [first, second, third]
    });
    // Rank 0 only knows that it waited for rank 1.
    assert!(errors[0].iter().all(|error| error.is_timeout() && error.ranks() == [1]), "{errors:?}");
    for error in &errors[1] {
        assert!(error.to_string().contains("too many open files"), "{error}");
        assert!(error.ranks().is_empty(), "{error}");
    }
}

/// A panic inside the driver, while a lane is in the middle of a call.
fn panics() -> FaultAction {
    FaultAction::Notify(Arc::new(|| panic!("as planned")))
}

/// Runs `body` without printing the messages of planned panics. One test at a time replaces the process's
/// panic hook.
fn quietly<R>(body: impl FnOnce() -> R) -> R {
    static HOOK: Mutex<()> = Mutex::new(());
    let _turn = HOOK.lock().unwrap_or_else(PoisonError::into_inner);
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = catch_unwind(AssertUnwindSafe(body));
    std::panic::set_hook(hook);
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn panicked<R>(body: impl FnOnce() -> R) -> bool {
    catch_unwind(AssertUnwindSafe(body)).is_err()
}

#[test]
fn a_lane_in_which_a_call_panicked_refuses_all_calls_and_every_rank_learns_of_it() {
    for memory in HandlePath::ALL {
        let errors = quietly(|| {
            crate::ranks::ranks(2, |group| {
                let rank = group.rank();
                let plan = match rank {
                    1 => FaultPlan::new().at_call(DriverCall::Create, 2, panics()),
                    _ => FaultPlan::new(),
                };
                let driver = FaultDriver::new(memory.driver(u64::from(rank)), plan);
                let driver = Driver::new(driver);
                let pool = Pool::builder(group).driver(driver).stride(1 << 32).build().unwrap();
                let blocks: Vec<_> = (0..4).map(|_| pool.alloc::<u8>(100).unwrap()).collect();
                pool.commit().unwrap();
                let lane = pool.default_lane();
                if rank == 1 {
                    assert!(panicked(|| pool.alloc::<u8>(64 * MIB)));
                    refuses(&pool, blocks);
                    // Other lanes are not affected.
                    let control = pool.lane(symmpool_allocator::CONTROL_LANE).unwrap();
                    control.stats().unwrap();
                } else {
                    pool.alloc::<u8>(64 * MIB).unwrap();
                    assert_eq!(lane.counter().unwrap(), 6);
                }
                assert!(pool.is_commit_due());
                [pool.commit().unwrap_err(), pool.resync().unwrap_err(), pool.commit().unwrap_err()]
            })
        });
        for error in errors.concat() {
            let text = error.to_string();
            assert!(error.is_invalid_state(), "{memory:?}: {text}");
            assert!(text.contains("rank 1 failed in "), "{memory:?}: {text}");
            assert!(
                text.contains("lane \"default\" of rank 1: an earlier call panicked"),
                "{text}"
            );
        }
    }
}

/// Asserts that every call of the first lane reports that the lane is half changed.
fn refuses(pool: &Pool, mut blocks: Vec<symmpool_allocator::Block<u8>>) {
    let lane = pool.default_lane();
    let address = blocks[0].address();
    let refusals = [
        lane.alloc::<u8>(1).map(drop),
        lane.try_alloc_bytes(1, 1, Stream::DEFAULT).map(drop),
        lane.reserve(1),
        lane.trim().map(drop),
        lane.stats().map(drop),
        lane.counter().map(drop),
        lane.map().map(drop),
        lane.free_address(address),
        lane.free_address_unordered(address),
        lane.record_stream_address(address, Stream::DEFAULT),
        pool.stats().map(drop),
        blocks[0].record_stream(Stream::DEFAULT),
        blocks.pop().unwrap().free(),
        blocks.pop().unwrap().free_unordered(),
    ];
    for refusal in refusals {
        let error = refusal.unwrap_err();
        let text = error.to_string();
        assert!(error.is_invalid_state() && text.contains("half changed"), "{text}");
        assert!(text.contains("build a new pool"), "{text}");
    }
    assert_ne!(blocks.pop().unwrap().into_address(), 0);
}

#[test]
fn a_commit_that_panics_leaves_no_lane_in_use() {
    let group = Group::in_process(1).unwrap().remove(0);
    let plan = FaultPlan::new().at_step(Step::CommitFinish, 2, panics());
    let driver = Driver::new(FaultDriver::new(Driver::sim(1), plan));
    let pool = Pool::builder(group).driver(driver).build().unwrap();
    let block = pool.alloc::<u8>(100).unwrap();
    pool.commit().unwrap();
    drop(block);
    let panicked = AtomicBool::new(false);
    quietly(|| panicked.store(self::panicked(|| pool.commit()), Ordering::Relaxed));
    assert!(panicked.into_inner());
    assert!(pool.alloc::<u8>(100).unwrap_err().is_invalid_state());
    let error = pool.commit().unwrap_err();
    assert!(error.is_invalid_state() && error.to_string().contains("half changed"), "{error}");
}
