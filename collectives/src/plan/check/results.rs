//! Checks of a plan's results: whether outputs hold what they must, and whether that is so in place.

use std::collections::BTreeMap;

use super::super::model::{Buffer, Cell, Contribution, Plan};
use super::error::{PlanError, PlanErrorReason};
use super::run::{CheckRun, RunOutcome, error, name_of};
use super::value::Value;

/// Refuses outputs that do not hold what the collective promises, and reductions in different orders.
pub(super) fn check_results(plan: &Plan, outcome: &RunOutcome) -> Result<(), PlanError> {
    // The first output of each set of contributions.
    let mut orders: BTreeMap<Vec<Contribution>, (Value, u32, usize)> = BTreeMap::new();
    for rank in 0..plan.world {
        for index in 0..plan.output_chunks(rank) {
            let cell = Cell { rank, buffer: Buffer::Output, index };
            let held = outcome.cells.get(&cell);
            let mut expected = plan.expected(rank, index);
            expected.sort_unstable();
            let last = plan.programs[rank as usize].len().saturating_sub(1);
            let (value, (by, at)) = match held {
                Some(held) => (held.value, held.writer.unwrap_or((rank, last))),
                None => {
                    let message = format!("{cell} is never written");
                    return Err(error(plan, PlanErrorReason::NeverWritten, rank, last, message));
                }
            };
            let found = outcome.values.contributions(value);
            if found.as_ref() != Some(&expected) {
                let why = difference(found.as_deref(), &expected);
                let message = format!("{} leaves {cell} wrong: {why}", name_of(plan, by, at));
                return Err(error(plan, PlanErrorReason::Contributions, by, at, message));
            }
            if expected.len() < 2 || !plan.reproducible {
                continue;
            }
            let (first, first_by, first_at) = *orders.entry(expected).or_insert((value, by, at));
            if first != value {
                let message = format!(
                    "{} and {} leave the same reduction in different orders, so its last bits may differ: reduce in \
                     rank order on all ranks, or say reproducible=False",
                    name_of(plan, first_by, first_at),
                    name_of(plan, by, at)
                );
                return Err(error(plan, PlanErrorReason::Orders, by, at, message));
            }
        }
    }
    Ok(())
}

/// Describes the inputs that are missing in a chunk, and those that are too many.
fn difference(found: Option<&[Contribution]>, expected: &[Contribution]) -> String {
    let Some(found) = found else { return "far too many inputs take part in it".to_owned() };
    let (found, expected) = (counts(found), counts(expected));
    let count =
        |of: &BTreeMap<Contribution, u32>, each: &Contribution| of.get(each).map_or(0, |n| *n);
    for (each, must) in &expected {
        if count(&found, each) < *must {
            return format!("it lacks {each}");
        }
    }
    for (each, has) in &found {
        let must = count(&expected, each);
        if must == 0 {
            return format!("{each} does not belong there");
        }
        if *has > must {
            return format!("{each} takes part {has} times");
        }
    }
    "it differs".to_owned()
}

/// How often each input takes part.
fn counts(of: &[Contribution]) -> BTreeMap<Contribution, u32> {
    let mut counts = BTreeMap::new();
    for each in of {
        *counts.entry(*each).or_insert(0) += 1;
    }
    counts
}

/// Whether the plan is right where input and output are one memory, on whichever ranks that is so.
///
/// Every operation must write there what it writes where they are two, and be ordered with all that it conflicts with. Then
/// it does not matter which ranks are in place. What a chunk holds follows from the writes to its rank's buffers, and from
/// whether that rank is in place; no other rank's memory takes part. So with equal writes, a read takes the same value
/// whichever of the other ranks are in place, and one run in which all of them are stands for every choice.
pub(super) fn check_in_place(
    plan: &Plan,
    usual: &RunOutcome,
    needs_equal_chunks: bool,
) -> Result<(), PlanError> {
    let aliased = CheckRun::in_place(plan, usual.values.clone()).run()?;
    for (ran, usual) in aliased.order.iter().zip(&usual.order) {
        for (written, usual) in ran.written.iter().zip(&usual.written) {
            let name = || name_of(plan, ran.rank, ran.index);
            let (reason, message) = if written.value != usual.value {
                let why = "reads an input that an output has overwritten by then";
                (PlanErrorReason::OtherValue, format!("{} {why}", name()))
            } else if written.index_in_part != usual.index_in_part && !needs_equal_chunks {
                let why = "reads an input over which a shorter chunk was copied";
                (PlanErrorReason::OtherLength, format!("{} {why}", name()))
            } else {
                continue;
            };
            return Err(error(plan, reason, ran.rank, ran.index, message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::right_in_place_on_both_or_none;
    use super::*;

    #[test]
    fn what_is_right_in_place_on_all_ranks_alone_is_not_right_in_place() {
        let checked = right_in_place_on_both_or_none().check().expect("right elsewhere");
        let error = checked.in_place().expect_err("wrong in place on rank 0 alone");
        assert_eq!(error.reason, PlanErrorReason::OtherValue, "{error}");
        assert!(error.message.contains("reads an input that an output has overwritten"), "{error}");
    }
}
