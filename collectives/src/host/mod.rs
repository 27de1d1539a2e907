//! The host backend: ranks are processes (or threads), memory is shared pages, signals are
//! atomics in them.
//!
//! - [`engine`](HostEngine) owns a communicator's state on one rank and the two kinds of wait;
//!   `options` is how it behaves
//! - `control` says where things lie in the control block, `wait` how a rank passes the time, and
//!   `cores` whether each rank has a core for that
//! - `call` is what ranks compare on entry, `operation` what can be called, `fault` what they tell
//!   each other when one is missing
//! - `one_sided` is signals and copies outside calls, `p2p` messages between two ranks
//! - `place` is where data lies, `kernels` are the loops over it
//! - `collectives` has the algorithms, one file or folder for each collective; `slices` offers them on
//!   ordinary slices, and `row_exchange` has the steps of row exchanges

pub(crate) mod call;
mod collectives;
mod control;
pub(crate) mod cores;
mod engine;
mod fault;
pub(crate) mod kernels;
mod one_sided;
mod operation;
mod options;
mod p2p;
mod place;
mod row_exchange;
mod slices;
mod wait;

pub use collectives::all_reduce::AllReduceAlgorithm;
pub use collectives::all_to_all::{SplitRows, SplitsAt};
pub use engine::HostEngine;
pub(crate) use one_sided::HostSided;
pub use options::HostOptions;
pub use place::Place;
pub(crate) use place::{Data, InPlace};
pub(crate) use row_exchange::BadRow;
pub(crate) use slices::expect_length;
