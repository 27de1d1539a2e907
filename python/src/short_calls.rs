//! The short way of torch's backend: calls on the current stream, if a communicator takes the arguments as they are.
//! Each function returns false where it does not, without a word to the other ranks; the backend plans the call then.
//! None says to autograd what it writes to, as torch decides that for its backends.

#![allow(unsafe_code)] // passes on addresses that tensors gave

use pyo3::prelude::*;
use symmpool_collectives::ReduceOp::{self, Sum as SUM};
use symmpool_collectives::StandardCollective::{
    self, AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter,
};

use crate::arguments::{Argument, RankContext};
use crate::communicator::Communicator;
use crate::number::Number;
use crate::reading::{Refusal, Tensor};

/// Arguments of a call that a communicator takes: the output, the input, and the elements of a part.
struct Taken {
    output: Tensor,
    input: Tensor,
    count: usize,
    op: ReduceOp,
    root: u32,
}

/// Makes a call of `collective`, if its arguments can be read.
#[inline]
fn make(
    comm: &Bound<'_, Communicator>,
    collective: StandardCollective,
    read: impl FnOnce(&RankContext) -> Result<Taken, Refusal>,
) -> PyResult<bool> {
    let (py, calls) = (comm.py(), comm.get().calls());
    let stream = calls.stream(py, None)?;
    let Ok(Taken { output, input, count, op, root }) = read(calls) else { return Ok(false) };
    let which = (collective, None, op, root);
    // SAFETY: `read` has found contiguous tensors on the pool's device, of the lengths that the collective has for this
    // count; the caller's frame keeps them alive for the call, and the documented contract of the class says how long a
    // stream needs them.
    unsafe { calls.make(py, which, (output, input), count, stream) }?;
    Ok(true)
}

/// Reduces a tensor in place.
#[pyfunction]
pub(crate) fn try_all_reduce(
    comm: &Bound<'_, Communicator>,
    tensor: Argument<'_, '_>,
    op: Argument<'_, '_>,
) -> PyResult<bool> {
    make(comm, AllReduce, |calls| {
        let (input, output, op) = calls.of_all_reduce(tensor, Some(op), None)?;
        Ok(Taken { output, input, count: input.count, op, root: 0 })
    })
}

/// Copies rank `src`'s tensor into every other rank's.
#[pyfunction]
pub(crate) fn try_broadcast(
    comm: &Bound<'_, Communicator>,
    tensor: Argument<'_, '_>,
    src: Number<u32>,
) -> PyResult<bool> {
    make(comm, Broadcast, |calls| {
        let (found, root) = calls.of_broadcast(tensor, src)?;
        Ok(Taken { output: found, input: found, count: found.count, op: SUM, root })
    })
}

/// Gathers all ranks' `input` in `output`.
#[pyfunction]
pub(crate) fn try_all_gather(
    comm: &Bound<'_, Communicator>,
    output: Argument<'_, '_>,
    input: Argument<'_, '_>,
) -> PyResult<bool> {
    make(comm, AllGather, |calls| {
        let (input, output) = calls.of_all_gather(output, input)?;
        Ok(Taken { output, input, count: input.count, op: SUM, root: 0 })
    })
}

/// Reduces all ranks' `input`, and leaves this rank's part in `output`.
#[pyfunction]
pub(crate) fn try_reduce_scatter(
    comm: &Bound<'_, Communicator>,
    output: Argument<'_, '_>,
    input: Argument<'_, '_>,
    op: Argument<'_, '_>,
) -> PyResult<bool> {
    make(comm, ReduceScatter, |calls| {
        let (input, output, op) = calls.of_reduce_scatter(output, input, Some(op))?;
        Ok(Taken { output, input, count: output.count, op, root: 0 })
    })
}

/// Exchanges equal parts of tensors.
#[pyfunction]
pub(crate) fn try_all_to_all(
    comm: &Bound<'_, Communicator>,
    output: Argument<'_, '_>,
    input: Argument<'_, '_>,
) -> PyResult<bool> {
    make(comm, AllToAll, |calls| {
        let (output, input, count) = calls.equal_parts_of(output, input)?;
        Ok(Taken { output, input, count, op: SUM, root: 0 })
    })
}
