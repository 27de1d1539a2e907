//! The options of a communicator.

use pyo3::prelude::*;
use symmpool_collectives::CommunicatorOptions;

use crate::convert::{self, Device};
use crate::number::Number;

/// Options as Python gives them: the sizes are `scratch_bytes` and `concurrent`.
pub(crate) fn read(
    py: Python<'_>,
    device: Device,
    timeout: Number<f64>,
    algorithm: &str,
    all_to_all: &str,
    (scratch_bytes, concurrent): (Option<Number<u64>>, Option<Number<u32>>),
) -> PyResult<CommunicatorOptions> {
    let bytes = scratch_bytes.map(|bytes| bytes.or_raise(py, "scratch_bytes")).transpose()?;
    let concurrent = concurrent.map(|number| number.or_raise(py, "concurrent")).transpose()?;
    let mut options = CommunicatorOptions {
        timeout: timeout.seconds(py, "timeout")?,
        algorithm: convert::algorithm(py, algorithm)?,
        all_to_all: convert::all_to_all_algorithm(py, all_to_all)?,
        concurrent,
        ..CommunicatorOptions::default()
    };
    match (device, bytes) {
        (Device::Cpu, Some(bytes)) => options.scratch_bytes = bytes,
        (Device::Cuda(_), Some(bytes)) => options.device_scratch_bytes = Some(bytes),
        (_, None) => {}
    }
    Ok(options)
}
