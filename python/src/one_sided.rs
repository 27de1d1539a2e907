//! One-sided operations of a communicator: copies and signals between two ranks, by kernels or without.

#![allow(unsafe_code)] // passes on addresses that tensors gave

use pyo3::prelude::*;

use crate::arguments::{Argument, CommunicatorCalls};
use crate::convert::long_name;
use crate::errors::invalid;
use crate::number::Number;
use crate::stream;

/// The copies. The end that is named last is the other rank's.
#[derive(Clone, Copy)]
pub(crate) enum Way {
    Put,
    Get,
}

/// Whether an engine is the other one than "kernel".
fn is_other(py: Python<'_>, engine: &str, other: &str) -> PyResult<bool> {
    if engine == "kernel" || engine == other {
        return Ok(engine == other);
    }
    Err(invalid(py, format!("engine: {engine:?} is none of \"kernel\" and {other:?}")))
}

/// `put` or `get`: between a tensor of this rank and what `peer` has at the address of the other one.
pub(crate) fn copy(
    calls: &CommunicatorCalls,
    py: Python<'_>,
    way: Way,
    (dst, src): (Argument<'_, '_>, Argument<'_, '_>),
    peer: Number<u32>,
    engine: &str,
    stream: Option<Argument<'_, '_>>,
) -> PyResult<()> {
    let by_copy_engine = is_other(py, engine, "copy")?;
    let peer = peer.or_raise(py, "peer")?;
    let stream = stream::resolve(py, calls.device, stream)?;
    let read = |name, tensor, write| calls.read(name, tensor, write).map_err(|why| why.raise(py));
    let (to, from) = (read("dst", dst, true)?, read("src", src, false)?);
    if (to.dtype, to.count) != (from.dtype, from.count) {
        let text = format!(
            "dst: {} elements of {}, and src: {} of {}; pass parts of equal length and type",
            to.count,
            long_name(to.dtype),
            from.count,
            long_name(from.dtype)
        );
        return Err(invalid(py, text));
    }
    let bytes = to.count * to.dtype.size();
    calls.run(py, || {
        let (comm, to, from) = (&calls.comm, to.to(), from.from());
        match (way, by_copy_engine) {
            // SAFETY: both are tensors of so many bytes, contiguous, on the pool's device, which the caller's frame
            // keeps alive for the length of the call; how long a stream needs them, and who else may touch
            // them, is the documented contract of `put` and `get`. So it is in all four.
            (Way::Put, false) => unsafe { comm.put_at(to, from, bytes, peer, &stream) },
            // SAFETY: both are contiguous tensors of `bytes` bytes on the pool's device, alive for the call by the
            // caller's frame.
            (Way::Put, true) => unsafe {
                comm.put_by_copy_engine_at(to, from, bytes, peer, &stream)
            },
            // SAFETY: both are contiguous tensors of `bytes` bytes on the pool's device, alive for the call by the
            // caller's frame.
            (Way::Get, false) => unsafe { comm.get_at(to, from, bytes, peer, &stream) },
            // SAFETY: both are contiguous tensors of `bytes` bytes on the pool's device, alive for the call by the
            // caller's frame.
            (Way::Get, true) => unsafe {
                comm.get_by_copy_engine_at(to, from, bytes, peer, &stream)
            },
        }
    })
}

/// `signal`, or `wait` if there is a timeout.
pub(crate) fn signal_or_wait(
    calls: &CommunicatorCalls,
    py: Python<'_>,
    (peer, channel): (Number<u32>, Number<u32>),
    timeout: Option<Number<f64>>,
    engine: &str,
    stream: Option<Argument<'_, '_>>,
) -> PyResult<()> {
    let by_memory = is_other(py, engine, "memory")?;
    let (peer, channel) = (peer.or_raise(py, "peer")?, channel.or_raise(py, "channel")?);
    let timeout = timeout.map(|timeout| timeout.seconds(py, "timeout")).transpose()?;
    let stream = stream::resolve(py, calls.device, stream)?;
    calls.run(py, || match (timeout, by_memory) {
        (None, false) => calls.comm.signal(peer, channel, &stream),
        (None, true) => calls.comm.signal_by_memory(peer, channel, &stream),
        (Some(timeout), false) => calls.comm.wait(peer, channel, timeout, &stream),
        (Some(timeout), true) => calls.comm.wait_by_memory(peer, channel, timeout, &stream),
    })
}
