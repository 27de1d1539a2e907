//! Calls of a program: counts at the boundaries of chunks, lines, pieces and slices, element types, and data.

use symmpool_allocator::testing::SplitMix64;
use symmpool_collectives::plan::reference::{self, ChunkLayout};
use symmpool_collectives::plan::{CheckedPlan, Collective, Plan};
use symmpool_collectives::{DType, ReduceOp};

/// A call, but for its data.
#[derive(Clone, Debug)]
pub(crate) struct RandomCall {
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    /// Whether the call is in place, by rank of the plan.
    pub(crate) in_place: Vec<bool>,
    pub(crate) root: u32,
}

/// The boundaries that an executor has.
#[derive(Clone, Debug)]
pub(crate) struct Boundaries {
    /// Bytes of scratch that a call has.
    pub(crate) scratch: usize,
    /// Bytes of a chunk at which something changes.
    pub(crate) chunks: Vec<usize>,
    /// Bytes of an input or output, at most.
    pub(crate) most: usize,
}

/// Types that reductions are made of, and one of which bytes are only moved.
const TYPES: [DType; 7] =
    [DType::F32, DType::I64, DType::Bf16, DType::I32, DType::F16, DType::F64, DType::U8];
const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Max, ReduceOp::Prod];

/// Some calls of a program. Whether averages are among them depends on the plan.
pub(crate) fn cases(
    checked: &CheckedPlan,
    random: &mut SplitMix64,
    number: usize,
    boundaries: &Boundaries,
) -> Vec<RandomCall> {
    let plan = checked.plan();
    (0..number)
        .map(|_| {
            let reduces = plan.collective.reduces();
            let dtype = if reduces || random.below(8) > 0 {
                TYPES[random.below(TYPES.len() as u64) as usize]
            } else {
                [DType::Bool, DType::Complex128][random.below(2) as usize]
            };
            let op = match random.below(5) {
                0 if reduces => ReduceOp::Avg,
                nth => OPS[nth as usize % 4],
            };
            let count = count(plan, random, dtype.size(), boundaries);
            let aliased = match random.below(6) {
                0 | 1 => 0,
                2 | 3 => u64::MAX,
                _ => random.next(),
            };
            let in_place = (0..plan.world).map(|rank| aliased >> rank & 1 == 1).collect();
            let has_root = plan.collective == Collective::Broadcast;
            let root = if has_root { random.below(plan.world.into()) as u32 } else { 0 };
            RandomCall { count, dtype, op, in_place, root }
        })
        .collect()
}

/// Elements of a part.
fn count(plan: &Plan, random: &mut SplitMix64, size: usize, boundaries: &Boundaries) -> usize {
    let of_part = plan.chunks_of_part().max(1) as usize;
    let line = (64 / size).max(1);
    let lines = line * (1 + random.below(4) as usize);
    let piece = boundaries.scratch / (plan.scratch.max(1) as usize) / 64 * 64 / size;
    let far = boundaries.chunks[random.below(boundaries.chunks.len() as u64) as usize] / size;
    let near = [
        random.below(4) as usize,
        15 + random.below(3) as usize,
        of_part * lines,
        of_part * lines - line * random.below(of_part as u64) as usize,
        of_part * piece.max(1),
        of_part * piece.max(1) * 2,
        of_part * (1 + random.below(40) as usize),
        of_part * far,
    ];
    let nth = random.below(near.len() as u64 + 1) as usize;
    let near = near.get(nth).copied().unwrap_or(of_part * lines);
    let off = [0, 0, 1, 2][random.below(4) as usize];
    let count = if off == 2 { near.saturating_sub(1) } else { near + off };
    let parts = plan.input_parts().max(plan.output_parts()) as usize;
    let chunks = (0..plan.world).map(|rank| plan.output_chunks(rank)).max().unwrap_or(0);
    // A collective of one's own may have a longer output than input.
    let times = match plan.collective {
        Collective::Custom { .. } => (chunks as usize).div_ceil(of_part).max(1),
        _ => parts,
    };
    let count = if count * times * size > boundaries.most { of_part * lines } else { count };
    // Collectives of one's own, and programs whose chunks must be equal, take only what divides; some calls do not.
    let divides = matches!(plan.collective, Collective::Custom { .. }) || random.below(3) == 0;
    if divides && random.below(10) > 0 { count / of_part * of_part } else { count }
}

/// The inputs of all ranks of the plan. Floats are of few magnitudes, so that sums round, with zeros of both signs, NaNs,
/// infinities and denormals among them.
pub(crate) fn inputs(
    plan: &Plan,
    case: &RandomCall,
    layout: &ChunkLayout,
    seed: u64,
) -> Vec<Vec<u8>> {
    let elements = layout.total(plan.chunks);
    let of_rank = |rank: u32| {
        if !reference::has_input(plan, rank) {
            return Vec::new();
        }
        let mut random = SplitMix64::for_participant(seed, rank.into());
        let mut bytes = vec![0; elements * case.dtype.size()];
        let each = if case.dtype == DType::F32 { 4 } else { 8 };
        for place in bytes.chunks_mut(each) {
            let bits = random.next();
            let special = bits >> 58;
            let word = match case.dtype {
                DType::F32 => {
                    let number = (bits as u32 & 0x007f_ffff) as f32 / 8192.0 - 500.0;
                    let word = match special {
                        0 => 0x8000_0000,
                        1 => (bits >> 8) as u32 & 0x807f_ffff,
                        2 => 0x7f80_0000,
                        3 => 0xffc0_0000,
                        _ => number.to_bits(),
                    };
                    u64::from(word)
                }
                DType::F64 if special == 0 => 1 << 63,
                DType::F64 => ((bits & 0xffff_ffff) as f64 / 8192.0 - 5e5).to_bits(),
                // All bits of narrow floats are numbers, but some.
                _ => bits,
            };
            place.copy_from_slice(&word.to_le_bytes()[..place.len()]);
        }
        bytes
    };
    (0..plan.world).map(of_rank).collect()
}

/// The first element that differs. NaNs that reductions make may have other signs and payloads.
pub(crate) fn differs(got: &[u8], wanted: &[u8], dtype: DType, is_reduced: bool) -> Option<usize> {
    if got == wanted {
        return None;
    }
    let size = dtype.size();
    if got.len() != wanted.len() {
        return Some(got.len().min(wanted.len()) / size);
    }
    let is_nan = |bytes: &[u8]| {
        let mut word = [0; 8];
        let Some(to) = word.get_mut(..bytes.len()) else { return false };
        to.copy_from_slice(bytes);
        let bits = u64::from_le_bytes(word);
        match dtype {
            DType::F32 => bits & 0x7fff_ffff > 0x7f80_0000,
            DType::F64 => bits & !(1 << 63) > 0x7ff0 << 48,
            DType::F16 => bits & 0x7fff > 0x7c00,
            DType::Bf16 => bits & 0x7fff > 0x7f80,
            _ => false,
        }
    };
    let mut pairs = got.chunks(size).zip(wanted.chunks(size));
    pairs.position(|(a, b)| a != b && !(is_reduced && is_nan(a) && is_nan(b)))
}
