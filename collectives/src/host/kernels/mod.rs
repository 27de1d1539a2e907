//! The loops over memory: reductions of several sources into several destinations, and copies.
//!
//! All pointers are raw, and shared memory is never turned into a reference here: it is the signals around a loop
//! (rule S3) that keep peers from writing what it reads, not types.

#![allow(unsafe_code)] // raw loops over memory that other processes share

mod convert;
mod copy;
mod elementwise;
mod expert_rows;
mod float_environment;
mod norm;
mod reduce;
mod row_sums;

pub(crate) use copy::{copy, copy_own, copy_streaming, prepare_to_copy};
pub(crate) use expert_rows::ExpertRows;
pub(crate) use norm::{RowIn, narrow_row, norm_row, widen_row};
pub(crate) use reduce::{Isa, ReduceFn, moves_only, select};
