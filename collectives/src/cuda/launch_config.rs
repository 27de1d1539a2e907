//! How many blocks of how many threads a kernel has.

use super::kernels::Loaded;

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
        let mut threads = if few { kernel.threads } else { threads };
        let blocks = loop {
            let room = u64::from(kernel.resident(threads)).min(most_blocks).max(2) - 1;
            let wanted = vectors.div_ceil(u64::from(threads)).max(1).min(u64::from(most));
            if wanted <= room || threads >= kernel.threads {
                break wanted.min(room) as u32;
            }
            // The device has no place for as many: larger blocks have as many threads.
            threads = (2 * threads).min(kernel.threads);
        };
        Self { blocks: blocks + 1, threads }
    }

    /// With one block more where they are as many as fit: it takes the place of the one that attends,
    /// which ends as soon as all ranks have entered. For kernels that wait for no entry.
    pub(super) fn and_one(self, kernel: &Loaded, vectors: u64) -> Self {
        let full = self.blocks == kernel.resident(self.threads);
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

#[cfg(test)]
mod tests {
    use super::super::kernels::SIZES;
    use super::*;

    /// A kernel of 512 threads of 64 registers on a device of so many processors, each with room for so many
    /// threads and blocks.
    fn kernel(processors: u32, threads: u32, blocks: u32) -> Loaded {
        let resident = SIZES.map(|size| (threads / size).min(blocks) * processors);
        Loaded::new(0, resident, 512, processors)
    }

    #[test]
    fn grids_have_a_place_for_every_block_on_any_device() {
        // As sm_80 and sm_90 have them, sm_86, and sm_89 and sm_120.
        for (processors, threads, places) in [(132, 2048, 32), (84, 1536, 16), (128, 1536, 24)] {
            let loaded = kernel(processors, threads, places);
            for vectors in [0, 1, 100, 10_000, 65_536, 1 << 20, 1 << 30] {
                for least in SIZES {
                    let grid = Grid::new(&loaded, vectors, least, u32::MAX);
                    let held = places.min(threads / grid.threads) * processors;
                    assert!(grid.blocks <= held, "{grid:?} where {held} run at once");
                    assert!(grid.threads >= least && grid.blocks >= 2);
                    // No thread has more to do than need be.
                    let at_once = u64::from(grid.data_blocks() * grid.threads);
                    let most = u64::from(processors * threads - 512);
                    assert!(at_once >= vectors.min(most), "{grid:?} for {vectors}");
                }
            }
        }
    }

    #[test]
    fn blocks_are_as_small_as_was_asked_where_there_is_room() {
        let loaded = kernel(132, 2048, 32);
        assert_eq!(Grid::new(&loaded, 256, 32, u32::MAX), Grid { blocks: 9, threads: 32 });
        assert_eq!(Grid::new(&loaded, 65_536, 32, u32::MAX), Grid { blocks: 2049, threads: 32 });
        assert_eq!(Grid::new(&loaded, 1 << 30, 64, 264), Grid { blocks: 265, threads: 64 });
        let few = kernel(84, 1536, 16);
        assert_eq!(Grid::new(&few, 65_536, 32, u32::MAX), Grid { blocks: 1025, threads: 64 });
    }
}
