//! The process's allocator, for `symmpool.install()`.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use symmpool::process;

use crate::errors::OrRaise;
use crate::number::Number;
use crate::slot::Slot;

/// A device's numbers in the process's allocator, or None if nothing was allocated there.
#[pyfunction]
pub(crate) fn process_stats(
    py: Python<'_>,
    device: Number<usize>,
) -> PyResult<Option<Bound<'_, PyDict>>> {
    let device = device.or_raise(py, "device")?;
    let Some(stats) = process::stats(device).or_raise(py)? else { return Ok(None) };
    let dict = PyDict::new(py);
    let numbers = [
        ("allocated", stats.allocated),
        ("peak_allocated", stats.peak_allocated),
        ("reserved", stats.reserved),
        ("peak_reserved", stats.peak_reserved),
        ("allocs", stats.allocs),
        ("frees", stats.frees),
        ("ooms", stats.ooms),
        ("retries", stats.retries),
        ("graphs", stats.graphs),
        ("segments", stats.segments),
    ];
    for (key, value) in numbers {
        dict.set_item(key, value)?;
    }
    Ok(Some(dict))
}

/// Forgets the peaks of a device so far.
#[pyfunction]
pub(crate) fn process_reset_peaks(py: Python<'_>, device: Number<usize>) -> PyResult<()> {
    process::reset_peaks(device.or_raise(py, "device")?).or_raise(py)
}

/// Where a thread's allocations went before they were sent elsewhere.
#[pyclass(frozen, module = "symmpool")]
pub(crate) struct Redirected(process::Redirected);

/// Sends this thread's allocations to a slot's pool. Undone by `process_redirect_back`.
#[pyfunction]
pub(crate) fn process_redirect(slot: &Bound<'_, Slot>) -> Redirected {
    Redirected(process::redirect(Some(slot.get().slot())))
}

/// Sends this thread's allocations where they went before.
#[pyfunction]
pub(crate) fn process_redirect_back(before: &Bound<'_, Redirected>) {
    process::redirect_back(before.get().0);
}
