//! The order of a communicator's calls, which run one after the other whatever streams they are on.

#![allow(unsafe_code)] // FFI: an event by its handle

use symmpool_allocator::driver::{CudaDriver, MemoryDriver};
use symmpool_allocator::{Result, Stream};

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
        if driver.is_capturing(stream) {
            self.in_graphs = true;
            return Ok(());
        }
        match (self.last, self.mark) {
            (Some(_), Some(mark)) if self.marked => {
                // SAFETY: the event is this value's, until `end`; the streams are live, which whoever made
                // them from raw handles vouched for, here and below.
                let wait = || unsafe { (api.stream_wait)(stream.raw() as Handle, mark, 0) };
                let text = || "making a stream wait for a communicator's last call".to_owned();
                driver.with_context(|| CudaDriver::check(wait(), text))?;
            }
            (Some(last), _) if !driver.is_capturing(last) => fork(driver, last, stream)?,
            _ => {}
        }
        (self.last, self.marked) = (Some(stream), false);
        Ok(())
    }

    /// A kernel of a call was put on `stream`. If others' calls may be under way beside it, what comes behind
    /// it there is nothing that the next call may wait for: on other ranks that may wait for this call.
    #[inline]
    pub(super) fn called(&mut self, api: &Api, driver: &CudaDriver, stream: Stream, beside: bool) {
        if self.last != Some(stream) {
            return;
        }
        self.marked = false;
        if !beside || self.in_graphs {
            return;
        }
        self.in_graphs = driver.is_capturing(stream);
        if !self.in_graphs {
            let marked = driver.with_context(|| self.record(api, stream));
            self.marked = marked.is_ok();
            if let Err(error) = marked {
                tracing::debug!(%error, "the next call waits for all that is on this one's stream");
            }
        }
    }

    fn record(&mut self, api: &Api, stream: Stream) -> Result<()> {
        let mark = match self.mark {
            Some(mark) => mark,
            None => *self.mark.insert(api.event()?),
        };
        // SAFETY: the event is this value's, and the stream is live.
        let code = unsafe { (api.event_record)(mark, stream.raw() as Handle) };
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
