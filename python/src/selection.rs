//! Functions of a program that choose algorithms.

use std::ffi::CString;
use std::path::Path;
use std::sync::Arc;

use pyo3::exceptions::{PyRuntimeWarning, PyTypeError};
use pyo3::prelude::*;
use symmpool_allocator::topology::Mesh;
use symmpool_allocator::{Error, Result};
use symmpool_collectives::{CallShape, ReduceOp, Selector, StandardCollective};

use crate::algorithm::window_names;
use crate::arguments::Calls;
use crate::convert::long_name;
use crate::errors::{OrRaise, invalid};

/// The collective of a name.
pub(crate) fn standard(py: Python<'_>, name: &str) -> PyResult<StandardCollective> {
    StandardCollective::named(name).ok_or_else(|| {
        let names = StandardCollective::ALL.map(StandardCollective::name).join(", ");
        invalid(py, format!("collective: {name:?} is none of {names}"))
    })
}

/// Has a function choose the algorithm of calls of a collective.
pub(crate) fn select(
    py: Python<'_>,
    calls: &Calls,
    collective: &str,
    function: &Bound<'_, PyAny>,
) -> PyResult<()> {
    calls.comm.check("a communicator").or_raise(py)?;
    let (collective, selector) = (standard(py, collective)?, selector(py, function)?);
    py.detach(|| calls.comm.select(collective, selector));
    Ok(())
}

/// Loads a table of algorithms.
pub(crate) fn load_tables(py: Python<'_>, calls: &Calls, path: &Path) -> PyResult<()> {
    calls.comm.check("a communicator").or_raise(py)?;
    py.detach(|| calls.comm.load_tables(path)).or_raise(py)
}

/// A selector that is a function; None is none.
fn selector(py: Python<'_>, function: &Bound<'_, PyAny>) -> PyResult<Option<Arc<dyn Selector>>> {
    if function.is_none() {
        return Ok(None);
    }
    if !function.is_callable() {
        let kind = function.get_type().name()?;
        return Err(invalid(py, format!("selector: a {kind} cannot be called")));
    }
    Ok(Some(Arc::new(Function(function.clone().unbind()))))
}

struct Function(Py<PyAny>);

impl Function {
    fn call(&self, py: Python<'_>, call: &CallShape) -> PyResult<Option<String>> {
        let topology = match call.topology {
            Mesh::FullyConnected { .. } => "fully_connected",
            Mesh::HybridCubeMesh => "hybrid_cube_mesh",
            Mesh::Other => "other",
            Mesh::Unknown => "unknown",
        };
        let (dtype, op) = (long_name(call.dtype), call.op.map(ReduceOp::name));
        let windows = window_names(call.input_window, call.output_window);
        let found =
            self.0.bind(py).call1((call.bytes, dtype, op, call.world, windows, topology))?;
        if found.is_none() {
            return Ok(None);
        }
        found.extract::<String>().map(Some).map_err(|_| {
            PyTypeError::new_err(format!("it returned {found:?}, which is no name and not None"))
        })
    }
}

impl Selector for Function {
    fn select(&self, call: &CallShape) -> Result<Option<String>> {
        Python::attach(|py| {
            self.call(py, call).map_err(|error| Error::invalid_state(error.to_string()))
        })
    }

    fn warn(&self, why: &Error) {
        Python::attach(|py| {
            let text = CString::new(why.to_string().replace('\0', " ")).unwrap_or_default();
            // Where warnings are errors, the call goes on all the same, as it does on other ranks.
            if let Err(error) = PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &text, 1) {
                error.write_unraisable(py, Some(self.0.bind(py)));
            }
        });
    }
}
