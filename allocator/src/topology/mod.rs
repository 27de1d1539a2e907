//! How the devices of a group are linked, for the choice of algorithms.
//!
//! [`Topology::detect`] reads links (NVML, `nvml.rs`), [`classify`] names their shape (`links.rs`,
//! pure). Ranks compare topologies at rendezvous: an algorithm chosen by one must be chosen by
//! all, so a topology holds nothing that may differ between ranks that see the same machine.

mod links;
mod nvml;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use links::{Link, LinkMatrix, TopologyKind, classify};

use crate::driver::DeviceIdentity;
use crate::{Error, Result};

/// The links between the ranks of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    world: u32,
    links: Links,
}

/// A group may have thousands of simulated ranks, so where all pairs are alike there is no matrix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Links {
    Local,
    Unknown,
    Matrix(LinkMatrix),
}

impl Topology {
    /// Ranks that share the memory of one host, or one device.
    pub fn host(world: u32) -> Self {
        Self { world, links: Links::Local }
    }

    /// Ranks whose links are not known.
    pub fn unknown(world: u32) -> Self {
        Self { world, links: Links::Unknown }
    }

    /// Links that the caller gives.
    pub fn from_matrix(matrix: LinkMatrix) -> Self {
        Self { world: matrix.world(), links: Links::Matrix(matrix) }
    }

    /// Finds out how `devices`, in rank order, are linked.
    ///
    /// Without NVML, and if a device does not belong to this host, the topology is unknown, which is no error.
    /// It is also unknown for drivers that are not symmpool's own.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` without devices, `is_diverged` where ranks use different kinds.
    pub fn detect(devices: &[DeviceIdentity]) -> Result<Self> {
        let world = u32::try_from(devices.len())
            .map_err(|_| Error::invalid_argument("more than 2^32 ranks"))?;
        let Some(first) = devices.first() else {
            return Err(Error::invalid_argument("the topology of no devices"));
        };
        if let Some(rank) = devices.iter().position(|device| device.kind != first.kind) {
            return Err(Error::mismatch(format!(
                "rank 0 uses a {:?} driver and rank {rank} a {:?} one; all ranks of a group use \
                 the same kind",
                first.kind, devices[rank].kind
            ))
            .naming(u32::try_from(rank)));
        }
        match first.kind.as_str() {
            "host" | "sim" => Ok(Self::host(world)),
            "cuda" => Ok(Self::of_cuda(world, devices)),
            _ => Ok(Self::unknown(world)),
        }
    }

    fn of_cuda(world: u32, devices: &[DeviceIdentity]) -> Self {
        let uuids: Vec<&str> = devices.iter().map(|device| device.uuid.as_str()).collect();
        // One rank, or ranks on one device, have no links to ask about.
        if uuids.iter().all(|uuid| !uuid.is_empty() && *uuid == uuids[0]) {
            return Self::host(world);
        }
        match nvml::read(&uuids) {
            Ok(matrix) => Self::from_matrix(matrix),
            Err(error) => {
                tracing::warn!(%error, "the links between the devices of this group are unknown");
                Self::unknown(world)
            }
        }
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// The link between two ranks, in either order; `Unknown` for a rank that does not exist.
    pub fn link(&self, a: u32, b: u32) -> Link {
        match &self.links {
            _ if a >= self.world || b >= self.world => Link::Unknown,
            _ if a == b => Link::Local,
            Links::Local => Link::Local,
            Links::Unknown => Link::Unknown,
            Links::Matrix(matrix) => matrix.link(a, b),
        }
    }

    /// The class of shape.
    pub fn kind(&self) -> TopologyKind {
        match &self.links {
            Links::Local => TopologyKind::FullyConnected { links: 0 },
            Links::Unknown => TopologyKind::Unknown,
            Links::Matrix(matrix) => classify(matrix),
        }
    }
}

/// The matrix as a table, with ranks as rows and columns, and its class.
impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Links::Matrix(matrix) = &self.links {
            write!(f, "{:>8}", "")?;
            for b in 0..self.world {
                write!(f, " {b:>5}")?;
            }
            writeln!(f)?;
            for a in 0..self.world {
                write!(f, "rank {a:>3}")?;
                for b in 0..self.world {
                    write!(f, " {:>5}", matrix.link(a, b))?;
                }
                writeln!(f)?;
            }
        }
        let s = if self.world == 1 { "" } else { "s" };
        write!(f, "{} rank{s}: {}", self.world, self.kind())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(kind: &str, uuid: &str) -> DeviceIdentity {
        DeviceIdentity { kind: kind.to_owned(), name: String::new(), uuid: uuid.to_owned() }
    }

    #[test]
    fn host_and_simulated_ranks_need_no_links() {
        for kind in ["host", "sim"] {
            let found = Topology::detect(&[device(kind, ""), device(kind, "")]).unwrap();
            assert_eq!(found, Topology::host(2));
            assert_eq!(found.kind(), TopologyKind::FullyConnected { links: 0 });
            assert_eq!(found.link(0, 1), Link::Local);
            assert_eq!(found.link(0, 2), Link::Unknown);
        }
    }

    #[test]
    fn devices_that_nobody_knows_are_an_unknown_topology() {
        let strangers = [device("cuda", "GPU-not-here-0"), device("cuda", "GPU-not-here-1")];
        assert_eq!(Topology::detect(&strangers).unwrap(), Topology::unknown(2));
        let unnamed = [device("cuda", ""), device("cuda", "")];
        assert_eq!(Topology::detect(&unnamed).unwrap(), Topology::unknown(2));
        let foreign = Topology::detect(&[device("other", "")]).unwrap();
        assert_eq!(foreign.kind(), TopologyKind::Unknown);
    }

    #[test]
    fn ranks_on_one_device_need_no_links() {
        let shared = [device("cuda", "GPU-1"), device("cuda", "GPU-1")];
        assert_eq!(Topology::detect(&shared).unwrap(), Topology::host(2));
    }

    #[test]
    fn a_mixture_of_drivers_names_the_odd_rank() {
        let mixed = [device("host", ""), device("host", ""), device("cuda", "GPU-1")];
        let error = Topology::detect(&mixed).unwrap_err();
        assert!(error.is_diverged(), "{error}");
        assert!(error.to_string().contains("rank 2"), "{error}");
        assert!(Topology::detect(&[]).unwrap_err().is_invalid_argument());
    }

    #[test]
    fn topologies_travel() {
        let matrix = LinkMatrix::from_fn(3, |a, b| Link::NvLink(a + b));
        for topology in [Topology::host(4096), Topology::unknown(2), Topology::from_matrix(matrix)]
        {
            let bytes = postcard::to_stdvec(&topology).unwrap();
            assert!(bytes.len() < 32, "{} bytes", bytes.len());
            assert_eq!(postcard::from_bytes::<Topology>(&bytes).unwrap(), topology);
        }
    }

    #[test]
    fn a_matrix_reads_like_a_table() {
        let matrix = LinkMatrix::from_fn(3, |a, b| match (a, b) {
            (0, 1) => Link::NvSwitch(18),
            (0, 2) => Link::NvLink(4),
            _ => Link::Pci,
        });
        let expected = "             0     1     2\n\
                        rank   0     -  SW18   NV4\n\
                        rank   1  SW18     -   PCI\n\
                        rank   2   NV4   PCI     -\n\
                        3 ranks: other";
        assert_eq!(Topology::from_matrix(matrix).to_string(), expected);
    }
}
