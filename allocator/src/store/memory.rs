//! The store of ranks that are threads of one process.
//!
//! One mutex over maps. Every getter of a key and every gather has its own condition variable,
//! so that thousands of waiting threads are woken only when what they wait for has happened. The last
//! rank to come builds the result of a gather, and all share it.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use super::gathering::Gathering;
use super::traffic::TrafficCounters;
use super::{Gathered, Stop, Store, StoreTraffic, check_gather, check_limits, counter_sum};
use crate::sync::{Condvar, Mutex, MutexGuard, OnceLock, mutant};
use crate::{Deadline, Error, Result};

/// A store inside the process. Clones are handles to the same content, each counting its own
/// [`StoreTraffic`]; give every rank one.
#[derive(Debug, Default)]
pub struct MemoryStore {
    shared: Arc<Mutex<Shared>>,
    counters: TrafficCounters,
}

#[derive(Debug, Default)]
struct Shared {
    values: BTreeMap<String, Arc<[u8]>>,
    getters: BTreeMap<String, Getters>,
    gathers: BTreeMap<String, OpenGather>,
}

/// Threads that wait for one key.
#[derive(Debug, Default)]
struct Getters {
    waiting: usize,
    set: Arc<Condvar>,
}

#[derive(Debug)]
struct OpenGather {
    gathering: Gathering<Arc<[u8]>>,
    outcome: Arc<GatherOutcome>,
}

/// Result of a gather, which waiting ranks hold; it outlives the entry in the map.
#[derive(Debug, Default)]
struct GatherOutcome {
    decided: Condvar,
    /// The result and the bytes a network store would have sent for it.
    result: OnceLock<Result<(Gathered, usize)>>,
}

impl Clone for MemoryStore {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), counters: TrafficCounters::default() }
    }
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Locks the maps. A panic under the lock leaves nothing half changed, so poison is ignored.
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts `value` under `key` and wakes who waits for it.
    fn put(shared: &mut Shared, key: &str, value: Arc<[u8]>) {
        shared.values.insert(key.to_owned(), value);
        if let Some(getters) = shared.getters.get(key) {
            getters.set.notify_all();
        }
    }

    #[cfg(test)]
    fn entries(&self) -> (usize, usize, usize) {
        let shared = self.lock();
        (shared.values.len(), shared.getters.len(), shared.gathers.len())
    }
}

/// Waits on `condvar`; spurious wake-ups and early returns are the caller's loop to handle.
fn wait<'a>(
    condvar: &Condvar,
    guard: MutexGuard<'a, Shared>,
    deadline: Deadline,
) -> MutexGuard<'a, Shared> {
    match condvar.wait_timeout(guard, deadline.remaining()) {
        Ok((guard, _)) => guard,
        Err(poison) => poison.into_inner().0,
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8], _deadline: Deadline) -> Result<()> {
        check_limits(key, value)?;
        self.counters.asked(key.len() + value.len());
        Self::put(&mut self.lock(), key, value.into());
        Ok(())
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        check_limits(key, &[])?;
        self.counters.asked(key.len());
        let mut shared = self.lock();
        let mut waiting_on: Option<Arc<Condvar>> = None;
        let value = loop {
            if let Some(value) = shared.values.get(key) {
                break Some(value.clone());
            }
            if mutant("mutant_looks_before_it_waits") {
                drop(shared);
                shared = self.lock();
            }
            if deadline.expired() {
                break None;
            }
            let set = waiting_on.get_or_insert_with(|| {
                let getters = shared.getters.entry(key.to_owned()).or_default();
                getters.waiting += 1;
                getters.set.clone()
            });
            shared = wait(set, shared, deadline);
        };
        if waiting_on.is_some()
            && let Some(getters) = shared.getters.get_mut(key)
        {
            getters.waiting -= 1;
            if getters.waiting == 0 || mutant("mutant_getters_forgotten") {
                shared.getters.remove(key);
            }
        }
        drop(shared);
        match value {
            Some(value) => {
                self.counters.answered(value.len());
                Ok(value.to_vec())
            }
            None => Err(Error::timeout(
                format!("waiting for the store's key {key:?}"),
                deadline.budget(),
                Vec::new(),
            )),
        }
    }

    fn add(&self, key: &str, delta: i64, _deadline: Deadline) -> Result<i64> {
        check_limits(key, &[])?;
        self.counters.asked(key.len() + size_of::<i64>());
        let mut shared = self.lock();
        let sum = counter_sum(key, shared.values.get(key).map(|old| &**old), delta)?;
        Self::put(&mut shared, key, sum.to_string().as_bytes().into());
        self.counters.answered(size_of::<i64>());
        Ok(sum)
    }

    fn delete(&self, key: &str, _deadline: Deadline) -> Result<bool> {
        check_limits(key, &[])?;
        self.counters.asked(key.len());
        Ok(self.lock().values.remove(key).is_some())
    }

    /// Does not call `stop`.
    fn all_gather_until(
        &self,
        key: &str,
        rank: u32,
        world: u32,
        value: &[u8],
        deadline: Deadline,
        _stop: Option<Stop<'_>>,
    ) -> Result<Gathered> {
        check_gather(key, rank, world, value)?;
        self.counters.asked(key.len() + value.len());
        let mut guard = self.lock();
        let shared = &mut *guard;
        let open = shared.gathers.entry(key.to_owned()).or_insert_with(|| OpenGather {
            gathering: Gathering::new(world),
            outcome: Arc::default(),
        });
        let outcome = open.outcome.clone();
        match open.gathering.arrive(key, rank, world, value.into()) {
            Ok(false) => {}
            Ok(true) => {
                if let Some(open) = shared.gathers.remove(key) {
                    let (distinct, which) = open.gathering.finish();
                    let gathered = Gathered::from_distinct(distinct, which)
                        .expect("a finished gather has a part for every rank");
                    let bytes = gathered.payload_bytes();
                    outcome.result.get_or_init(|| Ok((gathered, bytes)));
                    outcome.decided.notify_all();
                }
            }
            Err(error) => {
                if open.gathering.is_spent() {
                    shared.gathers.remove(key);
                }
                outcome.result.get_or_init(|| Err(error));
                outcome.decided.notify_all();
            }
        }
        while outcome.result.get().is_none() {
            if deadline.expired() {
                // There is no outcome yet, so the entry is still that of this gather.
                let Some(open) = guard.gathers.get_mut(key) else { break };
                let missing = open.gathering.missing();
                if !mutant("mutant_part_of_a_rank_that_left") {
                    open.gathering.leave(rank);
                }
                if open.gathering.is_spent() {
                    guard.gathers.remove(key);
                }
                return Err(Error::timeout(
                    format!("in all_gather {key:?}"),
                    deadline.budget(),
                    missing,
                ));
            }
            guard = wait(&outcome.decided, guard, deadline);
        }
        drop(guard);
        let (gathered, bytes) =
            outcome.result.get().cloned().expect(
                "the loop ends when the result is there: only its maker removes the entry",
            )?;
        self.counters.answered(bytes);
        Ok(gathered)
    }

    fn traffic(&self) -> StoreTraffic {
        self.counters.snapshot()
    }
}

#[cfg(test)]
mod models {
    use std::time::Duration;

    use super::*;
    use crate::models::{prove, thread};

    fn long() -> Deadline {
        Deadline::seconds(60)
    }

    /// Every getter of a key is woken when it is set, also if it missed an earlier value, and nothing is kept of waits.
    fn getters_meet_a_set() {
        let store = MemoryStore::new();
        let getters = [0, 1].map(|_| {
            let store = store.clone();
            thread::spawn(move || assert_eq!(store.get("k", long()).unwrap(), b"v"))
        });
        store.set("k", b"v", long()).unwrap();
        store.delete("k", long()).unwrap();
        store.set("k", b"v", long()).unwrap();
        getters.into_iter().for_each(|getter| getter.join().unwrap());
        assert_eq!(store.entries(), (1, 0, 0));
    }

    /// A rank whose time is over leaves a gather, and comes again. All ranks have the same parts then.
    fn a_gather_meets_a_rank_that_left() {
        let store = MemoryStore::new();
        let theirs = store.clone();
        let late = thread::spawn(move || {
            let gather = |deadline| theirs.all_gather("g", 1, 2, b"1", deadline);
            gather(Deadline::after(Duration::ZERO)).or_else(|late| {
                assert_eq!(late.ranks(), [0], "{late}");
                gather(long())
            })
        });
        let mine = store.all_gather("g", 0, 2, b"0", long()).unwrap();
        let theirs = late.join().unwrap().unwrap();
        assert!(mine.parts().eq([b"0", b"1"]) && theirs.parts().eq(mine.parts()));
        assert_eq!(store.entries(), (0, 0, 0));
    }

    #[test]
    fn loom_getters_are_woken() {
        let mutants = ["mutant_looks_before_it_waits", "mutant_getters_forgotten"];
        prove(3, &mutants, getters_meet_a_set);
    }

    #[test]
    fn loom_a_rank_leaves_a_gather_and_comes_again() {
        prove(3, &["mutant_part_of_a_rank_that_left"], a_gather_meets_a_rank_that_left);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn ranks<T: Send>(
        world: u32,
        store: &MemoryStore,
        run: impl Fn(u32, &MemoryStore) -> T + Sync,
    ) -> Vec<T> {
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..world)
                .map(|rank| {
                    let (store, run) = (store.clone(), &run);
                    std::thread::Builder::new()
                        .stack_size(64 << 10)
                        .spawn_scoped(scope, move || run(rank, &store))
                        .unwrap()
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn four_thousand_ranks_share_one_result() {
        let store = MemoryStore::new();
        let value = vec![9u8; 64 << 10];
        let results = ranks(4096, &store, |rank, store| {
            let gathered =
                store.all_gather("k", rank, 4096, &value, Deadline::seconds(120)).unwrap();
            (gathered, store.traffic())
        });
        let first = results[0].0.distinct()[0].clone();
        for (gathered, traffic) in &results {
            assert!(Arc::ptr_eq(&gathered.distinct()[0], &first));
            assert_eq!(traffic.round_trips, 1);
            assert_eq!(traffic.bytes_received, (64 << 10) + 8);
        }
        assert_eq!(store.entries(), (0, 0, 0));
        assert_eq!(store.traffic(), StoreTraffic::default());
    }

    #[test]
    fn nothing_is_left_of_gathers_and_waits_that_ended() {
        let store = MemoryStore::new();
        let soon = || Deadline::after(Duration::from_millis(20));
        assert!(store.get("absent", soon()).unwrap_err().is_timeout());
        let error = store.all_gather("g", 1, 3, b"x", soon()).unwrap_err();
        assert_eq!(error.ranks(), [0, 2]);
        assert_eq!(store.entries(), (0, 0, 0));
        let gathered = ranks(3, &store, |rank, store| {
            store.all_gather("g", rank, 3, b"x", Deadline::seconds(60)).unwrap()
        });
        assert!(gathered[0].is_uniform());
        assert_eq!(store.entries(), (0, 0, 0));
    }
}
