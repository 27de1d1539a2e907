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
//! | `fault` | what a rank reports to the others when it gives up waiting |
//! | `place` | this rank's addresses of a call's data |
//! | `collectives` | the collectives, one file or folder each |
//! | `plan` | runs collectives that programs bring along |
//! | `host_algorithm`, `algorithms` | what the tables of their algorithms consist of, and how one is found |
//! | `fused` | all-reduces with a residual and a norm |
//! | `interface` | all of it as an `Engine` |
//! | `calls` | the collectives as methods, on places and on slices |
//! | `experts` | dispatch to experts, and combine |
//! | `numbers` | numbers that others may write meanwhile |
//! | `one_sided`, `p2p` | signals and copies outside of calls, and point-to-point messages |
//! | `mailbox` | point-to-point messages of pairs of ranks, which need no communicator |
//! | `kernels` | the loops over memory: reductions and copies |

mod algorithms;
mod calls;
mod collectives;
mod control;
pub(crate) mod cores;
mod crowd;
mod engine;
mod experts;
mod fault;
mod fused;
mod host_algorithm;
mod interface;
pub(crate) mod kernels;
mod mailbox;
mod numbers;
mod one_sided;
mod options;
mod p2p;
mod place;
mod plan;
mod shared_cores;
mod wait;

pub(crate) use calls::expect_length;
pub use engine::HostEngine;
pub use mailbox::{Mailbox, Operation};
pub(crate) use one_sided::{HostChannels, HostOneSided};
pub use options::HostOptions;
pub(crate) use place::{Data, InPlace};
