//! Barrier: the entry of a call, and nothing after it.

use symmpool_allocator::Result;

use crate::host::HostEngine;
use crate::host::call::{Call, Operation};

impl HostEngine {
    /// Returns once every rank has called it. What ranks wrote before is visible to all after.
    ///
    /// # Errors
    ///
    /// `is_diverged`, on every rank, if a rank called something else; `is_timeout` or
    /// `is_peer_lost` if a rank does not come.
    pub fn barrier(&mut self) -> Result<()> {
        self.ready()?;
        self.catch_up()?;
        self.enter(&Call::new(Operation::Barrier))
    }
}
