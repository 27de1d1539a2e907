//! How many blocks of how many threads a kernel has.

use super::kernels::Loaded;

/// Blocks that a processor holds.
const BLOCKS_OF_PROCESSOR: u64 = 32;

/// How many blocks of how many threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    pub(super) blocks: u32,
    pub(super) threads: u32,
}

impl Grid {
    /// A thread for each of `vectors`, as far as `most` blocks go, and one block more, which
    /// attends to the entry. All of them run at once: blocks of peers wait for each other. Where
    /// communicators that work at once leave too few for so many threads each, blocks have all they can.
    pub(super) fn new(kernel: &Loaded, vectors: u64, threads: u32, most: u32) -> Self {
        let most_blocks = u64::from(kernel.share.most_blocks);
        let few = vectors.div_ceil(u64::from(threads)) >= most_blocks;
        let threads = if few { kernel.threads } else { threads };
        let resident = u64::from(kernel.resident);
        let by_threads = resident * u64::from(kernel.threads) / u64::from(threads);
        let by_slots = u64::from(kernel.processors) * BLOCKS_OF_PROCESSOR;
        let room = by_threads.min(by_slots).min(most_blocks).max(2) - 1;
        let wanted = vectors.div_ceil(u64::from(threads)).max(1);
        let blocks = wanted.min(room).min(u64::from(most)) as u32;
        Self { blocks: blocks + 1, threads }
    }

    /// With one block more where they are as many as fit: it takes the place of the one that attends,
    /// which ends as soon as all ranks have entered. For kernels that wait for no entry.
    pub(super) fn and_one(self, kernel: &Loaded, vectors: u64) -> Self {
        let full = u64::from(self.blocks) == u64::from(kernel.resident);
        let wants = vectors > u64::from(self.data_blocks()) * u64::from(self.threads);
        Self { blocks: self.blocks + u32::from(full && wants), ..self }
    }

    /// As many of these blocks as the kernel's communicator may take.
    pub(super) fn within(self, kernel: &Loaded) -> Self {
        Self { blocks: self.blocks.min(kernel.share.most_blocks).max(2), ..self }
    }

    /// Without the one that attends.
    pub(super) fn data_blocks(self) -> u32 {
        self.blocks - 1
    }
}
