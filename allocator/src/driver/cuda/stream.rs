//! Events, capture, and copies between the host and mapped memory.
#![allow(unsafe_code)] // FFI: the calls on streams and events, and the copies.

use std::ffi::c_uint;

use cudarc::driver::sys;

use super::api::Handle;
use super::calls::size;
use super::context::Context;
use crate::driver::{Event, Stream};
use crate::{Error, Result};

/// `CU_STREAM_LEGACY`: the default stream by its explicit name.
const LEGACY: Handle = 1;

/// The handle of a stream, which is live, as whoever made the `Stream` of a raw handle promised. Others are
/// refused.
pub(super) fn handle(stream: Stream) -> Result<Handle> {
    if stream.is_numbered() {
        return Err(Error::invalid_argument(format!(
            "stream number {} is none of a CUDA device; pass the default stream, or one that was made of \
             a raw handle",
            stream.raw()
        )));
    }
    // Handles are pointers, so on every system CUDA runs on they fit.
    Ok(stream.raw() as Handle)
}

/// Makes an event without timing and records it on `stream`.
pub(super) fn record(cx: &Context, stream: Stream) -> Result<Event> {
    let stream = handle(stream)?;
    let _current = cx.enter()?;
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
    let mut event: Handle = 0;
    // SAFETY: writes one handle through a valid pointer.
    let code = unsafe { (cx.api.event_create)(&raw mut event, flags) };
    cx.api.check(code, || "creating an event".to_owned())?;
    // SAFETY: the event was just made; the stream is live, as `handle` says.
    let code = unsafe { (cx.api.event_record)(event, stream) };
    if code.0 != 0 {
        destroy(cx, event);
    }
    cx.api.check(code, || "recording an event".to_owned())?;
    // SAFETY: the event was just made, and nobody else knows of it.
    Ok(unsafe { Event::from_raw(event as u64) })
}

/// Makes `stream` wait for an event that the driver knows to be live.
pub(super) fn wait(cx: &Context, stream: Stream, event: u64) -> Result<()> {
    let stream = handle(stream)?;
    let _current = cx.enter()?;
    // SAFETY: the event is live, which the driver's table says; the stream is, as `handle` says.
    let code = unsafe { (cx.api.stream_wait_event)(stream, event as Handle, 0) };
    cx.api.check(code, || "making a stream wait for an event".to_owned())
}

/// Whether an event that the driver knows to be live has completed. Other streams may be captured.
pub(super) fn is_done(cx: &Context, event: u64) -> Result<bool> {
    let _current = cx.enter_for_memory()?;
    // SAFETY: the event is live, which the driver's table says.
    let code = unsafe { (cx.api.event_query)(event as Handle) };
    if code.0 == sys::cudaError_enum::CUDA_ERROR_NOT_READY as c_uint {
        return Ok(false);
    }
    cx.api.check(code, || "asking whether an event has completed".to_owned())?;
    Ok(true)
}

/// Gives back an event that the driver knows to be live.
pub(super) fn release(cx: &Context, event: u64) {
    match cx.enter() {
        Ok(_current) => destroy(cx, event as Handle),
        Err(error) => tracing::warn!(%error, "an event could not be given back"),
    }
}

fn destroy(cx: &Context, event: Handle) {
    // SAFETY: the event is live and given up here. CUDA lets go of it once it has completed.
    let code = unsafe { (cx.api.event_destroy)(event) };
    if code.0 != 0 {
        tracing::warn!(error = cx.api.describe(code), "destroying an event");
    }
}

/// Waits for all work of the device's context; refused while a stream of it is being captured.
pub(super) fn synchronize(cx: &Context) -> Result<()> {
    let _current = cx.enter()?;
    // Where a blocking stream is being captured this question finds out and harms nothing,
    // whereas synchronizing would fail and spoil the capture.
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

/// Whether `stream` is being captured.
pub(super) fn is_capturing(cx: &Context, stream: Stream) -> bool {
    // What is no stream of a device is not captured.
    let Ok(stream) = handle(stream) else { return false };
    match cx.enter() {
        Ok(_current) => capturing(cx, stream),
        Err(error) => {
            tracing::warn!(%error, "cannot tell whether a stream is being captured");
            false
        }
    }
}

fn capturing(cx: &Context, stream: Handle) -> bool {
    let mut status: c_uint = 0;
    // SAFETY: writes one enumerator through a valid pointer; the stream is live, as `handle` says.
    let code = unsafe { (cx.api.stream_is_capturing)(stream, &raw mut status) };
    if code.0 != 0 {
        // The default stream cannot be asked while another is captured, and says so. A broken
        // context is not a capture: the call that follows will tell what is wrong.
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
    // SAFETY: the caller promised that both ranges are there.
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
    // SAFETY: the caller promised that both ranges are there.
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
    // SAFETY: the caller promised that the range is there.
    let code = unsafe { (cx.api.fill_u32)(target, value, words) };
    cx.api.check(code, || format!("filling {words} words at {target:#x}"))?;
    synchronize(cx)
}
