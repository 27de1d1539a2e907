//! The device's primary context: retained while a driver lives, current only during its calls.
#![allow(unsafe_code)] // FFI: the calls that retain, push and pop a context.

use std::ffi::{c_int, c_uint};
use std::marker::PhantomData;

use cudarc::driver::sys;

use super::api::{DriverApi, RawHandle};
use crate::Result;

/// One device's primary context, the one that the CUDA runtime (and so torch) uses too.
pub(super) struct Context {
    pub(super) api: &'static DriverApi,
    /// The `CUdevice`.
    pub(super) device: c_int,
    handle: RawHandle,
}

impl Context {
    /// Retains the primary context of `device`.
    pub(super) fn retain(api: &'static DriverApi, device: c_int) -> Result<Self> {
        let mut handle: RawHandle = 0;
        // SAFETY: writes one handle through a valid pointer.
        let code = unsafe { (api.primary_retain)(&raw mut handle, device) };
        api.check(code, || format!("retaining the primary context of CUDA device {device}"))?;
        Ok(Self { api, device, handle })
    }

    /// Makes the context current on this thread until the guard is dropped; then the caller's own
    /// context is current again.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        let mut current: RawHandle = 0;
        // SAFETY: writes one handle through a valid pointer.
        let code = unsafe { (self.api.context_current)(&raw mut current) };
        self.api.check(code, || "asking for the current CUDA context".to_owned())?;
        if current == self.handle {
            return Ok(Entered { api: self.api, pushed: false, on_this_thread: PhantomData });
        }
        // SAFETY: the handle is of a context that this value keeps retained.
        let code = unsafe { (self.api.context_push)(self.handle) };
        self.api.check(code, || "making a CUDA context current".to_owned())?;
        Ok(Entered { api: self.api, pushed: true, on_this_thread: PhantomData })
    }

    /// Enters like [`enter`](Context::enter), for calls that manage memory: they also work while this thread captures
    /// a graph. They are not part of any stream, so nothing is missing in the capture; in the default capture
    /// mode CUDA would refuse them and invalidate the capture.
    pub(super) fn enter_for_memory(&self) -> Result<(Relaxed, Entered<'_>)> {
        let entered = self.enter()?;
        let relaxed = Relaxed::start(self.api)?;
        Ok((relaxed, entered))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: gives back the reference that `retain` took. At process exit the driver may be
        // gone already and answers so; there is nothing left to do then.
        let code = unsafe { (self.api.primary_release)(self.device) };
        if code.0 != 0 {
            tracing::debug!(error = self.api.describe(code), "releasing a CUDA context");
        }
    }
}

/// A context made current on this thread.
pub(super) struct Entered<'a> {
    api: &'a DriverApi,
    pushed: bool,
    on_this_thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if !self.pushed {
            return;
        }
        let mut popped: RawHandle = 0;
        // SAFETY: writes one handle through a valid pointer; pops what `enter` pushed, on the
        // same thread because this type is not `Send`.
        let code = unsafe { (self.api.context_pop)(&raw mut popped) };
        if code.0 != 0 {
            tracing::debug!(error = self.api.describe(code), "popping a CUDA context");
        }
    }
}

/// This thread's capture mode set to relaxed.
pub(super) struct Relaxed {
    api: &'static DriverApi,
    before: c_uint,
    on_this_thread: PhantomData<*const ()>,
}

impl Relaxed {
    fn start(api: &'static DriverApi) -> Result<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        // SAFETY: reads a mode through a valid pointer and writes the former one there.
        let code = unsafe { (api.capture_mode)(&raw mut mode) };
        api.check(code, || "changing the thread's stream capture mode".to_owned())?;
        Ok(Self { api, before: mode, on_this_thread: PhantomData })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        let mut mode = self.before;
        // SAFETY: writes one enumerator through a valid pointer; it puts back the mode that `start` found, on the
        // same thread because this type is not `Send`.
        let code = unsafe { (self.api.capture_mode)(&raw mut mode) };
        if code.0 != 0 {
            tracing::debug!(error = self.api.describe(code), "restoring the stream capture mode");
        }
    }
}
