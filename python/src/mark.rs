//! The class `StreamPosition`, for calls on streams that nobody waits for at once.

use pyo3::prelude::*;
use symmpool_allocator::{Driver, Result, Stream};

use crate::convert::MemoryDevice;
use crate::errors::OrRaise;
use crate::fork_guarded::ForkGuarded;
use crate::stream;

/// How far a stream was when this was made: what was given to it until then. On the CPU, where work
/// is done when its call returns, there is never anything to wait for.
#[pyclass(frozen, module = "symmpool")]
pub(crate) struct StreamPosition {
    event: ForkGuarded<OwnedEvent>,
    device: MemoryDevice,
}

/// An event, given back when it is dropped.
struct OwnedEvent {
    driver: Driver,
    /// `None` only while dropping.
    event: Option<symmpool_allocator::driver::Event>,
}

impl OwnedEvent {
    fn get(&self) -> &symmpool_allocator::driver::Event {
        self.event.as_ref().expect("there until dropped")
    }
}

impl Drop for OwnedEvent {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            self.driver.release_event(event);
        }
    }
}

impl StreamPosition {
    pub(crate) fn new(driver: &Driver, device: MemoryDevice, stream: Stream) -> Result<Self> {
        let event = driver.record_event(stream)?;
        let event = ForkGuarded::new(OwnedEvent { driver: driver.clone(), event: Some(event) });
        Ok(Self { event, device })
    }

    /// Makes what `follower` gets from now on wait for what `stream` was given so far.
    pub(crate) fn follow(
        driver: &Driver,
        device: MemoryDevice,
        (stream, follower): (Stream, Stream),
    ) -> Result<()> {
        Self::new(driver, device, stream)?.hold(follower)
    }

    /// Makes later work of `stream` wait, on the device.
    fn hold(&self, stream: Stream) -> Result<()> {
        self.event.check("a mark")?;
        self.event.driver.wait_event(stream, self.event.get())
    }
}

#[pymethods]
impl StreamPosition {
    /// Makes what `stream` (torch's current one unless given) gets from now on wait until the marked
    /// stream has come this far. Waits for nothing itself. Where that stream is being captured in a
    /// graph and this mark is outside of it, the marked stream must have come this far already; if it
    /// has not, it is an InvalidStateError, and the capture goes on.
    #[pyo3(signature = (stream = None))]
    fn wait(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let stream = stream::resolve(py, self.device, stream)?;
        self.hold(stream).or_raise(py)
    }

    /// Whether the marked stream has come this far. Does not wait. False of a mark in a graph.
    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        self.event.check("a mark").or_raise(py)?;
        self.event.driver.is_event_done(self.event.get()).or_raise(py)
    }
}
