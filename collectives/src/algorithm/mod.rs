//! The algorithms by their names, and which one was requested: by a call, by options, or by the environment.

mod all_to_all;
mod requested;

pub use crate::host::AllReduceAlgorithm;
pub use all_to_all::AllToAllAlgorithm;
pub(crate) use requested::{Asked, VARIABLE};
