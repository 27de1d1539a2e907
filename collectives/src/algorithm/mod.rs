//! The names of the algorithms, which one is requested (by a call, by options, or by the environment), and the
//! algorithms that programs bring along.

mod all_reduce;
mod all_to_all;
mod names;
mod registered;
mod requested;

pub use all_reduce::AllReduceAlgorithm;
pub use all_to_all::AllToAllAlgorithm;
pub use registered::Algorithm;
pub(crate) use requested::{RequestedAlgorithm, VARIABLE};
