//! Plans for unit tests: those that tests from outside have.

#[path = "../../tests/host/plans/builder.rs"]
mod builder;
#[path = "../../tests/host/plans/more_programs.rs"]
mod more_programs;
#[path = "../../tests/host/plans/odd_programs.rs"]
mod odd_programs;
#[path = "../../tests/host/plans/programs.rs"]
mod programs;

pub(crate) use odd_programs::right_in_place_on_both_or_none;

use super::CheckedPlan;

/// Every program for so many ranks, checked. Those in LL have it at the end of their names.
pub(crate) fn plans(world: u32) -> Vec<CheckedPlan> {
    let mut all = programs::all(world);
    all.append(&mut more_programs::all(world));
    all.append(&mut more_programs::in_ll(world));
    all.append(&mut odd_programs::all(world));
    all.into_iter().map(|plan| plan.check().expect("a right program")).collect()
}
