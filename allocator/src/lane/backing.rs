//! Requests of a lane to the outside: physical memory and stream events.

use super::segments::Growth;
use crate::Result;
use crate::driver::{Event, Stream};

/// Source of a lane's physical memory and stream events. A backing never decides where something is placed.
pub trait Backing {
    /// Called when a commit has become due: the lane is about to grow, or enough deferred frees wait. It is
    /// called before anything that can fail, so at the same event on every rank.
    fn due(&mut self) {}
    /// Makes and moves segments: all of `growth`, or none on an error.
    fn grow(&mut self, growth: &Growth) -> Result<()>;
    /// Records an event on `stream`.
    fn record(&mut self, stream: Stream) -> Result<Event>;
    /// Makes `stream` wait for `event`, on the device.
    fn wait(&mut self, stream: Stream, event: &Event) -> Result<()>;
    /// Whether `stream` is being captured into a graph.
    fn is_capturing(&self, _stream: Stream) -> bool {
        false
    }
    /// Destroys an event.
    fn release(&mut self, event: Event);
}

/// A backing without memory: for planning, and for tests of the arithmetic.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoBacking;

impl Backing for NoBacking {
    fn grow(&mut self, _growth: &Growth) -> Result<()> {
        Ok(())
    }

    fn record(&mut self, _stream: Stream) -> Result<Event> {
        Ok(Event::numbered(0))
    }

    fn wait(&mut self, _stream: Stream, _event: &Event) -> Result<()> {
        Ok(())
    }

    fn release(&mut self, _event: Event) {}
}
