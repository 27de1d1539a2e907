//! Point-to-point messages of a communicator.

#![allow(unsafe_code)] // passes on addresses that tensors gave

use pyo3::prelude::*;

use crate::arguments::{Argument, Calls};
use crate::number::Number;
use crate::reading::Tensor;
use crate::stream;

/// `recv` if `receives`, else `send`.
pub(crate) fn send_or_recv(
    calls: &Calls,
    py: Python<'_>,
    receives: bool,
    tensor: Argument<'_, '_>,
    peer: Number<u32>,
    stream: Option<Argument<'_, '_>>,
) -> PyResult<()> {
    let peer = peer.or_raise(py, "peer")?;
    let stream = stream::resolve(py, calls.device, stream)?;
    let tensor = calls.read("tensor", tensor, receives).map_err(|why| why.raise(py))?;
    let Tensor { count, dtype, .. } = tensor;
    let comm = &calls.comm;
    calls.run(py, || {
        if receives {
            // SAFETY: the tensor has this length and type, is contiguous and on the pool's device; its frame keeps it alive.
            unsafe { comm.recv_at(tensor.to(), count, dtype, peer, &stream) }
        } else {
            // SAFETY: the tensor has this length and type, is contiguous and on the pool's device; its frame keeps it alive.
            unsafe { comm.send_at(tensor.from(), count, dtype, peer, &stream) }
        }
    })
}
