//! The engine in host memory: ranks are processes (or threads), memory is shared pages, and signals are atomics
//! in them.
//!
//! | module | holds |
//! | --- | --- |
//! | [`engine`](HostEngine) | a rank's state of a communicator, and the phases of a call: handshake and steps |
//! | `options` | how an engine behaves |
//! | `control` | where things lie in the control block |
//! | `wait`, `cores` | how a rank waits, and whether each rank has a core of its own to spin on |
//! | `shared_cores` | where ranks run that share cores |
//! | `crowd` | whether other programs want this machine's cores |
//! | `call`, `operation` | the call description that ranks compare in the handshake, and the operations |
//! | `fault` | what a rank reports to the others when it gives up waiting |
//! | `place` | where the data of a call lies |
//! | `collectives` | the collectives, one file or folder each |
//! | `plan`, `plan_call` | runs collectives that programs bring along; what both engines check of such calls |
//! | `host_algorithm`, `algorithms` | what the tables of their algorithms consist of, and how one is found |
//! | `fused` | all-reduces with a residual and a norm |
//! | `slices` | collectives on slices |
//! | `experts` | dispatch to experts, and combine |
//! | `numbers` | numbers that others may write meanwhile |
//! | `one_sided`, `p2p` | signals and copies outside of calls, and point-to-point messages |
//! | `mailbox` | point-to-point messages of pairs of ranks, which need no communicator |
//! | `kernels` | the loops over memory: reductions and copies |

mod algorithms;
pub(crate) mod call;
mod collectives;
mod control;
pub(crate) mod cores;
mod crowd;
mod engine;
mod experts;
mod fault;
mod fused;
mod host_algorithm;
pub(crate) mod kernels;
mod mailbox;
mod numbers;
mod one_sided;
mod operation;
mod options;
mod p2p;
mod place;
mod plan;
pub(crate) mod plan_call;
mod shared_cores;
mod slices;
mod wait;

pub use collectives::all_to_all::{SplitRows, SplitsAt};
pub use engine::HostEngine;
pub use mailbox::{Mailbox, Operation};
pub(crate) use one_sided::{HostChannels, HostOneSided};
pub use options::HostOptions;
pub use place::Place;
pub(crate) use place::{Data, InPlace};
pub(crate) use slices::expect_length;
