//! The collectives and the other operations in host memory, one file or folder each. Each is written with the phases of
//! [`HostEngine`](super::HostEngine): a handshake, then any number of steps.
//!
//! | file | holds |
//! | --- | --- |
//! | `calls`, `algorithms` | the collectives as methods; the tables of their algorithms |
//! | `all_reduce`, `reduce_scatter`, `all_gather`, `broadcast`, `all_to_all`, `barrier` | the collectives of these names |
//! | `pieces` | how data is divided, for all of them |
//! | `plan` | collectives that programs bring along |
//! | `norm` | all-reduces with a residual and a norm |
//! | `experts` | dispatch to experts, and combine |
//! | `one_sided`, `p2p` | signals and copies outside of calls, and point-to-point messages |

mod algorithms;
mod all_gather;
mod all_reduce;
mod all_to_all;
mod barrier;
mod broadcast;
pub(in crate::host) mod calls;
pub(crate) mod experts;
mod norm;
pub(in crate::host) mod one_sided;
mod p2p;
mod pieces;
mod plan;
mod reduce_scatter;
