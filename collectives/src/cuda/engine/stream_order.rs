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
//! A call may have work behind its last kernel: copies out of memory that peers write in the next call, or products of
//! it. [`extend`](StreamOrder::extend) moves the call's end behind that.
//!
//! Captured calls wait for nothing outside the capture, which a CUDA graph cannot express. Whoever launches the
//! graph orders it. A capture does not change the order of calls outside graphs. Within a capture, calls on several
//! streams are in order too: the graph has an edge from each to the next.
//!
//! `CU_STREAM_PER_THREAD` is one handle for many streams. No thread can record an event on another one's, so an
//! event is always recorded behind a call there.

#![allow(unsafe_code)] // FFI: an event by its handle

use std::sync::atomic::{AtomicU64, Ordering};

use symmpool_allocator::driver::{CudaDriver, MemoryDriver};
use symmpool_allocator::{Error, Result, Stream};

use crate::cuda::driver::api::{Api, CudaHandle};
use crate::sync::mutant;

/// Operations that the order needs of a device.
pub(in crate::cuda) trait Events {
    /// Makes an event.
    fn event(&self) -> Result<CudaHandle>;
    /// Records an event behind what is on a stream.
    fn record(&self, event: CudaHandle, stream: Stream) -> Result<()>;
    /// Makes a stream wait for what an event was recorded behind.
    fn wait(&self, event: CudaHandle, stream: Stream) -> Result<()>;
    /// Refuses a stream that is none of the device.
    fn check(&self, stream: Stream) -> Result<()>;
    /// Whether a stream is being captured.
    fn is_capturing(&self, stream: Stream) -> bool;
    /// The number of the capture that a stream is part of.
    fn capture_of(&self, stream: Stream) -> Option<u64>;
}

/// The events of a CUDA device.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct CudaEvents<'a> {
    pub(in crate::cuda) api: &'a Api,
    pub(in crate::cuda) driver: &'a CudaDriver,
}

impl Events for CudaEvents<'_> {
    fn event(&self) -> Result<CudaHandle> {
        self.driver.with_context(|| self.api.event())
    }

    fn record(&self, event: CudaHandle, stream: Stream) -> Result<()> {
        let what = "recording an event behind a call";
        self.driver.with_context(|| record(self.api, self.driver, event, stream, what))
    }

    fn wait(&self, event: CudaHandle, stream: Stream) -> Result<()> {
        let what = "making a stream wait for a communicator's last call";
        self.driver.with_context(|| wait(self.api, self.driver, event, stream, what))
    }

    fn check(&self, stream: Stream) -> Result<()> {
        self.driver.stream_handle(stream).map(drop)
    }

    fn is_capturing(&self, stream: Stream) -> bool {
        self.driver.is_capturing(stream)
    }

    fn capture_of(&self, stream: Stream) -> Option<u64> {
        self.driver.capture_of(stream)
    }
}

/// A stream. The handle `CU_STREAM_PER_THREAD` means another stream in each thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StreamId {
    stream: Stream,
    /// The number of the thread for `CU_STREAM_PER_THREAD`, else 0.
    thread: u64,
}

impl StreamId {
    #[inline]
    fn of(stream: Stream) -> Self {
        Self { stream, thread: if stream.is_per_thread() { this_thread() } else { 0 } }
    }

    /// Whether this thread can name the stream.
    fn is_named_here(self) -> bool {
        self == Self::of(self.stream)
    }
}

/// A number that no other thread of the process has, from 1.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|number| *number)
}

/// The end of the last call that was captured, as far as is known.
#[derive(Clone, Copy, Debug)]
struct CapturedCall {
    /// The number of its capture.
    capture: u64,
    id: StreamId,
}

/// The last call outside graphs. Graphs are ordered by whoever launches them.
#[derive(Debug, Default)]
pub(in crate::cuda) struct StreamOrder {
    /// The stream of the last call, unless that was forgotten.
    last: Option<StreamId>,
    /// An event, made when one is first needed.
    event: Option<CudaHandle>,
    /// Whether the event was recorded behind the last call. If not, the next call on another stream waits for all
    /// that is on the last call's stream.
    is_recorded: bool,
    /// Whether calls were captured, as far as is known. A graph that runs on the last call's stream is waited for
    /// with all that is on that stream.
    in_graphs: bool,
    /// The last captured call, unless it was captured on the stream of the last call outside graphs and nobody asked.
    captured: Option<CapturedCall>,
    /// An event behind that call, within its capture.
    captured_event: Option<CudaHandle>,
}

impl StreamOrder {
    /// Puts all that comes on `stream` from now on behind the last call.
    #[inline]
    pub(in crate::cuda) fn switch_to(
        &mut self,
        events: &impl Events,
        stream: Stream,
    ) -> Result<()> {
        if self.last == Some(StreamId::of(stream)) && self.captured.is_none() {
            return Ok(());
        }
        self.follow_on(events, StreamId::of(stream))
    }

    fn follow_on(&mut self, events: &impl Events, id: StreamId) -> Result<()> {
        let stream = id.stream;
        events.check(stream)?;
        if events.is_capturing(stream) {
            self.in_graphs = true;
            return self.follow_in_capture(events, id);
        }
        if self.captured.is_some_and(|call| !events.is_capturing(call.id.stream)) {
            self.captured = None;
        }
        match self.last {
            Some(last) if last == id => return Ok(()),
            _ if self.is_recorded => {}
            Some(last) if !last.is_named_here() => return Err(other_threads()),
            Some(last) if events.is_capturing(last.stream) => {
                return Err(captured(last.stream, "make a call on another stream"));
            }
            Some(last) => self.record(events, last.stream)?,
            None => {
                self.last = Some(id);
                return Ok(());
            }
        }
        if let Some(event) = self.event {
            events.wait(event, stream)?;
        }
        (self.last, self.is_recorded) = (Some(id), false);
        Ok(())
    }

    /// Whether the last call outside graphs is on a stream that is captured, and has no event behind it: a call on another
    /// stream must wait until the capture has ended.
    pub(in crate::cuda) fn is_captured(&self, events: &impl Events) -> bool {
        let last = self.last.filter(|last| !self.is_recorded && last.is_named_here());
        last.is_some_and(|last| events.is_capturing(last.stream))
    }

    /// Puts what is captured on a stream from now on behind the last call of the same capture.
    fn follow_in_capture(&mut self, events: &impl Events, id: StreamId) -> Result<()> {
        let Some(capture) = events.capture_of(id.stream) else { return Ok(()) };
        let before = match self.captured.filter(|call| call.capture == capture) {
            Some(call) => call.id,
            // A call that was captured on the stream of the last call outside graphs went unnoticed, unless an event was
            // recorded behind that one.
            None => match self.last {
                Some(last)
                    if !self.is_recorded
                        && last.is_named_here()
                        && last != id
                        && events.capture_of(last.stream) == Some(capture) =>
                {
                    self.note_captured(events, last)?;
                    last
                }
                _ => return Ok(()),
            },
        };
        match self.captured_event {
            Some(event) if before != id => events.wait(event, id.stream),
            _ => Ok(()),
        }
    }

    /// Notes that a kernel of a call was put on `stream`. You must call this then. If other communicators' calls may be under
    /// way at the same time, the next call must not wait for what comes behind this one on `stream`: on other ranks, that
    /// may wait for the next call.
    #[inline]
    pub(in crate::cuda) fn after_call(
        &mut self,
        events: &impl Events,
        stream: Stream,
        concurrent: bool,
    ) -> Result<()> {
        let is_plain = !self.is_recorded && self.captured.is_none() && !stream.is_per_thread();
        if is_plain && !concurrent && self.last == Some(StreamId::of(stream)) {
            return Ok(());
        }
        self.end_call(events, StreamId::of(stream), concurrent)
    }

    fn end_call(&mut self, events: &impl Events, id: StreamId, concurrent: bool) -> Result<()> {
        if events.is_capturing(id.stream) {
            self.in_graphs = true;
            if mutant("mutant_captured_call_unnoticed") {
                return Ok(());
            }
            return self.note_captured(events, id);
        }
        if self.last == Some(id) {
            self.is_recorded = self.is_recorded && mutant("mutant_event_of_the_call_before");
            if id.stream.is_per_thread() || (concurrent && !self.in_graphs) {
                self.record_behind(events, id.stream);
            }
        }
        Ok(())
    }

    /// Moves the end of the last call behind all that `stream` was given so far: the next call, on whatever stream,
    /// comes after it. If the last call is on another stream, this one waits for it first.
    pub(in crate::cuda) fn extend(&mut self, events: &impl Events, stream: Stream) -> Result<()> {
        let id = StreamId::of(stream);
        let moves = self.last != Some(id);
        if !moves && !self.is_recorded && self.captured.is_none() && !stream.is_per_thread() {
            // The next call on another stream waits for all that is on this one.
            return Ok(());
        }
        self.switch_to(events, stream)?;
        if events.is_capturing(stream) {
            return self.note_captured(events, id);
        }
        let is_behind_event = moves || self.is_recorded || stream.is_per_thread();
        if is_behind_event && !mutant("mutant_end_not_moved") {
            self.record_behind(events, stream);
        }
        Ok(())
    }

    /// Notes that an operation on a channel was put on `stream`. You must call this then: a wait on any channel may follow.
    pub(in crate::cuda) fn after_operation(
        &mut self,
        events: &impl Events,
        stream: Stream,
    ) -> Result<()> {
        let id = StreamId::of(stream);
        if events.is_capturing(stream) {
            self.in_graphs = true;
            return self.note_captured(events, id);
        }
        if self.last == Some(id) {
            self.record_behind(events, stream);
        }
        Ok(())
    }

    /// Records the end of the last call, if need be. You must call this before you put a wait for a peer on `stream`: the peer
    /// may wait for this communicator's next call.
    pub(in crate::cuda) fn before_wait(
        &mut self,
        events: &impl Events,
        stream: Stream,
    ) -> Result<()> {
        let id = StreamId::of(stream);
        if self.last != Some(id) || self.is_recorded {
            return Ok(());
        }
        if !events.is_capturing(stream) {
            if !mutant("mutant_wait_within_the_call") {
                self.record_behind(events, stream);
            }
            return Ok(());
        }
        self.in_graphs = true;
        // The last call of this capture may be on another of its streams.
        let capture = events.capture_of(stream);
        let known = self.captured.is_some_and(|call| Some(call.capture) == capture);
        if known { Ok(()) } else { self.note_captured(events, id) }
    }

    /// Does not touch `stream` again unless a call names it. The stream still lives.
    pub(in crate::cuda) fn forget(&mut self, events: &impl Events, stream: Stream) -> Result<()> {
        let id = StreamId::of(stream);
        let holds_captured = self.captured.is_some_and(|call| call.id == id);
        let holds_last = self.last == Some(id);
        let needs = holds_captured || (holds_last && !self.is_recorded);
        if needs && events.is_capturing(stream) {
            return Err(captured(stream, "forget it"));
        }
        if holds_captured {
            self.captured = None;
        }
        if holds_last {
            if !self.is_recorded && !mutant("mutant_forgotten_unrecorded") {
                self.record(events, stream)?;
            }
            (self.last, self.is_recorded) = (None, true);
        }
        Ok(())
    }

    /// Notes that the last call of a capture ends with what is on a stream of it now.
    fn note_captured(&mut self, events: &impl Events, id: StreamId) -> Result<()> {
        let Some(capture) = events.capture_of(id.stream) else { return Ok(()) };
        let event = match self.captured_event {
            Some(event) => event,
            None => *self.captured_event.insert(events.event()?),
        };
        events.record(event, id.stream)?;
        self.captured = Some(CapturedCall { capture, id });
        Ok(())
    }

    fn record_behind(&mut self, events: &impl Events, stream: Stream) {
        let recorded = self.record(events, stream);
        self.is_recorded = recorded.is_ok();
        if let Err(error) = recorded {
            tracing::debug!(%error, "the next call on another stream waits for all that is on this one's");
        }
    }

    fn record(&mut self, events: &impl Events, stream: Stream) -> Result<()> {
        let event = match self.event {
            Some(event) => event,
            None => *self.event.insert(events.event()?),
        };
        events.record(event, stream)
    }

    /// Destroys the events. The device's context must be current, and no call can follow.
    pub(in crate::cuda) fn end(&mut self, api: &Api) {
        let events = self.event.take().into_iter().chain(self.captured_event.take());
        events.for_each(|event| destroy(api, event));
    }
}

/// Events by which an engine's streams wait for each other within a call. Each is made when it is first needed, and
/// recorded again and again: a wait is for what it was recorded behind when the wait was put on its stream. In graphs,
/// too.
#[derive(Debug, Default)]
pub(in crate::cuda) struct CallEvents {
    numbered: Vec<CudaHandle>,
    /// The event of [`fork`](Self::fork). A stream waits for what it was last recorded behind, so one is enough.
    between: Option<CudaHandle>,
    /// The event of [`mark`](Self::mark).
    mark: Option<CudaHandle>,
}

impl CallEvents {
    /// Records the event of that number behind what is on the stream.
    pub(in crate::cuda) fn record(
        &mut self,
        api: &Api,
        driver: &CudaDriver,
        number: usize,
        stream: Stream,
    ) -> Result<()> {
        driver.with_context(|| {
            while self.numbered.len() <= number {
                self.numbered.push(api.event()?);
            }
            record(api, driver, self.numbered[number], stream, "recording an event within a call")
        })
    }

    /// Puts all that comes on the stream from now on behind the event of that number, which was recorded.
    pub(in crate::cuda) fn wait(
        &self,
        api: &Api,
        driver: &CudaDriver,
        number: usize,
        stream: Stream,
    ) -> Result<()> {
        let Some(&event) = self.numbered.get(number) else { return Ok(()) };
        let what = "making a stream wait within a call";
        driver.with_context(|| wait(api, driver, event, stream, what))
    }

    /// Remembers what a stream has been given so far. It belongs to no capture.
    pub(in crate::cuda) fn mark(
        &mut self,
        api: &Api,
        driver: &CudaDriver,
        stream: Stream,
    ) -> Result<()> {
        driver.with_context(|| {
            let event = match self.mark {
                Some(event) => event,
                None => *self.mark.insert(api.event()?),
            };
            record(api, driver, event, stream, "marking the beginning of a call")
        })
    }

    /// Makes a stream wait for what was marked last.
    pub(in crate::cuda) fn wait_for_mark(
        &self,
        api: &Api,
        driver: &CudaDriver,
        stream: Stream,
    ) -> Result<()> {
        let Some(event) = self.mark else { return Ok(()) };
        driver.with_context(|| wait(api, driver, event, stream, "waiting for what was marked"))
    }

    /// Makes the stream `to` wait for what `from` has been given within a call, to branch off as well as to join. Both belong to the same capture, or to none.
    pub(in crate::cuda) fn fork(
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
    pub(in crate::cuda) fn end(&mut self, api: &Api) {
        let all = self.numbered.drain(..).chain(self.between.take()).chain(self.mark.take());
        all.for_each(|event| destroy(api, event));
    }
}

/// Records an event of the caller's behind what is on a stream; `what` is for errors. The device's context must be current.
fn record(
    api: &Api,
    driver: &CudaDriver,
    event: CudaHandle,
    stream: Stream,
    what: &str,
) -> Result<()> {
    let handle = driver.stream_handle(stream)?;
    // SAFETY: the caller owns the event; the stream is live, as whoever made it of a raw handle promised.
    let code = unsafe { (api.event_record)(event, handle) };
    CudaDriver::check(code, || what.to_owned())
}

/// Makes a stream wait for what such an event was recorded behind. The device's context must be current.
fn wait(
    api: &Api,
    driver: &CudaDriver,
    event: CudaHandle,
    stream: Stream,
    what: &str,
) -> Result<()> {
    let handle = driver.stream_handle(stream)?;
    // SAFETY: the caller owns the event; the stream is live, as whoever made it of a raw handle promised.
    let code = unsafe { (api.stream_wait)(handle, event, 0) };
    CudaDriver::check(code, || what.to_owned())
}

fn destroy(api: &Api, event: CudaHandle) {
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

/// The error where the last call's end cannot be waited for, as only another thread could record an event behind it.
#[cold]
fn other_threads() -> Error {
    Error::invalid_state(
        "this communicator's last call is on another thread's CU_STREAM_PER_THREAD, where no event could be recorded \
         behind it; synchronize there, and make a new communicator",
    )
}

#[cfg(test)]
mod tests;
