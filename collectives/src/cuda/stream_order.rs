//! The order of a communicator's calls, which run one after the other whatever streams they are on.
//!
//! A call on another stream waits for the communicator's last call, and for nothing that follows it on its stream:
//! that may wait for a peer, which waits for this call. So an event is recorded behind a call as soon as something
//! that waits for a peer may follow it: behind every operation on a channel; and behind a call of all ranks when
//! other communicators' calls may be under way at the same time, before a wait on a channel is put on its stream,
//! and when the program says that the stream is about to be destroyed. Recording costs the host 0.4 us, and keeps
//! the stream's next kernel from starting early, so calls that stay on one stream do without. If a call on another
//! stream comes before an event was recorded, it waits for all that is on the last call's stream. That stream
//! still lives, as whoever made the `Stream` of a raw handle promised.
//!
//! Captured calls wait for nothing outside the capture, which a CUDA graph cannot express. Whoever launches the
//! graph orders it. A capture does not change the order of calls outside graphs.

#![allow(unsafe_code)] // FFI: an event by its handle

use symmpool_allocator::driver::{CudaDriver, MemoryDriver};
use symmpool_allocator::{Error, Result, Stream};

use super::api::{Api, Handle};

/// Makes a stream wait for what another one has been given, in graphs too.
fn fork(driver: &dyn MemoryDriver, from: Stream, to: Stream) -> Result<()> {
    let event = driver.record_event(from)?;
    let waited = driver.wait_event(to, &event);
    driver.release_event(event);
    waited
}

/// The last call outside graphs. Graphs are ordered by whoever launches them.
#[derive(Debug, Default)]
pub(super) struct StreamOrder {
    /// The stream of the last call, unless that was forgotten.
    last: Option<Stream>,
    /// An event, made when one is first needed.
    event: Option<Handle>,
    /// Whether the event was recorded behind the last call. If not, the next call on another stream waits for all
    /// that is on the last call's stream.
    is_recorded: bool,
    /// Whether calls were captured, as far as is known. A graph that runs on the last call's stream is waited for
    /// with all that is on that stream.
    in_graphs: bool,
}

impl StreamOrder {
    /// Puts all that comes on `stream` from now on behind the last call.
    #[inline]
    pub(super) fn switch_to(
        &mut self,
        api: &Api,
        driver: &CudaDriver,
        stream: Stream,
    ) -> Result<()> {
        if self.last == Some(stream) {
            return Ok(());
        }
        self.follow_on(api, driver, stream)
    }

    fn follow_on(&mut self, api: &Api, driver: &CudaDriver, stream: Stream) -> Result<()> {
        driver.stream_handle(stream)?;
        if driver.is_capturing(stream) {
            self.in_graphs = true;
            return Ok(());
        }
        match (self.last, self.event) {
            (_, Some(event)) if self.is_recorded => {
                let what = "making a stream wait for a communicator's last call";
                driver.with_context(|| wait(api, driver, event, stream, what))?;
            }
            (Some(last), _) if driver.is_capturing(last) => {
                return Err(captured(last, "make a call on another stream"));
            }
            (Some(last), _) => fork(driver, last, stream)?,
            (None, _) => {}
        }
        (self.last, self.is_recorded) = (Some(stream), false);
        Ok(())
    }

    /// To be called when a kernel of a call was put on `stream`. If other communicators' calls may be under way at
    /// the same time, the next call must not wait for what comes behind this one on `stream`: on other ranks, that
    /// may wait for the next call.
    #[inline]
    pub(super) fn after_call(
        &mut self,
        api: &Api,
        driver: &CudaDriver,
        stream: Stream,
        concurrent: bool,
    ) {
        if self.last != Some(stream) || (self.is_recorded && self.is_in_graph(driver, stream)) {
            return;
        }
        self.is_recorded = false;
        if concurrent && !self.in_graphs && !self.is_in_graph(driver, stream) {
            self.record_behind(api, driver, stream);
        }
    }

    /// To be called when an operation on a channel was put on `stream`: a wait on any channel may follow.
    pub(super) fn after_operation(&mut self, api: &Api, driver: &CudaDriver, stream: Stream) {
        if self.last == Some(stream) && !self.is_in_graph(driver, stream) {
            self.record_behind(api, driver, stream);
        }
    }

    /// To be called before a wait for a peer is put on `stream`: the peer may wait for this communicator's next call.
    pub(super) fn before_wait(&mut self, api: &Api, driver: &CudaDriver, stream: Stream) {
        if self.last == Some(stream) && !self.is_recorded && !self.is_in_graph(driver, stream) {
            self.record_behind(api, driver, stream);
        }
    }

    /// Does not touch `stream` again unless a call names it. The stream still lives.
    pub(super) fn forget(&mut self, api: &Api, driver: &CudaDriver, stream: Stream) -> Result<()> {
        if self.last != Some(stream) {
            return Ok(());
        }
        if !self.is_recorded {
            if driver.is_capturing(stream) {
                return Err(captured(stream, "forget it"));
            }
            driver.with_context(|| self.record(api, driver, stream))?;
        }
        (self.last, self.is_recorded) = (None, true);
        Ok(())
    }

    fn is_in_graph(&mut self, driver: &CudaDriver, stream: Stream) -> bool {
        let captured = driver.is_capturing(stream);
        self.in_graphs |= captured;
        captured
    }

    fn record_behind(&mut self, api: &Api, driver: &CudaDriver, stream: Stream) {
        let recorded = driver.with_context(|| self.record(api, driver, stream));
        self.is_recorded = recorded.is_ok();
        if let Err(error) = recorded {
            tracing::debug!(%error, "the next call on another stream waits for all that is on this one's");
        }
    }

    fn record(&mut self, api: &Api, driver: &CudaDriver, stream: Stream) -> Result<()> {
        let event = match self.event {
            Some(event) => event,
            None => *self.event.insert(api.event()?),
        };
        record(api, driver, event, stream, "recording an event behind a call")
    }

    /// Destroys the event. The device's context must be current, and no call can follow.
    pub(super) fn end(&mut self, api: &Api) {
        if let Some(event) = self.event.take() {
            destroy(api, event);
        }
    }
}

/// Events by which an engine's streams wait for each other within a call. Each is made when it is first needed, and
/// recorded again and again: a wait is for what it was recorded behind when the wait was put on its stream. In graphs,
/// too.
#[derive(Debug, Default)]
pub(super) struct CallEvents {
    made: Vec<Handle>,
    /// The event of [`fork`](Self::fork). A stream waits for what it was last recorded behind, so one is enough.
    between: Option<Handle>,
}

impl CallEvents {
    /// Records the event of that number behind what is on the stream.
    pub(super) fn record(
        &mut self,
        api: &Api,
        driver: &CudaDriver,
        number: usize,
        stream: Stream,
    ) -> Result<()> {
        driver.with_context(|| {
            while self.made.len() <= number {
                self.made.push(api.event()?);
            }
            record(api, driver, self.made[number], stream, "recording an event within a call")
        })
    }

    /// Puts all that comes on the stream from now on behind the event of that number, which was recorded.
    pub(super) fn wait(
        &self,
        api: &Api,
        driver: &CudaDriver,
        number: usize,
        stream: Stream,
    ) -> Result<()> {
        let Some(&event) = self.made.get(number) else { return Ok(()) };
        let what = "making a stream wait within a call";
        driver.with_context(|| wait(api, driver, event, stream, what))
    }

    /// Makes a stream wait for what another one has been given within a call. Both belong to the same capture, or to none.
    pub(super) fn fork(
        &mut self,
        api: &Api,
        driver: &CudaDriver,
        from: Stream,
        to: Stream,
    ) -> Result<()> {
        let what = "ordering streams within a call";
        driver.with_context(|| {
            let event = match self.between {
                Some(event) => event,
                None => *self.between.insert(api.event()?),
            };
            record(api, driver, event, from, what)?;
            wait(api, driver, event, to, what)
        })
    }

    /// Destroys the events. The device's context must be current, and no call can follow.
    pub(super) fn end(&mut self, api: &Api) {
        self.made.drain(..).chain(self.between.take()).for_each(|event| destroy(api, event));
    }
}

/// Records an event of the caller's behind what is on a stream; `what` is for errors. The device's context must be current,
/// here and in the next two.
fn record(api: &Api, driver: &CudaDriver, event: Handle, stream: Stream, what: &str) -> Result<()> {
    let handle = driver.stream_handle(stream)?;
    // SAFETY: the caller owns the event; the stream is live, as whoever made it of a raw handle promised.
    let code = unsafe { (api.event_record)(event, handle) };
    CudaDriver::check(code, || what.to_owned())
}

/// Makes a stream wait for what such an event was recorded behind.
fn wait(api: &Api, driver: &CudaDriver, event: Handle, stream: Stream, what: &str) -> Result<()> {
    let handle = driver.stream_handle(stream)?;
    // SAFETY: as in `record`.
    let code = unsafe { (api.stream_wait)(handle, event, 0) };
    CudaDriver::check(code, || what.to_owned())
}

fn destroy(api: &Api, event: Handle) {
    // SAFETY: callers own the event, and give it up here.
    let code = unsafe { (api.event_destroy)(event) };
    if let Err(error) = CudaDriver::check(code, || "giving back an event".to_owned()) {
        tracing::debug!(%error, "at the end of a communicator");
    }
}

/// The error where the last call's end cannot be waited for: an event recorded on a stream that is being captured
/// would belong to the graph.
#[cold]
fn captured(stream: Stream, what: &str) -> Error {
    Error::invalid_state(format!(
        "stream {:#x}, which has this communicator's last call, is being captured into a graph; {what} \
         after the capture",
        stream.raw()
    ))
}
