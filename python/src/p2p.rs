//! Point-to-point messages of a communicator.

#![allow(unsafe_code)] // passes on addresses that tensors gave

use pyo3::prelude::*;
use symmpool_allocator::Stream;

use crate::arguments::{Argument, CommunicatorCalls};
use crate::communicator::Communicator;
use crate::errors::{OrRaise, raised};
use crate::number::Number;
use crate::reading::{Refusal, Tensor};
use crate::stream;

/// The ranks that have sent a message which this one does not receive yet, on the CPU. Does not wait.
#[pyfunction(name = "_waiting_senders")]
pub(crate) fn waiting_senders(
    py: Python<'_>,
    comm: &Bound<'_, Communicator>,
) -> PyResult<Vec<u32>> {
    comm.get().calls().comm.waiting_senders().or_raise(py)
}

/// `recv` if `receives`, else `send`.
pub(crate) fn send_or_recv(
    calls: &CommunicatorCalls,
    py: Python<'_>,
    receives: bool,
    tensor: Argument<'_, '_>,
    peer: Number<u32>,
    stream: Option<Argument<'_, '_>>,
) -> PyResult<()> {
    let peer = peer.or_raise(py, if receives { "src" } else { "dst" })?;
    // First, as a refusal of arguments is reported to the peer, which a forked child must not do.
    calls.comm.check("a communicator").or_raise(py)?;
    let refuse = |stream, refusal| decline(calls, py, (receives, peer), stream, refusal);
    let stream = stream::resolve(py, calls.device, stream)
        .map_err(|error| refuse(Stream::DEFAULT, Refusal::Raised(error)))?;
    let tensor = calls.read("tensor", tensor, receives).map_err(|why| refuse(stream, why))?;
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

/// Reports to the peer that this rank refuses a message, which it sends or `receives`. The exception to raise.
#[cold]
fn decline(
    calls: &CommunicatorCalls,
    py: Python<'_>,
    (receives, peer): (bool, u32),
    stream: Stream,
    refusal: Refusal,
) -> PyErr {
    let (why, comm) = (refusal.to_error(), &calls.comm);
    let error = py.detach(|| {
        if receives {
            comm.decline_recv(why, peer, &stream)
        } else {
            comm.decline_send(why, peer, &stream)
        }
    });
    // Why the communicator has failed, if it has, comes first.
    if error.is_invalid_argument() { refusal.raise(py) } else { raised(py, &error) }
}

/// Refuses a message for a reason of the caller's.
#[cold]
pub(crate) fn decline_message(
    calls: &CommunicatorCalls,
    py: Python<'_>,
    end: (bool, u32),
    why: String,
    stream: Option<Argument<'_, '_>>,
) -> PyErr {
    let found = calls.comm.check("a communicator").or_raise(py);
    match found.and_then(|()| stream::resolve(py, calls.device, stream)) {
        Ok(stream) => decline(calls, py, end, stream, Refusal::Invalid(why)),
        Err(error) => error,
    }
}
