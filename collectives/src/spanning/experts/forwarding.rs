//! Which rank forwards whose tokens on its host, and where rows come back to.

use symmpool_allocator::Hosts;

use crate::spanning::ranks::{RankTable, Route};

/// The ranks that forward tokens of one rank, and those whose tokens it forwards.
#[derive(Clone, Debug)]
pub(in crate::spanning) struct Forwarding {
    /// The outer engine that carries rows.
    pub(super) route: Route,
    /// Ranks that forward this rank's tokens on the other hosts: the place of each in the outer engine, and its host. In the order
    /// of places.
    pub(super) outgoing: Vec<(usize, usize)>,
    /// Ranks of other hosts whose tokens this one forwards: the place of each in the outer engine, and the rank. In the order of
    /// places.
    pub(super) incoming: Vec<(usize, u32)>,
    /// Slot of the rank of this host that forwards the tokens of each rank. A rank forwards its own inside its host.
    pub(super) slots: Vec<u32>,
    /// Number of each rank among those that its own forwarding slot forwards.
    pub(super) numbers: Vec<usize>,
}

impl Forwarding {
    pub(in crate::spanning) fn new(ranks: &RankTable, has_rail: bool) -> Self {
        let hosts = &ranks.hosts;
        let route = if ranks.is_alike && has_rail { Route::Rail } else { Route::Flat };
        let place = |rank: u32| match route {
            Route::Rail => hosts.of(rank) as usize,
            Route::Flat => rank as usize,
        };
        let mut outgoing: Vec<(usize, usize)> = ranks
            .other_hosts()
            .map(|host| (place(hosts.ranks(host as u32)[forwarder(hosts, host, ranks.rank)]), host))
            .collect();
        outgoing.sort_unstable();
        let here = ranks.host as usize;
        let slots: Vec<u32> =
            (0..hosts.world()).map(|rank| forwarder(hosts, here, rank) as u32).collect();
        let mut served = vec![0; ranks.local_world()];
        let numbers = slots
            .iter()
            .map(|slot| {
                let count = &mut served[*slot as usize];
                *count += 1;
                *count - 1
            })
            .collect();
        let mut incoming: Vec<(usize, u32)> = (0..hosts.world())
            .filter(|rank| hosts.of(*rank) != ranks.host && slots[*rank as usize] == ranks.index)
            .map(|rank| (place(rank), rank))
            .collect();
        incoming.sort_unstable();
        Self { route, outgoing, incoming, slots, numbers }
    }

    /// Area of combined rows, in the slot that forwards the tokens of `source`, for the rows that another slot sends back. There
    /// are `inside` slots.
    pub(super) fn area(&self, source: u32, from: u32, inside: u32) -> usize {
        let to = self.slots[source as usize];
        let distance = (from + inside - to) % inside;
        debug_assert!(distance > 0, "a slot's own rows stay where they are");
        self.numbers[source as usize] * (inside as usize - 1) + distance as usize - 1
    }
}

/// Index on a host of the rank that forwards the tokens of `source` there.
fn forwarder(hosts: &Hosts, host: usize, source: u32) -> usize {
    let index = hosts.here(source).iter().position(|rank| *rank == source).unwrap_or(0);
    index % hosts.ranks(host as u32).len()
}

/// The most areas for rows that come back to a rank, of all ranks: one for each rank whose tokens it forwards, and each other
/// rank of its host.
pub(crate) fn combine_areas(hosts: &Hosts) -> usize {
    let of_host = |host: usize| {
        let inside = hosts.ranks(host as u32).len();
        let mut served = vec![0; inside];
        (0..hosts.world()).for_each(|rank| served[forwarder(hosts, host, rank)] += 1);
        served.into_iter().max().unwrap_or(0) * (inside - 1)
    };
    (0..hosts.count() as usize).map(of_host).max().unwrap_or(0)
}
