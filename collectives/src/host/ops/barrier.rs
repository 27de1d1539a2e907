//! Barrier in host memory: the handshake of a call, and nothing after it.

#![allow(unsafe_code)] // writes to an address

use symmpool_allocator::Result;

use crate::call::{CallDescription, OpType};
use crate::host::HostEngine;
use crate::host::layout::numbers::Numbers;

impl HostEngine {
    /// Returns once every rank has called it. What ranks wrote before the call is visible to all ranks after it.
    ///
    /// # Errors
    ///
    /// `is_diverged`, on every rank, if a rank makes another call; `is_timeout` or `is_peer_lost` if a rank makes
    /// no call.
    pub fn barrier(&mut self) -> Result<()> {
        self.handshake_only(&CallDescription::new(OpType::Barrier))
    }

    /// [`Self::barrier`] that adds to `waits`, an `i64` for each rank, for how many nanoseconds this rank waited for
    /// that one.
    ///
    /// # Safety
    ///
    /// `waits` is an aligned address, readable and writable for a number for each rank.
    pub(crate) unsafe fn measured_barrier(&mut self, waits: *mut i64) -> Result<()> {
        self.ready()?;
        self.catch_up()?;
        let world = self.world() as usize;
        // SAFETY: the caller promised that `waits` is aligned, and readable and writable for a number for each rank.
        let waits: Numbers<i64> = unsafe { Numbers::new(waits as u64, world) };
        let waited = |rank: u32, time: std::time::Duration| {
            let time = i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
            waits.set(rank as usize, waits.get(rank as usize).wrapping_add(time));
        };
        self.measured_handshake(&CallDescription::new(OpType::Barrier), waited)
    }

    /// Makes a call that is nothing but its handshake.
    pub(crate) fn handshake_only(&mut self, call: &CallDescription) -> Result<()> {
        self.ready()?;
        self.catch_up()?;
        self.handshake(call)
    }
}
