//! A range of a lane in its owner's hands.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;

use super::lane::SharedLane;
use crate::driver::Stream;
use crate::lane::{BlockKey, here};
use crate::{Error, Result};

/// `len` elements of symmetric memory. Dropping it frees it, in order; in a forked child, which has a
/// copy of the handle and not of the block, dropping it does nothing.
///
/// A block never hands out references to its memory: peers write to it, and memory that another
/// party writes is only ever raw pointers here. A block keeps its heap alive, also past its pool.
pub struct Block<T: Pod> {
    lane: Arc<SharedLane>,
    key: BlockKey,
    /// From the start of a slot.
    offset: u64,
    len: usize,
    freed: bool,
    element: PhantomData<fn() -> T>,
}

impl<T: Pod> Block<T> {
    pub(super) fn new(lane: Arc<SharedLane>, key: BlockKey, offset: u64, len: usize) -> Self {
        Self { lane, key, offset, len, freed: false, element: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements. It has an address of its own even so.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        (self.len * size_of::<T>()) as u64
    }

    /// Offset from the start of a slot: the same on every rank.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Counter of the allocation: the same on every rank.
    pub fn counter(&self) -> u64 {
        self.key.counter
    }

    /// Address of the first element in this process.
    pub fn address(&self) -> u64 {
        let layout = self.lane.heap().layout();
        layout.address(layout.rank, self.offset)
    }

    /// The first element. Valid for [`len`](Block::len) elements while the block lives; on a
    /// device only the device can follow it.
    pub fn as_ptr(&self) -> *mut T {
        self.address() as *mut T
    }

    /// `rank`'s copy of the first element. It can be followed once the memory is a window: see
    /// [`Pool::is_window`](crate::Pool::is_window).
    pub fn peer_ptr(&self, rank: u32) -> Result<*mut T> {
        Ok(self.lane.heap().layout().peer(rank, self.address())? as *mut T)
    }

    /// Copies `values` to the start of the block.
    ///
    /// Only on memory that the CPU reaches. The copy is not atomic: a peer that reads or writes
    /// the same elements meanwhile may see, or leave, a mixture.
    pub fn write(&self, values: &[T]) -> Result<()> {
        self.check_access(values.len())?;
        super::access::write(self.as_ptr(), values);
        Ok(())
    }

    /// Copies the block's elements out. Access as in [`Block::write`].
    pub fn read(&self) -> Result<Vec<T>> {
        self.check_access(self.len)?;
        Ok(super::access::read(self.as_ptr(), self.len))
    }

    fn check_access(&self, count: usize) -> Result<()> {
        let driver = self.lane.heap().driver();
        if !driver.host_accessible() {
            return Err(Error::unsupported(format!(
                "the CPU cannot reach memory of the {} driver; copy with the device",
                driver.name()
            )));
        }
        if count > self.len {
            return Err(Error::invalid_argument(format!(
                "{count} elements do not fit a block of {}",
                self.len
            )));
        }
        Ok(())
    }

    /// Notes that the block is used on `stream` too: after it is freed, its place is reused only
    /// behind that stream's work so far, by a wait on the device (rule D4).
    #[track_caller]
    pub fn record_stream(&self, stream: Stream) -> Result<()> {
        let site = here();
        self.lane.lock()?.state.record_stream(self.key, stream, site)
    }

    /// Frees the block in order, saying from where. Dropping it does the same anonymously.
    #[track_caller]
    pub fn free(mut self) -> Result<()> {
        let freed = self.lane.free(self.key, here());
        self.freed = freed.is_ok();
        freed
    }

    /// Frees the block without order: for garbage collectors and other threads, whose order is
    /// not the same on every rank. It comes back to the lane at the commit by which every rank has
    /// freed it (rule D5).
    #[track_caller]
    pub fn free_unordered(mut self) -> Result<()> {
        let freed = self.lane.free_unordered(self.key, here());
        self.freed = freed.is_ok();
        freed
    }

    /// Gives up the handle but not the memory: free it with
    /// [`Lane::free_address`](super::Lane::free_address), which refuses the blocks of handles. Waits
    /// for no commit under way.
    pub fn into_address(mut self) -> u64 {
        self.freed = true;
        self.lane.give_up(self.key);
        self.address()
    }
}

impl<T: Pod> Drop for Block<T> {
    fn drop(&mut self) {
        if self.freed {
            return;
        }
        // A forked child has let go of its copy of the handle; the block is its parent's.
        if !self.lane.is_here() {
            return;
        }
        if let Err(error) = self.lane.free(self.key, None) {
            tracing::error!(%error, "freeing a dropped block");
        }
    }
}

impl<T: Pod> fmt::Debug for Block<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("lane", &self.lane.name)
            .field("counter", &self.key.counter)
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
