//! What the tests of groups and rendezvous share.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};

use crate::store::{Gathered, Store};
use crate::{Deadline, Error, Group, Result};

/// The smallest store that can serve a test: one map, and a condition variable for those who wait.
#[derive(Default)]
pub(crate) struct MeetingStore {
    values: Mutex<BTreeMap<String, Vec<u8>>>,
    changed: Condvar,
    gathers: Mutex<u64>,
}

impl MeetingStore {
    /// How many contributions to gathers there were.
    pub(crate) fn gathers(&self) -> u64 {
        *self.gathers.lock().unwrap()
    }

    /// Waits until `found` finds something.
    fn wait<T>(
        &self,
        deadline: Deadline,
        found: impl Fn(&BTreeMap<String, Vec<u8>>) -> Option<T>,
    ) -> Option<T> {
        let mut values = self.values.lock().unwrap();
        loop {
            if let Some(found) = found(&values) {
                return Some(found);
            }
            if deadline.expired() {
                return None;
            }
            values = self.changed.wait_timeout(values, deadline.remaining()).unwrap().0;
        }
    }
}

impl Store for MeetingStore {
    fn set(&self, key: &str, value: &[u8], _deadline: Deadline) -> Result<()> {
        self.values.lock().unwrap().insert(key.into(), value.into());
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.wait(deadline, |values| values.get(key).cloned())
            .ok_or_else(|| Error::timeout(format!("for {key:?}"), deadline.budget(), Vec::new()))
    }

    fn add(&self, _key: &str, _delta: i64, _deadline: Deadline) -> Result<i64> {
        Err(Error::unsupported("counters, in this test's store"))
    }

    fn delete(&self, key: &str, _deadline: Deadline) -> Result<bool> {
        Ok(self.values.lock().unwrap().remove(key).is_some())
    }

    fn all_gather(
        &self,
        key: &str,
        rank: u32,
        world: u32,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Gathered> {
        *self.gathers.lock().unwrap() += 1;
        self.set(&format!("{key}/{rank}"), value, deadline)?;
        let keys: Vec<String> = (0..world).map(|rank| format!("{key}/{rank}")).collect();
        let all = self.wait(deadline, |values| {
            keys.iter().map(|key| values.get(key).cloned()).collect::<Option<Vec<_>>>()
        });
        all.map(Gathered::from_parts).ok_or_else(|| {
            let values = self.values.lock().unwrap();
            let missing = (0..world).filter(|&rank| !values.contains_key(&keys[rank as usize]));
            let missing = missing.collect();
            Error::timeout(format!("in all_gather {key:?}"), deadline.budget(), missing)
        })
    }
}

/// `world` participants that meet in `store`.
pub(crate) fn groups(world: u32, store: &Arc<MeetingStore>) -> Vec<Group> {
    (0..world).map(|rank| Group::new(rank, world, store.clone()).unwrap()).collect()
}

/// Runs `body` as each of `world` ranks, one thread a rank, and returns what each returned. A
/// panic of one is a panic of the test.
pub(crate) fn on_ranks<T: Send>(world: u32, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let groups = groups(world, &Arc::default());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| body(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// This test program again, running the test `name` alone, with `role` to tell it apart. For what
/// threads cannot stand in for: processes that are killed, and counts of open files.
pub(crate) fn this_test_as(name: &str, role: &str) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(ROLE, role);
    command
}

/// The role given by [`this_test_as`]; `None` in the test proper.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

const ROLE: &str = "SYMMPOOL_TEST_ROLE";
