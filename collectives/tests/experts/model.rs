//! A model of dispatch and combine, one element at a time.

use half::bf16;
use symmpool_collectives::{DType, ExpertQuantization, ExpertShape, F8E4m3};

/// Numbers that look random and depend on what is mixed in only.
pub(crate) fn mixed(parts: &[usize]) -> u64 {
    parts.iter().fold(0x9e37_79b9_7f4a_7c15, |hash, part| {
        let hash = (hash ^ *part as u64).wrapping_mul(0xff51_afd7_ed55_8ccd);
        (hash ^ hash >> 29).wrapping_mul(0xc4ce_b9fe_1a85_ec53) ^ hash >> 32
    })
}

/// An element of the type, of any sign and a magnitude between 2^-8 and 2^8: sums of such depend on their order.
pub(crate) fn element(dtype: DType, parts: &[usize]) -> f32 {
    let bits = mixed(parts) as u32;
    let value = f32::from_bits(bits & 0x807f_ffff | (119 + (bits >> 23) % 16) << 23);
    rounded(dtype, value)
}

pub(crate) fn rounded(dtype: DType, value: f32) -> f32 {
    if dtype == DType::Bf16 { bf16::from_f32(value).to_f32() } else { value }
}

/// The bytes of elements.
pub(crate) fn bytes(dtype: DType, elements: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let each = |value: f32| match dtype {
        DType::Bf16 => bf16::from_f32(value).to_bits().to_ne_bytes().to_vec(),
        _ => value.to_ne_bytes().to_vec(),
    };
    elements.into_iter().flat_map(each).collect()
}

/// The experts of all ranks' tokens.
#[derive(Clone, Debug)]
pub(crate) struct RoutingModel {
    pub(crate) shape: ExpertShape,
    /// For each rank the experts of its tokens; what is no expert counts as -1.
    pub(crate) ids: Vec<Vec<i64>>,
    /// Mixed into weights and elements.
    pub(crate) seed: usize,
}

/// A row that a rank receives.
pub(crate) type ReceivedRow = (usize, usize);

impl RoutingModel {
    pub(crate) fn world(&self) -> usize {
        self.ids.len()
    }

    pub(crate) fn tokens(&self, rank: usize) -> usize {
        self.ids[rank].len() / self.shape.top_k as usize
    }

    pub(crate) fn local(&self) -> usize {
        self.shape.experts as usize / self.world()
    }

    /// The experts of a token as numbers of those of `rank`; `None` for those elsewhere.
    pub(crate) fn experts_on(
        &self,
        rank: usize,
        (source, token): ReceivedRow,
    ) -> Vec<Option<usize>> {
        let (top_k, local) = (self.shape.top_k as usize, self.local());
        let here = |id: &i64| {
            let id = usize::try_from(*id).ok().filter(|id| *id < self.shape.experts as usize)?;
            (id / local == rank).then_some(id % local)
        };
        self.ids[source][token * top_k..][..top_k].iter().map(here).collect()
    }

    /// The rows that go to a rank, with those that it has no room for.
    pub(crate) fn sent_to(&self, rank: usize) -> Vec<ReceivedRow> {
        let all = (0..self.world())
            .flat_map(|source| (0..self.tokens(source)).map(move |token| (source, token)));
        all.filter(|row| self.experts_on(rank, *row).iter().any(Option::is_some)).collect()
    }

    /// The rows that a rank receives.
    pub(crate) fn received(&self, rank: usize) -> Vec<ReceivedRow> {
        let mut rows = self.sent_to(rank);
        rows.truncate(self.shape.capacity.unwrap_or(usize::MAX));
        rows
    }

    pub(crate) fn token(&self, call: usize, (source, token): ReceivedRow) -> Vec<f32> {
        let of = |at| element(self.shape.dtype, &[self.seed, call, source, token, at]);
        (0..self.shape.hidden).map(of).collect()
    }

    /// Answer of a rank's experts to a row.
    pub(crate) fn answer(&self, call: usize, rank: usize, row: usize) -> Vec<f32> {
        let of = |at| element(self.shape.dtype, &[self.seed, call, 77, rank, row, at]);
        (0..self.shape.hidden).map(of).collect()
    }

    pub(crate) fn weight(&self, call: usize, (source, token): ReceivedRow, k: usize) -> f32 {
        element(DType::F32, &[self.seed, call, 78, source, token, k])
    }

    /// Where rows by expert begin, and the end; then for each received row and expert of it its place.
    pub(crate) fn by_expert(&self, rank: usize, align: usize) -> (Vec<usize>, Vec<Option<usize>>) {
        let experts: Vec<Option<usize>> =
            self.received(rank).iter().flat_map(|row| self.experts_on(rank, *row)).collect();
        let mut offsets = vec![0];
        for expert in 0..self.local() {
            let rows = experts.iter().filter(|at| **at == Some(expert)).count();
            offsets.push(offsets[expert] + rows.next_multiple_of(align));
        }
        let mut next = offsets.clone();
        let place = |expert: &Option<usize>| {
            expert.map(|expert| {
                next[expert] += 1;
                next[expert] - 1
            })
        };
        (offsets, experts.iter().map(place).collect())
    }

    /// The sum of a token's rows, which `answer(rank, row)` gives as they come back.
    pub(crate) fn combined(
        &self,
        row: ReceivedRow,
        answer: impl Fn(usize, usize) -> Vec<f32>,
    ) -> Vec<f32> {
        let mut sum = vec![0.0; self.shape.hidden];
        for rank in 0..self.world() {
            if let Some(at) = self.received(rank).iter().position(|it| *it == row) {
                sum.iter_mut().zip(answer(rank, at)).for_each(|(sum, it)| *sum += it);
            }
        }
        sum.into_iter().map(|it| rounded(self.shape.dtype, it)).collect()
    }

    /// Returns the sum that comes back from a rank for a row, if rows lie by expert.
    pub(crate) fn weighted(
        &self,
        (call, rank, align): (usize, usize, usize),
        row: usize,
        weight: impl Fn(ReceivedRow, usize) -> f32,
    ) -> Vec<f32> {
        let (_, places) = self.by_expert(rank, align);
        let (top_k, source) = (self.shape.top_k as usize, self.received(rank)[row]);
        let mut sum = vec![0.0; self.shape.hidden];
        for k in 0..top_k {
            let Some(place) = places[row * top_k + k] else { continue };
            let (weight, row) = (weight(source, k), self.answer(call, rank, place));
            sum.iter_mut().zip(row).for_each(|(sum, it)| *sum += it * weight);
        }
        sum.into_iter().map(|it| rounded(self.shape.dtype, it)).collect()
    }
}

/// The quantised bytes of a row, and the bytes of its scales.
pub(crate) fn quantized(row: &[f32], how: ExpertQuantization) -> (Vec<u8>, Vec<u8>) {
    let (mut bytes, mut scales) = (Vec::new(), Vec::new());
    for group in row.chunks(128) {
        let largest = group.iter().fold(1e-4_f32, |largest, it| largest.max(it.abs()));
        let mut scale = largest / 448.0;
        if how != ExpertQuantization::Fp8 {
            let exponent = f64::from(scale).log2().ceil();
            scale = exponent.exp2() as f32;
        }
        match how {
            ExpertQuantization::Fp8Ue8m0 => scales.push((scale.to_bits() >> 23) as u8),
            _ => scales.extend(scale.to_ne_bytes()),
        }
        bytes.extend(group.iter().map(|it| F8E4m3::from_f32(it * (1.0 / scale)).to_bits()));
    }
    (bytes, scales)
}
