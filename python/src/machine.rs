//! The hardware of this machine, for Python's doctor.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use symmpool_allocator::driver::{CudaDriver, DeviceIdentity, Fabric};
use symmpool_allocator::topology::Topology;
use symmpool_allocator::{Driver, Result};
use symmpool_collectives::{CommunicatorMemory, kernel_cache, kernel_compiler};

/// A device, or why it cannot be used.
type Found = Result<(symmpool_allocator::driver::CudaFacts, (u64, u64))>;

fn look_at(ordinal: u32) -> Found {
    let driver = CudaDriver::new(ordinal)?;
    Ok((driver.facts().clone(), driver.memory_info()?))
}

/// Returns what the machine has, as far as this package is concerned: a dict of `host` (an error's text, or
/// None), `cuda` (likewise), `devices` (a dict each, with `error` where one cannot be used), `links`
/// (rows of names), `mesh`, `compiler` and `cache`. Every device gets a context for a moment.
#[pyfunction]
pub(crate) fn machine(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let (host, count, devices, compiler) = py.detach(|| {
        let host = Driver::host().err();
        let count = CudaDriver::device_count();
        let devices: Vec<Found> = (0..*count.as_ref().unwrap_or(&0)).map(look_at).collect();
        let version = devices.iter().flatten().map(|(facts, _)| facts.driver_version / 1000).next();
        (host, count, devices, kernel_compiler(version))
    });
    let found = PyDict::new(py);
    let memory = CommunicatorMemory::by_default();
    found.set_item("communicator_error", memory.as_ref().err().map(ToString::to_string))?;
    found.set_item("communicator_bytes", memory.ok().map(Vec::from))?;
    let growing = CommunicatorMemory::growing().ok().flatten();
    found.set_item("growing_communicator_bytes", growing.map(Vec::from))?;
    found.set_item("host", host.map(|error| error.to_string()))?;
    found.set_item("cuda", count.err().map(|error| error.to_string()))?;
    let list = PyList::empty(py);
    let mut identities = Vec::new();
    for (ordinal, device) in devices.iter().enumerate() {
        let dict = PyDict::new(py);
        dict.set_item("ordinal", ordinal)?;
        match device {
            Err(error) => dict.set_item("error", error.to_string())?,
            Ok((facts, (free, total))) => {
                dict.set_item("error", py.None())?;
                dict.set_item("name", &facts.name)?;
                dict.set_item("uuid", &facts.uuid)?;
                dict.set_item("driver", facts.driver_version)?;
                dict.set_item("free_bytes", free)?;
                dict.set_item("total_bytes", total)?;
                dict.set_item("granularity", facts.granularity)?;
                dict.set_item("posix_fd", facts.posix_fd)?;
                dict.set_item("fabric", facts.fabric == Fabric::Works)?;
                dict.set_item("fabric_why", facts.fabric.to_string())?;
                identities.push(DeviceIdentity {
                    kind: "cuda".into(),
                    name: facts.name.clone(),
                    uuid: facts.uuid.clone(),
                });
            }
        }
        list.append(dict)?;
    }
    found.set_item("devices", list)?;
    let topology = py.detach(|| Topology::detect(&identities)).ok();
    let ranks = 0..identities.len() as u32;
    let links: Vec<Vec<String>> = topology.as_ref().map_or_else(Vec::new, |topology| {
        let row = |a| ranks.clone().map(|b| topology.link(a, b).to_string()).collect();
        ranks.clone().map(row).collect()
    });
    found.set_item("links", links)?;
    found.set_item("mesh", topology.map(|topology| topology.kind().to_string()))?;
    let dict = PyDict::new(py);
    match compiler {
        Ok(compiler) => {
            dict.set_item("error", py.None())?;
            dict.set_item("version", compiler.version)?;
            dict.set_item("place", compiler.place)?;
            dict.set_item("archs", compiler.archs)?;
        }
        Err(error) => dict.set_item("error", error.to_string())?,
    }
    found.set_item("compiler", dict)?;
    let cache = kernel_cache().map(|folder| folder.display().to_string());
    found.set_item("cache", cache)?;
    Ok(found)
}
