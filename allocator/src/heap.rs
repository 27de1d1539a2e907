//! The flat heap: one reservation of `world x stride` bytes, slot `r` holding rank `r`'s memory.

use crate::{Error, Result};

/// Where every rank's memory lies in this process: plain arithmetic, no table.
///
/// For any address `p` of rank `a`, rank `b`'s copy is `p + (b - a) * stride`. Kernels get these
/// four numbers by value and nothing else.
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
    /// The address of `offset` in `rank`'s slot. The caller keeps `rank < world` and
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

    /// `rank`'s copy of `address`, which may lie in any slot.
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
