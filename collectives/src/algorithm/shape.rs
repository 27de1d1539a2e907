//! Shape of a call, as those see it who select an algorithm for it.

use symmpool_allocator::topology::TopologyKind;

use super::StandardCollective;
use crate::{DType, ReduceOp};

/// A call of a collective, as selectors see it. It is the same on every rank, except that inputs and outputs of
/// all-to-alls may be windows on some ranks only.
#[derive(Clone, Copy, Debug)]
pub struct CallShape {
    /// The collective.
    pub collective: StandardCollective,
    /// Bytes of the larger one of input and output, which has all ranks' parts where the other has one.
    pub bytes: u64,
    /// The type of the elements.
    pub dtype: DType,
    /// How elements are reduced, if the collective reduces.
    pub op: Option<ReduceOp>,
    /// The number of ranks.
    pub world: u32,
    /// Whether the input lies in a window.
    pub input_window: bool,
    /// Whether the output lies in a window.
    pub output_window: bool,
    /// How the ranks are linked.
    pub topology: TopologyKind,
}

impl CallShape {
    /// Bytes of a part: of what a rank gathers, or sends to another one.
    pub fn part(&self) -> u64 {
        self.bytes / u64::from(self.collective.parts(self.world).max(1))
    }
}
