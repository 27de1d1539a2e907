//! Places of ranks: on which host each is, and its index there.

use symmpool_allocator::Hosts;

/// Ranks of a group by host.
#[derive(Clone, Debug)]
pub(super) struct RankTable {
    pub(super) hosts: Hosts,
    /// This rank, its host, and its index among the host's ranks.
    pub(super) rank: u32,
    pub(super) host: u32,
    pub(super) index: u32,
}

impl RankTable {
    pub(super) fn new(hosts: &Hosts, rank: u32) -> Self {
        let index = hosts.here(rank).iter().position(|&other| other == rank).unwrap_or(0) as u32;
        Self { hosts: hosts.clone(), rank, host: hosts.of(rank), index }
    }

    /// The number of ranks.
    pub(super) fn world(&self) -> usize {
        self.hosts.world() as usize
    }

    /// The number of hosts.
    pub(super) fn host_count(&self) -> usize {
        self.hosts.count() as usize
    }

    /// The number of ranks of this host.
    pub(super) fn local_world(&self) -> usize {
        self.hosts.here(self.rank).len()
    }

    /// Whether all hosts have as many ranks, and more than one, so that phases inside hosts pay off.
    pub(super) fn is_even(&self) -> bool {
        let count = self.local_world();
        count > 1 && self.hosts.iter().all(|ranks| ranks.len() == count)
    }

    /// Whether the ranks of each host follow each other, in the order of hosts: parts for one host lie side by side then.
    pub(super) fn is_blocked(&self) -> bool {
        self.hosts.iter().flatten().copied().eq(0..self.hosts.world())
    }

    /// The rank of a host with an index there.
    pub(super) fn at(&self, host: usize, index: usize) -> usize {
        self.hosts.ranks(host as u32)[index] as usize
    }

    /// The rank of this host with an index.
    pub(super) fn here(&self, index: u32) -> u32 {
        self.hosts.here(self.rank).get(index as usize).copied().unwrap_or(index)
    }

    /// The index on its host of any rank.
    pub(super) fn index_of(&self, rank: u32) -> u32 {
        let ranks = self.hosts.here(rank);
        ranks.iter().position(|&other| other == rank).unwrap_or(0) as u32
    }
}

/// Which outer engine carries a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// Between the ranks of equal index on all hosts.
    Rail,
    /// Between all ranks.
    Flat,
}
