//! Reports of ranks to the process that started them, as lines of JSON.

use serde::{Deserialize, Serialize};

use crate::common::say;

/// How the memory of a run of the tensor program orders free blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Order {
    /// The counter-example: best fit, ties by address.
    Address,
    /// symmpool: by place in the lane.
    Counter,
}

/// A live block: its tensor, where it lies, and its length. The offset counts through all windows, end to end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LiveBlock {
    pub(crate) tensor: u32,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// One rank's memory: its windows end to end, and what lies in them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Map {
    pub(crate) windows: Vec<u64>,
    pub(crate) live: Vec<LiveBlock>,
}

/// One line of a rank's report.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// A round of the tensor program: how many of its tensors were wrong after the all-reduce.
    Round { order: Order, round: u32, tensors: u32, wrong: u32 },
    /// The memory at the end of the tensor program.
    Map { order: Order, map: Map },
    /// One timed size: mean microseconds for each call, and the number of elements that differ from the reference.
    Timed { op: String, bytes: usize, us: f64, wrong: usize },
    /// Why the rank stops.
    Failed(String),
}

impl Report {
    pub(crate) fn send(&self) {
        match serde_json::to_string(self) {
            Ok(line) => say!("{line}"),
            Err(error) => eprintln!("a report that cannot be sent: {error}"),
        }
    }
}
