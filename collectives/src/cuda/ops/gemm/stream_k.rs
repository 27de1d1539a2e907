//! How the tiles are divided that fill no whole wave: along the inner dimension, as stream-K decompositions do (Osama et al.,
//! "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU", 2023).
//!
//! A wave is as many tiles as there are clusters of blocks. If the last one has few, the other clusters help: each makes the
//! products of a part of the inner dimension, for one of these tiles or several, and leaves the sums in memory for the cluster
//! that makes the rest of it.

use crate::cuda::layout::params::StreamK;
/// How long it takes a helper to leave a tile's sums in memory and to begin another tile, and how long to add them, as blocks
/// of the inner dimension, of which each takes some 0.7 us: measured on H100s.
const LEAVING: u32 = 8;
const ADDING: u32 = 4;
/// Blocks by which the last wave must become shorter.
const MIN_SAVED: u32 = 4;

impl StreamK {
    /// All of `tiles` tiles are made whole.
    pub(super) fn none(tiles: u32) -> Self {
        Self { whole: tiles, helpers: 0, per_tile: 1, per_helper: 1, helper_blocks: 0 }
    }

    /// Divides `tiles` tiles, with `inner_blocks` blocks of the inner dimension each, among `clusters` clusters.
    pub(super) fn of(tiles: u32, clusters: u32, inner_blocks: u32) -> Self {
        let rest = tiles % clusters;
        // With less than a wave nobody is sure to be free before the others.
        if rest == 0 || tiles < clusters {
            return Self::none(tiles);
        }
        let helpers = clusters - rest;
        let of = |per_tile: u32, per_helper: u32| {
            let leaving = per_helper * LEAVING;
            let helper_blocks =
                inner_blocks.saturating_sub(leaving) / (per_tile.max(per_helper) + 1);
            let helping = per_helper * helper_blocks + leaving;
            let time = helping.max(inner_blocks - per_tile * helper_blocks) + per_tile * ADDING;
            (time, Self { whole: tiles - rest, helpers, per_tile, per_helper, helper_blocks })
        };
        let best = if helpers < rest {
            Some(of(1, rest.div_ceil(helpers)))
        } else {
            (1..=helpers / rest).map(|per_tile| of(per_tile, 1)).min_by_key(|(time, _)| *time)
        };
        best.filter(|(time, _)| time + MIN_SAVED <= inner_blocks)
            .map_or_else(|| Self::none(tiles), |(_, split)| split)
    }

    /// Sums of tiles that helpers leave in memory.
    pub(super) fn partial_tiles(&self) -> u32 {
        self.helpers * self.per_helper
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who makes which blocks of which tile, as the kernel has it (`Tiles` in `fused/matmul_tiles.cuh`).
    fn made(split: &StreamK, tiles: u32, clusters: u32, inner: u32) -> Vec<(u32, u32, u32, u32)> {
        let rest = tiles - split.whole;
        let mut found = Vec::new();
        for cluster in 0..clusters {
            let mut tile = cluster;
            while tile < split.whole {
                found.push((cluster, tile, 0, inner));
                tile += clusters;
            }
            if cluster >= split.helpers {
                if cluster - split.helpers < rest {
                    let begin = split.per_tile * split.helper_blocks;
                    found.push((cluster, split.whole + cluster - split.helpers, begin, inner));
                }
                continue;
            }
            for item in cluster * split.per_helper..(cluster + 1) * split.per_helper {
                let (tile, nth) = (item / split.per_tile, item % split.per_tile);
                if tile < rest {
                    let begin = nth * split.helper_blocks;
                    found.push((cluster, split.whole + tile, begin, begin + split.helper_blocks));
                }
            }
        }
        found
    }

    #[test]
    fn every_block_of_every_tile_is_made_once_and_no_cluster_makes_much_more_than_its_share() {
        for clusters in [1, 2, 3, 7, 66] {
            for tiles in 1..5 * clusters {
                for inner in [1, 8, 30, 64, 200] {
                    let split = StreamK::of(tiles, clusters, inner);
                    let made = made(&split, tiles, clusters, inner);
                    let mut blocks = vec![0; (tiles * inner) as usize];
                    let mut work = vec![0; clusters as usize];
                    for (cluster, tile, begin, end) in made {
                        work[cluster as usize] += end - begin;
                        (begin..end).for_each(|block| blocks[(tile * inner + block) as usize] += 1);
                    }
                    assert!(blocks.iter().all(|&count| count == 1), "{tiles} by {clusters}");
                    let most = work.into_iter().max().unwrap_or(0);
                    let undivided = tiles.div_ceil(clusters) * inner;
                    assert!(most <= undivided, "{split:?}");
                    if split != StreamK::none(tiles) {
                        assert!(most + MIN_SAVED <= undivided, "{split:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_last_wave_is_as_long_as_its_tiles_divide() {
        // 28 tiles for 66 clusters: each by two. 46: by 20 helpers, of which each has three.
        let half = StreamK::of(160, 66, 64);
        assert_eq!((half.whole, half.helpers, half.per_tile, half.helper_blocks), (132, 38, 1, 28));
        let quarter = StreamK::of(640, 66, 64);
        assert_eq!((quarter.helpers, quarter.per_helper, quarter.helper_blocks), (20, 3, 10));
        let several = StreamK::of(1792, 66, 64);
        assert_eq!((several.helpers, several.per_tile, several.helper_blocks), (56, 3, 14));
        // Helpers with many tiles each would be late.
        assert_eq!(StreamK::of(256, 66, 112), StreamK::none(256));
        // Too short to be worth it, and less than a wave.
        assert_eq!(StreamK::of(160, 66, 12), StreamK::none(160));
        assert_eq!(StreamK::of(60, 66, 64), StreamK::none(60));
    }
}
