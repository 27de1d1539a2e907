//! Events, capture, and copies between the host and mapped memory.
#![allow(unsafe_code)] // FFI: the calls on streams and events, and the copies.

use std::ffi::c_uint;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::api::RawHandle;
use super::calls::size;
use super::context::Context;
use crate::driver::{Event, Stream};
use crate::{Deadline, Error, Result, blocking};

/// `CU_STREAM_LEGACY`: the default stream by its explicit name.
const LEGACY: RawHandle = 1;

/// The handle of a stream. It is live: whoever made the `Stream` from a raw handle has promised that.
/// Streams that were made from a number are refused.
pub(super) fn handle(stream: Stream) -> Result<RawHandle> {
    if stream.is_numbered() {
        return Err(Error::invalid_argument(format!(
            "stream number {} is none of a CUDA device; pass the default stream, or one that was made of \
             a raw handle",
            stream.raw()
        )));
    }
    // Handles are pointers, so on every system CUDA runs on they fit.
    Ok(stream.raw() as RawHandle)
}

/// How long an event from outside a capture may take to complete when a stream in the capture is to wait
/// for it.
const DONE_WITHIN: Duration = Duration::from_millis(5);

/// The number of a capture, by which the driver tells captures apart. 0 stands for none.
pub(super) type CaptureId = u64;

/// Which capture a stream is part of.
fn capture_of(cx: &Context, stream: RawHandle) -> CaptureId {
    let (mut status, mut id): (c_uint, CaptureId) = (0, 0);
    let (graph, edges, count) =
        (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut::<usize>());
    // SAFETY: writes an enumerator and a number through valid pointers; the others may be null. The
    // stream is live, as `handle` says.
    let code = unsafe {
        (cx.api.stream_capture_info)(stream, &raw mut status, &raw mut id, graph, edges, count)
    };
    let active = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_uint != status;
    if code.0 == 0 && active { id } else { 0 }
}

/// The capture that a stream is part of, if it is part of one.
pub(super) fn capture(cx: &Context, stream: Stream) -> Option<CaptureId> {
    let stream = handle(stream).ok()?;
    let _current = cx.enter().ok()?;
    Some(capture_of(cx, stream)).filter(|id| *id != 0)
}

/// Makes an event without timing and records it on `stream`. Also says which capture it is part of.
pub(super) fn record(cx: &Context, stream: Stream) -> Result<(Event, CaptureId)> {
    let stream = handle(stream)?;
    let _current = cx.enter()?;
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
    let mut event: RawHandle = 0;
    // SAFETY: writes one handle through a valid pointer.
    let code = unsafe { (cx.api.event_create)(&raw mut event, flags) };
    cx.api.check(code, || "creating an event".to_owned())?;
    let capture = capture_of(cx, stream);
    // SAFETY: the event was just made; the stream is live, as `handle` says.
    let code = unsafe { (cx.api.event_record)(event, stream) };
    if code.0 != 0 {
        destroy(cx, event);
    }
    cx.api.check(code, || "recording an event".to_owned())?;
    // SAFETY: the event was just made, and nobody else knows of it.
    Ok((unsafe { Event::from_raw(event as u64) }, capture))
}

/// Makes `stream` wait for an event that the driver knows to be live, which is part of `capture`.
///
/// In a capture, CUDA does not allow waiting for an event from outside, and ends the capture if that is
/// tried. So it is not tried: a complete event need not be waited for, an incomplete one is an error, and
/// the order of two graphs is that of their launches. An event that was just recorded takes the device some
/// microseconds, so it is given [`DONE_WITHIN`].
pub(super) fn wait(cx: &Context, stream: Stream, event: u64, capture: CaptureId) -> Result<()> {
    let stream = handle(stream)?;
    let _current = cx.enter()?;
    let waiting = capture_of(cx, stream);
    if waiting != 0 && waiting != capture {
        let end = Instant::now() + DONE_WITHIN;
        while capture == 0 && !is_done(cx, event, capture)? {
            if Instant::now() > end {
                return Err(not_done());
            }
            std::hint::spin_loop();
        }
        return Ok(());
    }
    // SAFETY: the event is live, which the driver's table says; the stream is, as `handle` says.
    let code = unsafe { (cx.api.stream_wait_event)(stream, event as RawHandle, 0) };
    // CUDA's error for an event whose capture has ended: the event marks a place in the graph, so outside of
    // the graph there is nothing to wait for.
    let ended = code.0 == sys::cudaError_enum::CUDA_ERROR_INVALID_VALUE as c_uint;
    if capture != 0 && waiting == 0 && ended {
        return Ok(());
    }
    cx.api.check(code, || "making a stream wait for an event".to_owned())
}

#[cold]
fn not_done() -> Error {
    Error::invalid_state(
        "a stream that is being captured cannot wait for what was put on another stream before the \
         capture and is not done; wait for that (Work.wait and torch.cuda.synchronize(), or \
         Communicator::synchronize) before the capture begins",
    )
}

/// Whether an event that the driver knows to be live has completed; works while other streams are captured.
/// An event that is part of a capture never completes: it marks a place in the graph, which may run often.
pub(super) fn is_done(cx: &Context, event: u64, capture: CaptureId) -> Result<bool> {
    if capture != 0 {
        return Ok(false);
    }
    let _current = cx.enter_for_memory()?;
    // SAFETY: the event is live, which the driver's table says.
    let code = unsafe { (cx.api.event_query)(event as RawHandle) };
    if code.0 == sys::cudaError_enum::CUDA_ERROR_NOT_READY as c_uint {
        return Ok(false);
    }
    cx.api.check(code, || "asking whether an event has completed".to_owned())?;
    Ok(true)
}

/// Gives back an event that the driver knows to be live.
pub(super) fn release(cx: &Context, event: u64) {
    match cx.enter() {
        Ok(_current) => destroy(cx, event as RawHandle),
        Err(error) => tracing::warn!(%error, "an event could not be given back"),
    }
}

fn destroy(cx: &Context, event: RawHandle) {
    // SAFETY: the event is live and given up here. CUDA lets go of it once it has completed.
    let code = unsafe { (cx.api.event_destroy)(event) };
    if code.0 != 0 {
        tracing::warn!(error = cx.api.describe(code), "destroying an event");
    }
}

/// Waits for all work of the device's context; refused while a stream of it is being captured.
pub(super) fn synchronize(cx: &Context) -> Result<()> {
    let _current = cx.enter()?;
    // This query finds out whether a blocking stream is being captured, without side effects; synchronizing
    // would fail and end the capture.
    if capturing(cx, LEGACY) {
        return Err(Error::invalid_state(
            "waiting for the device while a stream is being captured; do this before or after the \
             capture of a graph",
        ));
    }
    // SAFETY: no arguments; the context is current.
    let code = unsafe { (cx.api.context_synchronize)() };
    cx.api.check(code, || format!("waiting for CUDA device {}", cx.device))
}

/// Waits like [`synchronize`], until `deadline`.
///
/// CUDA has no query for all streams of a context that could be polled, and its wait has no deadline. So
/// another thread waits for the device, and this one waits for that thread.
pub(super) fn synchronize_by(cx: &Arc<Context>, deadline: Deadline) -> Result<()> {
    let waiting = cx.clone();
    let waited = blocking::within(deadline.remaining(), "a wait for the device", move || {
        synchronize(&waiting)
    })?;
    waited.unwrap_or_else(|| {
        let what = format!("for the device (CUDA device {}) to do what it was given", cx.device);
        Err(Error::timeout(what, deadline.budget(), Vec::new()))
    })
}

/// Whether `stream` is being captured.
pub(super) fn is_capturing(cx: &Context, stream: Stream) -> bool {
    // A numbered stream belongs to no device and is not captured.
    let Ok(stream) = handle(stream) else { return false };
    match cx.enter() {
        Ok(_current) => capturing(cx, stream),
        Err(error) => {
            tracing::warn!(%error, "cannot tell whether a stream is being captured");
            false
        }
    }
}

fn capturing(cx: &Context, stream: RawHandle) -> bool {
    let mut status: c_uint = 0;
    // SAFETY: writes one enumerator through a valid pointer; the stream is live, as `handle` says.
    let code = unsafe { (cx.api.stream_is_capturing)(stream, &raw mut status) };
    if code.0 != 0 {
        // While another stream is captured, the query of the default stream fails with an error about the
        // capture. Other errors come from a broken context, and the call that follows reports them.
        return code.is_capture();
    }
    status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_uint
}

/// Copies `bytes` bytes from the host to an address mapped for the device, and waits until they
/// are there for every device to see.
///
/// # Safety
///
/// `source` must be readable and `target` mapped for `bytes` bytes.
pub(super) unsafe fn copy_to_device(
    cx: &Context,
    target: u64,
    source: *const u8,
    bytes: usize,
) -> Result<()> {
    let _current = cx.enter()?;
    // SAFETY: the caller promised that `source` is readable and `target` mapped for `bytes` bytes; `cx` is current.
    let code = unsafe { (cx.api.copy_to_device)(target, source.cast(), bytes) };
    cx.api.check(code, || format!("copying {bytes} bytes to {target:#x}"))?;
    synchronize(cx)
}

/// Copies `bytes` bytes from an address mapped for the device to the host.
///
/// # Safety
///
/// `target` must be writable and `source` mapped for `bytes` bytes.
pub(super) unsafe fn copy_to_host(
    cx: &Context,
    target: *mut u8,
    source: u64,
    bytes: usize,
) -> Result<()> {
    let _current = cx.enter()?;
    // SAFETY: the caller promised that `target` is writable and `source` mapped for `bytes` bytes; `cx` is current.
    let code = unsafe { (cx.api.copy_to_host)(target.cast(), source, bytes) };
    cx.api.check(code, || format!("copying {bytes} bytes from {source:#x}"))
}

/// Fills `words` 32-bit words from `target` on, and waits until they are there.
///
/// # Safety
///
/// `target` must be a multiple of 4, and mapped for that many words.
pub(super) unsafe fn fill(cx: &Context, target: u64, value: u32, words: u64) -> Result<()> {
    let words = size(words)?;
    let _current = cx.enter()?;
    // SAFETY: the caller promised that `target` is a multiple of 4 and mapped for `words` words; `cx` is current.
    let code = unsafe { (cx.api.fill_u32)(target, value, words) };
    cx.api.check(code, || format!("filling {words} words at {target:#x}"))?;
    synchronize(cx)
}
