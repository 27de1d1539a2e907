//! Dispatch to experts and combine, on the CPU.

#![allow(unsafe_code)] // reads and writes memory by address

use symmpool_allocator::{Error, Result};

use super::HostEngine;
use crate::experts::ExpertCall;

impl HostEngine {
    pub(crate) unsafe fn dispatch(&mut self, _call: &ExpertCall) -> Result<()> {
        Err(Error::unsupported("not yet"))
    }

    pub(crate) unsafe fn combine(&mut self, _call: &ExpertCall) -> Result<()> {
        Err(Error::unsupported("not yet"))
    }
}
