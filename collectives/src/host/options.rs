//! How an engine in host memory behaves.

use std::fmt;
use std::time::Duration;

use symmpool_allocator::topology::{Mesh, Topology};
use symmpool_allocator::{Error, Result};

use crate::AllToAllAlgorithm;

/// The version of what ranks leave for each other in control segments; grows with any change to that.
/// 2: rows of traffic matrices say where outputs are, and senders write shares of them.
/// 3: messages between two ranks have a place of their own.
const LAYOUT_VERSION: u64 = 3;

/// Tells whether a rank's process still runs.
type PeerAlive = Box<dyn Fn(u32) -> bool + Send>;

/// How a [`HostEngine`](super::HostEngine) behaves. Everything but `peer_alive` must be the same on
/// every rank.
pub struct HostOptions {
    /// Longest wait for a peer, from when it is noticed to be late (rule S5). Default 30 s.
    pub timeout: Duration,
    /// Bytes of scratch per parity, of which there are two. Calls up to about this size take one
    /// phase; larger ones from ordinary memory pass through it in pieces. A multiple of 256.
    /// Default 2 MiB.
    pub scratch_bytes: u64,
    /// The epoch of the first call, 1 or more. Default 1; others serve to test wrapping.
    pub first_epoch: u64,
    /// Spin before giving the core away, which pays if every rank has a core of its own. Default:
    /// if there are as many cores as ranks where the calling thread may run.
    pub spin: Option<bool>,
    /// Asked, while waiting for a late rank, whether its process still runs; so that a lost rank
    /// is named long before the timeout. Default: unknown, nobody is asked.
    pub peer_alive: Option<PeerAlive>,
    /// How the ranks are linked, for all-reduces by `cube_mesh`, which move data over direct links
    /// only; a hybrid cube mesh has them by default. Default: all ranks are linked.
    pub links: Option<Topology>,
    /// How all-to-alls go about it. Default: `Auto`.
    pub all_to_all: AllToAllAlgorithm,
}

impl Default for HostOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            scratch_bytes: 2 << 20,
            first_epoch: 1,
            spin: None,
            peer_alive: None,
            links: None,
            all_to_all: AllToAllAlgorithm::Auto,
        }
    }
}

impl HostOptions {
    /// Refuses what no engine of `world` ranks can be made with.
    pub(super) fn check(&self, world: u32) -> Result<()> {
        if self.first_epoch == 0 || self.timeout.is_zero() {
            return Err(Error::invalid_argument(
                "the first epoch must be 1 or more, and the timeout longer than nothing",
            ));
        }
        if let Some(links) = self.links.as_ref().filter(|links| links.world() != world) {
            return Err(Error::invalid_argument(format!(
                "the links of {} ranks for a communicator of {world}; give those of all its ranks",
                links.world()
            )));
        }
        Ok(())
    }

    /// A hash of what must be equal on all ranks for calls to work, the build's layout too.
    pub(super) fn salt(&self) -> u64 {
        let mut salt = self.scratch_bytes;
        let mut mix = |word: u64| {
            salt = (salt ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
            salt ^= salt >> 32;
        };
        mix(LAYOUT_VERSION);
        if self.all_to_all != AllToAllAlgorithm::Auto {
            mix(self.all_to_all as u64);
        }
        // Ranks that are all linked hash to nothing, so that they need not be asked about.
        let all_linked = |links: &&Topology| matches!(links.mesh(), Mesh::FullyConnected { .. });
        if let Some(links) = self.links.as_ref().filter(|links| !all_linked(links)) {
            mix(u64::from(links.mesh() == Mesh::HybridCubeMesh));
            for a in 0..links.world() {
                for b in (a + 1..links.world()).filter(|b| !links.link(a, *b).is_direct()) {
                    mix(u64::from(a) << 32 | u64::from(b));
                }
            }
        }
        salt
    }
}

impl fmt::Debug for HostOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostOptions")
            .field("timeout", &self.timeout)
            .field("scratch_bytes", &self.scratch_bytes)
            .field("first_epoch", &self.first_epoch)
            .field("spin", &self.spin)
            .field("peer_alive", &self.peer_alive.is_some())
            .field("links", &self.links.as_ref().map(Topology::mesh))
            .field("all_to_all", &self.all_to_all)
            .finish()
    }
}
