//! The layout of the rows that a row exchange received, and the memory of exchanges and layouts.

use std::fmt;

use bytemuck::Pod;
use symmpool_allocator::{Block, Error, Pool, Result, Stream};

use crate::RowShape;
use crate::parts::ALIGN;
use crate::row_exchange::LayoutParts;

/// How the rows that a [`RowExchange::send`](super::RowExchange::send) received are ordered. It is needed to read
/// them, and to send them back.
///
/// It belongs to exchanges of one shape. A send overwrites its contents.
pub struct RowLayout {
    pub(super) shape: RowShape,
    pub(super) parts: LayoutParts,
    pub(super) memory: Memory,
}

/// The contents of a [`RowLayout`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// How many rows each rank sent, including those that the output had no room for.
    pub counts: Vec<i64>,
    /// The row of the output at which each rank's rows begin.
    pub offsets: Vec<i64>,
    /// Which row of its source each row was, for all rows that were sent, including those that the output had no
    /// room for.
    pub source_index: Vec<i32>,
}

/// A block that kernels may still use when it is dropped.
pub(in super::super) struct Memory {
    pool: Pool,
    /// `None` only while dropping.
    block: Option<Block<u8>>,
}

impl Memory {
    pub(in super::super) fn new(pool: &Pool, lane: &str, bytes: u64) -> Result<Self> {
        let bytes = usize::try_from(bytes).map_err(|_| {
            Error::out_of_memory(format!("{bytes} bytes for rows: no memory is that long"))
        })?;
        let block = pool.lane(lane)?.alloc_bytes(bytes, ALIGN, Stream::DEFAULT)?;
        let memory = Self { pool: pool.clone(), block: Some(block) };
        // Waits for kernels on any stream that may still use the place.
        pool.driver().synchronize_by(pool.group().deadline())?;
        Ok(memory)
    }

    pub(in super::super) fn block(&self) -> &Block<u8> {
        self.block.as_ref().expect("there until dropped")
    }
}

impl Drop for Memory {
    /// An unordered free, as garbage collectors may drop exchanges at any time (rule D5).
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        if let Err(error) = self.pool.driver().synchronize_by(self.pool.group().deadline()) {
            // Kernels may still run, so the memory that they use is leaked.
            tracing::warn!(%error, "the memory for rows is not given back");
            block.into_address();
            return;
        }
        if let Err(error) = block.free_unordered() {
            tracing::error!(%error, "freeing the memory for rows");
        }
    }
}

impl RowLayout {
    /// The address of the number of rows that each rank sent, `i64`, including those that the output had no room
    /// for. On a device only the device can read it, once the stream is past the call.
    pub fn counts(&self) -> *const i64 {
        self.at(self.parts.counts).cast()
    }

    /// The address of the row at which each rank's rows begin, `i64`.
    pub fn offsets(&self) -> *const i64 {
        self.at(self.parts.offsets).cast()
    }

    /// The address of the row of its source that each row was, `i32`, with room for all rows that can
    /// be received.
    pub fn source_index(&self) -> *const i32 {
        self.at(self.parts.source_index).cast()
    }

    fn at(&self, offset: u64) -> *const u8 {
        (self.memory.block().address() + offset) as *const u8
    }

    /// Its contents.
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
