//! Which phase of a call takes how long.

use std::time::Instant;

use crate::PhaseTimes;
use crate::algorithm::StandardCollective;

/// Part of a call's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Waits for the host's other ranks.
    Meeting,
    /// The hosts' agreement on a call.
    Agreement,
    /// Work inside the host in front of the transfer.
    Before,
    /// The transfer between hosts.
    Between,
    /// Work inside the host behind the transfer.
    After,
}

impl Phase {
    /// The phase of a collective inside a host: what gathers and distributes comes behind the transfer between hosts.
    pub(super) fn inside(collective: StandardCollective) -> Self {
        match collective {
            StandardCollective::AllGather | StandardCollective::Broadcast => Self::After,
            _ => Self::Before,
        }
    }
}

/// Times so far, and whether a phase is under way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PhaseClock {
    pub(super) times: PhaseTimes,
    is_running: bool,
}

impl PhaseClock {
    /// Begins a phase, unless another one is under way, of which it is a part.
    pub(super) fn begin(&mut self) -> Option<Instant> {
        let began = (!self.is_running).then(Instant::now);
        self.is_running = true;
        began
    }

    /// Ends a phase that [`begin`](Self::begin) began.
    pub(super) fn end(&mut self, phase: Phase, began: Option<Instant>) {
        let Some(began) = began else { return };
        self.is_running = false;
        let times = &mut self.times;
        let part = match phase {
            Phase::Meeting => &mut times.meeting,
            Phase::Agreement => &mut times.agreement,
            Phase::Before => &mut times.before,
            Phase::Between => &mut times.between,
            Phase::After => &mut times.after,
        };
        *part += began.elapsed();
    }
}
