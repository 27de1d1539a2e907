//! Collectives that programs bring along: a *plan* says what every rank does with its chunks, step by step.
//!
//! Plans come from `symmpool.language`, which traces a Python function once for each rank, or from a file. A plan is
//! [checked](Plan::check) before anything runs it: signals and waits must match and end, accesses must be ordered,
//! and every chunk of every output must hold what the collective promises. What passes is a [`CheckedPlan`], and only
//! that can be executed.
//!
//! | module | holds |
//! | --- | --- |
//! | `model` | what a plan is: collectives, buffers, chunks, operations |
//! | `format` | plans as JSON |
//! | `check` | the proof, and the errors that tell where it fails |
//! | `checked`, `step` | what was proved, and the steps of its ranks |
//! | `reference` | what a plan means: an interpreter of plans, against which all else is held |
//! | `schedule`, `cuda` | a plan in levels, as devices run it, and the CUDA kernel of a rank's program |
//! | `timeline`, `explain`, `draw` | when operations run at the earliest; a plan as a table, and as a picture |
//!
//! The engines run checked plans; see `host/ops/plan.rs` and `cuda/ops/plan.rs`.

mod check;
mod checked;
pub(crate) mod cuda;
mod draw;
mod explain;
mod format;
mod model;
pub mod reference;
pub(crate) mod schedule;
mod step;
#[cfg(test)]
pub(crate) mod testing;
mod timeline;

pub use check::{PlanError, PlanErrorKind, PlanErrorReason};
pub use checked::CheckedPlan;
pub use format::PLAN_VERSION;
pub(crate) use format::unreadable;
pub use model::{Buffer, Collective, Contribution, Instruction, Operation, Plan, Protocol, Span};
pub(crate) use model::{Cell, MAX_NAME};
pub(crate) use step::{Item, PlanStep};
