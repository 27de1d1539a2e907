//! The loops over memory: reduce several sources into several destinations, and copy.
//!
//! All pointers are raw. Shared memory is never turned into a reference here: that peers do not
//! write what is being read is promised by the signals around a kernel (rule S3), not by types.

#![allow(unsafe_code)] // raw loops over memory that other processes share

mod convert;
mod copy;
mod elementwise;
mod environment;
mod reduce;

pub(crate) use copy::{copy, copy_own, copy_streaming, prepare_to_copy};
pub(crate) use reduce::{Isa, ReduceFn, select};
