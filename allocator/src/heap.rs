//! The flat heap: one reservation of `world x stride` bytes, slot `r` holding rank `r`'s memory. A group that spans hosts
//! has a heap for each, whose slots are those of the host's ranks.

#![allow(unsafe_code)] // maps memory by address, from the caller's promise

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use crate::driver::{Driver, Physical, Reservation};
use crate::fork::ProcessId;
use crate::ranks::list;
use crate::sync::lock_leaf;
use crate::{Deadline, Error, Result};

/// Where every rank's memory lies in this process. Addresses are found by arithmetic, without a table.
///
/// For any address `p` of rank `a`, rank `b`'s copy is `p + (b - a) * stride`. Kernels get these
/// four numbers by value and nothing else. Where ranks are on several hosts, these are the ranks of one, counted from 0
/// (see [`Pool::on_host`](crate::Pool::on_host)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapLayout {
    /// First address of slot 0.
    pub base: u64,
    /// Bytes from one slot to the next.
    pub stride: u64,
    /// This process's rank.
    pub rank: u32,
    /// Number of slots.
    pub world: u32,
}

impl HeapLayout {
    /// The address of `offset` in `rank`'s slot. The caller ensures that `rank < world` and
    /// `offset < stride`.
    #[inline]
    pub fn address(&self, rank: u32, offset: u64) -> u64 {
        debug_assert!(rank < self.world && offset < self.stride);
        self.base + u64::from(rank) * self.stride + offset
    }

    /// Which rank's slot `address` lies in, and at which offset; `None` outside the heap.
    #[inline]
    pub fn locate(&self, address: u64) -> Option<(u32, u64)> {
        let from_base = address.checked_sub(self.base)?;
        let rank = from_base / self.stride;
        (rank < u64::from(self.world)).then(|| (rank as u32, from_base % self.stride))
    }

    /// The address of `rank`'s copy of `address`, which may lie in any slot.
    pub fn peer(&self, rank: u32, address: u64) -> Result<u64> {
        let (_, offset) = self.locate(address).ok_or_else(|| {
            Error::invalid_argument(format!(
                "address {address:#x} is not in the heap [{:#x}, {:#x}) of rank {}",
                self.base,
                self.base + u64::from(self.world) * self.stride,
                self.rank
            ))
        })?;
        if rank >= self.world {
            return Err(Error::invalid_argument(format!(
                "rank {rank} of a group of {} ranks",
                self.world
            )));
        }
        Ok(self.address(rank, offset))
    }
}

/// How long giving memory back waits for the device where there is no other deadline.
pub(crate) const DROP_TIMEOUT: Duration = Duration::from_secs(300);

/// The address range of a heap and what is mapped in it. Dropping it unmaps and gives back everything,
/// except in a forked child.
#[derive(Debug)]
pub(crate) struct Heap {
    driver: Driver,
    layout: HeapLayout,
    /// The group's ranks whose slots these are, in that order.
    ranks: Vec<u32>,
    group_world: u32,
    reservation: Option<Reservation>,
    mapped: Mutex<Mapped>,
    maker: ProcessId,
}

/// Mappings by offset, with their length in bytes. One list serves all peers, because the same segments
/// are mapped in each of their slots.
#[derive(Debug, Default)]
struct Mapped {
    own: BTreeMap<u64, u64>,
    peers: BTreeMap<u64, u64>,
}

impl Heap {
    /// Refuses a stride that a heap of `world` slots cannot have. Returns how many bytes they take.
    pub(crate) fn check_stride(driver: &Driver, stride: u64, world: u32) -> Result<u64> {
        let granularity = driver.granularity();
        if stride == 0 || !stride.is_multiple_of(granularity) {
            return Err(Error::invalid_argument(format!(
                "stride {stride} is not a positive multiple of the driver's granularity of \
                 {granularity} bytes"
            )));
        }
        stride.checked_mul(u64::from(world)).ok_or_else(|| {
            Error::invalid_argument(format!(
                "a heap of {world} ranks x {stride} bytes exceeds 64 bits; lower the stride"
            ))
        })
    }

    /// Reserves a slot of `stride` bytes of address space for each of these ranks of a group of `group_world`, of which
    /// `own` is this one.
    pub(crate) fn reserve(
        driver: Driver,
        (own, group_world): (u32, u32),
        ranks: &[u32],
        stride: u64,
    ) -> Result<Self> {
        let granularity = driver.granularity();
        let world = ranks.len() as u32;
        let bytes = Self::check_stride(&driver, stride, world)?;
        let rank = ranks.iter().position(|&rank| rank == own);
        let rank = rank.ok_or_else(|| {
            Error::invalid_argument(format!(
                "rank {own} is none of the ranks {ranks:?} of its heap"
            ))
        })? as u32;
        let reservation = driver.reserve(bytes, granularity)?;
        let layout = HeapLayout { base: reservation.base(), stride, rank, world };
        Ok(Self {
            driver,
            layout,
            ranks: ranks.to_vec(),
            group_world,
            reservation: Some(reservation),
            mapped: Mutex::default(),
            maker: ProcessId::here(),
        })
    }

    pub(crate) fn layout(&self) -> HeapLayout {
        self.layout
    }

    pub(crate) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// This process's rank in its group.
    pub(crate) fn rank(&self) -> u32 {
        self.ranks[self.layout.rank as usize]
    }

    /// The group's ranks whose slots these are, in that order.
    pub(crate) fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// The slot of a rank of the group.
    pub(crate) fn slot_of(&self, rank: u32) -> Result<u32> {
        let slot = self.ranks.iter().position(|&other| other == rank);
        slot.map(|slot| slot as u32).ok_or_else(|| {
            let world = self.group_world;
            if rank >= world {
                return Error::invalid_argument(format!("rank {rank} of a group of {world} ranks"));
            }
            Error::invalid_argument(format!(
                "rank {rank} is on another host than rank {}, whose memory it cannot reach; on one host are ranks {}",
                self.rank(),
                list(&self.ranks)
            ))
            .naming([rank])
        })
    }

    /// Whether this is the process that reserved it.
    pub(crate) fn is_here(&self) -> bool {
        self.maker.is_here()
    }

    /// Maps `physical` at `offset` of `rank`'s slot.
    pub(crate) fn map(&self, rank: u32, offset: u64, physical: &Physical) -> Result<()> {
        self.map_all(rank, offset, std::slice::from_ref(physical))
    }

    /// Maps `physicals` one behind the other, from `offset` of `rank`'s slot: all of them, or none on an
    /// error.
    pub(crate) fn map_all(&self, rank: u32, offset: u64, physicals: &[Physical]) -> Result<()> {
        let sizes = physicals.iter().map(Physical::bytes);
        let end = sizes.clone().try_fold(offset, u64::checked_add);
        if rank >= self.layout.world || end.is_none_or(|end| end > self.layout.stride) {
            return Err(Error::invalid_argument(format!(
                "{} bytes at offset {offset} of slot {rank}: the heap has {} slots of {} bytes",
                sizes.fold(0, u64::saturating_add),
                self.layout.world,
                self.layout.stride
            )));
        }
        self.driver.map_all(self.reservation(), self.position(rank, offset), physicals)?;
        if rank == self.layout.rank {
            let mut offset = offset;
            for bytes in sizes {
                lock_leaf(&self.mapped).own.insert(offset, bytes);
                offset += bytes;
            }
        }
        Ok(())
    }

    /// Maps memory a second time, at `offset` of every slot: `bytes` from `from[rank]` on in slot `rank`. All of it, or
    /// none on an error. Dropping the heap unmaps it.
    ///
    /// # Safety
    ///
    /// From each of `from`, `bytes` of the driver's memory are mapped, and stay so until this returns.
    pub(crate) unsafe fn map_again(&self, offset: u64, from: &[u64], bytes: u64) -> Result<()> {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.layout.stride);
        if from.len() != self.layout.world as usize || !fits {
            return Err(Error::invalid_argument(format!(
                "{bytes} bytes of {} ranks at offset {offset}: the heap has {} slots of {} bytes",
                from.len(),
                self.layout.world,
                self.layout.stride
            )));
        }
        for (rank, &address) in (0..).zip(from) {
            let at = self.position(rank, offset);
            // SAFETY: the caller promised that `bytes` of the driver's memory are mapped from `address` on until this
            // returns.
            let mapped = unsafe { self.driver.map_again(self.reservation(), at, address, bytes) };
            if let Err(error) = mapped {
                for done in 0..rank {
                    self.driver.unmap(self.reservation(), self.position(done, offset), bytes)?;
                }
                return Err(error);
            }
        }
        let mut mapped = lock_leaf(&self.mapped);
        mapped.own.insert(offset, bytes);
        mapped.peers.insert(offset, bytes);
        Ok(())
    }

    /// Removes the mapping of `bytes` at `offset` of `rank`'s slot.
    pub(crate) fn unmap(&self, rank: u32, offset: u64, bytes: u64) -> Result<()> {
        self.driver.unmap(self.reservation(), self.position(rank, offset), bytes)?;
        if rank == self.layout.rank {
            lock_leaf(&self.mapped).own.remove(&offset);
        }
        Ok(())
    }

    /// Notes that every peer's segment at `offset` is mapped, so that dropping the heap unmaps it.
    pub(crate) fn note_peers_mapped(&self, offset: u64, bytes: u64) {
        lock_leaf(&self.mapped).peers.insert(offset, bytes);
    }

    /// Where peers' segments are mapped.
    #[cfg(test)]
    pub(crate) fn mapped_of_peers(&self) -> Vec<u64> {
        lock_leaf(&self.mapped).peers.keys().copied().collect()
    }

    /// Unmaps every peer's segment at `offset`, if peers' segments are mapped there.
    pub(crate) fn unmap_peers(&self, offset: u64) -> Result<()> {
        let Some(bytes) = lock_leaf(&self.mapped).peers.remove(&offset) else { return Ok(()) };
        for rank in self.peers() {
            self.driver.unmap(self.reservation(), self.position(rank, offset), bytes)?;
        }
        Ok(())
    }

    /// All ranks but this one.
    pub(crate) fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let own = self.layout.rank;
        (0..self.layout.world).filter(move |&rank| rank != own)
    }

    fn position(&self, rank: u32, offset: u64) -> u64 {
        u64::from(rank) * self.layout.stride + offset
    }

    fn reservation(&self) -> &Reservation {
        self.reservation.as_ref().expect("the reservation lives as long as the heap")
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        let Some(reservation) = self.reservation.take() else { return };
        if !self.is_here() {
            // A forked child has a copy of the driver, whose locks another thread of the parent may have
            // held at the fork. The child leaves the mappings and the driver as they are.
            std::mem::forget(self.driver.clone());
            return;
        }
        // Kernels that use this memory may still run.
        match self.driver.synchronize_by(Deadline::after(DROP_TIMEOUT)) {
            Ok(()) => {}
            Err(error) if error.is_timeout() => {
                // Work that still runs keeps its memory until the process ends.
                tracing::error!(%error, "a heap's memory is not given back, because its device is still at work");
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "waiting for the device before dropping a heap");
            }
        }
        let Mapped { own, peers } = std::mem::take(&mut *lock_leaf(&self.mapped));
        let unmap_slot = |rank, list: &BTreeMap<u64, u64>| {
            for (&offset, &bytes) in list {
                if let Err(error) =
                    self.driver.unmap(&reservation, self.position(rank, offset), bytes)
                {
                    tracing::warn!(%error, rank, offset, "unmapping while dropping a heap");
                }
            }
        };
        for rank in self.peers() {
            unmap_slot(rank, &peers);
        }
        unmap_slot(self.layout.rank, &own);
        if let Err(error) = self.driver.unreserve(reservation) {
            tracing::warn!(%error, "giving a heap's address range back");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u64 = 2 << 20;

    #[test]
    fn every_address_of_the_heap_and_no_other_is_located() {
        let layout = HeapLayout { base: 10 * UNIT, stride: 4 * UNIT, rank: 1, world: 3 };
        let end = layout.base + 12 * UNIT;
        for (address, place) in [
            (layout.base - 1, None),
            (layout.base, Some((0, 0))),
            (layout.base + 4 * UNIT - 1, Some((0, 4 * UNIT - 1))),
            (layout.base + 4 * UNIT, Some((1, 0))),
            (end - 1, Some((2, 4 * UNIT - 1))),
            (end, None),
        ] {
            assert_eq!(layout.locate(address), place);
            match place {
                Some((_, offset)) => {
                    let peer = layout.peer(2, address).unwrap();
                    assert_eq!(peer, layout.base + 8 * UNIT + offset);
                    assert_eq!(peer, layout.address(2, offset));
                }
                None => assert!(layout.peer(2, address).unwrap_err().is_invalid_argument()),
            }
        }
        assert!(layout.peer(3, layout.base).unwrap_err().is_invalid_argument());
    }

    #[test]
    fn strides_that_make_no_heap_are_refused() {
        for stride in [0, 1, UNIT + 1, UNIT / 2, u64::MAX - UNIT + 1] {
            let error = Heap::reserve(Driver::sim(1), (0, 2), &[0, 1], stride).unwrap_err();
            assert!(error.is_invalid_argument(), "{stride}: {error}");
        }
    }

    #[test]
    fn nothing_is_mapped_outside_of_a_slot() {
        let driver = Driver::sim(1);
        let heap = Heap::reserve(driver.clone(), (1, 2), &[0, 1], 4 * UNIT).unwrap();
        let physicals = [UNIT, UNIT].map(|bytes| driver.create(bytes).unwrap());
        // Slot 0 ends where this rank's begins.
        for (rank, offset) in [(0, 3 * UNIT), (1, 3 * UNIT), (2, 0), (1, u64::MAX - UNIT + 1)] {
            let error = heap.map_all(rank, offset, &physicals).unwrap_err();
            assert!(error.is_invalid_argument(), "slot {rank}, offset {offset}: {error}");
        }
        heap.map_all(1, 2 * UNIT, &physicals).unwrap();
        for physical in physicals {
            driver.release(physical).unwrap();
        }
    }
}
