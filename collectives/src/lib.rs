//! Collectives on symmetric memory, between ranks that share it.
//!
//! A [`Communicator`] runs them on the blocks of a pool, and is what programs use.
//!
//! [`HostEngine`] is what runs them in host memory: ranks are processes, the heap is shared pages, signals
//! are atomics in them. Every wait is bounded, every difference between what ranks call is an error
//! on all of them before data is touched, and results have the same bits on every rank, in every
//! run and with every algorithm.

#![deny(unsafe_code)]

mod algorithm;
mod communicator;
mod cuda;
mod dtype;
mod float8;
mod former_names;
mod host;
mod jit;
mod p2p;
mod reduce_op;
mod row_exchange;
mod signal;
mod timeout;

pub use algorithm::{AllReduceAlgorithm, AllToAllAlgorithm};
pub use communicator::{
    Communicator, CommunicatorOptions, Received, RowExchange, RowLayout, RowsAt, Splits,
};
pub use cuda::leave_room;
pub use dtype::{DType, Element};
pub use float8::{F8E4m3, F8E5m2};
pub use host::{HostEngine, HostOptions, Place, SplitRows, SplitsAt};
pub use jit::{KernelCompiler, kernel_cache, kernel_compiler};
pub use reduce_op::ReduceOp;
pub use row_exchange::RowShape;
