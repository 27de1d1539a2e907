//! How an engine in host memory behaves.

use std::fmt;
use std::time::Duration;

use symmpool_allocator::topology::{Topology, TopologyKind};
use symmpool_allocator::{Error, Result};

use crate::AllToAllAlgorithm;
use crate::host::wait::waiter::Interrupted;

/// The version of the control block's layout and protocol, which increases with every change of them.
/// 2: rows of traffic matrices say where outputs are, and senders write a part of them.
/// 3: point-to-point messages have a part of their own.
const LAYOUT_VERSION: u64 = 3;

/// Returns whether a rank's process still runs.
type PeerAlive = Box<dyn Fn(u32) -> bool + Send>;

/// How a [`HostEngine`](super::HostEngine) behaves. Everything but `peer_alive` and `interrupted` must be the same on
/// every rank.
pub struct HostEngineOptions {
    /// The longest wait for a peer, counted from when a rank begins to wait for it (rule S5). Default: 30 s.
    pub timeout: Duration,
    /// Bytes of scratch for each of the two parities of calls. Calls of up to about this size take one phase; larger
    /// ones from ordinary memory pass through scratch in pieces. A multiple of 256. Default: 2 MiB.
    pub scratch_bytes: u64,
    /// The epoch of the first call, 1 or more. Default: 1; other values are for tests in which epochs wrap.
    pub first_epoch: u64,
    /// Whether waits spin before they yield the core, which is worth it if every rank has a core of its own. Default:
    /// spin if the calling thread may use as many cores as there are ranks. Where ranks share cores, collectives spin
    /// only for ranks that run on other cores, and a rank leaves a core that has two ranks more than another. To move, it
    /// sets the affinity mask of the calling thread to the other core, and then back. A thread without a mask keeps one
    /// of all cores that it could use.
    pub spin: Option<bool>,
    /// Called while a rank waits for a late peer, to find out whether its process still runs, so that the error names
    /// a lost rank long before the timeout. Default: processes are not checked.
    pub peer_alive: Option<PeerAlive>,
    /// Called several times a second while a rank waits for a late peer. Once it returns `true` the wait ends: the call
    /// fails as `is_invalid_state`, and the communicator has failed, which the peers hear. Default: waits are not
    /// interrupted.
    pub interrupted: Option<Interrupted>,
    /// How the ranks are linked. The all-reduce algorithm `cube_mesh` moves data over direct links only; it is the
    /// automatic choice on a hybrid cube mesh. Default: all ranks are linked.
    pub links: Option<Topology>,
    /// The algorithm of all-to-alls. Default: `Auto`.
    pub all_to_all: AllToAllAlgorithm,
}

impl Default for HostEngineOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            scratch_bytes: 2 << 20,
            first_epoch: 1,
            spin: None,
            peer_alive: None,
            interrupted: None,
            links: None,
            all_to_all: AllToAllAlgorithm::Auto,
        }
    }
}

impl HostEngineOptions {
    /// Refuses what no engine of `world` ranks can be made with.
    pub(in crate::host) fn check(&self, world: u32) -> Result<()> {
        if self.first_epoch == 0 || self.timeout.is_zero() {
            return Err(Error::invalid_argument(
                "the first epoch must be 1 or more, and the timeout longer than 0",
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

    /// A hash of what must be equal on all ranks for calls to work, including the layout version.
    pub(in crate::host) fn salt(&self) -> u64 {
        let mut salt = self.scratch_bytes;
        let mut mix = |word: u64| {
            salt = (salt ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd);
            salt ^= salt >> 32;
        };
        mix(LAYOUT_VERSION);
        if self.all_to_all != AllToAllAlgorithm::Auto {
            mix(self.all_to_all as u64);
        }
        // Fully connected ranks add nothing to the hash, so that they may leave `links` out.
        let all_linked =
            |links: &&Topology| matches!(links.kind(), TopologyKind::FullyConnected { .. });
        if let Some(links) = self.links.as_ref().filter(|links| !all_linked(links)) {
            mix(u64::from(links.kind() == TopologyKind::HybridCubeMesh));
            for a in 0..links.world() {
                for b in (a + 1..links.world()).filter(|b| !links.link(a, *b).is_direct()) {
                    mix(u64::from(a) << 32 | u64::from(b));
                }
            }
        }
        salt
    }
}

impl fmt::Debug for HostEngineOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostOptions")
            .field("timeout", &self.timeout)
            .field("scratch_bytes", &self.scratch_bytes)
            .field("first_epoch", &self.first_epoch)
            .field("spin", &self.spin)
            .field("peer_alive", &self.peer_alive.is_some())
            .field("interrupted", &self.interrupted.is_some())
            .field("links", &self.links.as_ref().map(Topology::kind))
            .field("all_to_all", &self.all_to_all)
            .finish()
    }
}
