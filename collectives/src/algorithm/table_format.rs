//! The format of tables of algorithms: which one was fastest, on a kind of device. The files in `collectives/tables` have
//! it, and those that `python -m symmpool tune` writes. The program `cuda_collectives`, which writes such files, includes
//! this source file too.

use serde::{Deserialize, Serialize};

/// The version of the format.
pub(crate) const TABLES_VERSION: u32 = 1;

/// The contents of a file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AlgorithmTable {
    /// The version of the format; the first one if it is absent.
    #[serde(default = "version", skip_serializing_if = "is_version")]
    pub(crate) symmpool_tables: u32,
    /// The names of the devices that the table is for, as the driver gives them; `cpu` for host memory.
    pub(crate) devices: Vec<String>,
    /// Rows of one group are in order of size.
    pub(crate) rows: Vec<TableRow>,
}

/// Which algorithm is fastest up to some size. Rows that differ only in size form a group.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TableRow {
    /// The collective's name; all-reduce if it is absent.
    #[serde(default = "all_reduce", skip_serializing_if = "is_all_reduce")]
    pub(crate) collective: String,
    /// The number of ranks.
    pub(crate) world: u32,
    /// For element types that the Lamport protocol can carry, or for all other types; for any if it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lamport: Option<bool>,
    /// For outputs that are windows, or for other outputs; for any if it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) windows: Option<bool>,
    /// The most bytes that the row is for, of the larger one of input and output, more than those of the row before;
    /// `None` where there is no limit.
    pub(crate) up_to: Option<u64>,
    /// The algorithm's name.
    pub(crate) algorithm: String,
    /// The thread blocks that a plan is launched with; its own if they are absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) blocks: Option<u32>,
}

fn version() -> u32 {
    TABLES_VERSION
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde calls it so
fn is_version(version: &u32) -> bool {
    *version == TABLES_VERSION
}

pub(crate) fn all_reduce() -> String {
    "all_reduce".to_owned()
}

fn is_all_reduce(collective: &str) -> bool {
    collective == "all_reduce"
}
