//! Summaries of many durations.

use std::time::Duration;

use serde_json::{Value, json};

/// Median, minimum and maximum of durations, in microseconds.
pub(crate) struct Figures {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Figures {
    /// All NaN if there are no durations.
    pub(crate) fn of(times: &[f64]) -> Self {
        let mut times = times.to_vec();
        times.sort_by(f64::total_cmp);
        // The median of an even number of durations is the higher of the two in the middle.
        let at = |place: usize| times.get(place).copied().unwrap_or(f64::NAN);
        Self { median: at(times.len() / 2), least: at(0), most: at(times.len().wrapping_sub(1)) }
    }

    pub(crate) fn json(&self) -> Value {
        json!({ "median": self.median, "least": self.least, "most": self.most })
    }
}

pub(crate) fn median(times: &[f64]) -> f64 {
    Figures::of(times).median
}

pub(crate) fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}
