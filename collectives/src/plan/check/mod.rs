//! The proof that a plan does what its collective promises, on every schedule.
//!
//! The checks, in this order: spans and peers are there, and inputs are only read; signals and waits match; nobody
//! waits in a circle; accesses that conflict are ordered, also with the calls before and after; and every output
//! holds what it must, reduced in one order. `run` does most of it.
//!
//! The state between calls is part of the proof. Scratch has two halves that calls use alternately, and no rank is
//! more than one call ahead (rule S4), so scratch of one call is never touched by another. Input and output are the
//! caller's again when the call ends on a rank. So a peer's input and output may be accessed only behind a signal
//! that shows that the peer has entered the call, and the peer must wait for a signal behind the last access. What is
//! proved of one call this way holds for any number of them.
//!
//! # Chunks of unequal lengths
//!
//! The chunks of a part are equally long but for the last ones, which may be shorter, or empty. A chunk has an
//! *index in its part*, and one with a higher index is never longer. A chunk of scratch is as long as the first. An operation
//! works on as many elements as each of its chunks has: as many as the one with the highest index. What it writes is known to
//! be as long, wherever it goes on to. An output may be known to be shorter than the chunk that it is in. Then it is complete
//! only where all chunks are equally long, and calls must divide into such chunks.

mod clock;
mod error;
mod operations;
mod results;
mod run;
mod value;

use std::collections::BTreeSet;
use std::sync::OnceLock;

pub use error::{PlanError, PlanErrorKind, PlanErrorReason};
use operations::{check_places, check_protocol, check_signals};
use results::{check_in_place, check_results};
use run::{CheckRun, HeldValue, RunOutcome, Written};
use value::Value;

use super::checked::CheckedPlan;
use super::model::{Buffer, Cell, Collective, Operation, Plan};
use super::step::{Item, PlanStep};

impl Plan {
    /// Proves that the plan computes what its collective promises on every schedule, whatever calls come before and
    /// after.
    ///
    /// It takes time in proportion to operations and chunks: some milliseconds for 16 ranks.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong, with the rank and the line.
    pub fn check(self) -> Result<CheckedPlan, PlanError> {
        if let Err(error) = self.within_limits() {
            let message = error.to_string();
            let message = message.trim_start_matches("symmpool: ").to_owned();
            let reason =
                if self.is_shaped() { PlanErrorReason::Limits } else { PlanErrorReason::Shape };
            return Err(PlanError::new(reason, 0, 0, message));
        }
        check_places(&self)?;
        check_signals(&self)?;
        let outcome = CheckRun::new(&self).run()?;
        check_results(&self, &outcome)?;
        check_protocol(&self)?;
        let needs_equal_chunks = self.needs_equal_chunks(&outcome);
        let in_place = check_in_place(&self, &outcome, needs_equal_chunks);
        Ok(CheckedPlan::new(self, &outcome, needs_equal_chunks, in_place))
    }

    /// Whether results are complete only where all chunks have equal lengths.
    fn needs_equal_chunks(&self, outcome: &RunOutcome) -> bool {
        let is_shorter = |rank, index| {
            let cell = Cell { rank, buffer: Buffer::Output, index };
            outcome
                .cells
                .get(&cell)
                .is_some_and(|held| held.index_in_part > self.index_in_part(cell))
        };
        let is_custom = matches!(self.collective, Collective::Custom { .. });
        is_custom
            || (0..self.world)
                .any(|rank| (0..self.output_chunks(rank)).any(|index| is_shorter(rank, index)))
    }
}

impl CheckedPlan {
    fn new(
        plan: Plan,
        outcome: &RunOutcome,
        needs_equal_chunks: bool,
        in_place: Result<(), PlanError>,
    ) -> Self {
        let values = &outcome.values;
        let is_output = |(cell, held): (&Cell, &HeldValue)| {
            (cell.buffer == Buffer::Output).then_some(held.value)
        };
        let results: BTreeSet<Value> = outcome.cells.iter().filter_map(is_output).collect();
        // A result of which others are made stays a sum until the end, when nobody reads it any more.
        let all = outcome.order.iter().flat_map(|ran| &ran.written);
        let parts: BTreeSet<Value> =
            all.flat_map(|written| values.operands(written.value)).copied().collect();
        let mut steps = vec![Vec::new(); plan.world as usize];
        let mut has_partial_results = false;
        for ran in &outcome.order {
            let steps = &mut steps[ran.rank as usize];
            let operation = &plan.programs[ran.rank as usize][ran.index].operation;
            match operation {
                Operation::Signal { peer, channel } => {
                    steps.push(PlanStep::Signal { peer: *peer, channel: *channel });
                }
                Operation::Wait { peer, channel } => {
                    steps.push(PlanStep::Wait { peer: *peer, channel: *channel });
                }
                Operation::Barrier => steps.push(PlanStep::Barrier),
                _ => {}
            }
            for (offset, Written { value, index_in_part }) in (0u32..).zip(&ran.written) {
                let Some(dst) = operation.destination() else { continue };
                has_partial_results |= !values.is_flat(*value);
                let srcs: Vec<Cell> =
                    operation.sources().iter().map(|src| src.cell(offset)).collect();
                let divides = srcs.len() > 1 && results.contains(value) && !parts.contains(value);
                let divisor = if divides { values.count(*value) } else { 1 };
                let (dst, index_in_part) = (dst.cell(offset), *index_in_part);
                steps.push(PlanStep::Reduce(Item { dst, srcs, index_in_part, divisor }));
            }
        }
        for (rank, steps) in (0u32..).zip(&mut steps) {
            for index in 0..plan.output_chunks(rank) {
                let cell = Cell { rank, buffer: Buffer::Output, index };
                let Some(HeldValue { value, index_in_part, .. }) = outcome.cells.get(&cell) else {
                    continue;
                };
                let by = values.count(*value);
                if by > 1 && parts.contains(value) {
                    steps.push(PlanStep::Divide { cell, index_in_part: *index_in_part, by });
                }
            }
        }
        let is_division = |step: &PlanStep| matches!(step, PlanStep::Divide { .. });
        let divides_last = steps.iter().flatten().any(is_division);
        let reaches = |buffer: Buffer| {
            let programs = (0u32..).zip(&plan.programs);
            programs.into_iter().any(|(rank, program)| {
                let spans = program.iter().flat_map(|each| each.operation.spans());
                spans.into_iter().any(|span| span.rank != rank && span.buffer == buffer)
            })
        };
        let (reaches_inputs, reaches_outputs) = (reaches(Buffer::Input), reaches(Buffer::Output));
        let in_place = in_place.and_then(|()| match plan.collective {
            Collective::AllGather if reaches_inputs => Err(elsewhere("inputs")),
            Collective::ReduceScatter if reaches_outputs => Err(elsewhere("outputs")),
            _ => Ok(()),
        });
        Self {
            hash: plan.hash(),
            order: outcome.order.iter().map(|ran| (ran.rank, ran.index)).collect(),
            steps,
            in_place,
            needs_equal_chunks,
            reaches_inputs,
            reaches_outputs,
            has_partial_results,
            divides_last,
            schedule: OnceLock::new(),
            plan,
        }
    }
}

/// Why a program that reaches its peers' inputs, or outputs, is not right where these are a rank's own part of the other
/// buffer: peers look for them at one offset on every rank.
fn elsewhere(what: &str) -> PlanError {
    let message = format!("peers access {what}, which then lie at another offset on each rank");
    PlanError::new(PlanErrorReason::OtherOffset, 0, 0, message)
}
