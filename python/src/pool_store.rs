//! Values of a pool's own in the store of its group, for what else its ranks make together.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use symmpool_allocator::Deadline;
use symmpool_allocator::store::Store;

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
    let (store, key, deadline) = place_of(py, pool.get(), key, seconds)?;
    py.detach(|| store.set(&key, value, deadline)).or_raise(py)
}

/// Returns the value that any rank has written under a key of the pool's, for which it waits so long.
#[pyfunction]
pub(crate) fn pool_store_get<'py>(
    py: Python<'py>,
    pool: &Bound<'_, Pool>,
    key: &str,
    seconds: f64,
) -> PyResult<Bound<'py, PyBytes>> {
    let (store, key, deadline) = place_of(py, pool.get(), key, seconds)?;
    let value = py.detach(|| store.get(&key, deadline)).or_raise(py)?;
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
    let (store, key, deadline) = place_of(py, pool.get(), key, seconds)?;
    py.detach(|| store.add(&key, delta, deadline)).or_raise(py)
}

/// The store, the key there, and the deadline: so many seconds from now, at most a year. A forked child is refused.
fn place_of<'a>(
    py: Python<'_>,
    pool: &'a Pool,
    key: &str,
    seconds: f64,
) -> PyResult<(&'a Arc<dyn Store>, String, Deadline)> {
    pool.pool.check_process().or_raise(py)?;
    let group = pool.pool.group();
    let limit = Duration::try_from_secs_f64(seconds.clamp(0.0, 3.2e7)).unwrap_or_default();
    Ok((group.store(), format!("{}/{key}", group.name()), Deadline::after(limit)))
}
