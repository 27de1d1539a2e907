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
mod communicator;
mod cuda;
mod dtype;
mod experts;
mod float8;
mod fused;
mod host;
mod jit;
mod matching;
mod matmul;
mod p2p;
mod parts;
pub mod plan;
mod reduce_op;
mod signal;
mod timeout;

pub use algorithm::{
    Algorithm, AllReduceAlgorithm, AllToAllAlgorithm, CallShape, Constraints, LaunchShape,
    NativeKernel, Origin, StandardCollective,
};
pub use built::{built_from, kernel_versions};
pub use communicator::{
    CallPlan, ChannelSet, Communicator, CommunicatorMemory, CommunicatorOptions, ExpertBuffer,
    Explanation, ReceivedParts, Selector, Splits,
};
pub use cuda::{end_watching, share_sms};
pub use dtype::{DType, Element};
pub use experts::{
    CombineAt, DispatchAt, ExpertLayout, ExpertShape, HandleParts, Quantization, ReceivedSizes,
};
pub use float8::{F8E4m3, F8E5m2};
pub use fused::{FusedAlgorithm, NormBuffers, NormOutput, NormShape};
pub use host::{HostEngine, HostOptions, Mailbox, Operation, Place, SplitRows, SplitsAt};
pub use jit::{KernelCompiler, kernel_cache, kernel_compiler, search_packages};
pub use matmul::{
    MatmulAllReduce, MatmulGather, MatmulKind, MatmulScatter, MatmulShape, MatmulTerm, RightMatrix,
    Rows,
};
pub use reduce_op::ReduceOp;
