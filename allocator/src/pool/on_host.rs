//! The ranks of one host among themselves, in a pool whose ranks are on several.

use super::Pool;
use crate::group::Hosts;
use crate::heap::Heap;
use crate::rendezvous::peers::Peers;
use crate::topology::Topology;
use crate::{Error, Group, Result};

/// Which ranks a pool's methods count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RankScope {
    /// All ranks of the group.
    Group,
    /// Those of this host, from 0 on.
    Host,
}

/// Names and links that the ranks of this host have for themselves.
pub(super) struct HostRanks {
    /// The ranks of this host, with names of their own in the store.
    pub(super) group: Group,
    hosts: Hosts,
    pub(super) topology: Topology,
}

impl HostRanks {
    pub(super) fn new(group: &Group, heap: &Heap, hosts: &Hosts, peers: &Peers) -> Result<Self> {
        let layout = heap.layout();
        let own = match hosts.count() {
            1 => group.clone(),
            _ => group.part(hosts.of(group.rank()), layout.rank, layout.world)?,
        };
        let topology = peers.topology().clone();
        Ok(Self { group: own, hosts: Hosts::one(layout.world), topology })
    }
}

impl Pool {
    /// Which ranks can map each other's memory: those of a host, or, where the driver's handles reach further, of several.
    /// The same on every rank.
    pub fn hosts(&self) -> &Hosts {
        match self.1 {
            RankScope::Group => &self.0.hosts,
            RankScope::Host => &self.0.on_host.hosts,
        }
    }

    /// This pool as the ranks of this host see it among themselves. [`rank`](Self::rank), [`world`](Self::world),
    /// [`group`](Self::group), [`topology`](Self::topology) and whatever takes a rank count the ranks of this host, in the
    /// order of their ranks in the group and from 0 on. These are the slots of [`layout`](Self::layout).
    ///
    /// It is the same pool, with the same lanes: a commit is one of all ranks on all hosts. Where all are on one host
    /// nothing differs.
    #[must_use]
    pub fn on_host(&self) -> Self {
        Self(self.0.clone(), RankScope::Host)
    }

    /// The slot of [`layout`](Self::layout) that holds `rank`'s memory. `is_invalid_argument`, with the host's name, where
    /// the rank is on another host.
    pub fn slot_of(&self, rank: u32) -> Result<u32> {
        if rank >= self.world() {
            return Err(Error::invalid_argument(format!(
                "rank {rank} of a group of {} ranks",
                self.world()
            )));
        }
        if self.1 == RankScope::Host {
            return Ok(rank);
        }
        let hosts = &self.0.hosts;
        let (here, there) = (hosts.of(self.rank()), hosts.of(rank));
        if here != there {
            return Err(Error::invalid_argument(format!(
                "rank {rank} is on host {}, and rank {} on host {}: memory is not reached across hosts; the ranks \
                 here are {:?}",
                hosts.name(there),
                self.rank(),
                hosts.name(here),
                hosts.here(self.rank())
            ))
            .naming([rank]));
        }
        self.0.heap.slot_of(rank)
    }

    /// The number in the whole group of a rank that this value counts. Panics when there is no such rank.
    pub(super) fn group_rank(&self, rank: u32) -> u32 {
        match self.1 {
            RankScope::Group => rank,
            RankScope::Host => self.0.heap.ranks()[rank as usize],
        }
    }

    /// The number of a rank of the whole group as this value counts them, if it does.
    pub(super) fn number_of(&self, group_rank: u32) -> Option<u32> {
        match self.1 {
            RankScope::Group => Some(group_rank),
            RankScope::Host => self.0.heap.slot_of(group_rank).ok(),
        }
    }
}
