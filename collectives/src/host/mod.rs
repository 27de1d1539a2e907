//! The engine in host memory: ranks are processes (or threads), memory is shared pages, and signals are atomics
//! in them.
//!
//! | room | holds |
//! | --- | --- |
//! | `step` | the points of calls at which tests can intervene |
//! | `wait` | how a rank waits, what it reports when it gives up, and how many cores ranks have to spin on |
//! | `layout` | where things lie in the control block and in a call's data, and how links, loads and routings divide them |
//! | `kernels` | the loops over memory: reductions and copies |
//! | `engine` | one rank's side of a communicator: its state, and the phases of a call: handshake and steps |
//! | `ops` | the collectives and the other operations, one file or folder each |
//! | `subgroup_memory` | memory from which communicators of some ranks are made |
//! | `mailbox` | point-to-point messages of pairs of ranks, which need no communicator |
//! | `interface` | all of it as an `Engine` |

mod engine;
mod interface;
pub(crate) mod kernels;
mod layout;
mod mailbox;
mod ops;
mod step;
pub(crate) mod subgroup_memory;
mod wait;

pub use engine::HostEngine;
pub use engine::options::HostEngineOptions;
pub(crate) use kernels::{Isa, ReduceFn, select};
pub(crate) use layout::place::{checked, disjoint};
pub use mailbox::{Mailbox, PendingMessage};
pub(crate) use ops::calls::expect_length;
pub(crate) use ops::experts;
pub(crate) use ops::one_sided::{HostChannels, HostOneSided};
#[cfg(feature = "testing")]
pub use step::{CallStep, watch::watch_call_steps};
pub use subgroup_memory::{Arrivals, GroupKey};
pub(crate) use wait::cores;
