//! Memory that a buffer for experts has for itself.

use symmpool_allocator::{Block, Error, Pool, Result, Stream};

use crate::types::bump_layout::ALIGN;

/// A block that kernels may still use when it is dropped.
pub(super) struct ExpertMemory {
    /// `None` only while dropping.
    block: Option<Block<u8>>,
}

impl ExpertMemory {
    pub(super) fn new(pool: &Pool, lane: &str, bytes: u64) -> Result<Self> {
        let bytes = usize::try_from(bytes).map_err(|_| {
            Error::out_of_memory(format!("{bytes} bytes for rows: no memory is that long"))
        })?;
        let block = pool.lane(lane)?.alloc_bytes(bytes, ALIGN, Stream::DEFAULT)?;
        let memory = Self { block: Some(block) };
        // Waits for kernels on any stream that may still use the place.
        pool.driver().synchronize_by(pool.group().deadline())?;
        Ok(memory)
    }

    pub(super) fn block(&self) -> &Block<u8> {
        self.block.as_ref().expect("there until dropped")
    }
}

impl Drop for ExpertMemory {
    /// An unordered free, as garbage collectors may drop buffers at any time (rule D5), also while a stream is being
    /// captured. Kernels may still run that use the memory.
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        if let Err(error) = block.free_after_device() {
            tracing::error!(%error, "freeing the memory for rows");
        }
    }
}
