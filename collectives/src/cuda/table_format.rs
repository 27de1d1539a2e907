//! The format of the files in `collectives/tables`: which all-reduce was fastest on a kind of device. The
//! example `cuda_collectives`, which writes such files, includes this source file too.

use serde::{Deserialize, Serialize};

/// The contents of a file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    /// The names of the devices that the table is for, as the driver gives them.
    pub(crate) devices: Vec<String>,
    /// Rows of one group are in order of size.
    pub(crate) rows: Vec<Row>,
}

/// Which algorithm is fastest up to some size. Rows that differ only in size form a group.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    /// The number of ranks.
    pub(crate) world: u32,
    /// For element types that the Lamport protocol can carry, or for all other types.
    pub(crate) lamport: bool,
    /// For outputs that are windows, or for other outputs.
    pub(crate) windows: bool,
    /// The most bytes that the row is for, more than those of the row before; `None` where there is no limit.
    pub(crate) up_to: Option<u64>,
    /// The algorithm's name.
    pub(crate) algorithm: String,
}
