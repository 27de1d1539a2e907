//! The class `Algorithm`: an algorithm of a communicator, or one that a program brought along.

#![allow(unsafe_code)] // passes on addresses that tensors gave

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use symmpool_allocator::{Error, Result, Stream};
use symmpool_collectives::plan::{CheckedPlan, Plan, PlanError};
use symmpool_collectives::{DType, NativeKernel, ReduceOp, Request};

use crate::arguments::{Argument, CommunicatorCalls};
use crate::communicator::Communicator;
use crate::convert::{self, long_name, standard, window_names};
use crate::errors::{OrRaise, exception, invalid};
use crate::number::Number;
use crate::operation;
use crate::reading::{Refusal, Tensor};

/// An algorithm for a collective: a built-in one, which `Communicator.algorithms` lists, a plan that was proved to
/// compute it, or a kernel. `symmpool.language` makes one of a program, `symmpool.language.load` of a file, and
/// `symmpool.native` of CUDA C++.
///
/// A plan is for one number of ranks. `Communicator.register` makes it known under its name, so that calls take it by
/// `algorithm=`; `execute` runs it as it is. Algorithms are equal that ranks may take for each other: of one name and
/// collective, with one program or kernel, whatever file it is from.
#[pyclass(frozen, eq, hash, module = "symmpool.language")]
#[derive(PartialEq, Eq, Hash)]
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

    /// The algorithm that a CUDA kernel is; `symmpool.native` says what the arguments are.
    #[staticmethod]
    #[allow(clippy::too_many_arguments)] // a kernel has these parts
    fn native(
        py: Python<'_>,
        source: &str,
        path: String,
        kernel: &str,
        collective: &str,
        name: String,
        world: Option<Number<u32>>,
        windows: (bool, bool),
        in_place: bool,
        max_bytes: Option<Number<u64>>,
        grid: Option<Number<u32>>,
        threads: Number<u32>,
    ) -> PyResult<Self> {
        let collective = standard(py, collective)?;
        let number = |number: Option<Number<u32>>, what: &'static str| {
            number.map(|number| number.or_raise(py, what)).transpose()
        };
        let kernel = NativeKernel {
            name,
            path,
            world: number(world, "world")?,
            input_window: windows.0,
            output_window: windows.1,
            in_place,
            max_bytes: max_bytes.map(|number| number.or_raise(py, "max_bytes")).transpose()?,
            blocks: number(grid, "grid")?,
            threads: threads.or_raise(py, "threads")?,
            ..NativeKernel::new(collective, kernel, source)
        };
        let algorithm = symmpool_collectives::Algorithm::native(kernel).or_raise(py)?;
        Ok(Self { algorithm })
    }

    /// The name, under which it is registered.
    #[getter]
    fn name(&self) -> &str {
        self.algorithm.name()
    }

    /// Name of the collective: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", or the name
    /// of the program's own collective.
    #[getter]
    fn collective(&self) -> &str {
        self.algorithm.collective()
    }

    /// The number of ranks that it is for.
    #[getter]
    fn world(&self) -> Option<u32> {
        let constraints = self.algorithm.constraints()?;
        let (least, most) = (*constraints.world.start(), *constraints.world.end());
        (least == most).then_some(least)
    }

    /// Where it comes from: "builtin", "plan" or "native".
    #[getter]
    fn origin(&self) -> &'static str {
        self.algorithm.origin().name()
    }

    /// A hash of the plan, by which ranks find out that they have registered different ones; of a built-in one, of its
    /// name and this version.
    #[getter]
    fn hash(&self) -> String {
        format!("{:016x}", self.algorithm.hash())
    }

    /// Whether input and output may be one memory.
    #[getter]
    fn in_place(&self) -> bool {
        self.algorithm.constraints().is_some_and(|constraints| constraints.in_place)
    }

    /// Which of "input" and "output" must be memory of the pool, because peers access it.
    #[getter]
    fn windows(&self) -> Vec<&'static str> {
        self.algorithm.constraints().map_or_else(Vec::new, |constraints| {
            window_names(constraints.input_window, constraints.output_window)
        })
    }

    /// Which calls it can serve: "world" (the least and the greatest number of ranks), "topology" (how ranks must be
    /// linked, or None), "dtypes", "ops" (none for what does not reduce), "bytes" (of the larger one of input and
    /// output, the least and the most; None stands for no limit), "multiple_of" (elements of a part), "windows" and
    /// "in_place".
    #[getter]
    fn constraints<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(found) = self.algorithm.constraints() else { return Ok(None) };
        let all = PyDict::new(py);
        all.set_item("world", (*found.world.start(), *found.world.end()))?;
        all.set_item("topology", found.topology)?;
        let dtypes: Vec<&str> = found.dtypes.iter().map(|dtype| long_name(*dtype)).collect();
        all.set_item("dtypes", dtypes)?;
        all.set_item("ops", found.ops.iter().map(|op| op.name()).collect::<Vec<_>>())?;
        let most = Some(*found.bytes.end()).filter(|most| *most < u64::MAX);
        all.set_item("bytes", (*found.bytes.start(), most))?;
        all.set_item("multiple_of", found.multiple_of)?;
        all.set_item("windows", window_names(found.input_window, found.output_window))?;
        all.set_item("in_place", found.in_place)?;
        Ok(Some(all))
    }

    /// Chunks of scratch that a plan needs; 0 for built-in ones, which take what there is.
    #[getter]
    fn scratch(&self) -> u32 {
        self.algorithm.scratch()
    }

    /// Thread blocks on devices, at most; None leaves it to the size of a call.
    #[getter]
    fn blocks(&self) -> Option<u32> {
        self.algorithm.launch().blocks
    }

    /// The plan as JSON. UnsupportedError for what is no plan: built-in ones and kernels; so do the three that follow.
    fn to_json(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.plan(py)?.plan().to_json())
    }

    /// Writes the plan to a file, for `symmpool.language.load` or a program in Rust.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let text = self.to_json(py)?;
        Ok(py.detach(|| std::fs::write(path, text))?)
    }

    /// The plan as a table: a column for each rank, a row for each step.
    fn explain(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.plan(py)?.explain())
    }

    /// Draws the plan as an SVG file: ranks, operations and signals over time.
    fn plot(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let plan = self.plan(py)?;
        Ok(py.detach(|| std::fs::write(path, plan.draw()))?)
    }

    /// Compiles a kernel that `symmpool.native` made, for devices of an architecture ("sm_80", "sm_90", ...), and
    /// returns the bytes of code. No device is needed, but NVRTC is: UnsupportedError where there is none, or for what is
    /// no kernel.
    ///
    /// InvalidArgumentError says what is wrong: what the compiler says of the source, with its lines, or that the
    /// source has no kernel of the name, with the lines of those that it has. `world` is the number of ranks (unless
    /// given, that of `symmpool.native`, else 2). For what reduces it is compiled for elements of `dtype` and `op`.
    #[pyo3(
        signature = (arch = "sm_90", *, world = None, dtype = None, op = None),
        text_signature = "($self, arch='sm_90', *, world=None, dtype='float32', op='sum')"
    )]
    fn compile(
        &self,
        py: Python<'_>,
        arch: &str,
        world: Option<Number<u32>>,
        dtype: Option<Argument<'_, '_>>,
        op: Option<Argument<'_, '_>>,
    ) -> PyResult<usize> {
        let Some(kernel) = self.algorithm.kernel() else {
            let why =
                format!("{} of {} is no kernel of symmpool.native", self.name(), self.collective());
            return Err(exception(py, &Error::unsupported(why)));
        };
        let number = arch.strip_prefix("sm_").and_then(|rest| {
            let digits = rest.strip_suffix('a').unwrap_or(rest);
            digits.parse::<u32>().ok().filter(|_| digits.len() >= 2)
        });
        let Some(number) = number else {
            let arch = symmpool_allocator::short(arch);
            return Err(invalid(
                py,
                format!("arch={arch:?}: it is \"sm_80\", \"sm_90\" or the like"),
            ));
        };
        let world = world.map(|world| world.or_raise(py, "world")).transpose()?;
        let world = world.or(kernel.world).unwrap_or(2);
        let dtype = dtype.map_or(Ok(DType::F32), convert::dtype)?;
        let op = operation::reduce_op(op).map_err(|why| invalid(py, why))?;
        py.detach(|| kernel.compile((number / 10, number % 10), world, dtype, op)).or_raise(py)
    }

    /// Runs it: a call like any other, which every rank makes in the same order. Without `output` it is in place. A rank that
    /// has no output passes an empty one or none; or, where peers access outputs, what others pass, which is not touched.
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
    #[allow(clippy::too_many_arguments)] // a call has these arguments
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
        let call = AlgorithmCall { input, output, op, src, raw };
        run(py, calls, &self.algorithm, call, stream_of_call)?;
        comm.get().wrote(&[Some(output.unwrap_or(input))])
    }

    fn __repr__(&self) -> String {
        let (name, collective) = (self.name(), self.collective());
        match self.algorithm.plan() {
            Some(plan) => {
                let world = plan.plan().world;
                format!("symmpool.language.Algorithm({name:?}, {collective:?}, world={world})")
            }
            None => format!(
                "symmpool.language.Algorithm({name:?}, {collective:?}, origin={:?})",
                self.origin()
            ),
        }
    }
}

/// The algorithms of a communicator, for one collective or for all.
pub(crate) fn all(calls: &CommunicatorCalls, collective: Option<&str>) -> Vec<Algorithm> {
    let all = calls.comm.algorithms().into_iter();
    all.filter(|each| collective.is_none_or(|of| each.collective() == of))
        .map(|algorithm| Algorithm { algorithm })
        .collect()
}

/// Runs an algorithm on a communicator: one that is registered there, by its name, or one as it is.
pub(crate) fn execute(
    comm: &Bound<'_, Communicator>,
    algorithm: Argument<'_, '_>,
    both: (Argument<'_, '_>, Option<Argument<'_, '_>>),
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let (py, calls) = (comm.py(), comm.get().calls());
    let found = match algorithm.cast::<Algorithm>() {
        Ok(algorithm) => Ok(algorithm.clone()),
        Err(_) => algorithm
            .extract::<String>()
            .map_err(|_| {
                let kind = algorithm.get_type().to_string();
                Refusal::Invalid(format!("algorithm: a name or an Algorithm is needed, not {kind}"))
            })
            .and_then(|name| {
                let found = calls.comm.registered_under(&name);
                found.map_err(|why| Refusal::Raised(exception(py, &why)))
            })
            .and_then(|algorithm| Ok(Bound::new(py, Algorithm { algorithm })?)),
    };
    let stream = options.map_or(Ok(None), |options| options.get_item("stream"))?;
    let stream = calls.stream(py, stream.as_ref())?;
    let found = calls.or_decline(py, stream, found)?;
    found.call_method("execute", (comm, both.0, both.1), options)?;
    Ok(())
}

impl Algorithm {
    fn plan(&self, py: Python<'_>) -> PyResult<&CheckedPlan> {
        let plan = self.algorithm.plan().map(|plan| &**plan);
        plan.ok_or_else(|| {
            let why = match self.origin() {
                "native" => format!("{} of {} is a native kernel", self.name(), self.collective()),
                _ => format!("{} of {} is built in", self.name(), self.collective()),
            };
            let why = format!("{why}: it has no plan");
            exception(py, &Error::unsupported(why))
        })
    }
}

/// A call with an algorithm, as Python gives it.
struct AlgorithmCall<'a, 'py> {
    input: Argument<'a, 'py>,
    output: Option<Argument<'a, 'py>>,
    op: Option<Argument<'a, 'py>>,
    src: Number<u32>,
    /// For addresses: the number of elements of the input, and their type.
    raw: Option<(u64, DType)>,
}

/// Runs an algorithm.
fn run(
    py: Python<'_>,
    calls: &CommunicatorCalls,
    algorithm: &symmpool_collectives::Algorithm,
    call: AlgorithmCall<'_, '_>,
    stream: Stream,
) -> PyResult<()> {
    let found = prepare(calls, algorithm, call);
    let Prepared { input, output, count, op, src } = calls.or_decline(py, stream, found)?;
    // SAFETY: both are tensors of the lengths that the algorithm has for this count, contiguous, on the pool's device,
    // and the caller's frame keeps them alive for the length of the call; of addresses the caller promises that, by
    // the documented contract of `execute`.
    calls.run(py, || unsafe {
        let dtype = input.dtype;
        calls.comm.call(
            &Request::at(algorithm, output.to(), input.from(), count, dtype).op(op).root(src),
            &stream,
        )
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
    calls: &CommunicatorCalls,
    algorithm: &symmpool_collectives::Algorithm,
    call: AlgorithmCall<'_, '_>,
) -> Result<Prepared, Refusal> {
    let AlgorithmCall { input, output, op, src, raw } = call;
    let op = operation::reduce_op(op).map_err(Refusal::Invalid)?;
    let src = src.or_refuse("src")?;
    let parts = algorithm.input_parts(calls.world);
    let whole = |count: usize| {
        (count.is_multiple_of(parts)).then_some(count / parts).ok_or_else(|| {
            Refusal::Invalid(format!("input: {count} elements do not divide into {parts} parts"))
        })
    };
    let lengths = |count: usize| algorithm.lengths(calls.rank, calls.world, count);
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
    // On a rank that has no output, one that is given only says where peers have theirs.
    let has_none = algorithm.plan().is_some_and(|plan| plan.plan().output_chunks(calls.rank) == 0);
    let from = calls.read("input", input, output.is_none() && !has_none)?;
    let to = match output {
        Some(output) => calls.output("output", output, &from, None)?,
        None if has_none => Tensor { address: 0, count: 0, ..from },
        None => from,
    };
    let count = whole(from.count)?;
    if has_none {
        return Ok(Prepared { input: from, output: to, count, op, src });
    }
    let [_, outputs] = lengths(count);
    if outputs != Some(to.count) {
        let divides = algorithm.constraints().map_or(1, |found| found.multiple_of as usize);
        if !count.is_multiple_of(divides) {
            return Err(Refusal::Invalid(format!(
                "input: {} elements do not divide into the equal chunks of {}: parts of a multiple of {divides} do",
                from.count,
                algorithm.name()
            )));
        }
    }
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
            "output: without one {} is in place, which needs an input and an output of one length; pass an output of {} \
             elements",
            algorithm.name(),
            outputs.map_or_else(|| "an impossible number of".to_owned(), |n| n.to_string())
        )));
    }
    Ok(Prepared { input: from, output: to, count, op, src })
}
