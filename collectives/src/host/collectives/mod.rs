//! The collectives in host memory, one file or folder each. Each is written with the phases of
//! [`HostEngine`](super::HostEngine): a handshake, then any number of steps. `pieces` divides data for all of them.

pub(crate) mod all_gather;
pub(crate) mod all_reduce;
pub(crate) mod all_to_all;
mod barrier;
pub(crate) mod broadcast;
mod pieces;
pub(crate) mod reduce_scatter;
