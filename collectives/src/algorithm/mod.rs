//! The names of the algorithms, and which one is requested: by a call, by options, or by the environment.

mod all_reduce;
mod all_to_all;
mod names;
mod requested;

pub use all_reduce::AllReduceAlgorithm;
pub use all_to_all::AllToAllAlgorithm;
pub(crate) use requested::{RequestedAlgorithm, VARIABLE};
