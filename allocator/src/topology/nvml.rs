//! Reading NVLinks through NVML, which is loaded at run time.
#![allow(unsafe_code)] // FFI: one NVML function that the wrapper does not pass on.

use std::ffi::{c_uint, c_void};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::links::{Link, LinkMatrix};

/// More links than any device has; reading stops at the first that NVML does not know.
const LINKS: u32 = 64;

/// The library that [`Nvml::init`] opens on Linux.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// Domain, bus and device number.
type PciAddress = (u32, u32, u32);

/// Where the far end of a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FarEnd {
    Device(PciAddress),
    Switch,
}

/// A device and where its active links lead.
#[derive(Clone, Debug)]
struct Ends {
    address: PciAddress,
    ends: Vec<FarEnd>,
}

/// The links between the devices with these UUIDs, in rank order. The error names what failed in NVML, or
/// that it is missing.
pub(super) fn read(uuids: &[&str]) -> Result<LinkMatrix, String> {
    let nvml = Nvml::init().map_err(|error| format!("NVML ({LIBRARY}): {error}"))?;
    let kinds = RemoteKind::load();
    let known = all_addresses(&nvml);
    let mut devices = Vec::with_capacity(uuids.len());
    for (rank, uuid) in uuids.iter().enumerate() {
        let ends = ends(&nvml, kinds.as_ref(), &known, uuid)
            .map_err(|error| format!("NVML, device {uuid} of rank {rank}: {error}"))?;
        devices.push(ends);
    }
    let world = u32::try_from(devices.len()).map_err(|error| error.to_string())?;
    Ok(LinkMatrix::from_fn(world, |a, b| join(&devices[a as usize], &devices[b as usize])))
}

/// The link between two devices. If they see different numbers of links, the smaller number counts.
fn join(a: &Ends, b: &Ends) -> Link {
    if a.address == b.address {
        return Link::Local;
    }
    let count =
        |device: &Ends, end: FarEnd| device.ends.iter().filter(|&&e| e == end).count() as u32;
    let direct = count(a, FarEnd::Device(b.address)).min(count(b, FarEnd::Device(a.address)));
    let switched = count(a, FarEnd::Switch).min(count(b, FarEnd::Switch));
    match (direct, switched) {
        (0, 0) => Link::Pci,
        (0, switched) => Link::NvSwitch(switched),
        (direct, _) => Link::NvLink(direct),
    }
}

fn ends(
    nvml: &Nvml,
    kinds: Option<&RemoteKind>,
    known: &[PciAddress],
    uuid: &str,
) -> Result<Ends, NvmlError> {
    let device = nvml.device_by_uuid(uuid)?;
    let pci = device.pci_info()?;
    let mut ends = Vec::new();
    for number in 0..LINKS {
        let link = device.link_wrapper_for(number);
        match link.is_active() {
            Ok(true) => {}
            Err(NvmlError::InvalidArg | NvmlError::NotSupported) => break,
            Ok(false) | Err(_) => continue,
        }
        // SAFETY: the handle is used while `nvml` and `device` live.
        let handle = unsafe { device.handle() };
        // SAFETY: the handle is that of `device`, which lives.
        let kind = kinds.and_then(|kinds| unsafe { kinds.ask(handle.cast(), number) });
        let remote = link.remote_pci_info().ok().map(|pci| (pci.domain, pci.bus, pci.device));
        ends.extend(end(kind, remote, known));
    }
    Ok(Ends { address: (pci.domain, pci.bus, pci.device), ends })
}

/// The far end of a link: by the type that NVML reports, otherwise by whether its address is that of a
/// device.
fn end(kind: Option<c_uint>, remote: Option<PciAddress>, known: &[PciAddress]) -> Option<FarEnd> {
    match (kind, remote) {
        (Some(RemoteKind::SWITCH), _) => Some(FarEnd::Switch),
        (Some(RemoteKind::DEVICE), remote) => remote.map(FarEnd::Device),
        (None | Some(RemoteKind::UNKNOWN), Some(remote)) if known.contains(&remote) => {
            Some(FarEnd::Device(remote))
        }
        (None | Some(RemoteKind::UNKNOWN), Some(_)) => Some(FarEnd::Switch),
        // A link to something else (a CPU), or to something unknown.
        _ => None,
    }
}

/// The addresses of all devices that NVML lists.
fn all_addresses(nvml: &Nvml) -> Vec<PciAddress> {
    let address = |index| {
        let pci = nvml.device_by_index(index).ok()?.pci_info().ok()?;
        Some((pci.domain, pci.bus, pci.device))
    };
    (0..nvml.device_count().unwrap_or(0)).filter_map(address).collect()
}

/// `nvmlDeviceGetNvLinkRemoteDeviceType`. Called here because the wrapper's method has NVML write
/// into a temporary and always answers "unknown".
struct RemoteKind {
    function: unsafe extern "C" fn(*mut c_void, c_uint, *mut c_uint) -> c_uint,
    /// Keeps the function loaded.
    _library: libloading::Library,
}

impl RemoteKind {
    const DEVICE: c_uint = 0;
    const SWITCH: c_uint = 2;
    const UNKNOWN: c_uint = 255;

    /// `None` where NVML is too old to have it.
    fn load() -> Option<Self> {
        // SAFETY: the library is loaded already (NVML is initialised), so nothing new is run.
        let library = unsafe { libloading::Library::new(LIBRARY) }.ok()?;
        // SAFETY: the type is that of the function of this name in NVML's header.
        let function = unsafe { library.get(b"nvmlDeviceGetNvLinkRemoteDeviceType\0") };
        let function = *function.ok()?;
        Some(Self { function, _library: library })
    }

    /// Kind of device that a link leads to; `None` where NVML cannot tell.
    ///
    /// # Safety
    ///
    /// You must pass the handle of a device that NVML knows.
    unsafe fn ask(&self, device: *mut c_void, link: c_uint) -> Option<c_uint> {
        let mut kind = Self::UNKNOWN;
        // SAFETY: the caller promised a live handle; one enumerator is written through a valid pointer.
        let code = unsafe { (self.function)(device, link, &raw mut kind) };
        (code == 0).then_some(kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(bus: u32, ends: &[FarEnd]) -> Ends {
        Ends { address: (0, bus, 0), ends: ends.to_vec() }
    }

    #[test]
    fn links_are_counted_from_both_sides() {
        let to = |bus| FarEnd::Device((0, bus, 0));
        let a = device(1, &[to(2), to(2), to(3)]);
        let b = device(2, &[to(1), to(1)]);
        let c = device(3, &[]);
        assert_eq!(join(&a, &b), Link::NvLink(2));
        assert_eq!(join(&b, &a), Link::NvLink(2));
        assert_eq!(join(&a, &c), Link::Pci);
        assert_eq!(join(&a, &a), Link::Local);
    }

    #[test]
    fn switches_join_what_has_no_direct_link() {
        let a = device(1, &[FarEnd::Switch; 18]);
        let b = device(2, &[FarEnd::Switch; 17]);
        assert_eq!(join(&a, &b), Link::NvSwitch(17));
        let direct = device(3, &[FarEnd::Device((0, 4, 0)), FarEnd::Switch]);
        let also = device(4, &[FarEnd::Device((0, 3, 0)), FarEnd::Switch]);
        assert_eq!(join(&direct, &also), Link::NvLink(1));
    }

    #[test]
    fn an_end_that_nvml_does_not_name_is_identified_by_its_address() {
        let known = [(0, 1, 0), (0, 2, 0)];
        assert_eq!(end(Some(0), Some((0, 9, 0)), &known), Some(FarEnd::Device((0, 9, 0))));
        assert_eq!(end(Some(2), None, &known), Some(FarEnd::Switch));
        assert_eq!(end(None, Some((0, 2, 0)), &known), Some(FarEnd::Device((0, 2, 0))));
        assert_eq!(end(Some(255), Some((0, 9, 0)), &known), Some(FarEnd::Switch));
        assert_eq!(end(Some(1), Some((0, 9, 0)), &known), None);
        assert_eq!(end(None, None, &known), None);
    }
}
