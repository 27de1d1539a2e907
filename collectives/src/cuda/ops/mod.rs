//! Collectives and operations on a device.
//!
//! | file | holds |
//! | --- | --- |
//! | `all_reduce` | all-reduce: checks of a call, and launches for its algorithms |
//! | `reduce_scatter` | reduce-scatter: which kernels it launches |
//! | `all_gather_broadcast` | all-gathers and broadcasts: in the LL protocol, or as all-to-alls |
//! | `all_to_all` | all-to-alls: what their kernel is given |
//! | `copy_engine` | collectives whose data copy engines carry |
//! | `norm` | all-reduces with a residual and a norm |
//! | `experts` | dispatch to experts, and combine |
//! | `gemm` | products of tensor cores: of gathered rows, or added up over all ranks |
//! | `local` | copies and reductions of this rank's own memory, for calls over hosts |
//! | `one_sided` | copies and signals between two ranks |
//! | `p2p` | send and recv between two ranks |
//! | `plan`, `plan_kernel`, `native` | run collectives that programs bring along: plans, by kernels made for them, and kernels |
//! | `algorithms` | which algorithms an engine has for a call |
//! | `await_recv_counts` | the wait for how many rows a dispatch to experts receives |
//! | `arguments` | checks of what calls are given |

pub(in crate::cuda) mod algorithms;
pub(in crate::cuda) mod all_gather_broadcast;
pub(in crate::cuda) mod all_reduce;
pub(in crate::cuda) mod all_to_all;
pub(in crate::cuda) mod arguments;
pub(in crate::cuda) mod await_recv_counts;
pub(in crate::cuda) mod copy_engine;
pub(in crate::cuda) mod experts;
pub(in crate::cuda) mod gemm;
pub(in crate::cuda) mod local;
pub(in crate::cuda) mod native;
pub(in crate::cuda) mod norm;
pub(in crate::cuda) mod one_sided;
pub(in crate::cuda) mod p2p;
pub(in crate::cuda) mod plan;
pub(in crate::cuda) mod plan_kernel;
pub(in crate::cuda) mod reduce_scatter;
