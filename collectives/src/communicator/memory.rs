//! What a communicator holds of memory.

use super::Communicator;
use crate::cuda::communicator_bytes;

/// Bytes that a communicator holds for as long as it lives, on this rank. Those of a communicator in host memory are host
/// memory, else the device's. They are the same on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommunicatorMemory {
    /// All of it.
    pub total: u64,
    /// Flags, counts, descriptions of calls, and channels.
    pub control: u64,
    /// Where data of small calls arrives: the LL, LL128 and Lamport inboxes.
    pub inboxes: u64,
    /// Data of large calls on its way, and the scratch of programs.
    pub scratch: u64,
    /// Slots of point-to-point messages.
    pub staging: u64,
}

impl CommunicatorMemory {
    /// The memory with these parts; the rest of `total` is the control block.
    pub(crate) fn new(total: u64, inboxes: u64, scratch: u64, staging: u64) -> Self {
        let control = total.saturating_sub(inboxes + scratch + staging);
        Self { total, control, inboxes, scratch, staging }
    }

    /// Bytes that a communicator of several ranks takes of a device at most where its options leave it open: the first one
    /// of a process, and each further one. The environment may say so (`SYMMPOOL_DEVICE_MEMORY`).
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` if the environment's value is none.
    pub fn by_default() -> symmpool_allocator::Result<[u64; 2]> {
        Ok([communicator_bytes(true)?, communicator_bytes(false)?])
    }
}

impl Communicator {
    /// What this communicator holds of memory. Talks to nobody and waits for no call.
    pub fn memory(&self) -> CommunicatorMemory {
        self.memory
    }
}
