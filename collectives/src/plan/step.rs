//! The steps of a plan that was proved: what a rank does with single chunks.

use super::model::Cell;

/// A step of one rank, over single chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PlanStep {
    /// Reduces chunks, or copies one.
    Reduce(Item),
    /// Divides a chunk of the rank's own output, where a call averages: another result was made of it as a sum, so that
    /// it was not divided when it was reduced.
    Divide {
        cell: Cell,
        /// Which chunk of a part it has the length of.
        index_in_part: u32,
        by: u32,
    },
    Signal {
        peer: u32,
        channel: u32,
    },
    Wait {
        peer: u32,
        channel: u32,
    },
    Barrier,
}

/// A chunk that is written, and what it is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) dst: Cell,
    pub(crate) srcs: Vec<Cell>,
    /// Which chunk of a part the operation has the length of: none of its chunks is shorter.
    pub(crate) index_in_part: u32,
    /// Divisor of an average here: the number of inputs that are reduced in a result. 1 where nothing is divided,
    /// which are copies and partial results.
    pub(crate) divisor: u32,
}
