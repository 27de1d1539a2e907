//! The streams of calls, as Python programs name them.

#![allow(unsafe_code)] // makes a stream from a handle that the program gave

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyInt;
use symmpool_allocator::{Stream, short};

use crate::convert::MemoryDevice;
use crate::torch::torch;

/// The stream of a call: a raw handle, an object with one (`torch.cuda.Stream`), or torch's current
/// one. The CPU has none.
#[inline]
pub(crate) fn resolve(
    py: Python<'_>,
    device: MemoryDevice,
    stream: Option<&Bound<'_, PyAny>>,
) -> PyResult<Stream> {
    let MemoryDevice::Cuda(ordinal) = device else {
        return stream.map_or(Ok(()), is_stream).map(|()| Stream::DEFAULT);
    };
    let raw = match stream {
        Some(stream) => raw_stream(stream)?,
        None => match torch(py) {
            Some(torch) => torch.current_stream(py, ordinal)?,
            None => 0,
        },
    };
    Ok(from_handle(raw))
}

/// The stream that a program names by its handle.
pub(crate) fn from_handle(raw: u64) -> Stream {
    // SAFETY: the program's duty, documented at `Pool.forget_stream`: a stream lives until every
    // object that it was given to is gone or has forgotten it. Python has no `unsafe` to say so
    // with. torch's streams live as long as the process.
    unsafe { Stream::from_raw(raw) }
}

/// Refuses what is no stream of any device. The CPU needs none, and takes whichever.
#[cold]
fn is_stream(stream: &Bound<'_, PyAny>) -> PyResult<()> {
    let name = stream.get_type().name()?;
    if stream.is_instance_of::<PyInt>() || name.to_cow()?.ends_with("Stream") {
        return Ok(());
    }
    raw_stream(stream).map(drop)
}

fn raw_stream(stream: &Bound<'_, PyAny>) -> PyResult<u64> {
    let handle = || match stream.is_instance_of::<PyInt>() {
        true => stream.extract(),
        false => stream.getattr(intern!(stream.py(), "cuda_stream"))?.extract(),
    };
    handle().map_err(|_: PyErr| {
        PyTypeError::new_err(format!(
            "stream: a raw handle, or an object with one as cuda_stream, is needed, not {}",
            short(&format!("{stream:?}"))
        ))
    })
}
