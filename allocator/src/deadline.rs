//! A point in time by which something must have happened.

use std::time::{Duration, Instant};

/// A deadline together with the budget it was made from, so that messages can say how long a rank has
/// waited.
///
/// Every wait in symmpool takes one, except for calls whose purpose is to wait for a device
/// ([`MemoryDriver::synchronize`](crate::driver::MemoryDriver::synchronize), copies to and from the host).
/// A deadline is a fixed point in time: steps that are passed the same value share one budget.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    at: Instant,
    budget: Duration,
}

impl Deadline {
    /// A deadline `budget` from now. Budgets beyond 30 years are cut to that.
    pub fn after(budget: Duration) -> Self {
        const LONGEST: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
        let budget = budget.min(LONGEST);
        Self { at: Instant::now() + budget, budget }
    }

    /// A deadline `seconds` from now.
    pub fn seconds(seconds: u64) -> Self {
        Self::after(Duration::from_secs(seconds))
    }

    /// The earlier of the two.
    pub(crate) fn min(self, other: Self) -> Self {
        if other.at < self.at { other } else { self }
    }

    /// Time left; zero once the deadline has passed.
    pub fn remaining(&self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// Whether the deadline has passed.
    pub fn expired(&self) -> bool {
        self.remaining().is_zero()
    }

    /// The time this deadline gave in total.
    pub fn budget(&self) -> Duration {
        self.budget
    }

    /// The point in time itself.
    pub fn at(&self) -> Instant {
        self.at
    }
}
