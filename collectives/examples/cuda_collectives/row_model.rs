//! A model of row exchanges that moves one row at a time, for the expected results.

use crate::oracle::random;

/// How rows are distributed among the ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Even,
    Random,
    Skewed,
    OneHot,
    Nowhere,
    NoRows,
    Bad,
}

/// A call: the destinations of each rank's rows, and how many rows each rank's output has room for.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    kind: Kind,
    pub(crate) destinations: Vec<Vec<i64>>,
    pub(crate) capacities: Vec<usize>,
}

impl Call {
    /// A random call, the same for the same seed, of up to `most` rows a rank.
    pub(crate) fn random(seed: u64, world: u32, most: usize) -> Self {
        use Kind::{Bad, Even, NoRows, Nowhere, OneHot, Random, Skewed};
        let kinds = [Even, Random, Random, Random, Skewed, Skewed, OneHot, Nowhere, NoRows, Bad];
        Self::of(kinds[(random(seed, 1) % 10) as usize], seed, world, most)
    }

    pub(crate) fn of(kind: Kind, seed: u64, world: u32, most: usize) -> Self {
        let ranks = world as usize;
        let special = random(seed, 2) % u64::from(world);
        let rows_of = |rank: u64| {
            let number = random(seed, 10 + rank);
            match (kind, number & 3) {
                (Kind::NoRows, _) if rank == special || number & 4 == 0 => 0,
                (Kind::Even, _) | (_, 0) => most,
                // Sizes of all magnitudes.
                _ => (most >> (number >> 8 & 15)) * (number >> 20 & 7) as usize / 7,
            }
        };
        let to = |rank: u64, row: usize| {
            let number = random(seed ^ (rank << 48), 100 + row as u64);
            let any = (number % u64::from(world)) as i64;
            match kind {
                Kind::Even => (row % ranks) as i64,
                Kind::Nowhere if number >> 40 & 63 != 0 => -1,
                Kind::OneHot => special as i64,
                Kind::Skewed if number >> 40 & 7 != 0 => special as i64,
                _ if number >> 50 & 15 == 0 => -1,
                _ => any,
            }
        };
        let mut destinations: Vec<Vec<i64>> = (0..u64::from(world))
            .map(|rank| (0..rows_of(rank)).map(|row| to(rank, row)).collect())
            .collect();
        if matches!(kind, Kind::Bad) {
            let number = random(seed, 3);
            let of = &mut destinations[special as usize];
            let bad = [i64::from(world), -2, i64::from(i32::MAX), i64::from(i32::MIN)];
            if !of.is_empty() {
                let at = (number >> 8) as usize % of.len();
                of[at] = bad[(number & 3) as usize];
            }
        }
        let mut call = Self { kind, destinations, capacities: vec![0; ranks] };
        let capacities = (0..ranks).map(|rank| {
            let exact = call.received(rank).len();
            match random(seed, 200 + rank as u64) % 5 {
                0 => exact,
                1 if random(seed, 4) & 3 == 0 => exact - exact / 3,
                _ => (exact + exact / 3 + 1).min(most * ranks),
            }
        });
        call.capacities = capacities.collect();
        call
    }

    pub(crate) fn name(&self) -> String {
        format!("{:?}", self.kind)
    }

    /// A rank's first row whose destination is no rank.
    fn bad(&self, rank: usize) -> Option<usize> {
        let ranks = -1..self.destinations.len() as i64;
        self.destinations[rank].iter().position(|to| !ranks.contains(to))
    }

    /// The rows that are sent to a rank, as (source, row of the source), including those that it has no room for.
    pub(crate) fn received(&self, rank: usize) -> Vec<(usize, usize)> {
        let mut all = Vec::new();
        for (source, destinations) in self.destinations.iter().enumerate() {
            if self.bad(source).is_none() {
                let rows = destinations.iter().enumerate();
                all.extend(
                    rows.filter(|(_, to)| **to == rank as i64).map(|(row, _)| (source, row)),
                );
            }
        }
        all
    }

    /// The first rank with an error: with the bad row that it has, or with none if it has too little room.
    pub(crate) fn first_error(&self) -> Option<(usize, Option<usize>)> {
        (0..self.destinations.len()).find_map(|rank| {
            let bad = self.bad(rank);
            (bad.is_some() || self.received(rank).len() > self.capacities[rank])
                .then_some((rank, bad))
        })
    }

    /// Which of a rank's rows were received.
    pub(crate) fn all_arrived(&self, source: usize) -> Vec<bool> {
        let mut arrived = vec![false; self.destinations[source].len()];
        for (rank, capacity) in self.capacities.iter().enumerate() {
            for (from, row) in self.received(rank).into_iter().take(*capacity) {
                if from == source {
                    arrived[row] = true;
                }
            }
        }
        arrived
    }
}

/// Rows of these sources, one after the other.
pub(crate) fn there(data: &[Vec<u8>], rows: &[(usize, usize)], size: usize) -> Vec<u8> {
    rows.iter().flat_map(|(source, row)| &data[*source][row * size..][..size]).copied().collect()
}

/// The rows that are sent back to a rank, of which there are so many; their receivers inverted their bits.
pub(crate) fn back(
    data: &[Vec<u8>],
    call: &Call,
    rank: usize,
    size: usize,
    capacity: usize,
) -> Vec<u8> {
    let mut all = vec![0; capacity * size];
    let arrived = call.all_arrived(rank);
    for (row, to) in all.chunks_exact_mut(size).enumerate() {
        if arrived.get(row) == Some(&true) {
            let from = &data[rank][row * size..][..size];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = !*from);
        }
    }
    all
}
