//! Point-to-point messages of a group's ranks, by mailboxes: see [`symmpool_collectives::Mailbox`].

#![allow(unsafe_code)] // passes on addresses that tensors gave

use std::any::Any;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use symmpool_collectives as collectives;

use crate::arguments::Argument;
use crate::convert::MemoryDevice;
use crate::errors::{OrRaise, exception, is_interrupted, seconds};
use crate::number::Number;
use crate::reading::Tensor;
use crate::tensor;

/// A rank's messages to and from other ranks of a group on this machine.
#[pyclass(frozen, module = "symmpool._symmpool")]
pub(crate) struct Mailbox(collectives::Mailbox);

/// A send or a receive that was begun.
#[pyclass(frozen, module = "symmpool._symmpool")]
pub(crate) struct PendingMessage(collectives::PendingMessage);

fn read(tensor: Argument<'_, '_>, write: bool) -> PyResult<(Tensor, Box<dyn Any + Send + Sync>)> {
    let found = tensor::read("tensor", tensor, MemoryDevice::Cpu, write)
        .map_err(|refusal| refusal.raise(tensor.py()))?;
    Ok((found, Box::new(tensor.clone().unbind())))
}

#[pymethods]
impl Mailbox {
    #[new]
    fn new(py: Python<'_>, rank: Number<u32>, world: Number<u32>, timeout: f64) -> PyResult<Self> {
        let (rank, world) = (rank.or_raise(py, "rank")?, world.or_raise(py, "world")?);
        let timeout = seconds(py, "timeout", timeout)?;
        collectives::Mailbox::new(rank, world, timeout, Some(Arc::new(is_interrupted)))
            .map(Self)
            .or_raise(py)
    }

    /// Returns the address by which other ranks find this mailbox.
    fn address<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.0.address().or_raise(py)?))
    }

    /// Takes the addresses of all ranks. Returns why they cannot have messages by mailboxes, or None.
    fn connect(&self, addresses: Argument<'_, '_>) -> PyResult<Option<String>> {
        let found: Vec<Vec<u8>> = addresses.extract()?;
        self.0.connect(&found).or_raise(addresses.py())
    }

    /// Sets how long operations that are waited for from now on may take, in seconds.
    fn set_timeout(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        self.0.set_timeout(seconds(py, "timeout", timeout)?);
        Ok(())
    }

    /// Begins to send a contiguous tensor of the CPU, which is held until it is not needed any more.
    fn send(
        &self,
        py: Python<'_>,
        tensor: Argument<'_, '_>,
        peer: u32,
        tag: i64,
    ) -> PyResult<PendingMessage> {
        let (found, held) = read(tensor, false)?;
        let Tensor { count, dtype, .. } = found;
        // Without the interpreter, whose lock a thread may wait for that holds the mailbox's.
        // SAFETY: the tensor has this length and type, is contiguous and in host memory; the operation holds it, and that
        // nobody writes it meanwhile is the contract of torch's `isend`.
        let begun =
            py.detach(|| unsafe { self.0.send((found.from(), count, dtype), peer, tag, held) });
        begun.map(PendingMessage).or_raise(py)
    }

    /// Begins to receive into a contiguous tensor of the CPU; without a peer, from any rank.
    fn recv(
        &self,
        py: Python<'_>,
        tensor: Argument<'_, '_>,
        peer: Option<u32>,
        tag: i64,
    ) -> PyResult<PendingMessage> {
        let (found, held) = read(tensor, true)?;
        let Tensor { count, dtype, .. } = found;
        // SAFETY: the tensor has this length and type, and `held` keeps it alive until the operation ends; nobody
        // else touches it, which is the contract of torch's `irecv`.
        let begun =
            py.detach(|| unsafe { self.0.recv((found.to(), count, dtype), peer, tag, held) });
        begun.map(PendingMessage).or_raise(py)
    }

    /// Ends all messages with an error, and all later calls.
    fn end(&self, py: Python<'_>) {
        py.detach(|| self.0.end());
    }
}

#[pymethods]
impl PendingMessage {
    /// Waits until it has ended. Returns the other rank. With `limit`, in seconds, a wait that takes longer leaves it as
    /// it is.
    #[pyo3(signature = (limit=None))]
    fn wait(&self, py: Python<'_>, limit: Option<f64>) -> PyResult<u32> {
        let limit = limit.map(|limit| seconds(py, "timeout", limit)).transpose()?;
        py.detach(|| self.0.wait(limit)).or_raise(py)
    }

    /// Whether it has ended. Does not wait.
    fn is_done(&self, py: Python<'_>) -> bool {
        py.detach(|| self.0.is_done())
    }

    /// The exception that it has ended with, if it has.
    fn exception(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let error = self.0.outcome()?.err()?;
        Some(exception(py, &error).into_value(py).into_any())
    }
}
