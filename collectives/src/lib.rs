//! Collectives on symmetric memory, between the ranks that share it.
//!
//! Programs use a [`Communicator`], which runs collectives on the blocks of a pool.
//!
//! [`HostEngine`] runs them in host memory: ranks are processes, the heap is shared pages, and signals are atomics in
//! them. Every wait is bounded. If ranks make different calls, all of them get an error before data is accessed.
//! Results have the same bits on every rank, in every run and with every algorithm.

#![deny(unsafe_code)]

// Some unit tests share plans with tests from outside.
#[cfg(test)]
extern crate self as symmpool_collectives;

mod algorithm;
mod built;
mod call;
mod communicator;
mod cuda;
mod engine;
mod host;
mod jit;
mod matching;
mod outer;
pub mod plan;
mod signal;
mod spanning;
mod sync;
mod types;

#[cfg(feature = "testing")]
#[doc(hidden)]
pub use algorithm::read_table;
pub use algorithm::{
    Algorithm, AlgorithmOrigin, AllReduceAlgorithm, AllToAllAlgorithm, CallShape, Constraints,
    LaunchShape, NativeKernel, StandardCollective,
};
pub use built::{built_from, kernel_versions};
pub use call::experts::{
    CombineAt, DispatchAt, ExpertLayout, ExpertQuantization, ExpertShape, HandleParts,
    ReceivedSizes,
};
pub use call::matmul::shape::{MatmulKind, MatmulShape};
pub use call::matmul::{
    MatmulAllReduce, MatmulGather, MatmulScatter, MatmulTerm, MatrixView, RightMatrix,
};
pub use call::norm::{FusedAlgorithm, NormBuffers, NormShape};
pub use call::norm_output::NormOutput;
pub use call::splits::{SplitRows, SplitsAt};
pub use communicator::{
    CallPlan, Callee, ChannelSet, Communicator, CommunicatorOptions, ExpertBuffer, Explanation,
    GroupOffer, ReceivedParts, Request, Selector, Splits,
};
#[cfg(feature = "testing")]
pub use cuda::take_sms;
#[doc(hidden)]
pub use cuda::{Cases, CheckedAllReduce, ScatterCases, checked_exchanges, checked_reduce_scatters};
pub use cuda::{end_watching, share_sms, share_sms_of_several};
pub use host::{Arrivals, GroupKey, HostEngine, HostEngineOptions, Mailbox, PendingMessage};
#[cfg(feature = "testing")]
pub use host::{CallStep, watch_call_steps};
pub use jit::{KernelCompiler, kernel_cache, kernel_compiler, search_packages};
pub use outer::{Outer, Outers, Ticket, Transfer};
pub use types::communicator_memory::CommunicatorMemory;
pub use types::dtype::{DType, Element};
pub use types::float8::{F8E4m3, F8E5m2};
pub use types::phase_times::PhaseTimes;
pub use types::place::Place;
pub use types::reduce_op::ReduceOp;
