//! The launch configuration of a kernel: how many blocks of how many threads.

use super::loaded_kernel::{LoadedKernel, SIZES};
use crate::cuda::layout::params::MAX_RANKS;

/// How many blocks of how many threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct LaunchConfig {
    pub(in crate::cuda) blocks: u32,
    pub(in crate::cuda) threads: u32,
}

impl LaunchConfig {
    /// A thread for each of `vectors`, in at most `most` worker blocks, and one block more, the leader block, which
    /// runs the handshake. All blocks must be resident at once, as they wait for data of peers, which may wait
    /// for theirs. Where the
    /// communicator's SM budget has too few blocks for so many threads, blocks have as many threads as they can.
    pub(in crate::cuda) fn new(
        kernel: &LoadedKernel,
        vectors: u64,
        threads: u32,
        most: u32,
    ) -> Self {
        let most_blocks = u64::from(kernel.budget.most_blocks);
        let threads = threads.max(least_threads(kernel, vectors));
        let few = vectors.div_ceil(u64::from(threads)) >= most_blocks;
        let mut threads = if few { kernel.threads } else { threads };
        let blocks = loop {
            let room = u64::from(kernel.resident(threads)).min(most_blocks).max(2) - 1;
            let wanted = vectors.div_ceil(u64::from(threads)).max(1).min(u64::from(most));
            if wanted <= room || threads >= kernel.threads {
                break wanted.min(room) as u32;
            }
            // So many blocks are not resident at once; fewer and larger ones have as many threads.
            threads = (2 * threads).min(kernel.threads);
        };
        let items = vectors.div_ceil(u64::from(threads)).min(u64::from(u32::MAX)) as u32;
        let blocks = evenly(kernel, items, blocks) + 1;
        Self { blocks, threads: threads.min(kernel.threads_for(blocks)) }
    }

    /// With one block more if these are as many as fit: it starts when the leader block ends, which is as soon
    /// as the handshake is over. For kernels whose worker blocks do not wait for the handshake.
    pub(in crate::cuda) fn with_leader_place(self, kernel: &LoadedKernel, vectors: u64) -> Self {
        let full = self.blocks == kernel.resident(self.threads);
        let wants = vectors > u64::from(self.worker_blocks()) * u64::from(self.threads);
        Self { blocks: self.blocks + u32::from(full && wants), ..self }
    }

    /// With no more blocks than the SM budget of the kernel's communicator.
    pub(in crate::cuda) fn within_budget(self, kernel: &LoadedKernel) -> Self {
        let most = self.blocks.min(kernel.budget.most_blocks).max(2) - 1;
        Self { blocks: evenly(kernel, self.worker_blocks(), most) + 1, ..self }
    }

    /// The blocks without the leader block.
    pub(in crate::cuda) fn worker_blocks(self) -> u32 {
        self.blocks - 1
    }
}

/// The fewest threads of a block where blocks must ask for a grant. Blocks of more threads are so few that they need none, where
/// that is possible. A narrow grid has a warp for each rank at least.
fn least_threads(kernel: &LoadedKernel, vectors: u64) -> u32 {
    let Some(narrow) = kernel.budget.narrow_blocks else { return 0 };
    let workers = u64::from(narrow - 1);
    let fits = |threads: &u32| vectors.div_ceil(u64::from(*threads)) <= workers;
    let mut sizes = SIZES.into_iter().filter(|size| *size <= kernel.threads_for(narrow));
    sizes.find(fits).unwrap_or((32 * MAX_RANKS).min(kernel.threads))
}

/// The fewest worker blocks that do `items`, one each at a time, in as few rounds as `most` blocks do, where the budget does not
/// allow for one round. An all-reduce of 1 MiB on two H200s takes 6.8 us in 115 blocks, of which 13 do a second item, and 5.9 in
/// 64 that do two items each.
fn evenly(kernel: &LoadedKernel, items: u32, most: u32) -> u32 {
    if !kernel.budget.is_limited() || items <= most {
        return most;
    }
    items.div_ceil(items.div_ceil(most))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernel::loaded_kernel::SIZES;
    use crate::cuda::kernel::sm_budget::SmBudget;

    /// A kernel of 512 threads of 64 registers, on a device whose SMs hold so many threads and blocks each.
    fn kernel(sm_count: u32, threads: u32, blocks: u32) -> LoadedKernel {
        let resident = SIZES.map(|size| (threads / size).min(blocks) * sm_count);
        LoadedKernel::new(0, resident, 512, sm_count)
    }

    #[test]
    fn every_block_is_resident_on_any_device() {
        // The limits of sm_80 and sm_90, of sm_86, and of sm_89 and sm_120.
        for (sm_count, threads, places) in [(132, 2048, 32), (84, 1536, 16), (128, 1536, 24)] {
            let loaded = kernel(sm_count, threads, places);
            for vectors in [0, 1, 100, 10_000, 65_536, 1 << 20, 1 << 30] {
                for least in SIZES.into_iter().filter(|size| *size <= loaded.threads) {
                    let grid = LaunchConfig::new(&loaded, vectors, least, u32::MAX);
                    let held = places.min(threads / grid.threads) * sm_count;
                    assert!(grid.blocks <= held, "{grid:?} where {held} run at once");
                    assert!(grid.threads >= least && grid.blocks >= 2);
                    // There are threads for all vectors, as far as the device holds them.
                    let at_once = u64::from(grid.worker_blocks() * grid.threads);
                    let most = u64::from(sm_count * threads - 512);
                    assert!(at_once >= vectors.min(most), "{grid:?} for {vectors}");
                }
            }
        }
    }

    #[test]
    fn blocks_under_a_budget_have_equal_work() {
        let alone = kernel(132, 2048, 32);
        for most_blocks in 2..=140 {
            let budget = SmBudget { most_blocks, ..SmBudget::ALL };
            let limited = alone.with_budget(budget);
            for wanted in [1, 2, 63, 64, 100, 128, 256, 1000] {
                let [one, all] =
                    [limited, alone].map(|of| LaunchConfig::new(&of, 512 * wanted, 512, 256));
                let peers = LaunchConfig { blocks: wanted as u32 + 1, threads: 512 }
                    .within_budget(&limited);
                for grid in [one, peers] {
                    let (items, workers) = (wanted as u32, grid.worker_blocks());
                    let rounds = items.div_ceil(workers);
                    assert!(grid.blocks <= most_blocks.max(2), "{grid:?} of {most_blocks}");
                    assert_eq!(
                        rounds,
                        items.div_ceil((most_blocks - 1).min(items)),
                        "{grid:?} for {wanted}"
                    );
                    // One worker less would need a round more.
                    assert!(
                        workers == 1 || items.div_ceil(workers - 1) > rounds,
                        "{grid:?} for {wanted}"
                    );
                }
                assert!(all.worker_blocks() == wanted.min(256) as u32, "{all:?} alone");
            }
        }
    }

    /// Ranks compare numbers of blocks, and may be alone or in company.
    #[test]
    fn forms_that_share_sms_are_divided_like_those_that_do_not() {
        let (plain, sharing) = (kernel(132, 2048, 32), kernel(132, 1024, 16));
        let budget = SmBudget { most_blocks: 100, narrow_blocks: Some(24), ..SmBudget::ALL };
        let company = sharing.sharing(plain).with_budget(budget);
        for vectors in [1, 1000, 131_072, 1 << 24] {
            let [alone, beside] =
                [plain, company.alone()].map(|of| LaunchConfig::new(&of, vectors, 256, 1056));
            assert_eq!(alone, beside, "{vectors} vectors");
        }
        // The form that asks for a grant is launched where more blocks than the narrow grid are.
        let other = LoadedKernel::new(1, [132; SIZES.len()], 512, 132).sharing(plain);
        let company = other.with_budget(budget);
        assert_eq!([24, 25].map(|blocks| company.function_for(blocks)), [0, 1]);
        assert_eq!(company.alone().function_for(200), 0);
    }

    /// A block that has an SM of its own has as many threads as two, but in grids that are launched in the other form.
    #[test]
    fn forms_with_larger_blocks_have_these_in_wide_grids_alone() {
        let (plain, wide) =
            (kernel(132, 2048, 32), LoadedKernel::new(1, [132; SIZES.len()], 896, 132));
        for (most_blocks, narrow) in [(100, 24), (64, 24), (75, 3), (44, 2)] {
            let budget = SmBudget {
                most_blocks,
                narrow_blocks: Some(narrow),
                early: false,
                ..SmBudget::ALL
            };
            let company = wide.sharing(plain).with_budget(budget);
            for vectors in [1, 512, 11_776, 11_777, 23_552, 30_000, 51_200, 131_072, 1 << 22] {
                let grid = LaunchConfig::new(&company, vectors, 512, 264);
                let is_small = company.function_for(grid.blocks) == 0;
                assert_eq!(is_small, grid.blocks <= narrow, "{grid:?}");
                assert!(grid.threads <= if is_small { 512 } else { 896 }, "{grid:?}");
                let peers = LaunchConfig::new(&company.alone(), vectors, 512, 264);
                assert!(peers.threads <= 512 && peers.within_budget(&company).threads <= 512);
            }
            assert_eq!(LaunchConfig::new(&company, 1 << 22, 512, 264).threads, 896);
        }
    }

    #[test]
    fn blocks_are_as_small_as_requested_where_they_fit() {
        let loaded = kernel(132, 2048, 32);
        assert_eq!(
            LaunchConfig::new(&loaded, 256, 32, u32::MAX),
            LaunchConfig { blocks: 9, threads: 32 }
        );
        assert_eq!(
            LaunchConfig::new(&loaded, 65_536, 32, u32::MAX),
            LaunchConfig { blocks: 2049, threads: 32 }
        );
        assert_eq!(
            LaunchConfig::new(&loaded, 1 << 30, 64, 264),
            LaunchConfig { blocks: 265, threads: 64 }
        );
        let few = kernel(84, 1536, 16);
        assert_eq!(
            LaunchConfig::new(&few, 65_536, 32, u32::MAX),
            LaunchConfig { blocks: 1025, threads: 64 }
        );
    }
}
