//! Traffic matrices of all-to-alls with parts of different sizes. They are the same on every rank.

use clap::ValueEnum;
use symmpool_allocator::testing::SplitMix64;

/// In `Moe`: the number of experts of each rank.
const EXPERTS: usize = 8;
/// In `Moe`: how many experts each token goes to.
const CHOSEN: usize = 8;
/// In `Moe`: the number of tokens of each rank.
const TOKENS: u64 = 4096;

/// A kind of traffic matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[value(rename_all = "kebab-case")]
pub(crate) enum MatrixKind {
    /// Every rank sends the same to every rank.
    Even,
    /// Every rank sends most to rank 0, half of that to rank 1, a third to rank 2, and so on.
    Zipf,
    /// Every rank sends to rank 0 only.
    OneHot,
    /// Every other pair of ranks exchanges nothing.
    HalfEmpty,
    /// The tokens of a mixture of experts, of which some are more popular than others.
    Moe,
}

impl MatrixKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Even => "even",
            Self::Zipf => "zipf",
            Self::OneHot => "one-hot",
            Self::HalfEmpty => "half-empty",
            Self::Moe => "moe",
        }
    }

    /// The elements that each rank sends to each, with a row for each sender. A rank sends `count` elements on average.
    pub(crate) fn counts(self, world: usize, count: usize) -> Vec<Vec<usize>> {
        let weights: Vec<Vec<f64>> = match self {
            Self::Even => vec![vec![1.0; world]; world],
            Self::Zipf => vec![(1..=world).map(|place| 1.0 / place as f64).collect(); world],
            Self::OneHot => vec![(0..world).map(|to| f64::from(to == 0)).collect(); world],
            Self::HalfEmpty => {
                let pair = |from: usize, to: usize| f64::from((from + to).is_multiple_of(2));
                (0..world).map(|from| (0..world).map(|to| pair(from, to)).collect()).collect()
            }
            Self::Moe => moe(world),
        };
        let total: f64 = weights.iter().flatten().sum();
        let factor = (count * world) as f64 / total;
        let scale = |row: Vec<f64>| row.into_iter().map(|weight| (weight * factor) as usize);
        weights.into_iter().map(|row| scale(row).collect()).collect()
    }
}

/// Each token goes to `CHOSEN` different experts, which are drawn by their popularity, and to each rank at most once,
/// however many of its experts were drawn.
fn moe(world: usize) -> Vec<Vec<f64>> {
    let experts = world * EXPERTS;
    // Experts of any popularity are on any rank.
    let mut order: Vec<usize> = (0..experts).collect();
    order.sort_by_key(|expert| SplitMix64::at(1 << 40, *expert as u64));
    let row = |from: usize| {
        let mut row = vec![0.0; world];
        for token in 0..TOKENS {
            // Weighted sampling without replacement: the experts with the largest keys, where a key is a random
            // number to the power of one divided by the weight.
            let key = |expert: usize| {
                let number =
                    SplitMix64::at((2 + from as u64) << 40, token * experts as u64 + expert as u64);
                let uniform = (number >> 11) as f64 / (1_u64 << 53) as f64;
                uniform.powf((order[expert] + 1) as f64)
            };
            let mut drawn: Vec<(f64, usize)> = (0..experts).map(|e| (key(e), e)).collect();
            drawn.sort_by(|a, b| b.0.total_cmp(&a.0));
            let mut wanted = vec![false; world];
            for (_, expert) in drawn.into_iter().take(CHOSEN) {
                wanted[expert / EXPERTS] = true;
            }
            for (to, wanted) in wanted.into_iter().enumerate() {
                row[to] += f64::from(wanted);
            }
        }
        row
    };
    (0..world).map(row).collect()
}
