//! `Communicator.explain`: what a call would do now.

#![allow(unsafe_code)] // names addresses, which nothing reads

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use symmpool_collectives::ReduceOp::Sum as SUM;
use symmpool_collectives::{Explanation, Request, StandardCollective};

use crate::arguments::{Argument, CommunicatorCalls};
use crate::convert::{long_name, standard};
use crate::errors::{OrRaise, invalid};
use crate::name::Name;
use crate::number::Number;
use crate::reading::Refusal;

/// The names that methods have, where they are not those of their collectives.
const METHODS: [(&str, StandardCollective); 3] = [
    ("reduce_scatter_tensor", StandardCollective::ReduceScatter),
    ("all_gather_into_tensor", StandardCollective::AllGather),
    ("all_to_all_single", StandardCollective::AllToAll),
];

/// The arguments of an explanation, but for the communicator and its collective.
pub(crate) struct Asked<'a, 'py> {
    pub(crate) input: Argument<'a, 'py>,
    pub(crate) out: Option<Argument<'a, 'py>>,
    pub(crate) op: Option<Argument<'a, 'py>>,
    pub(crate) src: Number<u32>,
    pub(crate) algorithm: Option<Name<'a>>,
    pub(crate) stream: Option<Argument<'a, 'py>>,
}

/// Returns the explanation of a call of a collective, as an instance of `symmpool.Explanation`. Other ranks hear
/// nothing of it.
pub(crate) fn explain<'py>(
    py: Python<'py>,
    calls: &CommunicatorCalls,
    collective: &str,
    asked: Asked<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let method = METHODS.iter().find(|(name, _)| *name == collective);
    let collective = method.map_or_else(|| standard(py, collective), |(_, found)| Ok(*found))?;
    let Asked { input, out, op, src, algorithm, stream } = asked;
    let stream = calls.own_stream(py, stream)?;
    let raised = |refusal: Refusal| refusal.raise(py);
    let needed = || {
        let why = format!("out: {} has an output of its own", collective.name());
        out.ok_or_else(|| invalid(py, why))
    };
    let (output, input, count, op, root) = match collective {
        StandardCollective::AllReduce => {
            let (input, output, op) = calls.of_all_reduce(input, op, out).map_err(raised)?;
            (output, input, input.count, op, 0)
        }
        StandardCollective::ReduceScatter => {
            let found = calls.of_reduce_scatter(needed()?, input, op);
            let (input, output, op) = found.map_err(raised)?;
            (output, input, output.count, op, 0)
        }
        StandardCollective::AllGather => {
            let (input, output) = calls.of_all_gather(needed()?, input).map_err(raised)?;
            (output, input, input.count, SUM, 0)
        }
        StandardCollective::AllToAll => {
            let found = calls.equal_parts_of(needed()?, input).map_err(raised)?;
            let (output, input, count) = found;
            (output, input, count, SUM, 0)
        }
        StandardCollective::Broadcast => {
            if out.is_some() {
                return Err(invalid(
                    py,
                    "out: a broadcast has none, its tensor is both".to_owned(),
                ));
            }
            let (tensor, root) = calls.of_broadcast(input, src).map_err(raised)?;
            (tensor, tensor, tensor.count, SUM, root)
        }
    };
    let algorithm = algorithm.map(|name| name.or_refuse("algorithm")).transpose();
    let algorithm = algorithm.map_err(raised)?;
    let said = py
        .detach(|| {
            let (to, from) = (output.to(), input.from());
            let dtype = input.dtype;
            // SAFETY: nothing is read or written.
            let request = unsafe { Request::at(collective, to, from, count, dtype) };
            calls.comm.explain(&request.op(op).root(root).algorithm(algorithm), &stream)
        })
        .or_raise(py)?;
    as_object(py, &said)
}

fn as_object<'py>(py: Python<'py>, said: &Explanation) -> PyResult<Bound<'py, PyAny>> {
    let fields = PyDict::new(py);
    let launches: Vec<(u32, u32)> = said.now.launches.clone();
    let windows = [("input", said.input_window), ("output", said.output_window)];
    let windows = windows.into_iter().filter_map(|(name, is_one)| is_one.then_some(name));
    fields.set_item("collective", said.collective.name())?;
    fields.set_item("bytes", said.bytes)?;
    fields.set_item("dtype", long_name(said.dtype))?;
    fields.set_item("algorithm", &said.now.algorithm)?;
    fields.set_item("chosen_by", &said.chosen_by)?;
    fields.set_item("blocks", said.now.blocks())?;
    fields.set_item("sms", said.sms())?;
    fields.set_item("device_sms", said.device_sms)?;
    fields.set_item("launches", PyTuple::new(py, launches)?)?;
    fields.set_item("copies", said.now.copies)?;
    fields.set_item("starts_early", said.now.starts_early)?;
    fields.set_item("memory", said.memory)?;
    fields.set_item("takes", said.takes)?;
    fields.set_item("windows", PyTuple::new(py, windows.collect::<Vec<_>>())?)?;
    fields.set_item("best_algorithm", &said.best.algorithm)?;
    fields.set_item("best_blocks", said.best.blocks())?;
    fields.set_item("kept_by", PyTuple::new(py, &said.kept_by)?)?;
    fields.set_item("text", said.to_string())?;
    let class = py.import("symmpool.communicators.explanation")?.getattr("Explanation")?;
    class.call((), Some(&fields))
}
