//! Which phase of a call takes how long.

use std::time::Instant;

use super::state::SpanningEngine;
use crate::PhaseTimes;
use crate::algorithm::StandardCollective;

/// Part of a call's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Meeting,
    Agreement,
    Before,
    Between,
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

impl SpanningEngine {
    /// Time of this rank's calls so far.
    pub(crate) fn phase_times(&self) -> PhaseTimes {
        self.clock.times
    }

    /// Does a part of a call, whose time counts as that phase's. A phase within another one counts as the outer one.
    pub(super) fn timed<T>(&mut self, phase: Phase, run: impl FnOnce(&mut Self) -> T) -> T {
        if self.clock.is_running {
            return run(self);
        }
        self.clock.is_running = true;
        let began = Instant::now();
        let made = run(self);
        let took = began.elapsed();
        self.clock.is_running = false;
        let times = &mut self.clock.times;
        let part = match phase {
            Phase::Meeting => &mut times.meeting,
            Phase::Agreement => &mut times.agreement,
            Phase::Before => &mut times.before,
            Phase::Between => &mut times.between,
            Phase::After => &mut times.after,
        };
        *part += took;
        made
    }
}
