//! Functions of a program that choose algorithms.

use std::ffi::CString;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyRuntimeWarning, PyTypeError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use symmpool_allocator::topology::TopologyKind;
use symmpool_allocator::{Error, short};
use symmpool_collectives::{CallShape, ReduceOp, Selector, StandardCollective};

use crate::arguments::CommunicatorCalls;
use crate::convert::{long_name, standard, window_names};
use crate::errors::{OrRaise, from_within, invalid};

/// The selectors of a communicator, as Python's garbage collector must know them: functions often refer to the
/// communicator for which they choose, and neither would ever be freed.
#[derive(Default)]
pub(crate) struct Selectors(Mutex<Vec<(StandardCollective, Arc<ChoosingFunction>)>>);

impl Selectors {
    fn lock(&self) -> MutexGuard<'_, Vec<(StandardCollective, Arc<ChoosingFunction>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a function choose the algorithm of calls of a collective.
    pub(crate) fn select(
        &self,
        py: Python<'_>,
        calls: &CommunicatorCalls,
        collective: &str,
        function: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        calls.comm.check("a communicator").or_raise(py)?;
        let (collective, function) = (standard(py, collective)?, selector(py, function)?);
        // The former one is dropped when nothing is locked: what ends with it may be the program's.
        let former = py.detach(|| {
            let mut kept = self.lock();
            let former: Vec<_> = kept.extract_if(.., |(of, _)| *of == collective).collect();
            kept.extend(function.clone().map(|function| (collective, function)));
            let chooses = function.map(|function| function as Arc<dyn Selector>);
            calls.comm.select(collective, chooses);
            former
        });
        drop(former);
        Ok(())
    }

    /// Shows the functions to the garbage collector.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        // Whoever has it locked keeps the communicator.
        let Ok(kept) = self.0.try_lock() else { return Ok(()) };
        kept.iter().try_for_each(|(_, function)| visit.call(&function.0))
    }

    /// Lets go of all functions.
    pub(crate) fn clear(&self, calls: &CommunicatorCalls) {
        // In a forked child the communicator stays as it is.
        if calls.comm.check("a communicator").is_err() {
            return;
        }
        let kept = std::mem::take(&mut *self.lock());
        for (collective, _) in &kept {
            calls.comm.select(*collective, None);
        }
    }
}

/// Loads a table of algorithms.
pub(crate) fn load_tables(py: Python<'_>, calls: &CommunicatorCalls, path: &Path) -> PyResult<()> {
    calls.comm.check("a communicator").or_raise(py)?;
    py.detach(|| calls.comm.load_tables(path)).or_raise(py)
}

/// A selector that is a function; None is none.
fn selector(
    py: Python<'_>,
    function: &Bound<'_, PyAny>,
) -> PyResult<Option<Arc<ChoosingFunction>>> {
    if function.is_none() {
        return Ok(None);
    }
    if !function.is_callable() {
        let kind = function.get_type().name()?;
        return Err(invalid(py, format!("selector: a {kind} cannot be called")));
    }
    Ok(Some(Arc::new(ChoosingFunction(function.clone().unbind()))))
}

/// A function that chooses.
pub(crate) struct ChoosingFunction(Py<PyAny>);

impl ChoosingFunction {
    fn call(&self, py: Python<'_>, call: &CallShape) -> PyResult<Option<String>> {
        let topology = match call.topology {
            TopologyKind::FullyConnected { .. } => "fully_connected",
            TopologyKind::HybridCubeMesh => "hybrid_cube_mesh",
            TopologyKind::Other => "other",
            TopologyKind::Unknown => "unknown",
        };
        let (dtype, op) = (long_name(call.dtype), call.op.map(ReduceOp::name));
        let windows = window_names(call.input_window, call.output_window);
        let found =
            self.0.bind(py).call1((call.bytes, dtype, op, call.world, windows, topology))?;
        if found.is_none() {
            return Ok(None);
        }
        found.extract::<String>().map(Some).map_err(|_| {
            PyTypeError::new_err(format!(
                "it returned {}, which is no name and not None",
                short(&format!("{found:?}"))
            ))
        })
    }
}

impl Selector for ChoosingFunction {
    fn select(&self, call: &CallShape) -> symmpool_allocator::Result<Option<String>> {
        Python::attach(|py| self.call(py, call).map_err(|error| from_within(py, error)))
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
