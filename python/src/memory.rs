//! A block that Python objects hold, and what DLPack consumers keep alive.

use std::sync::Arc;

use symmpool_allocator::{Lane, Pool, Result, Stream};

use crate::convert::Device;
use crate::own::Own;

/// A block that is freed without order when its last holder is gone: holders are garbage of a
/// language whose order of collection differs between ranks (rule D5).
pub(crate) struct Memory {
    /// `None` only while dropping.
    block: Option<Own<symmpool_allocator::Block<u8>>>,
    /// Whether kernels of any stream may use the block still when its last holder is gone.
    outlived: bool,
    pub(crate) pool: Own<Pool>,
    pub(crate) device: Device,
    pub(crate) stream: Stream,
}

impl Memory {
    pub(crate) fn allocate(
        pool: &Pool,
        device: Device,
        bytes: usize,
        stream: Stream,
    ) -> Result<Arc<Self>> {
        Self::allocate_in(&pool.default_lane(), pool, device, bytes, stream, false)
    }

    /// Memory of a lane of the pool, for calls on any stream, which its last holder does not wait for.
    pub(crate) fn allocate_for_calls(
        lane: &Lane,
        pool: &Pool,
        device: Device,
        bytes: usize,
        stream: Stream,
    ) -> Result<Arc<Self>> {
        Self::allocate_in(lane, pool, device, bytes, stream, true)
    }

    fn allocate_in(
        lane: &Lane,
        pool: &Pool,
        device: Device,
        bytes: usize,
        stream: Stream,
        outlived: bool,
    ) -> Result<Arc<Self>> {
        // DLPack consumers may count on 256 bytes.
        let block = lane.alloc_bytes(bytes, 512, stream)?;
        let (block, pool) = (Some(Own::new(block)), Own::new(pool.clone()));
        Ok(Arc::new(Self { block, outlived, pool, device, stream }))
    }

    pub(crate) fn block(&self) -> &symmpool_allocator::Block<u8> {
        self.block.as_deref().expect("there until dropped")
    }

    /// Makes `stream` wait for what the block's own stream was given so far, and the block's place
    /// wait for `stream` before it is reused.
    pub(crate) fn use_on(&self, stream: Stream) -> Result<()> {
        if stream == self.stream {
            return Ok(());
        }
        let driver = self.pool.driver();
        let event = driver.record_event(self.stream)?;
        let waited = driver.wait_event(stream, &event);
        driver.release_event(event);
        waited?;
        self.block().record_stream(stream)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // An error means that the block is no longer the lane's; a destructor cannot raise it.
        if let Some(block) = self.block.take().and_then(Own::into_here) {
            let _ = if self.outlived { block.free_after_device() } else { block.free_unordered() };
        }
    }
}
