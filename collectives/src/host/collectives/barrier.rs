//! Barrier in host memory: the handshake of a call, and nothing after it.

use symmpool_allocator::Result;

use crate::host::HostEngine;
use crate::host::call::{Call, Operation};

impl HostEngine {
    /// Returns once every rank has called it. What ranks wrote before the call is visible to all ranks after it.
    ///
    /// # Errors
    ///
    /// `is_diverged`, on every rank, if a rank makes another call; `is_timeout` or `is_peer_lost` if a rank makes
    /// no call.
    pub fn barrier(&mut self) -> Result<()> {
        self.handshake_only(&Call::new(Operation::Barrier))
    }

    /// A call that is nothing but its handshake.
    pub(crate) fn handshake_only(&mut self, call: &Call) -> Result<()> {
        self.ready()?;
        self.catch_up()?;
        self.handshake(call)
    }
}
