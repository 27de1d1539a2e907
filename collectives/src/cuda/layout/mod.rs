//! Layouts of the memory that ranks, kernels and the host share.
//!
//! | file | holds |
//! | --- | --- |
//! | `params` | what kernels are given and share with the host |
//! | `headers` | the headers of kernels that are made of these structs |
//! | `control` | the layout of the control block |
//! | `footprint` | how much memory a communicator takes of its device, and what each part gets |
//! | `memory_channels`, `piece_slots` | flags of memory operations, and slots of pieces that copy engines carry |
//! | `p2p_layout` | slots of point-to-point messages, and how messages are divided among them |
//! | `fault` | what a kernel reports to the host when a peer is missing or differs |

pub(in crate::cuda) mod control;
pub(in crate::cuda) mod fault;
pub(in crate::cuda) mod footprint;
#[cfg(test)]
pub(in crate::cuda) mod headers;
pub(in crate::cuda) mod memory_channels;
pub(in crate::cuda) mod p2p_layout;
pub(in crate::cuda) mod params;
pub(in crate::cuda) mod piece_slots;
