//! An allocated range of a lane, owned by the caller.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;

use super::lane_memory::LaneInner;
use super::shared_lane::SharedLane;
use crate::driver::Stream;
use crate::heap::DROP_TIMEOUT;
use crate::lane::{BlockKey, here};
use crate::sync::mutant;
use crate::{Deadline, Error, Result};

/// `len` elements of symmetric memory. Dropping a block frees it, in order. In a forked child, which has a
/// copy of the handle but does not own the memory, dropping it does nothing.
///
/// A block never gives out references to its memory, only raw pointers, because peers write to it. It keeps
/// the heap alive, even after its pool is dropped.
pub struct Block<T: Pod> {
    lane: Arc<SharedLane>,
    key: BlockKey,
    /// In bytes, from the start of a slot.
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

    /// Whether it has no elements. Even then it has an address that no other block has.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        (self.len * size_of::<T>()) as u64
    }

    /// Offset in bytes from the start of a slot: the same on every rank.
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

    /// A pointer to the first element, valid for [`len`](Block::len) elements while the block lives. Device
    /// memory can be accessed only by the device.
    pub fn as_ptr(&self) -> *mut T {
        self.address() as *mut T
    }

    /// A pointer to `rank`'s copy of the first element. `rank` counts in the pool's group, and is on this host: else
    /// [`Error::is_invalid_argument`](crate::Error::is_invalid_argument). It can be dereferenced once the memory is a window:
    /// see [`Pool::is_window`](crate::Pool::is_window).
    pub fn peer_ptr(&self, rank: u32) -> Result<*mut T> {
        let heap = self.lane.heap();
        Ok(heap.layout().peer(heap.slot_of(rank)?, self.address())? as *mut T)
    }

    /// Checks that the CPU may access the first `count` elements.
    pub(super) fn check_access(&self, count: usize) -> Result<()> {
        let driver = self.lane.heap().driver();
        if !driver.host_accessible() {
            return Err(Error::unsupported(format!(
                "the CPU cannot access memory of the {} driver; copy with the device",
                driver.name()
            )));
        }
        if count > self.len {
            return Err(Error::invalid_argument(format!(
                "{count} elements do not fit in a block of {}",
                self.len
            )));
        }
        Ok(())
    }

    /// Notes that the block is used on `stream` too. After it is freed, whoever reuses its memory first waits,
    /// on the device, for that stream's work up to the free (rule D4).
    #[track_caller]
    pub fn record_stream(&self, stream: Stream) -> Result<()> {
        let site = here();
        self.lane.lock()?.state.record_stream(self.key, stream, site)
    }

    /// Notes that the block is used on `stream` too, on this rank alone: as [`record_stream`](Self::record_stream), but no
    /// part of the lane's sequence. Other ranks need not do so, and no block's place depends on it.
    ///
    /// Work of `CU_STREAM_PER_THREAD` counts up to this call. What is captured into a graph does not count: a graph's memory
    /// lives as long as the graph.
    pub fn record_use(&self, stream: Stream) -> Result<()> {
        let LaneInner { state, memory } = &mut *self.lane.lock()?;
        state.note_use(self.key, stream, memory)
    }

    /// Frees the block in order, and records the caller's line. Dropping it does the same without the line.
    #[track_caller]
    pub fn free(mut self) -> Result<()> {
        let freed = self.lane.free(self.key, here());
        self.freed = freed.is_ok();
        freed
    }

    /// Frees the block without order: for garbage collectors and other threads, whose order is not the same
    /// on every rank. The block returns to the lane at the commit by which every rank has freed it (rule D5).
    #[track_caller]
    pub fn free_unordered(mut self) -> Result<()> {
        let freed = self.lane.free_unordered(self.key, here());
        self.freed = freed.is_ok();
        freed
    }

    /// Frees like [`free_unordered`](Self::free_unordered), for a block that kernels may still use on streams that
    /// were not [recorded](Self::record_stream). It does not wait for them, so it may be called while a stream is
    /// being captured: the commit by which the block returns waits for the device first. In a local lane, which has
    /// no commits, it waits for the device itself.
    ///
    /// # Errors
    ///
    /// Those of freeing. If a local lane's wait for the device fails, the memory is never handed out again.
    #[track_caller]
    pub fn free_after_device(mut self) -> Result<()> {
        let site = here();
        if self.lane.is_symmetric() {
            // Before the free, so that no commit finds the free alone.
            if !mutant("mutant_free_before_its_wait") {
                self.lane.wait_for_device();
            }
        } else if let Err(error) =
            self.lane.heap().driver().synchronize_by(Deadline::after(DROP_TIMEOUT))
        {
            self.freed = true;
            return Err(error);
        }
        let freed = self.lane.free_unordered(self.key, site);
        if mutant("mutant_free_before_its_wait") {
            self.lane.wait_for_device();
        }
        self.freed = freed.is_ok();
        freed
    }

    /// Gives up the handle and keeps the memory, which is then freed with
    /// [`Lane::free_address`](super::Lane::free_address). (Memory that a `Block` owns cannot be freed so.)
    /// Does not wait for a commit under way.
    pub fn into_address(mut self) -> u64 {
        self.freed = true;
        self.lane.allow_free_by_address(self.key);
        self.address()
    }
}

impl<T: Pod> Drop for Block<T> {
    fn drop(&mut self) {
        if self.freed {
            return;
        }
        // A forked child drops its copy of the handle; the memory is its parent's.
        if !self.lane.is_here() {
            return;
        }
        if let Err(error) = self.lane.free(self.key, None) {
            tracing::error!(%error, "a dropped block could not be freed");
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
