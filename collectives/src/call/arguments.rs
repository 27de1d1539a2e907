//! A call as one value: what goes from a communicator's door to the engine.

use crate::algorithm::{AlgorithmId, CallShape, StandardCollective};
use crate::call::{CallDescription, OpType};
use crate::types::place::Place;
use crate::{DType, ReduceOp};

/// Arguments of a call by any algorithm, whose memory was found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arguments {
    pub(crate) input: Place,
    pub(crate) output: Place,
    /// Elements of a part; of the input, where the collective is a program's own.
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    pub(crate) root: u32,
}

/// A call of a collective that has built-in algorithms, by one of these or by any.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StandardCall {
    pub(crate) collective: StandardCollective,
    /// The built-in algorithm, or [`AUTO`](crate::algorithm::AUTO).
    pub(crate) algorithm: AlgorithmId,
    pub(crate) arguments: Arguments,
}

impl Arguments {
    /// Bytes of `parts` parts; saturates, and no memory is that long then.
    pub(crate) fn bytes_of(&self, parts: u32) -> u64 {
        let part = (self.count as u64).saturating_mul(self.dtype.size() as u64);
        part.saturating_mul(u64::from(parts))
    }
}

impl StandardCall {
    /// Description of the call that ranks compare, but for its algorithm and where its memory lies.
    #[inline]
    pub(crate) fn describe(&self) -> CallDescription {
        let Arguments { count, dtype, op, root, .. } = self.arguments;
        let call = CallDescription::new(OpType::of(self.collective)).elements(dtype, count);
        match self.collective {
            StandardCollective::Broadcast => call.root(root),
            collective if collective.reduces() => call.reduce(op),
            _ => call,
        }
    }

    /// Shape of the call, by which an algorithm is selected for it. `topology` is how the `world` ranks are linked.
    pub(crate) fn shape(
        &self,
        world: u32,
        topology: symmpool_allocator::topology::TopologyKind,
    ) -> CallShape {
        let Self { collective, arguments, .. } = *self;
        CallShape {
            collective,
            bytes: arguments.bytes_of(collective.parts(world)),
            dtype: arguments.dtype,
            op: collective.reduces().then_some(arguments.op),
            world,
            input_window: arguments.input.is_window(),
            output_window: arguments.output.is_window(),
            topology,
        }
    }
}
