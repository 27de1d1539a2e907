//! A model of dispatch to experts and combine that moves one row at a time, for the expected results.

use symmpool_collectives::{DType, ExpertQuantization, ExpertShape, F8E4m3, ReceivedSizes};

use crate::oracle::random;

/// The experts of every rank's tokens, and their weights.
#[derive(Clone, Debug)]
pub(crate) struct TokenRouting {
    pub(crate) ids: Vec<Vec<Vec<i64>>>,
    pub(crate) weights: Vec<Vec<Vec<f32>>>,
    pub(crate) experts: u32,
}

/// A row by expert: its number, source, token and expert.
pub(crate) type ExpertRow = (usize, usize, usize, usize);

/// A channel of a token: small integers, so that all sums are exact in every type.
pub(crate) fn channel(seed: u64, rank: usize, token: usize, at: usize) -> f32 {
    (random(seed ^ 5, ((rank * 4096 + token) * 1024 + at % 1024) as u64) % 5) as f32 - 2.0
}

/// The first tokens of a rank, in a buffer of this shape.
pub(crate) fn tokens_of(seed: u64, rank: usize, count: usize, shape: &ExpertShape) -> Vec<u8> {
    let values = (0..count)
        .flat_map(|token| (0..shape.hidden).map(move |at| channel(seed, rank, token, at)));
    encode(shape.dtype, values)
}

impl TokenRouting {
    /// Random tokens, the same for the same seed: none, all for one expert, few, or spread.
    pub(crate) fn random(seed: u64, world: u32, shape: &ExpertShape) -> Self {
        // Ranks with few tokens take part in other ways than ranks with many.
        let most = shape.max_tokens;
        let up_to = |rank: u64, most: usize| random(seed, 200 + rank) as usize % (most + 1);
        let tokens: Vec<usize> = (0..u64::from(world))
            .map(|rank| match random(seed, 100 + rank) % 5 {
                0 => 0,
                1 => most,
                2 => up_to(rank, most.min(128)),
                3 => up_to(rank, most.min(512)),
                _ => up_to(rank, most),
            })
            .collect();
        Self::of(seed, world, shape, &tokens)
    }

    /// Makes a model with so many tokens on each rank.
    pub(crate) fn of(seed: u64, world: u32, shape: &ExpertShape, tokens: &[usize]) -> Self {
        let (experts, top_k) = (u64::from(shape.experts), shape.top_k as usize);
        let kind = random(seed, 7) % 4;
        let id = |rank: usize, token: usize, k: usize| {
            let number = random(seed ^ 11, ((rank * 8192 + token) * 64 + k) as u64);
            match kind {
                0 => (random(seed, 8) % experts) as i64,
                1 if number.is_multiple_of(3) => -1,
                2 => (number % experts.min(2)) as i64,
                // All different, as far as there are as many.
                _ => ((number % experts) as i64 + k as i64) % experts as i64,
            }
        };
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for (rank, count) in tokens.iter().enumerate().take(world as usize) {
            ids.push(
                (0..*count).map(|token| (0..top_k).map(|k| id(rank, token, k)).collect()).collect(),
            );
            let weight = |token: usize, k: usize| (1 + (token + k + rank) % 2) as f32;
            weights.push(
                (0..*count).map(|token| (0..top_k).map(|k| weight(token, k)).collect()).collect(),
            );
        }
        Self { ids, weights, experts: shape.experts }
    }

    fn local(&self) -> i64 {
        i64::from(self.experts) / self.ids.len() as i64
    }

    fn goes(&self, source: usize, token: usize, rank: u32) -> bool {
        self.ids[source][token].iter().any(|id| *id >= 0 && id / self.local() == i64::from(rank))
    }

    /// The tokens that a rank receives, by source and token.
    pub(crate) fn received(&self, rank: u32) -> Vec<(usize, usize)> {
        let all = (0..self.ids.len())
            .flat_map(|source| (0..self.ids[source].len()).map(move |token| (source, token)));
        all.filter(|&(source, token)| self.goes(source, token, rank)).collect()
    }

    pub(crate) fn source_offsets(&self, rank: u32) -> Vec<i32> {
        let rows = self.received(rank);
        let before = |end: usize| rows.iter().filter(|(source, _)| *source < end).count() as i32;
        (0..=self.ids.len()).map(before).collect()
    }

    /// The expert among those of a rank, or -1.
    fn local_id(&self, id: i64, rank: u32) -> i32 {
        let local = self.local();
        if id >= 0 && id / local == i64::from(rank) { (id % local) as i32 } else { -1 }
    }

    pub(crate) fn local_ids(&self, rank: u32) -> Vec<i32> {
        let rows = self.received(rank);
        let ids = rows.iter().flat_map(|&(source, token)| &self.ids[source][token]);
        ids.map(|id| self.local_id(*id, rank)).collect()
    }

    pub(crate) fn local_weights(&self, rank: u32) -> Vec<f32> {
        let mut all = Vec::new();
        for (source, token) in self.received(rank) {
            for (id, weight) in self.ids[source][token].iter().zip(&self.weights[source][token]) {
                all.push(if self.local_id(*id, rank) >= 0 { *weight } else { 0.0 });
            }
        }
        all
    }

    pub(crate) fn expert_counts(&self, rank: u32) -> Vec<i32> {
        let ids = self.local_ids(rank);
        (0..self.local() as i32)
            .map(|expert| ids.iter().filter(|id| **id == expert).count() as i32)
            .collect()
    }

    /// How much a rank receives; the number of rows by expert is given.
    pub(crate) fn sizes(&self, rank: u32, rows_by_expert: usize) -> ReceivedSizes {
        let counts = self.expert_counts(rank).into_iter();
        ReceivedSizes {
            rows: self.received(rank).len(),
            rows_by_expert,
            expert_counts: counts.map(|count| count as usize).collect(),
        }
    }

    /// Where the rows of each expert of a rank begin, and its rows.
    pub(crate) fn by_expert(&self, rank: u32, alignment: usize) -> (Vec<i32>, Vec<ExpertRow>) {
        let (mut offsets, mut rows, mut next) = (vec![0], Vec::new(), 0_usize);
        for expert in 0..self.local() as usize {
            for (source, token) in self.received(rank) {
                for id in &self.ids[source][token] {
                    if self.local_id(*id, rank) == expert as i32 {
                        rows.push((next, source, token, expert));
                        next += 1;
                    }
                }
            }
            next = next.next_multiple_of(alignment);
            offsets.push(next as i32);
        }
        (offsets, rows)
    }

    /// The sums of a rank's tokens. Experts return a token as it is where rows lie by rank, and else with the number of
    /// the expert on its rank, modulo 3, added.
    pub(crate) fn combined(
        &self,
        rank: u32,
        seed: u64,
        hidden: usize,
        by_expert: bool,
    ) -> Vec<f32> {
        let source = rank as usize;
        let mut all = Vec::new();
        for (token, ids) in self.ids[source].iter().enumerate() {
            let ranks =
                (0..self.ids.len() as u32).filter(|other| self.goes(source, token, *other)).count();
            for at in 0..hidden {
                let value = channel(seed, source, token, at);
                if !by_expert {
                    all.push(if ranks == 0 { 0.0 } else { value * ranks as f32 });
                    continue;
                }
                let weighted =
                    ids.iter().zip(&self.weights[source][token]).filter(|(id, _)| **id >= 0);
                let terms = weighted
                    .map(|(id, weight)| (value + ((id % self.local()) % 3) as f32) * weight);
                let sum = terms.fold(0.0, |sum: f32, term| sum + term);
                all.push(sum);
            }
        }
        all
    }
}

/// Elements of a type that holds them exactly.
pub(crate) fn encode(dtype: DType, values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let values = values.into_iter();
    match dtype {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        _ => values.flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect(),
    }
}

/// A row as 8-bit floats, and its scales.
pub(crate) fn as_quantized(values: &[f32], quantize: ExpertQuantization) -> (Vec<u8>, Vec<u8>) {
    let (mut row, mut scales) = (Vec::new(), Vec::new());
    for group in values.chunks(128) {
        let largest = group.iter().fold(1e-4_f32, |largest, value| largest.max(value.abs()));
        let mut scale = largest / 448.0;
        if quantize != ExpertQuantization::Fp8 {
            scale = 2.0_f32.powi(scale.log2().ceil() as i32);
        }
        match quantize {
            ExpertQuantization::Fp8Ue8m0 => scales.push((scale.to_bits() >> 23) as u8),
            _ => scales.extend(scale.to_le_bytes()),
        }
        let inverse = 1.0 / scale;
        row.extend(group.iter().map(|value| F8E4m3::from_f32(value * inverse).to_bits()));
    }
    (row, scales)
}
