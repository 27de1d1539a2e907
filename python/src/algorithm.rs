//! The class `Algorithm`: an algorithm that a program brought along.

#![allow(unsafe_code)] // passes on addresses that tensors gave

use std::path::PathBuf;

use pyo3::prelude::*;
use symmpool_allocator::{Result, Stream};
use symmpool_collectives::plan::{Plan, PlanError};
use symmpool_collectives::{AllReduceAlgorithm, DType, ReduceOp};

use crate::arguments::{Argument, Calls};
use crate::communicator::Communicator;
use crate::convert;
use crate::errors::{OrRaise, exception, invalid};
use crate::number::Number;
use crate::operation;
use crate::reading::{Refusal, Tensor};

/// An algorithm for a collective: a plan that was proved to compute it. `symmpool.language` makes one of a
/// program, and `symmpool.language.load` of a file.
///
/// It is for one number of ranks. `Communicator.register` makes it known under its name, so that calls take it by
/// `algorithm=`; `execute` runs it as it is.
#[pyclass(frozen, module = "symmpool.language")]
pub(crate) struct Algorithm {
    pub(crate) algorithm: symmpool_collectives::Algorithm,
}

/// The exception for a plan that is wrong.
fn plan_error(py: Python<'_>, source: &str, error: &PlanError) -> PyErr {
    let make = || {
        let place = match (source, error.line) {
            ("", _) | (_, 0) => String::new(),
            (source, line) => format!("{source}:{line}: "),
        };
        let class = py.import("symmpool.errors")?.getattr("PlanError")?;
        let message = format!("{place}{error}");
        let instance = class.call1((message, error.kind.name(), error.rank, error.line))?;
        PyResult::Ok(PyErr::from_value(instance))
    };
    make().unwrap_or_else(|broken| broken)
}

#[pymethods]
impl Algorithm {
    /// Reads a plan from JSON and proves it: InvalidArgumentError for what is no plan, PlanError for one that is wrong.
    #[new]
    fn new(py: Python<'_>, plan: &str) -> PyResult<Self> {
        let plan = py.detach(|| Plan::from_json(plan)).or_raise(py)?;
        let source = plan.source.clone();
        let checked = py.detach(|| symmpool_collectives::Algorithm::from_plan(plan));
        let algorithm = checked.map_err(|error| plan_error(py, &source, &error))?;
        Ok(Self { algorithm })
    }

    /// The name, under which it is registered.
    #[getter]
    fn name(&self) -> &str {
        self.algorithm.name()
    }

    /// What it computes: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", or the name of the
    /// program's own collective.
    #[getter]
    fn collective(&self) -> &str {
        self.algorithm.collective()
    }

    /// The number of ranks that it is for.
    #[getter]
    fn world(&self) -> u32 {
        self.algorithm.plan().plan().world
    }

    /// Where it comes from: "plan".
    #[getter]
    fn origin(&self) -> &'static str {
        "plan"
    }

    /// A hash of the plan, by which ranks find out that they have registered different ones.
    #[getter]
    fn hash(&self) -> String {
        format!("{:016x}", self.algorithm.hash())
    }

    /// Whether input and output may be one memory.
    #[getter]
    fn in_place(&self) -> bool {
        self.algorithm.plan().in_place().is_ok()
    }

    /// Which of "input" and "output" must be memory of the pool, because peers access it.
    #[getter]
    fn windows(&self) -> Vec<&'static str> {
        let plan = self.algorithm.plan();
        let both = [(plan.needs_input_window(), "input"), (plan.needs_output_window(), "output")];
        both.into_iter().filter(|(is, _)| *is).map(|(_, name)| name).collect()
    }

    /// The plan as JSON.
    fn to_json(&self) -> String {
        self.algorithm.plan().plan().to_json()
    }

    /// Writes the plan to a file, for `symmpool.language.load` or a program in Rust.
    fn save(&self, path: PathBuf) -> PyResult<()> {
        Ok(std::fs::write(path, self.to_json())?)
    }

    /// The plan as a table: a column for each rank, a row for each step.
    fn explain(&self) -> String {
        self.algorithm.plan().explain()
    }

    /// Draws the plan as an SVG file: ranks, operations and signals over time.
    fn plot(&self, path: PathBuf) -> PyResult<()> {
        Ok(std::fs::write(path, self.algorithm.plan().draw())?)
    }

    /// Runs it: a call like any other, which every rank makes in the same order. Without `output` it is in place.
    ///
    /// `input` and `output` are tensors as other calls take them, with as many elements as the collective has there;
    /// or addresses, with `count`, the elements of the input, and `dtype`. `op` ("sum", "prod", "min", "max", "avg") is
    /// for what reduces, `src` for a broadcast, in which `input` of other ranks is not read. On the CPU it returns when
    /// this rank's part is done; on CUDA it is put on `stream`, or the current one, for which the first call with an
    /// element type and operation compiles a kernel.
    #[pyo3(
        signature = (
            comm, input, output = None, *, op = None, src = Number::of(0), stream = None, count = None, dtype = None
        ),
        text_signature = "($self, comm, input, output=None, *, op='sum', src=0, stream=None, count=None, dtype=None)"
    )]
    #[allow(clippy::too_many_arguments)] // what a call is
    fn execute(
        &self,
        py: Python<'_>,
        comm: &Bound<'_, Communicator>,
        input: Argument<'_, '_>,
        output: Option<Argument<'_, '_>>,
        op: Option<Argument<'_, '_>>,
        src: Number<u32>,
        stream: Option<Argument<'_, '_>>,
        count: Option<Number<u64>>,
        dtype: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        let calls = comm.get().calls();
        let stream_of_call = calls.stream(py, stream)?;
        let raw = match (count, dtype) {
            (None, None) => Ok(None),
            (Some(count), Some(dtype)) => count
                .or_raise(py, "count")
                .and_then(|count| Ok(Some((count, convert::dtype(dtype)?)))),
            _ => Err(invalid(py, "count and dtype are for addresses, and are given together")),
        };
        let raw = calls.or_decline(py, stream_of_call, raw.map_err(Refusal::Raised))?;
        let call = Call { input, output, op, src, raw };
        run(py, calls, &self.algorithm, call, stream_of_call)
    }

    fn __repr__(&self) -> String {
        let (name, collective, world) = (self.name(), self.collective(), self.world());
        format!("symmpool.language.Algorithm({name:?}, {collective:?}, world={world})")
    }
}

/// A call with an algorithm, as Python gives it.
pub(crate) struct Call<'a, 'py> {
    pub(crate) input: Argument<'a, 'py>,
    pub(crate) output: Option<Argument<'a, 'py>>,
    pub(crate) op: Option<Argument<'a, 'py>>,
    pub(crate) src: Number<u32>,
    /// For addresses: the number of elements of the input, and their type.
    pub(crate) raw: Option<(u64, DType)>,
}

impl<'a, 'py> Call<'a, 'py> {
    /// A call on tensors, of rank 0 as the root.
    pub(crate) fn new(
        input: Argument<'a, 'py>,
        output: Option<Argument<'a, 'py>>,
        op: Option<Argument<'a, 'py>>,
    ) -> Self {
        Self { input, output, op, src: Number::of(0), raw: None }
    }
}

/// Runs an algorithm.
pub(crate) fn run(
    py: Python<'_>,
    calls: &Calls,
    algorithm: &symmpool_collectives::Algorithm,
    call: Call<'_, '_>,
    stream: Stream,
) -> PyResult<()> {
    let found = prepare(calls, algorithm, call);
    let Prepared { input, output, count, op, src } = calls.or_decline(py, stream, found)?;
    // SAFETY: both are tensors of the lengths that the algorithm has for this count, contiguous, on the pool's device,
    // and the caller's frame keeps them alive for the length of the call; of addresses the caller promises that, by
    // the documented contract of `execute`.
    calls.run(py, || unsafe {
        let dtype = input.dtype;
        calls.comm.execute_at(algorithm, output.to(), input.from(), count, dtype, op, src, &stream)
    })
}

/// Arguments that fit the algorithm.
struct Prepared {
    input: Tensor,
    output: Tensor,
    /// Elements of a part.
    count: usize,
    op: ReduceOp,
    src: u32,
}

fn prepare(
    calls: &Calls,
    algorithm: &symmpool_collectives::Algorithm,
    call: Call<'_, '_>,
) -> Result<Prepared, Refusal> {
    let Call { input, output, op, src, raw } = call;
    let op = operation::reduce_op(op).map_err(Refusal::Invalid)?;
    let src = src.or_refuse("src")?;
    let checked = algorithm.plan();
    let parts = checked.plan().input_parts() as usize;
    let whole = |count: usize| {
        (count.is_multiple_of(parts)).then_some(count / parts).ok_or_else(|| {
            Refusal::Invalid(format!("input: {count} elements do not divide into {parts} parts"))
        })
    };
    let lengths = |count: usize| checked.lengths(calls.rank, count);
    if let Some((count, dtype)) = raw {
        let address = |name: &'static str, object: Argument<'_, '_>| {
            let address: Number<u64> = object.extract()?;
            Ok::<_, Refusal>(address.or_refuse(name)? as usize)
        };
        let (from, count) = (address("input", input)?, whole(count as usize)?);
        let to = output.map_or(Ok(from), |output| address("output", output))?;
        let [inputs, outputs] = lengths(count).map(|length| length.unwrap_or(usize::MAX));
        return Ok(Prepared {
            input: Tensor { address: from, count: inputs, dtype },
            output: Tensor { address: to, count: outputs, dtype },
            count,
            op,
            src,
        });
    }
    let from = calls.read("input", input, output.is_none())?;
    let to = match output {
        Some(output) => calls.output("output", output, &from, None)?,
        None => from,
    };
    let count = whole(from.count)?;
    let [_, outputs] = lengths(count);
    if output.is_some() && outputs != Some(to.count) {
        let (world, found) = (calls.world, to.count);
        let expected = outputs.map_or_else(|| "an impossible number".to_owned(), |n| n.to_string());
        return Err(Refusal::Invalid(format!(
            "output: {found} elements where {expected} are needed, for an input of {} among {world} ranks",
            from.count
        )));
    }
    if output.is_none() && outputs != Some(from.count) {
        return Err(Refusal::Invalid(format!(
            "output: {} is in place only where input and output are as long as each other; pass an output",
            algorithm.name()
        )));
    }
    Ok(Prepared { input: from, output: to, count, op, src })
}

/// Runs the algorithm that was registered under a name for a collective.
pub(crate) fn run_named(
    py: Python<'_>,
    calls: &Calls,
    collective: &str,
    name: &str,
    call: Call<'_, '_>,
    stream: Stream,
) -> PyResult<()> {
    let found = calls.comm.registered(collective, name);
    let found = found.map_err(|error| Refusal::Raised(exception(py, &error)));
    let algorithm = calls.or_decline(py, stream, found)?;
    run(py, calls, &algorithm, call, stream)
}

/// An all-reduce by a registered algorithm of that name, or else by a built-in one.
pub(crate) fn all_reduce_by_name(
    py: Python<'_>,
    calls: &Calls,
    name: &str,
    (tensor, out, op): (Argument<'_, '_>, Option<Argument<'_, '_>>, Option<Argument<'_, '_>>),
    stream: Stream,
) -> PyResult<()> {
    let algorithm = match calls.comm.registered("all_reduce", name) {
        Ok(registered) => {
            return run(py, calls, &registered, Call::new(tensor, out, op), stream);
        }
        Err(unknown) => {
            let built_in = AllReduceAlgorithm::named(name);
            let unknown = || Refusal::Raised(exception(py, &unknown));
            calls.or_decline(py, stream, built_in.ok_or_else(unknown))?
        }
    };
    let found = calls.of_all_reduce(tensor, op, out);
    let (input, output, op) = calls.or_decline(py, stream, found)?;
    let Tensor { count, dtype, .. } = input;
    // SAFETY: both are tensors of this length and type, contiguous, on the pool's device, and the caller's frame keeps
    // them alive for the length of the call.
    calls.run(py, || unsafe {
        let (to, from) = (output.to(), input.from());
        calls.comm.all_reduce_with_at(to, from, count, dtype, op, algorithm, &stream)
    })
}
