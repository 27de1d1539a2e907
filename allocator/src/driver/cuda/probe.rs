//! Abilities of a device and its driver. Attributes are not reliable (FABRIC is advertised where creation is
//! refused), so each ability that matters is tried once, when a driver is made.
#![allow(unsafe_code)] // FFI: the queries.

use std::ffi::{c_int, c_uint};
use std::fmt;

use cudarc::driver::sys;
use sys::CUdevice_attribute as Attribute;

use super::CudaOptions;
use super::api::{AllocationProp, DriverApi};
use super::calls::{self, FABRIC, POSIX_FD, memory_info, name};
use super::context::Context;
use crate::{Error, Result};

/// Segments are at least this large: the page size that NVIDIA GPUs translate best.
const MIN_GRANULARITY: u64 = 2 << 20;

/// Properties of a device, found when its driver was made.
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

/// The result of trying FABRIC handles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fabric {
    /// The device does not claim to support them; nothing was tried.
    NotAdvertised,
    /// The device claims to support them, but a trial failed for this reason.
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
pub(super) fn device_count(api: &DriverApi) -> Result<u32> {
    let mut count: c_int = 0;
    // SAFETY: writes one int through a valid pointer.
    let code = unsafe { (api.device_count)(&raw mut count) };
    api.check(code, || "counting CUDA devices".to_owned())?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// The `CUdevice` with this ordinal.
pub(super) fn device(api: &DriverApi, ordinal: u32) -> Result<c_int> {
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
    let kinds = kinds(posix_fd, advertised, rdma);
    let found = first_granted(context, &kinds, ordinal, &name)?;
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

/// A kind of allocation: how it can be exported, and whether a network card may reach it.
#[derive(Clone, Copy, Debug)]
struct AllocationKind {
    handle_types: c_uint,
    rdma: bool,
}

/// The kinds that a device claims to make and other processes can map, in the order in which they are tried:
/// FABRIC before plain descriptors, and each of them first with network access, then without.
fn kinds(posix_fd: bool, fabric: bool, rdma: bool) -> Vec<AllocationKind> {
    let plain = if posix_fd { POSIX_FD } else { 0 };
    let mut kinds = Vec::new();
    for handle_types in [fabric.then_some(plain | FABRIC), posix_fd.then_some(plain)] {
        let Some(handle_types) = handle_types else { continue };
        if rdma {
            kinds.push(AllocationKind { handle_types, rdma: true });
        }
        kinds.push(AllocationKind { handle_types, rdma: false });
    }
    kinds
}

/// Abilities that the device has been seen to grant.
struct Found {
    prop: AllocationProp,
    granularity: u64,
    fabric: Fabric,
    rdma: bool,
}

/// Tries one kind after the other, until the device makes and exports one.
fn first_granted(
    context: &Context,
    kinds: &[AllocationKind],
    ordinal: u32,
    name: &str,
) -> Result<Found> {
    let mut fabric = Fabric::NotAdvertised;
    let mut refusals = Vec::new();
    for &AllocationKind { handle_types, rdma } in kinds {
        let with_fabric = handle_types & FABRIC != 0;
        let prop = AllocationProp::pinned(context.device, handle_types, rdma);
        match attempt(context.api, &prop) {
            Ok(granularity) => {
                let fabric = if with_fabric { Fabric::Works } else { fabric };
                return Ok(Found { prop, granularity, fabric, rdma });
            }
            // A device without free memory shows nothing about what it can do.
            Err(error) if error.is_out_of_memory() => {
                return Err(error.context(format!("probing CUDA device {ordinal}")));
            }
            Err(error) => {
                let refusal = error.kind().to_string();
                if with_fabric {
                    fabric = Fabric::Refused(refusal.clone());
                }
                refusals.push(refusal);
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
fn attempt(api: &DriverApi, prop: &AllocationProp) -> Result<u64> {
    let granularity = granularity(api, prop)?;
    let handle = calls::create(api, granularity, prop)?;
    let exported = (|| {
        if prop.handle_types & POSIX_FD != 0 {
            // SAFETY: `create` has just handed out the handle, which is released below.
            unsafe { calls::export_fd(api, handle) }?;
        }
        if prop.handle_types & FABRIC != 0 {
            // SAFETY: `create` has just handed out the handle, which is released below.
            unsafe { calls::export_fabric(api, handle) }?;
        }
        Ok(granularity)
    })();
    // SAFETY: `create` has handed out the handle to this function, which uses it no more.
    unsafe { calls::release(api, handle) }?;
    exported
}

fn granularity(api: &DriverApi, prop: &AllocationProp) -> Result<u64> {
    let wanted = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    let mut bytes = 0;
    // SAFETY: reads a valid structure and writes one size through a valid pointer.
    let code = unsafe { (api.granularity)(&raw mut bytes, prop, wanted as c_uint) };
    api.check(code, || "asking for the allocation granularity".to_owned())?;
    Ok((bytes as u64).max(MIN_GRANULARITY).next_power_of_two())
}

fn attribute(api: &DriverApi, device: c_int, which: Attribute) -> Result<bool> {
    Ok(number(api, device, which as u32)? != 0)
}

/// A `CUdevice_attribute` of the device.
pub(super) fn number(api: &DriverApi, device: c_int, which: u32) -> Result<c_int> {
    let mut value: c_int = 0;
    let which = c_int::try_from(which).unwrap_or(c_int::MAX);
    // SAFETY: writes one int through a valid pointer; the driver refuses what is no attribute.
    let code = unsafe { (api.device_attribute)(&raw mut value, which, device) };
    api.check(code, || format!("asking CUDA device {device} for attribute {which}"))?;
    Ok(value)
}

fn driver_version(api: &DriverApi) -> Result<u32> {
    let mut version: c_int = 0;
    // SAFETY: writes one int through a valid pointer.
    let code = unsafe { (api.driver_version)(&raw mut version) };
    api.check(code, || "asking for the CUDA driver's version".to_owned())?;
    Ok(u32::try_from(version).unwrap_or(0))
}

fn uuid(api: &DriverApi, device: c_int) -> Result<String> {
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
    fn the_richest_kind_is_tried_first_and_only_what_is_claimed() {
        let tried = |posix_fd, fabric, rdma| {
            let kinds = kinds(posix_fd, fabric, rdma).into_iter();
            kinds.map(|kind| (kind.handle_types, kind.rdma)).collect::<Vec<_>>()
        };
        let both = POSIX_FD | FABRIC;
        assert_eq!(
            tried(true, true, true),
            [(both, true), (both, false), (POSIX_FD, true), (POSIX_FD, false)]
        );
        assert_eq!(tried(true, false, false), [(POSIX_FD, false)]);
        assert_eq!(tried(false, true, true), [(FABRIC, true), (FABRIC, false)]);
        assert_eq!(tried(false, false, true), []);
    }

    #[test]
    fn uuids_read_as_nvidia_smi_prints_them() {
        let bytes = std::array::from_fn(|i| (i as u8) * 17);
        assert_eq!(format_uuid(bytes), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
