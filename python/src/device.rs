//! The device that a pool is asked for.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyCFunction;
use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Driver, Error, PreparedPool, Result, short};

use crate::convert::MemoryDevice;
use crate::errors::{OrRaise, exception, reason};
use crate::group::group_of;

/// The driver for a device's name.
pub(crate) fn driver(name: Option<&str>) -> Result<(Driver, MemoryDevice)> {
    let cuda = |driver: CudaDriver| {
        let device = MemoryDevice::Cuda(driver.facts().ordinal);
        (Driver::new(driver), device)
    };
    match name {
        // torch gives the one CPU these names.
        Some("cpu" | "cpu:0") => Ok((Driver::host()?, MemoryDevice::Cpu)),
        Some(name) if name.starts_with("cpu:") => Err(Error::invalid_argument(format!(
            "device: {:?}: the CPU is one device here; pass \"cpu\"",
            short(name)
        ))),
        Some("cuda") => CudaDriver::from_env().map(cuda),
        Some(name) => {
            let ordinal = name.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
            let ordinal = ordinal.ok_or_else(|| {
                Error::invalid_argument(format!(
                    "device: {:?} is none of cpu, cuda, cuda:N",
                    short(name)
                ))
            })?;
            CudaDriver::new(ordinal).map(cuda)
        }
        // This chooses like `Driver::best`, and keeps which device it was.
        None => match CudaDriver::from_env() {
            Ok(driver) => Ok(cuda(driver)),
            Err(error) if error.is_unsupported() => Ok((Driver::host()?, MemoryDevice::Cpu)),
            Err(error) => Err(error),
        },
    }
}

/// Waits until the other ranks of the group have been sent this rank's refusals of earlier calls.
pub(crate) fn await_reports(py: Python<'_>, key: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    py.import("symmpool.groups.declined_calls")?.call_method1("await_reports", (key,)).map(drop)
}

/// Has a thread tell the group's other ranks why this one makes no pool, without waiting for them for long: `meet` does
/// that. Returns what it raised if they came soon, which is the same on all ranks.
pub(crate) fn report(
    py: Python<'_>,
    key: Option<&Bound<'_, PyAny>>,
    meet: impl FnOnce(Python<'_>) -> PyResult<()> + Send + 'static,
) -> PyResult<Option<PyErr>> {
    let once = Mutex::new(Some(meet));
    let work = PyCFunction::new_closure(py, None, None, move |arguments, _| {
        let meet = once.lock().unwrap_or_else(PoisonError::into_inner).take();
        meet.map_or(Ok(()), |meet| meet(arguments.py()))
    })?;
    let raised =
        py.import("symmpool.groups.declined_calls")?.call_method1("report", (key, work))?;
    Ok((!raised.is_none()).then(|| PyErr::from_value(raised)))
}

/// Makes no pool on this rank, because of `why`, which is reported to the other ranks of the group that `argument`
/// means.
pub(crate) fn decline(py: Python<'_>, argument: Option<&Bound<'_, PyAny>>, why: PyErr) -> PyErr {
    let (failure, of) = (Err(reason(py, &why)), argument.map(|argument| argument.clone().unbind()));
    let meet = move |py: Python<'_>| {
        let of = of.map(|of| of.into_bound(py));
        let group = group_of(py, of.as_ref(), None)?;
        let builder = symmpool_allocator::Pool::builder(group).driver_or_failure(failure);
        py.detach(|| builder.build()).or_raise(py).map(drop)
    };
    match report(py, argument, meet) {
        Ok(_) => why,
        Err(broken) => broken,
    }
}

/// The pool, once this rank has met the others. What is wrong on this rank alone is raised before they come.
pub(crate) fn meet(
    py: Python<'_>,
    argument: Option<&Bound<'_, PyAny>>,
    prepared: PreparedPool,
) -> PyResult<symmpool_allocator::Pool> {
    let Some(why) = prepared.failure().cloned() else {
        return py.detach(|| prepared.meet()).or_raise(py);
    };
    let meet = move |py: Python<'_>| py.detach(|| prepared.meet()).or_raise(py).map(drop);
    Err(report(py, argument, meet)?.unwrap_or_else(|| exception(py, &why)))
}
