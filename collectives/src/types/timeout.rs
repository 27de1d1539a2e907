//! How long a communicator's calls wait for a late rank.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A timeout that may be changed while a call waits. A call keeps the timeout that it began with.
#[derive(Debug)]
pub(crate) struct Timeout(AtomicU64);

impl Timeout {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self(AtomicU64::new(nanoseconds(timeout)))
    }

    pub(crate) fn set(&self, timeout: Duration) {
        self.0.store(nanoseconds(timeout), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds())
    }

    /// The timeout in nanoseconds, as kernels take it.
    #[inline]
    pub(crate) fn nanoseconds(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A duration in nanoseconds, at most 584 years.
pub(crate) fn nanoseconds(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX)
}
