//! Memory of rows on their way between hosts. It belongs to the engine, as transfers may use it until they have been aborted.

use symmpool_allocator::{Error, Result};

/// Memory that calls of experts use for themselves.
#[derive(Debug, Default)]
pub(in crate::spanning) struct ExpertTransit {
    /// Chunks that leave and that arrive, two of each: one is on its way while the other one is filled or read.
    pub(super) leaving: [TransitMemory; 2],
    pub(super) arriving: [TransitMemory; 2],
    /// Entries of tokens ahead of a combine: own ones, and those of other ranks.
    pub(super) told: TransitMemory,
    pub(super) heard: TransitMemory,
    /// Tokens that this rank has quantised, and their scales.
    pub(super) rows: TransitMemory,
    pub(super) scales: TransitMemory,
}

/// Bytes that grow and never shrink, at an address that is a multiple of 16.
#[derive(Debug, Default)]
pub(super) struct TransitMemory(Vec<u128>);

impl TransitMemory {
    /// Makes room for at least so many bytes. That may move the memory, so no transfer may be under way.
    ///
    /// # Errors
    ///
    /// `is_out_of_memory` where there is none.
    pub(super) fn reserve(&mut self, bytes: usize, rank: u32) -> Result<()> {
        let count = bytes.div_ceil(size_of::<u128>());
        if self.0.len() < count {
            self.0.try_reserve_exact(count - self.0.len()).map_err(|_| {
                Error::out_of_memory(format!(
                    "experts on rank {rank}: no memory for {bytes} bytes of tokens on their way between hosts"
                ))
            })?;
            self.0.resize(count, 0);
        }
        Ok(())
    }

    /// Returns where the memory begins, until room is made again.
    pub(super) fn at(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}
