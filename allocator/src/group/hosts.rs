//! Which ranks of a group share a host.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::{Group, Interrupt};
use crate::ranks::list;
use crate::store::Gathered;
use crate::sync::{Condvar, Mutex, MutexGuard, mutant};
use crate::{Deadline, Error, Result};

/// Hosts of a group, and the ranks on each. Hosts are numbered from 0 by their lowest rank; the ranks of a host may be any.
///
/// A host is where processes can hand each other file descriptors: one kernel, one network namespace and one user, and
/// one `SYMMPOOL_HOST_ID` where that is set. [`Group::hosts`] finds them. Cloning is cheap.
#[derive(Clone, PartialEq, Eq)]
pub struct Hosts(Arc<HostTable>);

#[derive(PartialEq, Eq)]
struct HostTable {
    /// The host of each rank.
    of: Vec<u32>,
    hosts: Vec<HostEntry>,
}

#[derive(PartialEq, Eq)]
struct HostEntry {
    name: String,
    ranks: Vec<u32>,
}

impl Hosts {
    /// Groups ranks by key. `ranks` has the key of each rank and its host's name, in rank order; a host has the name that
    /// its lowest rank has for it. Hosts that would have equal names are told apart by their numbers.
    pub(crate) fn new<K: Ord>(ranks: impl IntoIterator<Item = (K, String)>) -> Self {
        let (mut of, mut hosts) = (Vec::new(), Vec::<HostEntry>::new());
        let mut numbers = BTreeMap::new();
        for (rank, (key, name)) in (0..).zip(ranks) {
            let number: u32 = *numbers.entry(key).or_insert_with(|| {
                hosts.push(HostEntry { name, ranks: Vec::new() });
                hosts.len() as u32 - 1
            });
            hosts[number as usize].ranks.push(rank);
            of.push(number);
        }
        let mut uses = BTreeMap::<String, u32>::new();
        for host in &hosts {
            *uses.entry(host.name.clone()).or_default() += 1;
        }
        for (number, host) in hosts.iter_mut().enumerate().filter(|(_, host)| uses[&host.name] > 1)
        {
            host.name = format!("{} (number {number})", host.name);
        }
        Self(Arc::new(HostTable { of, hosts }))
    }

    /// One host of `world` ranks.
    pub(crate) fn one(world: u32) -> Self {
        Self::new((0..world).map(|_| ((), String::new())))
    }

    /// The number of ranks of the host that has the most.
    pub fn max_ranks(&self) -> u32 {
        self.iter().map(|ranks| ranks.len() as u32).max().unwrap_or(0)
    }

    /// Adds to an error that names ranks on which hosts these are, where there are several.
    pub(crate) fn named_in(&self, error: Error) -> Error {
        let on: Vec<u32> =
            error.ranks().iter().copied().filter(|&rank| rank < self.world()).collect();
        if self.count() == 1 || on.is_empty() {
            return error;
        }
        let named: Vec<String> = (0..self.count())
            .filter_map(|host| {
                let there: Vec<u32> =
                    on.iter().copied().filter(|&rank| self.of(rank) == host).collect();
                let plural = if there.len() == 1 { "" } else { "s" };
                (!there.is_empty())
                    .then(|| format!("rank{plural} {} on host {}", list(&there), self.name(host)))
            })
            .collect();
        error.context(named.join(", "))
    }

    /// The number of hosts.
    pub fn count(&self) -> u32 {
        self.0.hosts.len() as u32
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.0.of.len() as u32
    }

    /// The host of `rank`.
    ///
    /// # Panics
    ///
    /// If there is no such rank in the group.
    pub fn of(&self, rank: u32) -> u32 {
        match self.0.of.get(rank as usize) {
            Some(host) => *host,
            None => panic!("rank {rank} of a group of {} ranks; ranks count from 0", self.world()),
        }
    }

    /// The ranks on `host`, in rank order.
    ///
    /// # Panics
    ///
    /// If there is no such host.
    pub fn ranks(&self, host: u32) -> &[u32] {
        &self.host(host).ranks
    }

    /// The ranks on the host of `rank`, in rank order, with `rank` itself.
    ///
    /// # Panics
    ///
    /// If there is no such rank in the group.
    pub fn here(&self, rank: u32) -> &[u32] {
        self.ranks(self.of(rank))
    }

    /// Name of `host` for messages, behind the word "host": `node7`, or `a (SYMMPOOL_HOST_ID)` for a pretended one.
    ///
    /// # Panics
    ///
    /// If there is no such host.
    pub fn name(&self, host: u32) -> &str {
        &self.host(host).name
    }

    /// The ranks on each host, in the order of hosts.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u32]> {
        self.0.hosts.iter().map(|host| &*host.ranks)
    }

    fn host(&self, host: u32) -> &HostEntry {
        match self.0.hosts.get(host as usize) {
            Some(host) => host,
            None => panic!("host {host} of {}; hosts count from 0", self.count()),
        }
    }
}

/// All hosts with their ranks: `host node7: ranks 0-3; host node8: ranks 4-7`.
impl fmt::Display for Hosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, HostEntry { name, ranks }) in self.0.hosts.iter().enumerate() {
            let begin = if number == 0 { "" } else { "; " };
            let plural = if ranks.len() == 1 { "" } else { "s" };
            write!(f, "{begin}host {name}: rank{plural} {}", list(ranks))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Hosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hosts({self})")
    }
}

/// Hosts of a group and of its children, once one of them has asked.
#[derive(Default)]
pub(super) struct KnownHosts {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    known: Option<Hosts>,
    /// Whether a thread gathers them at the moment.
    is_gathering: bool,
    /// How many gathers all ranks came to. They count them alike, so that all begin the next one under one key.
    gathers: u64,
}

impl KnownHosts {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to gather, which ends also by a panic.
struct Turn<'a>(&'a KnownHosts);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.lock().is_gathering = false;
        self.0.changed.notify_all();
    }
}

impl Group {
    /// Hosts of this group's ranks, which `read` makes of what all ranks have brought. The group, its clones and its
    /// children do that once, as one: threads that ask meanwhile wait for the first one.
    pub(crate) fn hosts_by(
        &self,
        value: &[u8],
        deadline: Deadline,
        read: impl FnOnce(&Gathered) -> Result<Hosts>,
    ) -> Result<Hosts> {
        let known = &self.namespace.root.hosts;
        let turn = match self.turn_to_gather(known, deadline)? {
            Ok(hosts) => return Ok(hosts),
            Err(turn) => turn,
        };
        let number = known.lock().gathers;
        let gathered = self.gather_of_root("hosts", number, value, deadline)?;
        let hosts = read(&gathered);
        let turn = Some(turn).filter(|_| !mutant("mutant_turn_ends_early"));
        let mut state = known.lock();
        state.gathers += 1;
        state.known = hosts.as_ref().ok().cloned();
        drop(state);
        drop(turn);
        hosts
    }

    /// The hosts, if they are known, or the right to gather them.
    fn turn_to_gather<'a>(
        &self,
        known: &'a KnownHosts,
        deadline: Deadline,
    ) -> Result<std::result::Result<Hosts, Turn<'a>>> {
        let mut state = known.lock();
        loop {
            if let Some(hosts) = &state.known {
                return Ok(Ok(hosts.clone()));
            }
            if !state.is_gathering {
                state.is_gathering = true;
                return Ok(Err(Turn(known)));
            }
            let waiting = "for another thread of this rank, which gathers the group's hosts";
            if self.interrupt.as_ref().is_some_and(Interrupt::is_requested) {
                return Err(Error::interrupted_wait(&format!("waiting {waiting}"), &[]));
            }
            if deadline.expired() {
                return Err(Error::timeout(waiting, deadline.budget(), Vec::new()));
            }
            let moment = deadline.remaining().min(Duration::from_secs(1));
            let woken = known.changed.wait_timeout(state, moment);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Hosts that are known already.
    pub(crate) fn known_hosts(&self) -> Option<Hosts> {
        self.namespace.root.hosts.lock().known.clone()
    }
}

#[cfg(test)]
mod models {
    use super::*;
    use crate::models::{before, prove, thread};

    /// Threads of a rank gather its group's hosts once.
    fn threads_ask_for_hosts() {
        let group = before(|| Group::in_process(1).unwrap().remove(0));
        let ask = |group: &Group| {
            let read = |_: &Gathered| Ok(Hosts::new([(0, "a".to_owned())]));
            group.hosts_by(b"a", Deadline::seconds(60), read).unwrap()
        };
        let theirs = group.clone();
        let other = thread::spawn(move || ask(&theirs));
        assert_eq!(ask(&group), other.join().unwrap());
        assert_eq!(group.namespace.root.hosts.lock().gathers, 1, "gathered once");
    }

    #[test]
    fn loom_hosts_are_gathered_once() {
        prove(3, &["mutant_turn_ends_early"], threads_ask_for_hosts);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hosts(keys: &[u8]) -> Hosts {
        Hosts::new(keys.iter().map(|key| (*key, format!("node{key}"))))
    }

    #[test]
    fn hosts_are_numbered_by_their_lowest_ranks() {
        // Slurm's cyclic distribution of six ranks over node9 and node2.
        let found = hosts(&[9, 2, 9, 2, 9, 2]);
        assert_eq!((found.count(), found.world()), (2, 6));
        assert_eq!(found.iter().collect::<Vec<_>>(), [[0, 2, 4], [1, 3, 5]]);
        assert_eq!((found.of(3), found.here(3), found.name(0)), (1, &[1, 3, 5][..], "node9"));
        assert_eq!(found.to_string(), "host node9: ranks 0, 2, 4; host node2: ranks 1, 3, 5");
        assert_eq!(hosts(&[4]).to_string(), "host node4: rank 0");
        assert_eq!(found, found.clone());
    }

    #[test]
    fn equal_names_are_told_apart() {
        let found =
            Hosts::new([(1, "a"), (2, "a"), (3, "b")].map(|(key, name)| (key, name.to_owned())));
        assert_eq!([0, 1, 2].map(|host| found.name(host)), ["a (number 0)", "a (number 1)", "b"]);
    }

    #[test]
    #[should_panic(expected = "rank 2 of a group of 2 ranks")]
    fn a_rank_outside_the_group_is_named() {
        hosts(&[0, 1]).of(2);
    }

    #[test]
    #[should_panic(expected = "host 2 of 2")]
    fn a_host_that_is_none_is_named() {
        hosts(&[0, 1]).ranks(2);
    }

    proptest! {
        #[test]
        fn ranks_lie_where_a_plain_search_finds_them(keys in proptest::collection::vec(0_u8..6, 1..40)) {
            let found = hosts(&keys);
            // The hosts in the order in which a reader of the list meets them.
            let mut met = Vec::new();
            for key in &keys {
                if !met.contains(key) {
                    met.push(*key);
                }
            }
            prop_assert_eq!(found.count() as usize, met.len());
            prop_assert_eq!(found.world() as usize, keys.len());
            for (number, key) in (0..).zip(&met) {
                let ranks: Vec<u32> =
                    (0..keys.len()).filter(|&rank| keys[rank] == *key).map(|rank| rank as u32).collect();
                prop_assert_eq!(found.ranks(number), &ranks[..]);
                prop_assert_eq!(found.iter().nth(number as usize), Some(&ranks[..]));
                prop_assert_eq!(found.name(number), format!("node{key}"));
                for rank in ranks {
                    prop_assert_eq!(found.of(rank), number);
                    prop_assert_eq!(found.here(rank), found.ranks(number));
                }
            }
        }
    }
}
