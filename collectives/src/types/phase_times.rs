//! Time that calls over hosts spend in their phases.

use std::time::Duration;

/// Time that this rank has spent in calls over hosts since its communicator was made, by what it did or waited for. Phases of
/// chunks run beside each other: a transfer between hosts counts only while this rank waits for it. What is left of `total`
/// are copies and reductions between hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseTimes {
    /// The number of calls that ended well.
    pub calls: u64,
    /// From the begin of a call until all ranks of the host have come to it.
    pub meeting: Duration,
    /// Agreement of the hosts: waits for the leaders' message, and the handshake that tells what came of it. Calls whose data
    /// goes by the leaders have none: their message is the one with the data.
    pub agreement: Duration,
    /// Inside the host, before data leaves it.
    pub before: Duration,
    /// Waits for the outer engine.
    pub between: Duration,
    /// Inside the host, behind what has come from others.
    pub after: Duration,
    /// All of the calls.
    pub total: Duration,
}
