//! Whether something is wrong with a program on any of many random schedules.

use symmpool_allocator::testing::SplitMix64;
use symmpool_collectives::plan::reference::{CallSeries, ChunkLayout, Stopped, Values, promised};
use symmpool_collectives::plan::{CheckedPlan, Plan};
use symmpool_collectives::{DType, ReduceOp};

use crate::random_plans::calls::{RandomCall, differs, inputs};
use crate::random_plans::expected;
use crate::random_plans::schedules::run;

/// Fault on a schedule, the most telling first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wrong {
    /// An output does not hold what it must.
    Output,
    /// Ranks stop.
    Stuck,
    /// Signals are left, which the next call takes for its own.
    Signals,
    /// A rank's buffers are accessed before it enters or after it leaves.
    Touched,
    /// Outputs that must have the same bits have others.
    Bits,
    /// Two operations that access one memory could both be next.
    Conflict,
}

/// How to look for something wrong.
#[derive(Clone, Debug)]
pub(crate) struct Search {
    pub(crate) schedules: u64,
    pub(crate) in_place: Vec<bool>,
    /// Elements of a chunk, which are not equal if `uneven` elements are missing in the last one.
    pub(crate) each: usize,
    pub(crate) uneven: usize,
    /// Floats, of which the bits say in which order they were reduced.
    pub(crate) floats: bool,
    pub(crate) conflicts: bool,
}

impl Search {
    pub(crate) fn of(plan: &Plan, schedules: u64) -> Self {
        let in_place = vec![false; plan.world as usize];
        Self { schedules, in_place, each: 8, uneven: 0, floats: false, conflicts: false }
    }

    /// Looks for a schedule on which something is wrong. Two calls follow each other, with data of their own.
    pub(crate) fn find(&self, plan: &Plan, seed: u64) -> Option<Wrong> {
        let dtype = if self.floats { DType::F32 } else { DType::I64 };
        let of_part = plan.chunks_of_part().max(1) as usize;
        let count = of_part * self.each;
        let layout = match self.uneven {
            0 => ChunkLayout::equal(plan, count)?,
            missing => ChunkLayout::lines(plan, count.saturating_sub(missing), dtype.size()),
        };
        let op = ReduceOp::Sum;
        let in_place = self.in_place.clone();
        let case =
            RandomCall { count: layout.count(), dtype, op, in_place: in_place.clone(), root: 0 };
        let data: Vec<_> = (0..2)
            .map(|call| inputs(plan, &case, &layout, seed.rotate_left(call * 7 + 3)))
            .collect();
        let calls = CallSeries { plan, layout, dtype, op, in_place, inputs: &data };
        (0..self.schedules).find_map(|nth| self.look(&calls, SplitMix64::at(seed, nth)))
    }

    fn look(&self, calls: &CallSeries<'_>, seed: u64) -> Option<Wrong> {
        let mut conflict = false;
        let found = self.conflicts.then_some(&mut conflict);
        let left = match run(calls, seed, &mut Values::default(), found) {
            Ok(left) => left,
            Err(Stopped::Stuck(_)) => return Some(Wrong::Stuck),
        };
        let plan = calls.plan;
        let size = calls.dtype.size();
        let mut sets = Vec::new();
        for (call, outputs) in left.outputs.iter().enumerate() {
            for (rank, output) in (0u32..).zip(outputs) {
                for index in 0..plan.output_chunks(rank) {
                    let start = calls.layout.start(index) * size;
                    let chunk = &output[start..start + calls.layout.length(index) * size];
                    if !self.floats && chunk != promised(calls, call, rank, index) {
                        return Some(Wrong::Output);
                    }
                    let mut set = expected(plan, rank, index);
                    set.sort_unstable();
                    if self.floats {
                        sets.push((call, set, chunk));
                    }
                }
            }
        }
        if !left.touched.is_empty() {
            return Some(Wrong::Touched);
        }
        if left.signals > 0 {
            return Some(Wrong::Signals);
        }
        sets.sort_unstable();
        let is_other = |pair: &[(usize, Vec<_>, &[u8])]| {
            (pair[0].0, &pair[0].1) == (pair[1].0, &pair[1].1)
                && differs(pair[0].2, pair[1].2, calls.dtype, true).is_some()
        };
        if sets.windows(2).any(is_other) {
            return Some(Wrong::Bits);
        }
        conflict.then_some(Wrong::Conflict)
    }
}

/// Finds a fault of a program that the check passes: out of place and, where the check says so, in place; with equal
/// chunks, and with others, where calls of such counts are made.
pub(crate) fn flaw(
    checked: &CheckedPlan,
    seed: u64,
    schedules: u64,
) -> Option<(&'static str, Wrong)> {
    let plan = checked.plan();
    let usual = Search::of(plan, schedules);
    let mut searches = vec![("equal chunks", usual.clone())];
    if checked.in_place().is_ok() {
        let in_place = vec![true; plan.world as usize];
        searches.push(("in place", Search { in_place, ..usual.clone() }));
        let in_place = (0..plan.world).map(|rank| seed >> rank & 1 == 1).collect();
        searches.push(("in place on some ranks", Search { in_place, ..usual.clone() }));
    }
    for missing in [1, 9] {
        let of_part = plan.chunks_of_part().max(1) as usize;
        let count = of_part * usual.each;
        if count > missing
            && ChunkLayout::of_call(checked, count - missing, 8)
                .is_some_and(|layout| layout.each() == 8)
        {
            searches.push(("shorter chunks", Search { uneven: missing, ..usual.clone() }));
        }
    }
    if plan.reproducible && plan.collective.reduces() {
        searches.push(("floats", Search { floats: true, ..usual }));
    }
    searches.into_iter().find_map(|(what, search)| Some((what, search.find(plan, seed)?)))
}
