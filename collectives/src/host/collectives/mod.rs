//! The collectives in host memory, one file or folder each: what every rank does, in the phases that
//! [`HostEngine`](super::HostEngine) offers.

mod all_gather;
pub(crate) mod all_reduce;
pub(crate) mod all_to_all;
mod barrier;
mod broadcast;
mod reduce_scatter;
