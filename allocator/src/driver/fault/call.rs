//! The calls of a driver that can be made to fail, and how often each was made.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use super::super::Step;

/// A method of [`MemoryDriver`](super::super::MemoryDriver).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum DriverCall {
    Reserve,
    Unreserve,
    Create,
    Export,
    Import,
    Map,
    Unmap,
    Release,
    RecordEvent,
    WaitEvent,
    /// Returns nothing, so [`FaultAction::Fail`](super::FaultAction::Fail) means nothing here.
    ReleaseEvent,
    /// With a deadline or without.
    Synchronize,
}

impl DriverCall {
    /// Every call.
    pub const ALL: [Self; 12] = [
        Self::Reserve,
        Self::Unreserve,
        Self::Create,
        Self::Export,
        Self::Import,
        Self::Map,
        Self::Unmap,
        Self::Release,
        Self::RecordEvent,
        Self::WaitEvent,
        Self::ReleaseEvent,
        Self::Synchronize,
    ];
}

/// Where a fault happens: in a call, or at a step of rendezvous and commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Point {
    Call(DriverCall),
    Step(Step),
}

/// Number of points.
pub(super) const POINTS: usize = DriverCall::ALL.len() + Step::ALL.len();

impl Point {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        DriverCall::ALL.into_iter().map(Self::Call).chain(Step::ALL.into_iter().map(Self::Step))
    }

    pub(super) fn index(self) -> usize {
        match self {
            Self::Call(call) => call as usize,
            Self::Step(step) => DriverCall::ALL.len() + step as usize,
        }
    }
}

/// `create`, `record-event`, `step:commit-map`.
impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Call(call) => format!("{call:?}"),
            Self::Step(step) => {
                f.write_str("step:")?;
                format!("{step:?}")
            }
        };
        for (i, c) in name.chars().enumerate() {
            if c.is_ascii_uppercase() && i > 0 {
                f.write_str("-")?;
            }
            write!(f, "{}", c.to_ascii_lowercase())?;
        }
        Ok(())
    }
}

#[derive(Debug, Default)]
pub(super) struct CallCounters {
    made: [AtomicU64; POINTS],
    succeeded: [AtomicU64; POINTS],
}

impl CallCounters {
    /// Counts a call that begins; returns which of its kind it is, from 1.
    pub(super) fn begin(&self, point: Point) -> u64 {
        // Relaxed: a counter orders nothing but itself.
        self.made[point.index()].fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn success(&self, point: Point) {
        self.succeeded[point.index()].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn snapshot(&self) -> CallCounts {
        let read = |counters: &[AtomicU64; POINTS]| {
            std::array::from_fn(|i| counters[i].load(Ordering::Relaxed))
        };
        CallCounts { made: read(&self.made), succeeded: read(&self.succeeded) }
    }
}

/// How often each call was made through a [`FaultDriver`](super::FaultDriver) and how often it
/// succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallCounts {
    made: [u64; POINTS],
    succeeded: [u64; POINTS],
}

impl CallCounts {
    /// Calls made, failed ones included.
    pub fn made(&self, call: DriverCall) -> u64 {
        self.made[Point::Call(call).index()]
    }

    /// Calls that succeeded.
    pub fn succeeded(&self, call: DriverCall) -> u64 {
        self.succeeded[Point::Call(call).index()]
    }

    /// How often a step was reached.
    pub fn steps(&self, step: Step) -> u64 {
        self.made[Point::Step(step).index()]
    }

    /// Describes what was taken and not given back; `None` if everything was.
    pub fn leaks(&self) -> Option<String> {
        let n = |call| self.succeeded(call);
        let taken_and_returned = [
            ("reservations", n(DriverCall::Reserve), n(DriverCall::Unreserve)),
            ("segments", n(DriverCall::Create) + n(DriverCall::Import), n(DriverCall::Release)),
            ("mappings", n(DriverCall::Map), n(DriverCall::Unmap)),
            ("events", n(DriverCall::RecordEvent), n(DriverCall::ReleaseEvent)),
        ];
        let leaks: Vec<String> = taken_and_returned
            .into_iter()
            .filter(|(_, taken, returned)| taken != returned)
            .map(|(what, taken, returned)| format!("{what}: {taken} taken, {returned} given back"))
            .collect();
        (!leaks.is_empty()).then(|| leaks.join("; "))
    }
}
