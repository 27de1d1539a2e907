//! Counts of what a store's client did.

use std::sync::atomic::{AtomicU64, Ordering};

/// Traffic of a client with its store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreTraffic {
    /// Requests that waited for an answer.
    pub round_trips: u64,
    /// Payload bytes sent to the store: keys and values.
    pub bytes_sent: u64,
    /// Payload bytes received from the store: values, and for a gather its distinct parts and
    /// the run-length encoded index that says which rank has which.
    pub bytes_received: u64,
}

/// The counters behind [`StoreTraffic`]. They order nothing: relaxed throughout.
#[derive(Debug, Default)]
pub(crate) struct TrafficCounters {
    round_trips: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

impl TrafficCounters {
    /// Counts one request with `bytes` of key and value.
    pub(crate) fn asked(&self, bytes: usize) {
        self.round_trips.fetch_add(1, Ordering::Relaxed);
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts `bytes` of an answer.
    pub(crate) fn answered(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> StoreTraffic {
        StoreTraffic {
            round_trips: self.round_trips.load(Ordering::Relaxed),
            bytes_sent: self.sent.load(Ordering::Relaxed),
            bytes_received: self.received.load(Ordering::Relaxed),
        }
    }
}
