//! What a device and its driver can really do. Attributes promise more than they keep (FABRIC is
//! advertised where creation is refused), so what matters is tried once, when a driver is made.
#![allow(unsafe_code)] // FFI: the queries.

use std::ffi::{c_int, c_uint};
use std::fmt;

use cudarc::driver::sys;
use sys::CUdevice_attribute as Attribute;

use super::CudaOptions;
use super::api::{AllocationProp, Api};
use super::calls::{self, FABRIC, POSIX_FD, memory_info, name};
use super::context::Context;
use crate::{Error, Result};

/// Segments are at least this large: the page size that NVIDIA GPUs translate best.
const LEAST_GRANULARITY: u64 = 2 << 20;

/// What was found out about a device when its driver was made.
#[derive(Clone, Debug)]
pub struct CudaFacts {
    /// The newest CUDA version that the installed driver serves, as CUDA writes it: 13.0 is 13000.
    pub driver_version: u32,
    /// The device's ordinal in this process.
    pub ordinal: u32,
    /// The model.
    pub name: String,
    /// The device's UUID as `nvidia-smi` prints it.
    pub uuid: String,
    /// The device's memory in bytes.
    pub total_bytes: u64,
    /// Sizes and offsets of segments are multiples of this many bytes.
    pub granularity: u64,
    /// Whether memory can be exported as POSIX file descriptors.
    pub posix_fd: bool,
    /// Whether memory can be exported as FABRIC handles.
    pub fabric: Fabric,
    /// Whether segments are made so that a network card may read and write them.
    pub gpu_direct_rdma: bool,
}

/// What came of trying FABRIC handles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fabric {
    /// The device does not claim to support them; nothing was tried.
    NotAdvertised,
    /// The device claims to support them, but a trial failed; says how.
    Refused(String),
    /// A trial allocation was made and exported.
    Works,
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAdvertised => f.write_str("not advertised"),
            Self::Refused(how) => write!(f, "advertised but refused ({how})"),
            Self::Works => f.write_str("works"),
        }
    }
}

/// The number of devices that this process can see.
pub(super) fn device_count(api: &Api) -> Result<u32> {
    let mut count: c_int = 0;
    // SAFETY: writes one int through a valid pointer.
    let code = unsafe { (api.device_count)(&raw mut count) };
    api.check(code, || "counting CUDA devices".to_owned())?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// The `CUdevice` with this ordinal.
pub(super) fn device(api: &Api, ordinal: u32) -> Result<c_int> {
    let count = device_count(api)?;
    if count == 0 {
        return Err(Error::unsupported("the CUDA driver finds no device"));
    }
    let index = c_int::try_from(ordinal).ok().filter(|_| ordinal < count).ok_or_else(|| {
        Error::invalid_argument(format!(
            "CUDA device {ordinal} of {count} visible device(s); ordinals run from 0 to {} (see \
             CUDA_VISIBLE_DEVICES and LOCAL_RANK)",
            count - 1
        ))
    })?;
    let mut device: c_int = 0;
    // SAFETY: writes one int through a valid pointer.
    let code = unsafe { (api.device_get)(&raw mut device, index) };
    api.check(code, || format!("opening CUDA device {ordinal}"))?;
    Ok(device)
}

/// Finds out what the device of `context` can do, and how its segments are to be made.
pub(super) fn probe(
    context: &Context,
    ordinal: u32,
    options: CudaOptions,
) -> Result<(CudaFacts, AllocationProp)> {
    let api = context.api;
    let device = context.device;
    let name = name(api, device)?;
    if !attribute(api, device, Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?
    {
        return Err(Error::unsupported(format!(
            "CUDA device {ordinal} ({name}) has no virtual memory management"
        )));
    }
    let posix_fd = attribute(
        api,
        device,
        Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    )?;
    let advertised =
        attribute(api, device, Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)?;
    let rdma = options.gpu_direct_rdma
        && attribute(
            api,
            device,
            Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        )?;
    let _current = context.enter_for_memory()?;
    let found = Trials { context, posix_fd, advertised, rdma }.run(ordinal, &name)?;
    let (_, total_bytes) = memory_info(api)?;
    let facts = CudaFacts {
        driver_version: driver_version(api)?,
        ordinal,
        uuid: uuid(api, device)?,
        name,
        total_bytes,
        granularity: found.granularity,
        posix_fd,
        fabric: found.fabric,
        gpu_direct_rdma: found.rdma,
    };
    tracing::debug!(?facts, "CUDA device");
    Ok((facts, found.prop))
}

/// The search for the richest kind of allocation that the device really grants.
struct Trials<'a> {
    context: &'a Context,
    posix_fd: bool,
    advertised: bool,
    rdma: bool,
}

struct Found {
    prop: AllocationProp,
    granularity: u64,
    fabric: Fabric,
    rdma: bool,
}

impl Trials<'_> {
    /// Tries FABRIC before plain descriptors, and each of them with network access before without.
    fn run(&self, ordinal: u32, name: &str) -> Result<Found> {
        let fd = if self.posix_fd { POSIX_FD } else { 0 };
        let mut fabric = Fabric::NotAdvertised;
        let mut refusals = Vec::new();
        for with_fabric in [true, false] {
            let types = if with_fabric { fd | FABRIC } else { fd };
            if types == 0 || (with_fabric && !self.advertised) {
                continue;
            }
            for rdma in [true, false] {
                if rdma && !self.rdma {
                    continue;
                }
                let prop = AllocationProp::pinned(self.context.device, types, rdma);
                match self.attempt(&prop) {
                    Ok(granularity) => {
                        if with_fabric {
                            fabric = Fabric::Works;
                        }
                        return Ok(Found { prop, granularity, fabric, rdma });
                    }
                    // A full device says nothing about what it can do.
                    Err(error) if error.is_out_of_memory() => {
                        return Err(error.context(format!("probing CUDA device {ordinal}")));
                    }
                    Err(error) => {
                        if with_fabric {
                            fabric = Fabric::Refused(error.kind().to_string());
                        }
                        refusals.push(error.kind().to_string());
                    }
                }
            }
        }
        if refusals.is_empty() {
            refusals.push("it claims to support neither POSIX descriptors nor FABRIC".to_owned());
        }
        Err(Error::unsupported(format!(
            "CUDA device {ordinal} ({name}) makes no memory that other processes can map: {}",
            refusals.join("; ")
        )))
    }

    /// Makes, exports and releases one granule; gives the granularity.
    fn attempt(&self, prop: &AllocationProp) -> Result<u64> {
        let api = self.context.api;
        let granularity = granularity(api, prop)?;
        let handle = calls::create(api, granularity, prop)?;
        let exported = (|| {
            if prop.handle_types & POSIX_FD != 0 {
                calls::export_fd(api, handle)?;
            }
            if prop.handle_types & FABRIC != 0 {
                calls::export_fabric(api, handle)?;
            }
            Ok(granularity)
        })();
        calls::release(api, handle)?;
        exported
    }
}

fn granularity(api: &Api, prop: &AllocationProp) -> Result<u64> {
    let wanted = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    let mut bytes = 0;
    // SAFETY: reads a valid structure and writes one size through a valid pointer.
    let code = unsafe { (api.granularity)(&raw mut bytes, prop, wanted as c_uint) };
    api.check(code, || "asking for the allocation granularity".to_owned())?;
    Ok((bytes as u64).max(LEAST_GRANULARITY).next_power_of_two())
}

fn attribute(api: &Api, device: c_int, which: Attribute) -> Result<bool> {
    Ok(number(api, device, which as u32)? != 0)
}

/// A `CUdevice_attribute` of the device.
pub(super) fn number(api: &Api, device: c_int, which: u32) -> Result<c_int> {
    let mut value: c_int = 0;
    let which = c_int::try_from(which).unwrap_or(c_int::MAX);
    // SAFETY: writes one int through a valid pointer; the driver refuses what is no attribute.
    let code = unsafe { (api.device_attribute)(&raw mut value, which, device) };
    api.check(code, || format!("asking CUDA device {device} for attribute {which}"))?;
    Ok(value)
}

fn driver_version(api: &Api) -> Result<u32> {
    let mut version: c_int = 0;
    // SAFETY: writes one int through a valid pointer.
    let code = unsafe { (api.driver_version)(&raw mut version) };
    api.check(code, || "asking for the CUDA driver's version".to_owned())?;
    Ok(u32::try_from(version).unwrap_or(0))
}

fn uuid(api: &Api, device: c_int) -> Result<String> {
    let mut bytes = [0u8; 16];
    // SAFETY: writes 16 bytes through a pointer to an array of 16.
    let code = unsafe { (api.device_uuid)(&raw mut bytes, device) };
    api.check(code, || format!("asking for the UUID of CUDA device {device}"))?;
    Ok(format_uuid(bytes))
}

/// `GPU-` and the bytes in groups of 4, 2, 2, 2 and 6, as `nvidia-smi -L` writes them.
fn format_uuid(bytes: [u8; 16]) -> String {
    let mut out = "GPU".to_owned();
    for (i, byte) in bytes.iter().enumerate() {
        if [0, 4, 6, 8, 10].contains(&i) {
            out.push('-');
        }
        out.push_str(&format!("{byte:02x}"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_read_as_nvidia_smi_prints_them() {
        let bytes = std::array::from_fn(|i| (i as u8) * 17);
        assert_eq!(format_uuid(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
