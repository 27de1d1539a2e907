//! Traffic matrices, and the expected results of all-to-alls with them.

use crate::oracle::random;

/// Traffic from every rank to every other, in rows of some elements.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    pub(crate) name: &'static str,
    world: usize,
    counts: Vec<usize>,
}

/// The kinds of matrices that are made.
const KINDS: u64 = 9;

impl Matrix {
    fn new(name: &'static str, world: u32, count: impl Fn(usize, usize) -> usize) -> Self {
        let world = world as usize;
        let counts = (0..world * world).map(|pair| count(pair / world, pair % world)).collect();
        Self { name, world, counts }
    }

    /// A random matrix, the same for the same seed, in which no rank sends or receives more than `most`.
    pub(crate) fn random(seed: u64, world: u32, most: usize) -> Self {
        let ranks = world as usize;
        // Sizes of all magnitudes.
        let pair = (most / ranks).max(1) >> (random(seed, 1) % 18).min(17);
        let number = |from: usize, to: usize| random(seed, (100 + from * ranks + to) as u64);
        let any = |from: usize, to: usize| number(from, to) as usize % (pair + 1);
        let special = (random(seed, 2) as usize) % ranks;
        match random(seed, 3) % KINDS {
            0 => Self::new("even", world, |_, _| pair),
            1 => Self::new("random", world, any),
            2 => Self::new(
                "zero row",
                world,
                |from, to| {
                    if from == special { 0 } else { any(from, to) }
                },
            ),
            3 => Self::new(
                "zero column",
                world,
                |from, to| {
                    if to == special { 0 } else { any(from, to) }
                },
            ),
            4 => Self::new(
                "one-hot",
                world,
                |from, to| {
                    if to == special { any(from, to) } else { 0 }
                },
            ),
            5 => Self::new("all zero", world, |_, _| 0),
            6 => Self::new("one pair", world, |from, to| {
                if from == special && to == (special + 1) % ranks { pair } else { 0 }
            }),
            7 => Self::new("half empty", world, |from, to| {
                if number(from, to) >> 40 & 1 == 0 { 0 } else { any(from, to) }
            }),
            _ => {
                Self::new("skewed", world, |from, to| any(from, to) >> (2 * ((from + to) % ranks)))
            }
        }
    }

    /// Every pair exchanges about as much.
    pub(crate) fn new_even(seed: u64, world: u32, most: usize) -> Self {
        let ranks = world as usize;
        let pair = most / ranks;
        Self::new("about even", world, |from, to| {
            pair - random(seed, (from * ranks + to) as u64) as usize % (pair / 2)
        })
    }

    /// One rank receives more than `long` from every other rank; all other pairs exchange different smaller amounts.
    pub(crate) fn hot(seed: u64, world: u32, hot: u32, long: usize) -> Self {
        let ranks = world as usize;
        let number = |from: usize, to: usize| random(seed, (from * ranks + to) as u64) as usize;
        Self::new("hot", world, |from, to| match (from, to) {
            _ if from == to => number(from, to) % (long / 16),
            _ if to == hot as usize => long + 1 + number(from, to) % (long / 32),
            _ => long / 16 + number(from, to) % (long / 8),
        })
    }

    pub(crate) fn count(&self, from: u32, to: u32) -> usize {
        self.counts[from as usize * self.world + to as usize]
    }

    /// Whether some pair exchanges nothing.
    pub(crate) fn has_zeros(&self) -> bool {
        self.counts.contains(&0)
    }

    fn ranks(&self) -> std::ops::Range<u32> {
        0..self.world as u32
    }

    pub(crate) fn sends(&self, rank: u32) -> Vec<usize> {
        self.ranks().map(|peer| self.count(rank, peer)).collect()
    }

    pub(crate) fn receives(&self, rank: u32) -> Vec<usize> {
        self.ranks().map(|peer| self.count(peer, rank)).collect()
    }

    /// Where each rank's rows begin in this one's output.
    pub(crate) fn offsets(&self, rank: u32) -> Vec<usize> {
        let before = |peer: u32| (0..peer).map(|other| self.count(other, rank)).sum();
        self.ranks().map(before).collect()
    }

    /// The expected output of a rank, if it has room for `capacity` rows of `row` bytes.
    pub(crate) fn output(
        &self,
        inputs: &[Vec<u8>],
        rank: u32,
        row: usize,
        capacity: usize,
    ) -> Vec<u8> {
        let mut output = Vec::new();
        for from in self.ranks() {
            let before: usize = (0..rank).map(|to| self.count(from, to)).sum();
            let part = before * row..(before + self.count(from, rank)) * row;
            output.extend_from_slice(&inputs[from as usize][part]);
        }
        output.truncate(capacity * row);
        output
    }

    /// The first rank that is sent more than its capacity.
    pub(crate) fn overflows(&self, capacities: &[usize]) -> bool {
        self.ranks()
            .any(|rank| self.receives(rank).iter().sum::<usize>() > capacities[rank as usize])
    }
}

/// The input of a rank. Each byte depends on the rank and on its place, so that data from another place
/// or rank is noticed.
pub(crate) fn bytes(seed: u64, rank: u32, count: usize) -> Vec<u8> {
    let words = 0..count.div_ceil(8) as u64;
    let mut all: Vec<u8> =
        words.flat_map(|word| random(seed ^ u64::from(rank) << 32, word).to_le_bytes()).collect();
    all.truncate(count);
    all
}
