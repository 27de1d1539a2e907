//! Checks of each call's arguments, which a rank makes alone: before there is a communicator, too.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use symmpool_collectives::ReduceOp;

use crate::arguments::{Argument, RankContext};
use crate::convert::MemoryDevice;
use crate::number::Number;
use crate::operation;
use crate::reading::{Refusal, Tensor};
use crate::tensor;

impl RankContext {
    /// Checks an all-reduce: its input, its output, and its operation.
    #[inline]
    pub(crate) fn of_all_reduce(
        &self,
        tensor: Argument<'_, '_>,
        op: Option<Argument<'_, '_>>,
        out: Option<Argument<'_, '_>>,
    ) -> Result<(Tensor, Tensor, ReduceOp), Refusal> {
        let op = operation::reduce_op(op).map_err(Refusal::Invalid)?;
        let input = self.read("tensor", tensor, out.is_none())?;
        tensor::is_reduced("tensor", tensor, &input)?;
        let output = match out {
            None => input,
            Some(out) => self.output("out", out, &input, Some(input.count))?,
        };
        Ok((input, output, op))
    }

    /// Checks a reduce-scatter: its input, its output, and its operation.
    #[inline]
    pub(crate) fn of_reduce_scatter(
        &self,
        output: Argument<'_, '_>,
        input: Argument<'_, '_>,
        op: Option<Argument<'_, '_>>,
    ) -> Result<(Tensor, Tensor, ReduceOp), Refusal> {
        let op = operation::reduce_op(op).map_err(Refusal::Invalid)?;
        let from = input;
        let input = self.read("input", from, false)?;
        tensor::is_reduced("input", from, &input)?;
        let output = self.output("output", output, &input, None)?;
        let parts = self.parts(output.count);
        self.fits("input", input.count, parts, "one part for every rank")?;
        Ok((input, output, op))
    }

    /// Checks an all-gather: its input and its output.
    #[inline]
    pub(crate) fn of_all_gather(
        &self,
        output: Argument<'_, '_>,
        input: Argument<'_, '_>,
    ) -> Result<(Tensor, Tensor), Refusal> {
        let input = self.read("input_tensor", input, false)?;
        let output = self.output("output_tensor", output, &input, None)?;
        let parts = self.parts(input.count);
        self.fits("output_tensor", output.count, parts, "one part for every rank")?;
        Ok((input, output))
    }

    /// Checks a broadcast: its buffer and its root.
    #[inline]
    pub(crate) fn of_broadcast(
        &self,
        tensor: Argument<'_, '_>,
        src: Number<u32>,
    ) -> Result<(Tensor, u32), Refusal> {
        let src = src.or_refuse("src")?;
        if src >= self.world {
            let why = format!("src: root {src} of a group of {} ranks", self.world);
            return Err(Refusal::Invalid(why));
        }
        Ok((self.read("tensor", tensor, src != self.rank)?, src))
    }
}

/// Raises what the communicator of `rank` of `world` on a device (a CUDA device's number, -1 for the CPU)
/// would refuse a call for, by the name of its method, without telling anybody.
#[pyfunction]
pub(crate) fn check_call(
    py: Python<'_>,
    device: i64,
    rank: u32,
    world: u32,
    call: &str,
    arguments: &Bound<'_, PyTuple>,
) -> PyResult<()> {
    let device = u32::try_from(device).map_or(MemoryDevice::Cpu, MemoryDevice::Cuda);
    let context = RankContext { device, rank, world };
    let given = |at: usize| arguments.get_item(at).ok().filter(|it| !it.is_none());
    let Some(first) = given(0) else { return Ok(()) };
    let (second, third, fourth) = (given(1), given(2), given(3));
    let checked = match (call, &second) {
        ("all_reduce", op) => context.of_all_reduce(&first, op.as_ref(), third.as_ref()).map(drop),
        ("reduce_scatter_tensor", Some(input)) => {
            context.of_reduce_scatter(&first, input, third.as_ref()).map(drop)
        }
        ("all_gather_into_tensor", Some(input)) => context.of_all_gather(&first, input).map(drop),
        ("broadcast", Some(src)) => context.of_broadcast(&first, src.extract()?).map(drop),
        ("all_to_all_single", Some(input)) => {
            context.parts_of(&first, input, third.as_ref(), fourth.as_ref()).map(drop)
        }
        ("send" | "recv", _) => context.read("tensor", &first, call == "recv").map(drop),
        ("all_to_all_v", Some(input)) => match &third {
            Some(splits) => context
                .rows_by_splits(&first, input, splits, fourth.as_ref(), given(4).as_ref())
                .map(drop),
            None => Ok(()),
        },
        _ => Ok(()),
    };
    checked.map_err(|refusal| refusal.raise(py))
}
