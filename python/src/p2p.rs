//! Point-to-point messages of a communicator.

#![allow(unsafe_code)] // passes on addresses that tensors gave

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::arguments::{Argument, Calls};
use crate::convert::deprecated;
use crate::number::Number;
use crate::reading::Tensor;
use crate::stream;

/// The other rank of a message. `name` is torch's word for it, `dst` or `src`; `peer` is the former one.
pub(crate) fn peer_of(
    py: Python<'_>,
    call: &str,
    name: &str,
    rank: Option<Number<u32>>,
    peer: Option<Number<u32>>,
) -> PyResult<u32> {
    match (rank, peer) {
        (Some(rank), None) => rank.or_raise(py, name),
        (None, Some(peer)) => {
            deprecated(py, &format!("peer of Communicator.{call}"), name)?;
            peer.or_raise(py, "peer")
        }
        (None, None) => Err(PyTypeError::new_err(format!(
            "{call}: {name} is missing, the rank of the other side"
        ))),
        (Some(_), Some(_)) => Err(PyTypeError::new_err(format!(
            "{call}: {name} and its former name peer are both given"
        ))),
    }
}

/// `recv` if `receives`, else `send`.
pub(crate) fn send_or_recv(
    calls: &Calls,
    py: Python<'_>,
    receives: bool,
    tensor: Argument<'_, '_>,
    peer: u32,
    stream: Option<Argument<'_, '_>>,
) -> PyResult<()> {
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
