//! The CUDA backend: collectives as kernels on a stream, over the windows of a pool on a device.
//!
//! | file | holds |
//! | --- | --- |
//! | `engine` | one rank's side of a communicator: its state, and what every call does |
//! | `reductions`, `reduce_scatter` | all-reduce and reduce-scatter: which kernels they launch |
//! | `all_reduce_copy`, `all_reduce_pieces` | all-reduces carried by copy engines: with the device to themselves, and beside compute |
//! | `reduce_scatter_copy` | reduce-scatters carried by copy engines |
//! | `copied` | what copy engines have carried, and the kernel that reduces it |
//! | `copy_pieces` | pieces of data that copy engines carry through scratch beside compute |
//! | `all_gather_broadcast` | all-gathers and broadcasts: in the LL protocol, or as all-to-alls |
//! | `all_gather_pieces` | all-gathers carried by copy engines into ordinary memory |
//! | `all_to_all` | all-to-alls: what their kernel is given |
//! | `all_to_all_copy` | all-to-alls and all-gathers carried by copy engines |
//! | `fused` | all-reduces with a residual and a norm |
//! | `experts` | dispatch to experts, and combine |
//! | `matmul` | products of tensor cores: of gathered rows, or added up over all ranks |
//! | `one_sided` | copies and signals between two ranks |
//! | `memory_operations` | signals and waits that take no SM, and the thread that ends such waits |
//! | `p2p` | send and recv between two ranks |
//! | `plan`, `native` | run collectives that programs bring along: plans, by kernels made for them, and kernels |
//! | `arguments` | checks of what calls are given |
//! | `select` | which algorithm serves an all-reduce |
//! | `algorithms` | the built-in algorithms: what fits each, and how it is launched |
//! | `constraints` | what decides which all-reduce can serve a call |
//! | `table` | what was measured on known devices |
//! | `launch_config` | how many blocks of how many threads a kernel gets |
//! | `sm_budget` | how much of a device a communicator's kernels may occupy |
//! | `stream_order` | keeps a communicator's calls in order, whatever streams they are on |
//! | `footprint` | how much memory a communicator takes of its device, and what each part gets |
//! | `params` | what kernels are given, laid out as in `symmpool/comm.cuh`; the layout of the control block |
//! | `kernel_mode` | what a kernel is compiled to do, where its file can do several things |
//! | `kernel_spec` | what a kernel is compiled for; which kernels are ready before a communicator's first call |
//! | `modules` | compiled kernels, loaded once for all communicators of the process on a device |
//! | `made` | kernels whose sources are no files of ours |
//! | `kernels` | the kernels of one communicator, and their launch |
//! | `fault` | what a kernel reports to the host when a peer is missing or differs |
//! | `sizes` | how many rows a dispatch to experts receives, which the host learns before they have arrived |
//! | `words` | words of pinned memory, which the device writes |
//! | `api` | the functions of the CUDA driver library that this module calls |

mod algorithms;
mod all_gather_broadcast;
mod all_gather_pieces;
mod all_reduce_copy;
mod all_reduce_pieces;
mod all_to_all;
mod all_to_all_copy;
mod api;
mod arguments;
mod constraints;
mod copied;
mod copy_pieces;
mod engine;
mod experts;
mod failure;
mod fault;
mod footprint;
mod fused;
mod kernel_mode;
mod kernel_spec;
mod kernels;
mod launch_config;
mod made;
mod matmul;
mod memory_operations;
mod modules;
mod native;
mod native_compile;
mod one_sided;
mod p2p;
mod params;
mod plan;
mod plan_kernel;
mod reduce_scatter;
mod reduce_scatter_copy;
mod reductions;
mod rehearsal;
mod select;
mod sizes;
mod sm_budget;
mod stream_order;
mod table;
mod words;

pub(crate) use constraints::fits_lamport;
pub(crate) use engine::{Area, CudaEngine, CudaOptions, ReadyKernels};
pub(crate) use failure::Failure as CudaFailure;
pub(crate) use footprint::{
    Footprint, Requested as RequestedMemory, VARIABLE as MEMORY_VARIABLE, as_text, check_total,
    communicator_bytes, growing_bytes, requested_total,
};
pub use memory_operations::end_watching;
pub(crate) use rehearsal::{Lifts, Rehearsed};
pub(crate) use sm_budget::BudgetOptions;
pub use sm_budget::share_sms;
