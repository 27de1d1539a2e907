//! What a row exchange leaves for whoever reads its rows, and for the way back; memory of exchanges.

use std::fmt;

use bytemuck::Pod;
use symmpool_allocator::{Block, Error, Pool, Result, Stream};

use crate::RowShape;
use crate::row_exchange::{ALIGN, LayoutParts};

/// How the rows of a [`RowExchange::send`](super::RowExchange::send) lie, for whoever reads them and
/// for the way back.
///
/// It belongs to exchanges of one shape. A send overwrites what it holds.
pub struct RowLayout {
    pub(super) shape: RowShape,
    pub(super) parts: LayoutParts,
    pub(super) memory: Memory,
}

/// What a [`RowLayout`] holds, read in host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Rows that each rank sent, those that had no room included.
    pub counts: Vec<i64>,
    /// The row of the output at which each rank's begin.
    pub offsets: Vec<i64>,
    /// Which row of its source each received row was; of all that were sent, had they room or not.
    pub source_index: Vec<i32>,
}

/// A block that kernels may still use when it is dropped.
pub(super) struct Memory {
    pool: Pool,
    /// `None` only while dropping.
    block: Option<Block<u8>>,
}

impl Memory {
    pub(super) fn new(pool: &Pool, lane: &str, bytes: u64) -> Result<Self> {
        let bytes = usize::try_from(bytes).map_err(|_| {
            Error::out_of_memory(format!(
                "{bytes} bytes for a row exchange: no memory is that long"
            ))
        })?;
        let block = pool.lane(lane)?.alloc_bytes(bytes, ALIGN, Stream::DEFAULT)?;
        let memory = Self { pool: pool.clone(), block: Some(block) };
        // Whatever used the place before on another stream than will is past then.
        pool.driver().synchronize_by(pool.group().deadline())?;
        Ok(memory)
    }

    pub(super) fn block(&self) -> &Block<u8> {
        self.block.as_ref().expect("there until dropped")
    }
}

impl Drop for Memory {
    /// Without order, as garbage collectors drop exchanges (rule D5).
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        if let Err(error) = self.pool.driver().synchronize_by(self.pool.group().deadline()) {
            // What may still run keeps what it knows.
            tracing::warn!(%error, "the memory of a row exchange is not given back");
            block.into_address();
            return;
        }
        if let Err(error) = block.free_unordered() {
            tracing::error!(%error, "freeing the memory of a row exchange");
        }
    }
}

impl RowLayout {
    /// The address of the counts of rows that came from each rank, `i64`; those that had no room
    /// are counted. On a device only the device can follow it, once it is past the call.
    pub fn counts(&self) -> *const i64 {
        self.at(self.parts.counts).cast()
    }

    /// The address of the rows at which each rank's begin, `i64`.
    pub fn offsets(&self) -> *const i64 {
        self.at(self.parts.offsets).cast()
    }

    /// The address of the row of its source that each row was, `i32`, with room for all that can
    /// come.
    pub fn source_index(&self) -> *const i32 {
        self.at(self.parts.source_index).cast()
    }

    fn at(&self, offset: u64) -> *const u8 {
        (self.memory.block().address() + offset) as *const u8
    }

    /// What it holds.
    ///
    /// # Errors
    ///
    /// `is_unsupported` where the CPU cannot reach the memory.
    pub fn read(&self) -> Result<Received> {
        let bytes = self.memory.block().read()?;
        let world = self.memory.pool.world() as usize;
        let part = |at: u64, length: usize| &bytes[at as usize..][..length];
        let counts: Vec<i64> = numbers(part(self.parts.counts, 8 * world));
        let offsets = numbers(part(self.parts.offsets, 8 * world));
        let all = counts.iter().sum::<i64>().max(0) as usize;
        let room = LayoutParts::indices(&self.shape, world as u32);
        let indices = part(self.parts.source_index, 4 * all.min(room));
        Ok(Received { counts, offsets, source_index: numbers(indices) })
    }
}

fn numbers<T: Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

impl fmt::Debug for RowLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowLayout").field("shape", &self.shape).finish_non_exhaustive()
    }
}
