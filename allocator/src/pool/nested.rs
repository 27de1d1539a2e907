//! Pools of some of another pool's ranks, which are made without a word to the others.
//!
//! Whoever makes one has agreed with the other ranks by way of the pool around it, whose memory they share, and takes the
//! first memory from that. The ranks connect when the pool first commits.

#![allow(unsafe_code)] // maps memory by address, from the caller's promise

use super::builder::PreparedRank;
use super::committer::Unmet;
use super::{Pool, PoolBuilder};
use crate::rendezvous::peers::Peers;
use crate::topology::Topology;
use crate::{Error, Group, Result};

impl Pool {
    /// A pool of some of this pool's ranks in host memory: those with the numbers `ranks` here, in the order of `group`,
    /// which has as many. Collective, but it talks to nobody: ranks that call it have agreed to, with equal arguments.
    /// They connect when the pool first commits, which fails as [`PoolBuilder::build`] would; until then nobody sees that
    /// a rank [has left](Pool::has_left). `stride` is as for [`PoolBuilder::stride`]. Behind it each slot has `room` bytes
    /// for memory that is mapped there a second time: see [`map_room`](Pool::map_room).
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` if `ranks` are no ranks of this pool, or not those of `group`; `is_unsupported` in memory that
    /// is not the host's; `is_invalid_state` in a forked child.
    pub fn nested(&self, group: &Group, ranks: &[u32], stride: u64, room: u64) -> Result<Self> {
        self.check_process()?;
        let is_here = |rank: &u32| *rank < self.world();
        let own = ranks.get(group.rank() as usize);
        if ranks.len() != group.world() as usize
            || own != Some(&self.rank())
            || !ranks.iter().all(is_here)
        {
            return Err(Error::invalid_argument(format!(
                "ranks {ranks:?} of a pool of {} for rank {} of {}; name the pool's ranks in the order of the group",
                self.world(),
                group.rank(),
                group.world()
            )));
        }
        if self.hosts().count() > 1 {
            return Err(Error::unsupported(format!(
                "a pool within one that spans {} hosts; make it within what the ranks of a host share (Pool::on_host)",
                self.hosts().count()
            )));
        }
        if self.driver().device().kind != "host" {
            return Err(Error::unsupported(format!(
                "a pool within one of the {} driver; only host memory can be mapped twice",
                self.driver().name()
            )));
        }
        let builder = PoolBuilder::new(group.clone()).driver(self.driver().clone()).stride(stride);
        let child = group.child("pool");
        let ready = PreparedRank::new(builder, &child, room)?;
        let unmet =
            Unmet { text: ready.text.clone(), allow_shared_device: ready.allow_shared_device };
        let group_ranks: Vec<u32> = ranks.iter().map(|&rank| self.group_rank(rank)).collect();
        let identities = self.0.identities.of(&group_ranks);
        let devices = self.0.devices.of(&group_ranks);
        let topology = Topology::host(group.world());
        let peers = Peers::of_some(group.rank(), identities, devices, topology);
        let heap = ready.reserve(&child, peers.hosts())?;
        ready.into_pool(child, heap, peers, Some(unmet))
    }

    /// Where the room of a [nested](Self::nested) pool begins in each slot.
    pub fn room(&self) -> u64 {
        self.0.room
    }

    /// Maps memory a second time, at the beginning of the [room](Self::room): in slot `rank` the `bytes` from `from[rank]`
    /// on. All of it, or none on an error. It stays there for as long as the pool lives. `from` are multiples of a page,
    /// `bytes` is one of the driver's granularity.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for other numbers, and for more than the room; `is_unsupported` where the driver cannot;
    /// `is_out_of_memory` if the process has too many mappings.
    ///
    /// # Safety
    ///
    /// From each of `from`, `bytes` of host memory of a pool are mapped, and stay so until this returns.
    pub unsafe fn map_room(&self, from: &[u64], bytes: u64) -> Result<()> {
        self.check_process()?;
        // SAFETY: the caller promised that from each of `from`, `bytes` of host memory of a pool are mapped until
        // this returns.
        unsafe { self.0.heap.map_again(self.0.room, from, bytes) }
    }
}
