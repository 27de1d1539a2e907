//! The format of `collectives/tables`: what was measured on a kind of device. The program
//! `cuda_collectives`, which writes such files, uses this file too.

use serde::{Deserialize, Serialize};

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    /// Names of the devices it is for, as the driver gives them.
    pub(crate) devices: Vec<String>,
    /// Those of one group in order of size.
    pub(crate) rows: Vec<Row>,
}

/// Which algorithm is fastest up to some size. Rows that are alike but for size are a group.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    /// Ranks.
    pub(crate) world: u32,
    /// For element types that the Lamport protocol can carry, or for the others.
    pub(crate) lamport: bool,
    /// Where the output is a window, or where it is not.
    pub(crate) windows: bool,
    /// Bytes, and more than those of the row before; none: without end.
    pub(crate) up_to: Option<u64>,
    /// By its name.
    pub(crate) algorithm: String,
}
