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
    /// Whether all hosts have as many ranks as each other, and more than one, so that phases inside hosts pay off. It is the
    /// stricter one of two.
    pub(super) is_even: bool,
    /// Whether all hosts have as many ranks as each other, be it one.
    pub(super) is_alike: bool,
    /// Whether the ranks of each host follow each other, in the order of hosts: parts for one host lie side by side then.
    pub(super) is_blocked: bool,
}

impl RankTable {
    pub(super) fn new(hosts: &Hosts, rank: u32) -> Self {
        let count = hosts.here(rank).len();
        Self {
            hosts: hosts.clone(),
            rank,
            host: hosts.of(rank),
            index: index_in(hosts, rank),
            is_even: count > 1 && hosts.iter().all(|ranks| ranks.len() == count),
            is_alike: hosts.iter().all(|ranks| ranks.len() == count),
            is_blocked: hosts.iter().flatten().copied().eq(0..hosts.world()),
        }
    }

    /// The number of ranks.
    pub(super) fn world(&self) -> usize {
        self.hosts.world() as usize
    }

    /// The number of hosts.
    pub(super) fn host_count(&self) -> usize {
        self.hosts.count() as usize
    }

    /// All hosts but this one, by number.
    pub(super) fn other_hosts(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let here = self.host as usize;
        (0..self.host_count()).filter(move |host| *host != here)
    }

    /// The number of ranks of a host.
    pub(super) fn ranks_on(&self, host: usize) -> usize {
        self.hosts.ranks(host as u32).len()
    }

    /// The number of ranks of this host.
    pub(super) fn local_world(&self) -> usize {
        self.hosts.here(self.rank).len()
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
        index_in(&self.hosts, rank)
    }

    /// The least number that every host's number of ranks divides; `usize::MAX` where it cannot be counted.
    pub(super) fn common_multiple(&self) -> usize {
        let counts = self.hosts.iter().map(<[u32]>::len);
        counts.fold(1, |multiple, count| {
            let (mut divisor, mut rest) = (multiple, count);
            while rest > 0 {
                (divisor, rest) = (rest, divisor % rest);
            }
            (multiple / divisor).saturating_mul(count)
        })
    }

    /// The number of ranks of this host whose parts the phases inside it mix: one where there are none.
    pub(super) fn inside(&self, route: Route) -> usize {
        if route == Route::Rail { self.local_world() } else { 1 }
    }

    /// All ranks by their index on their host, then by host; in their own order where there are no phases inside hosts.
    pub(super) fn by_index(&self, route: Route) -> Vec<usize> {
        if route == Route::Flat {
            return (0..self.world()).collect();
        }
        let hosts = self.host_count();
        (0..self.local_world())
            .flat_map(|index| (0..hosts).map(move |host| self.at(host, index)))
            .collect()
    }

    /// All ranks by their host, then by their index there.
    pub(super) fn by_host(&self) -> Vec<usize> {
        self.hosts.iter().flatten().map(|&rank| rank as usize).collect()
    }
}

fn index_in(hosts: &Hosts, rank: u32) -> u32 {
    hosts.here(rank).iter().position(|&other| other == rank).unwrap_or(0) as u32
}

/// Which outer engine carries a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// Between the ranks of equal index on all hosts.
    Rail,
    /// Between all ranks.
    Flat,
}
