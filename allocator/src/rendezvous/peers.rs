//! The result of the handshake: a pool's ranks, and how to reach them.

use std::collections::BTreeMap;

use super::identity::HostIdentity;
use super::sockets::PeerSockets;
use crate::driver::{DeviceIdentity, Transport};
use crate::group::Hosts;
use crate::store::Gathered;
use crate::topology::Topology;
use crate::{Deadline, Error, Group, Result};

/// A value for each rank, equal ones stored once: the thousands of simulated ranks of one process have one
/// identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PerRank<T> {
    distinct: Vec<T>,
    which: Vec<u32>,
}

impl<T: Ord + Clone> PerRank<T> {
    /// Collects values in rank order.
    pub(crate) fn new<'a>(values: impl IntoIterator<Item = &'a T>) -> Self
    where
        T: 'a,
    {
        let mut index = BTreeMap::new();
        let mut distinct = Vec::new();
        let mut which = Vec::new();
        for value in values {
            let at = *index.entry(value).or_insert_with(|| {
                distinct.push(value.clone());
                distinct.len() as u32 - 1
            });
            which.push(at);
        }
        Self { distinct, which }
    }

    /// `rank`'s value. Panics when there is no such rank.
    pub(crate) fn get(&self, rank: u32) -> &T {
        &self.distinct[self.which[rank as usize] as usize]
    }

    /// The values of some ranks, in that order. Panics when there is no such rank.
    pub(crate) fn of(&self, ranks: &[u32]) -> Self {
        Self::new(ranks.iter().map(|&rank| self.get(rank)))
    }
}

/// A pool's ranks: who they are, and how to reach them.
#[derive(Debug)]
pub(crate) struct Peers {
    pub(super) rank: u32,
    pub(super) identities: PerRank<HostIdentity>,
    /// Which ranks can map each other's memory.
    pub(super) hosts: Hosts,
    pub(super) devices: PerRank<DeviceIdentity>,
    pub(super) first_on_device: bool,
    pub(super) transport: Transport,
    pub(super) topology: Topology,
    pub(super) sockets: Option<PeerSockets>,
    /// See [`take_missed`](Peers::take_missed).
    pub(super) missed: Option<Error>,
}

impl Peers {
    /// Some ranks of another pool on one host, in this order, which are not connected.
    pub(crate) fn of_some(
        rank: u32,
        identities: PerRank<HostIdentity>,
        devices: PerRank<DeviceIdentity>,
        topology: Topology,
    ) -> Self {
        Self {
            rank,
            hosts: Hosts::one(identities.which.len() as u32),
            identities,
            devices,
            first_on_device: true,
            transport: Transport::UnixSocket,
            topology,
            sockets: None,
            missed: None,
        }
    }

    /// This process's rank.
    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    /// The number of ranks.
    pub(crate) fn world(&self) -> u32 {
        self.identities.which.len() as u32
    }

    /// Which process on which machine each rank is.
    pub(crate) fn identities(&self) -> &PerRank<HostIdentity> {
        &self.identities
    }

    /// Which ranks can map each other's memory.
    pub(crate) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Each rank's device.
    pub(crate) fn devices(&self) -> &PerRank<DeviceIdentity> {
        &self.devices
    }

    /// Whether no rank's process had another pool on its device.
    pub(crate) fn first_on_device(&self) -> bool {
        self.first_on_device
    }

    /// How handles travel between these ranks.
    pub(crate) fn transport(&self) -> Transport {
        self.transport
    }

    /// How the devices of this host's ranks are linked; equal on all of these.
    pub(crate) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The connections to the other ranks of this host, where handles are file descriptors.
    pub(crate) fn sockets(&self) -> Option<&PeerSockets> {
        self.sockets.as_ref()
    }

    /// Every rank's `value`: over the connections to the other ranks, where these reach all of them, else
    /// through the group's store, while those that are connected are watched. Collective; see [`PeerSockets::all_gather`] and [`Group::all_gather`].
    /// A failure of the store on this rank alone is kept for [`take_missed`](Peers::take_missed).
    pub(crate) fn all_gather(
        &mut self,
        group: &Group,
        what: &str,
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Gathered> {
        let gathered = match &mut self.sockets {
            Some(sockets) if self.hosts.count() == 1 => {
                return sockets.all_gather(what, value, deadline);
            }
            Some(sockets) => {
                let gone = || sockets.lost_peers();
                group.all_gather_from_living(what, value, deadline, gone)
            }
            None => group.all_gather(what, value, deadline),
        };
        gathered.map_err(|error| self.hosts.named_in(error)).inspect_err(|error| {
            if !concerns_all_ranks(error) {
                self.missed.get_or_insert_with(|| error.clone());
            }
        })
    }

    /// Why this rank alone did not receive the others' parts in a gather through the store: the others may
    /// have received each other's and gone on. Returned once. Connections that fail are closed on both
    /// sides, so there is nothing to remember about them.
    pub(crate) fn take_missed(&mut self) -> Option<Error> {
        self.missed.take()
    }

    /// Sends the connected peers the reason why this rank takes part in nothing more.
    pub(crate) fn fail(&mut self, error: &Error) {
        if let Some(sockets) = &mut self.sockets {
            sockets.fail(error);
        }
    }

    /// Whether ranks can still talk, as far as this one knows.
    pub(crate) fn can_talk(&self) -> bool {
        self.sockets.as_ref().is_none_or(|sockets| !sockets.is_broken())
    }

    /// See [`sockets`](Peers::sockets).
    pub(crate) fn sockets_mut(&mut self) -> Option<&mut PeerSockets> {
        self.sockets.as_mut()
    }
}

/// Whether a store gives this error to all ranks of a gather alike: that ranks do not fit together, or that
/// their values are too long.
fn concerns_all_ranks(error: &Error) -> bool {
    error.is_diverged() || error.is_out_of_memory()
}
