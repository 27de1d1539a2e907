//! The parts of the memory that a communicator holds.

/// Bytes that a communicator holds on this rank. They are bytes of host memory for a communicator there, and else of the device.
/// They are the same on every rank.
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
    /// Bytes that it [would have grown by](crate::CommunicatorOptions::device_memory_grows), had each rank's device
    /// had room: large calls go in more pieces meanwhile, and it is tried again. They are no part of the total.
    pub wanted: u64,
}

impl CommunicatorMemory {
    /// So much memory with these parts; the rest of it is the control block.
    pub(crate) fn of(self, total: u64) -> Self {
        let Self { inboxes, scratch, staging, .. } = self;
        let control = total.saturating_sub(inboxes + scratch + staging);
        Self { total, control, ..self }
    }
}
