//! The device that a pool is asked for.

use pyo3::prelude::*;
use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Driver, Error, Result};

use crate::convert::Device;
use crate::errors::reason;

/// The driver for a device's name.
pub(crate) fn driver(name: Option<&str>) -> Result<(Driver, Device)> {
    let cuda = |driver: CudaDriver| {
        let device = Device::Cuda(driver.facts().ordinal);
        (Driver::new(driver), device)
    };
    match name {
        // As torch names the one CPU there is.
        Some("cpu" | "cpu:0") => Ok((Driver::host()?, Device::Cpu)),
        Some(name) if name.starts_with("cpu:") => Err(Error::invalid_argument(format!(
            "device: {name:?}: the CPU is one device here; pass \"cpu\""
        ))),
        Some("cuda") => CudaDriver::from_env().map(cuda),
        Some(name) => {
            let ordinal = name.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
            let ordinal = ordinal.ok_or_else(|| {
                Error::invalid_argument(format!("device: {name:?} is none of cpu, cuda, cuda:N"))
            })?;
            CudaDriver::new(ordinal).map(cuda)
        }
        // As `Driver::best`, keeping which device it was.
        None => match CudaDriver::from_env() {
            Ok(driver) => Ok(cuda(driver)),
            Err(error) if error.is_unsupported() => Ok((Driver::host()?, Device::Cpu)),
            Err(error) => Err(error),
        },
    }
}

/// Makes no pool on this rank, because of `why`, which is reported to the group's other ranks.
pub(crate) fn decline(py: Python<'_>, group: symmpool_allocator::Group, why: PyErr) -> PyErr {
    let failure = Err(reason(py, &why));
    let builder = symmpool_allocator::Pool::builder(group).driver_or_failure(failure);
    py.detach(|| drop(builder.build())); // fails with this, or because other ranks did not come
    why
}
