//! A plan that was proved, and what execution needs to know of it.

use std::sync::OnceLock;

use super::check::PlanError;
use super::model::{Collective, Plan};
use super::schedule::Schedule;
use super::step::PlanStep;

/// A plan that was proved, and what execution needs to know of it.
#[derive(Debug)]
pub struct CheckedPlan {
    pub(super) plan: Plan,
    pub(super) hash: u64,
    /// Steps of each rank, in an order in which one thread a rank can do them.
    pub(crate) steps: Vec<Vec<PlanStep>>,
    /// The operations of all ranks, as rank and index, in an order in which they can run one after the other.
    pub(super) order: Vec<(u32, usize)>,
    /// Why input and output must not be one memory, if they must not.
    pub(super) in_place: Result<(), PlanError>,
    /// Whether chunks must have equal lengths: in a collective of one's own, and where results pass through chunks at
    /// higher indices in their parts, which may be shorter.
    pub(crate) needs_equal_chunks: bool,
    /// Whether peers access inputs, so that these must be windows.
    pub(super) reaches_inputs: bool,
    /// Whether peers access outputs, so that these must be windows.
    pub(super) reaches_outputs: bool,
    /// Whether results are reduced in several steps, with rounding between them.
    pub(crate) has_partial_results: bool,
    /// Whether averages divide some results at the end of the call ([`PlanStep::Divide`]).
    pub(crate) divides_last: bool,
    /// Schedule for devices, from the first call on one.
    pub(super) schedule: OnceLock<Schedule>,
}

impl CheckedPlan {
    /// The plan in levels.
    pub(crate) fn schedule(&self) -> &Schedule {
        self.schedule.get_or_init(|| Schedule::new(&self.plan, &self.steps, &self.order))
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The plan's hash; see [`Plan::hash`].
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Whether input and output may be one memory. The error says what goes wrong if they are.
    ///
    /// In place, the input of an all-gather is the rank's part of the output, and the output of a reduce-scatter the
    /// rank's part of the input; else the two begin at one address.
    pub fn in_place(&self) -> Result<(), &PlanError> {
        self.in_place.as_ref().copied()
    }

    /// The elements of `rank`'s input and output in a call of `count` elements; see
    /// [`HostEngine::run_plan`](crate::HostEngine::run_plan). `None` stands for a number that is too large.
    pub fn lengths(&self, rank: u32, count: usize) -> [Option<usize>; 2] {
        let plan = &self.plan;
        let times = |parts: u32| count.checked_mul(parts as usize);
        match plan.collective {
            Collective::Custom { .. } => {
                let chunk = count / plan.chunks.max(1) as usize;
                [Some(count), chunk.checked_mul(plan.output_chunks(rank) as usize)]
            }
            _ => [times(plan.input_parts()), times(plan.output_parts())],
        }
    }

    /// Whether peers read or write inputs, which must then be windows.
    pub fn needs_input_window(&self) -> bool {
        self.reaches_inputs
    }

    /// Whether peers read or write outputs, which must then be windows.
    pub fn needs_output_window(&self) -> bool {
        self.reaches_outputs
    }
}
