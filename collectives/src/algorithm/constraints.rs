//! Where algorithms come from, and what they can serve.

use std::ops::RangeInclusive;

use symmpool_allocator::topology::TopologyKind;

use super::{CallShape, StandardCollective};
use crate::plan::CheckedPlan;
use crate::{DType, ReduceOp};

/// Where an algorithm comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AlgorithmOrigin {
    /// It is one of the library's own.
    BuiltIn,
    /// A program brought a plan, which was proved.
    Plan,
    /// A program brought a kernel.
    Native,
}

impl AlgorithmOrigin {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BuiltIn => "builtin",
            Self::Plan => "plan",
            Self::Native => "native",
        }
    }
}

/// Which calls an algorithm can serve.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Constraints {
    /// The numbers of ranks.
    pub world: RangeInclusive<u32>,
    /// How ranks must be linked, in words; `None` where any links do.
    pub topology: Option<&'static str>,
    /// The types of elements.
    pub dtypes: Vec<DType>,
    /// The operations of reductions; none for what does not reduce.
    pub ops: Vec<ReduceOp>,
    /// Bytes of the larger one of input and output.
    pub bytes: RangeInclusive<u64>,
    /// The elements of a part are a multiple of this.
    pub multiple_of: u32,
    /// Whether the input must be a window.
    pub input_window: bool,
    /// Whether the output must be a window.
    pub output_window: bool,
    /// Whether input and output may be one memory.
    pub in_place: bool,
}

/// How a kernel is launched, as far as the algorithm says so and does not leave it to the size of the call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaunchShape {
    /// Thread blocks, at most.
    pub blocks: Option<u32>,
    /// Threads of a block.
    pub threads: Option<u32>,
}

/// The largest power of two of bytes that constraints are looked for at.
const MAX_BITS: u32 = 47;

impl Constraints {
    /// Constraints of a plan.
    pub(super) fn of_plan(checked: &CheckedPlan) -> Self {
        let plan = checked.plan();
        let reduces = plan.collective.reduces();
        let dtypes = if reduces { DType::REDUCED.to_vec() } else { DType::all().collect() };
        Self {
            world: plan.world..=plan.world,
            topology: None,
            dtypes,
            ops: if reduces { ReduceOp::ALL.to_vec() } else { Vec::new() },
            bytes: 0..=u64::MAX,
            multiple_of: if checked.needs_equal_chunks { plan.chunks_of_part() } else { 1 },
            input_window: checked.needs_input_window(),
            output_window: checked.needs_output_window(),
            in_place: checked.in_place().is_ok(),
        }
    }

    /// Constraints of a built-in algorithm among so many ranks, found by asking whether it fits. `None` if it fits
    /// nothing there.
    pub(crate) fn of_built_in(
        collective: StandardCollective,
        world: u32,
        fits: impl Fn(&CallShape) -> bool,
    ) -> Option<Self> {
        let reduces = collective.reduces();
        let all: Vec<DType> =
            if reduces { DType::REDUCED.to_vec() } else { DType::all().collect() };
        let shape = |bytes: u64, dtype: DType| CallShape {
            collective,
            bytes,
            dtype,
            op: reduces.then_some(ReduceOp::Sum),
            world,
            input_window: true,
            output_window: true,
            topology: TopologyKind::Unknown,
        };
        let first = all[0];
        let bits = (0..=MAX_BITS).find(|bits| fits(&shape(1 << bits, first)))?;
        let some = 1_u64 << bits;
        let least = bound(some, 0, |bytes| fits(&shape(bytes, first)));
        let most = bound(some, 1 << MAX_BITS, |bytes| fits(&shape(bytes, first)));
        let dtypes = all.into_iter().filter(|dtype| fits(&shape(some, *dtype))).collect();
        let needs = |shape: CallShape| !fits(&shape);
        Some(Self {
            world: world..=world,
            topology: None,
            dtypes,
            ops: if reduces { ReduceOp::ALL.to_vec() } else { Vec::new() },
            bytes: least..=(if most == 1 << MAX_BITS { u64::MAX } else { most }),
            multiple_of: 1,
            input_window: needs(CallShape { input_window: false, ..shape(some, first) }),
            output_window: needs(CallShape { output_window: false, ..shape(some, first) }),
            in_place: collective != StandardCollective::AllToAll,
        })
    }
}

/// The number farthest from `inside` towards `end` up to which all fit, if those that fit are without gaps.
fn bound(inside: u64, end: u64, fits: impl Fn(u64) -> bool) -> u64 {
    if fits(end) {
        return end;
    }
    let (mut good, mut bad) = (inside, end);
    while good.abs_diff(bad) > 1 {
        let middle = good.min(bad) + good.abs_diff(bad) / 2;
        if fits(middle) { good = middle } else { bad = middle }
    }
    good
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constraints_are_found_by_asking() {
        let found = Constraints::of_built_in(StandardCollective::AllReduce, 4, |shape| {
            (1000..=70_000).contains(&shape.bytes)
                && shape.output_window
                && matches!(shape.dtype, DType::F32 | DType::Bf16)
        });
        let found = found.expect("something fits");
        assert_eq!((found.bytes, found.dtypes), (1000..=70_000, vec![DType::F32, DType::Bf16]));
        assert!(!found.input_window && found.output_window && found.in_place);
        assert_eq!(found.ops, ReduceOp::ALL);
        let all = Constraints::of_built_in(StandardCollective::AllToAll, 2, |_| true);
        let all = all.expect("everything fits");
        assert_eq!((all.bytes, all.ops.len(), all.in_place), (0..=u64::MAX, 0, false));
        assert_eq!(all.dtypes.len(), DType::all().count());
        assert!(Constraints::of_built_in(StandardCollective::AllToAll, 2, |_| false).is_none());
    }
}
