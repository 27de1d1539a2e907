//! A store that Python code is: how ranks meet over a `torch.distributed.Store`.
//!
//! The work is `symmpool/groups/store.py`'s; here its answers become the allocator's. Its methods may
//! wait, with the interpreter's lock released by the store's own code.

use std::time::Duration;

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use symmpool_allocator::store::{Gathered, Store};
use symmpool_allocator::{Deadline, Error, Result};

/// An object of `symmpool.groups.store.StoreAdapter`.
pub(crate) struct PythonStore(Py<PyAny>);

impl PythonStore {
    pub(crate) fn new(adapter: Py<PyAny>) -> Self {
        Self(adapter)
    }

    /// Runs `call` with the interpreter's lock, which the caller does not hold.
    fn with<T>(
        &self,
        what: &str,
        deadline: Deadline,
        call: impl FnOnce(&Bound<'_, PyAny>, f64) -> PyResult<T>,
    ) -> Result<T> {
        let seconds = deadline.remaining().as_secs_f64();
        let answer = Python::try_attach(|py| {
            call(self.0.bind(py), seconds).map_err(|error| to_error(py, what, deadline, &error))
        });
        answer.unwrap_or_else(|| {
            Err(Error::invalid_state(format!("{what}: the interpreter is shutting down")))
        })
    }
}

impl Store for PythonStore {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        self.with("set of the store", deadline, |store, seconds| {
            let value = PyBytes::new(store.py(), value);
            store.call_method1("set", (key, value, seconds)).map(drop)
        })
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        self.with("get of the store", deadline, |store, seconds| {
            store.call_method1("get", (key, seconds))?.extract()
        })
    }

    fn add(&self, key: &str, delta: i64, deadline: Deadline) -> Result<i64> {
        self.with("add of the store", deadline, |store, seconds| {
            store.call_method1("add", (key, delta, seconds))?.extract()
        })
    }

    fn delete(&self, key: &str, deadline: Deadline) -> Result<bool> {
        self.with("delete of the store", deadline, |store, seconds| {
            store.call_method1("delete", (key, seconds))?.extract()
        })
    }

    fn all_gather_until(
        &self,
        key: &str,
        rank: u32,
        world: u32,
        value: &[u8],
        deadline: Deadline,
        _stop: Option<&dyn Fn() -> bool>,
    ) -> Result<Gathered> {
        let what = format!("in all_gather {key:?}");
        self.with(&what, deadline, |store, seconds| {
            let value = PyBytes::new(store.py(), value);
            let parts = store.call_method1("all_gather", (key, rank, world, value, seconds))?;
            let parts: Vec<Bound<'_, PyBytes>> = parts.extract()?;
            Ok(Gathered::from_parts(parts.iter().map(PyBytesMethods::as_bytes)))
        })
    }
}

/// Turns an exception of the adapter into an error of the allocator.
#[cold]
fn to_error(py: Python<'_>, what: &str, deadline: Deadline, error: &PyErr) -> Error {
    let ranks: Vec<u32> =
        error.value(py).getattr("ranks").and_then(|ranks| ranks.extract()).unwrap_or_default();
    let text = error.value(py).to_string();
    let is = |name: &str| {
        let class = py.import("symmpool.errors").and_then(|errors| errors.getattr(name));
        class.is_ok_and(|class| error.matches(py, class).unwrap_or(false))
    };
    if is("TimeoutError") {
        let budget = deadline.budget().max(Duration::from_nanos(1));
        Error::timeout(format!("{what}: {text}"), budget, ranks)
    } else if is("PeerLostError") {
        Error::peer_lost(ranks, format!("{what}: {text}"))
    } else if is("DivergedError") {
        Error::mismatch(format!("{what}: {text}")).naming(ranks)
    } else if is("InvalidArgumentError") {
        Error::invalid_argument(format!("{what}: {text}"))
    } else if error.is_instance_of::<PyKeyboardInterrupt>(py) {
        // No error of the crates below. It is raised in place of this one when the call is back.
        let _ = py.import("_thread").and_then(|thread| thread.call_method0("interrupt_main"));
        Error::invalid_state(format!("{what}: interrupted"))
    } else {
        Error::system(what, error)
    }
}
