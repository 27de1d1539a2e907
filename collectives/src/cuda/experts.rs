//! Dispatch to experts and combine, on a device.

#![allow(unsafe_code)] // launches kernels on the caller's promises about raw memory

use symmpool_allocator::{Error, Result, Stream};

use super::engine::CudaEngine;
use crate::experts::{ExpertCall, ExpertShape};

impl CudaEngine {
    pub(crate) fn load_experts(&mut self, _shape: &ExpertShape) -> Result<()> {
        Ok(())
    }

    pub(crate) unsafe fn dispatch(&mut self, _call: &ExpertCall, _stream: Stream) -> Result<()> {
        Err(Error::unsupported("not yet"))
    }

    pub(crate) unsafe fn combine(&mut self, _call: &ExpertCall, _stream: Stream) -> Result<()> {
        Err(Error::unsupported("not yet"))
    }
}
