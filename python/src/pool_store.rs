//! Values of a pool's own in the store of its group, for what else its ranks make together.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use symmpool_allocator::Deadline;

use crate::errors::OrRaise;
use crate::pool::Pool;

/// Writes a value under a key of the pool's.
#[pyfunction]
pub(crate) fn pool_store_set(
    py: Python<'_>,
    pool: &Bound<'_, Pool>,
    key: &str,
    value: &[u8],
    seconds: f64,
) -> PyResult<()> {
    let (group, deadline) = (pool.get().pool.group(), deadline_of(seconds));
    let key = format!("{}/{key}", group.name());
    py.detach(|| group.store().set(&key, value, deadline)).or_raise(py)
}

/// Returns the value that any rank has written under a key of the pool's, for which it waits so long.
#[pyfunction]
pub(crate) fn pool_store_get<'py>(
    py: Python<'py>,
    pool: &Bound<'_, Pool>,
    key: &str,
    seconds: f64,
) -> PyResult<Bound<'py, PyBytes>> {
    let (group, deadline) = (pool.get().pool.group(), deadline_of(seconds));
    let key = format!("{}/{key}", group.name());
    let value = py.detach(|| group.store().get(&key, deadline)).or_raise(py)?;
    Ok(PyBytes::new(py, &value))
}

/// Adds to a counter under a key of the pool's; returns the sum.
#[pyfunction]
pub(crate) fn pool_store_add(
    py: Python<'_>,
    pool: &Bound<'_, Pool>,
    key: &str,
    delta: i64,
    seconds: f64,
) -> PyResult<i64> {
    let (group, deadline) = (pool.get().pool.group(), deadline_of(seconds));
    let key = format!("{}/{key}", group.name());
    py.detach(|| group.store().add(&key, delta, deadline)).or_raise(py)
}

/// A deadline so many seconds from now; at most a year.
fn deadline_of(seconds: f64) -> Deadline {
    Deadline::after(Duration::try_from_secs_f64(seconds.clamp(0.0, 3.2e7)).unwrap_or_default())
}
