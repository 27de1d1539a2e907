//! The CUDA backend: collectives as kernels on a stream, over the windows of a pool on a device.
//!
//! | file | holds |
//! | --- | --- |
//! | `engine` | one rank's side of a communicator: its state, and how a call is entered |
//! | `algorithms`, `grid` | which kernels a collective runs, of how many blocks |
//! | `sharing` | how much of a device a communicator's kernels take |
//! | `order` | calls run one after the other, whatever streams they are on |
//! | `spread` | all-gathers and broadcasts: as packets, or as all-to-alls |
//! | `all_to_all` | what an all-to-all is given, and its grid |
//! | `all_to_all_copied`, `slices` | those that copy engines carry |
//! | `copied` | all-reduces that copy engines carry |
//! | `row_exchange` | the steps of a row exchange beside its all-to-alls |
//! | `sided` | copies and signals between two ranks |
//! | `p2p` | messages between two ranks |
//! | `lengths` | what calls are given, checked |
//! | `select` | which algorithm serves a call |
//! | `shape` | what an all-reduce looks like, and which algorithms can serve it |
//! | `table`, `rows` | what was measured on known devices |
//! | `params` | what kernels are given, laid out as in `symmpool/comm.cuh`; where things lie in the control block |
//! | `specialty` | what kernels are compiled for, and which are ready before a communicator's first call |
//! | `modules` | compiled kernels, loaded once for all communicators of the process on a device |
//! | `kernels` | the kernels of one communicator, and their launch |
//! | `fault` | what a kernel tells the host when a peer is missing or differs |
//! | `api` | the functions of the CUDA driver library that this module calls |

mod algorithms;
mod all_to_all;
mod all_to_all_copied;
mod api;
mod copied;
mod engine;
mod fault;
mod grid;
mod kernels;
mod lengths;
mod modules;
mod order;
mod p2p;
mod params;
mod row_exchange;
mod rows;
mod select;
mod shape;
mod sharing;
mod sided;
mod slices;
mod specialty;
mod spread;
mod table;

pub(crate) use engine::{CudaEngine, CudaOptions, Ready};
pub use sharing::leave_room;
