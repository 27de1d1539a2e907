//! The order of a communicator's calls, which run one after the other whatever streams they are on.
//!
//! A call comes behind the call before it, and behind nothing else on that one's stream: what follows there
//! may wait for a peer that waits for this call. So an event, the mark, is recorded behind a call as soon as
//! something that waits for a peer may follow: behind every operation on a channel; behind a call of all
//! ranks when other communicators' calls may be under way beside it, or before a channel's wait goes on its
//! stream, or when the program says that the stream is about to be gone. Recording takes the host 0.4 us, and
//! keeps the stream's next kernel from taking its places early; calls on one stream do without. If a call on
//! another stream comes first, it waits for all that is on the last one's stream, which lives, as whoever made
//! it of a raw handle promised.
//!
//! What is captured waits for nothing that was not captured: CUDA has no place for that in a graph, done or
//! not. Whoever launches the graph orders it. And it leaves the order of calls outside graphs as it was.

#![allow(unsafe_code)] // FFI: an event by its handle

use symmpool_allocator::driver::{CudaDriver, MemoryDriver};
use symmpool_allocator::{Error, Result, Stream};

use super::api::{Api, Handle};

/// Makes a stream wait for what another one has been given, in graphs too.
pub(super) fn fork(driver: &dyn MemoryDriver, from: Stream, to: Stream) -> Result<()> {
    let event = driver.record_event(from)?;
    let waited = driver.wait_event(to, &event);
    driver.release_event(event);
    waited
}

/// Where the last call outside graphs is. What is captured is ordered by whoever launches the graph.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// Its stream, unless that was forgotten.
    last: Option<Stream>,
    /// An event, once there was need for one,
    mark: Option<Handle>,
    /// and whether it is behind the last call. If not, the next one on another stream waits for all that is
    /// on the last one's.
    marked: bool,
    /// Whether graphs have calls, as far as it shows: they are behind the last one's stream if on it.
    in_graphs: bool,
}

impl Order {
    /// What is put on `stream` from now on is behind the last call.
    #[inline]
    pub(super) fn turn_to(&mut self, api: &Api, driver: &CudaDriver, stream: Stream) -> Result<()> {
        if self.last == Some(stream) {
            return Ok(());
        }
        self.turn(api, driver, stream)
    }

    fn turn(&mut self, api: &Api, driver: &CudaDriver, stream: Stream) -> Result<()> {
        let handle = driver.stream_handle(stream)?;
        if driver.is_capturing(stream) {
            self.in_graphs = true;
            return Ok(());
        }
        match (self.last, self.mark) {
            (_, Some(mark)) if self.marked => {
                // SAFETY: the event is this value's, until `end`; the stream is live, as whoever made it of
                // a raw handle promised.
                let wait = || unsafe { (api.stream_wait)(handle, mark, 0) };
                let text = || "making a stream wait for a communicator's last call".to_owned();
                driver.with_context(|| CudaDriver::check(wait(), text))?;
            }
            (Some(last), _) if driver.is_capturing(last) => {
                return Err(captured(last, "make a call on another stream"));
            }
            (Some(last), _) => fork(driver, last, stream)?,
            (None, _) => {}
        }
        (self.last, self.marked) = (Some(stream), false);
        Ok(())
    }

    /// A kernel of a call was put on `stream`. If others' calls may be under way beside it, what comes behind
    /// it there is nothing that the next call may wait for: on other ranks that may wait for this call.
    #[inline]
    pub(super) fn called(&mut self, api: &Api, driver: &CudaDriver, stream: Stream, beside: bool) {
        if self.last != Some(stream) || (self.marked && self.is_in_graph(driver, stream)) {
            return;
        }
        self.marked = false;
        if beside && !self.in_graphs && !self.is_in_graph(driver, stream) {
            self.mark_behind(api, driver, stream);
        }
    }

    /// A kernel of an operation on a channel was put on `stream`: a wait may follow, on any channel.
    pub(super) fn operated(&mut self, api: &Api, driver: &CudaDriver, stream: Stream) {
        if self.last == Some(stream) && !self.is_in_graph(driver, stream) {
            self.mark_behind(api, driver, stream);
        }
    }

    /// What comes next on `stream` waits for a peer, which may wait for the call behind the last one.
    pub(super) fn before_a_wait(&mut self, api: &Api, driver: &CudaDriver, stream: Stream) {
        if self.last == Some(stream) && !self.marked && !self.is_in_graph(driver, stream) {
            self.mark_behind(api, driver, stream);
        }
    }

    /// Never touches `stream` again, which lives still, unless a call names it.
    pub(super) fn forget(&mut self, api: &Api, driver: &CudaDriver, stream: Stream) -> Result<()> {
        if self.last != Some(stream) {
            return Ok(());
        }
        if !self.marked {
            if driver.is_capturing(stream) {
                return Err(captured(stream, "forget it"));
            }
            driver.with_context(|| self.record(api, driver, stream))?;
        }
        (self.last, self.marked) = (None, true);
        Ok(())
    }

    fn is_in_graph(&mut self, driver: &CudaDriver, stream: Stream) -> bool {
        let captured = driver.is_capturing(stream);
        self.in_graphs |= captured;
        captured
    }

    fn mark_behind(&mut self, api: &Api, driver: &CudaDriver, stream: Stream) {
        let marked = driver.with_context(|| self.record(api, driver, stream));
        self.marked = marked.is_ok();
        if let Err(error) = marked {
            tracing::debug!(%error, "the next call waits for all that is on this one's stream");
        }
    }

    fn record(&mut self, api: &Api, driver: &CudaDriver, stream: Stream) -> Result<()> {
        let handle = driver.stream_handle(stream)?;
        let mark = match self.mark {
            Some(mark) => mark,
            None => *self.mark.insert(api.event()?),
        };
        // SAFETY: the event is this value's, and the stream is live, as whoever made it of a raw handle
        // promised.
        let code = unsafe { (api.event_record)(mark, handle) };
        CudaDriver::check(code, || "recording an event behind a call".to_owned())
    }

    /// Gives back what it has. The device's context must be current, and no call can follow.
    pub(super) fn end(&mut self, api: &Api) {
        if let Some(mark) = self.mark.take() {
            // SAFETY: the event is this value's, and given up here.
            let code = unsafe { (api.event_destroy)(mark) };
            if let Err(error) = CudaDriver::check(code, || "giving back an event".to_owned()) {
                tracing::debug!(%error, "at the end of a communicator");
            }
        }
    }
}

/// The last call's end cannot be waited for: an event that is recorded there is a part of the graph now.
#[cold]
fn captured(stream: Stream, what: &str) -> Error {
    Error::invalid_state(format!(
        "stream {:#x}, which has this communicator's last call, is being captured into a graph; {what} \
         after the capture",
        stream.raw()
    ))
}
