//! The class `Slot`: a pool behind a pair of exported functions, for torch's allocator.

use pyo3::prelude::*;
use symmpool::slots;

use crate::errors::{OrRaise, exception};
use crate::pool::Pool;

/// A pool behind the functions `symmpool_alloc_N` and `symmpool_free_N` of this library, in which
/// `torch.cuda.memory.CUDAPluggableAllocator` finds them. Allocates in the pool's first lane; frees
/// without order. Memory that was handed out stays, and keeps the pool, until it is freed.
///
/// `with pool:` makes one; this class is for those who make a `torch.cuda.MemPool` themselves.
#[pyclass(frozen, module = "symmpool")]
pub(crate) struct Slot {
    slot: slots::Slot,
}

impl Slot {
    pub(crate) fn slot(&self) -> &slots::Slot {
        &self.slot
    }
}

#[pymethods]
impl Slot {
    #[new]
    fn new(py: Python<'_>, pool: &Bound<'_, Pool>) -> PyResult<Self> {
        let pool = &pool.get().pool;
        let slot = slots::bind(pool, &pool.default_lane()).or_raise(py)?;
        Ok(Self { slot })
    }

    /// Its number, N.
    #[getter]
    fn index(&self) -> usize {
        self.slot.index()
    }

    /// The names of the two functions.
    #[getter]
    fn names(&self) -> (String, String) {
        let index = self.slot.index();
        (format!("symmpool_alloc_{index}"), format!("symmpool_free_{index}"))
    }

    /// Their addresses.
    #[getter]
    fn addresses(&self) -> (usize, usize) {
        self.slot.functions()
    }

    /// How many blocks were handed out and not freed.
    #[getter]
    fn live(&self) -> usize {
        self.slot.live()
    }

    /// Why the latest call that failed did so, as an exception, or None. It is then forgotten.
    fn take_failure(&self, py: Python<'_>) -> Option<PyErr> {
        self.slot.take_failure().map(|error| exception(py, &error))
    }

    fn __repr__(&self) -> String {
        format!("symmpool.Slot(index={}, live={})", self.index(), self.live())
    }
}
