//! What lies where in memory that ranks, kernels and the host share.
//!
//! | file | holds |
//! | --- | --- |
//! | `params` | what kernels are given, laid out as in `symmpool/comm.cuh`; the layout of the control block |
//! | `footprint` | how much memory a communicator takes of its device, and what each part gets |
//! | `fault` | what a kernel reports to the host when a peer is missing or differs |

pub(in crate::cuda) mod fault;
pub(in crate::cuda) mod footprint;
pub(in crate::cuda) mod params;
