//! The public interface: a pool of symmetric memory, its lanes, blocks and commits.
//!
//! Start with `lane` and `commit`. The hardest files are `exchange_segments`, where all ranks map new memory or none
//! does, and `resync`.
//!
//! | file | holds |
//! | --- | --- |
//! | `builder` | a pool's configuration, and the rendezvous that makes it |
//! | `lane` | the public interface of a lane: allocation, trim, numbers |
//! | `shared_lane` | a lane with its lock, its memory, and its place in the heap |
//! | `lane_memory` | the physical memory of a lane, and how it grows |
//! | `by_address` | a lane's calls for callers that keep addresses instead of blocks |
//! | `free_queue` | frees that are queued because another thread has the lane's lock |
//! | `block` | an allocated range, owned by the caller |
//! | `access` | copies between blocks and ordinary memory |
//! | `commit` | the collective step that compares ranks and makes windows |
//! | `exchange_segments` | mapping new segments on all ranks or none: part of a commit |
//! | `committer` | the state of commits: connections, and whether ranks are still alike |
//! | `commit_guard` | what a commit locks while it runs |
//! | `background` | a commit in a background thread, which reports a failure of this rank |
//! | `commit_due` | whether a commit is due |
//! | `early_handles` | segments' descriptors that are made before their commit, if that takes long |
//! | `host_barrier` | ranks that wait for each other, of which any may leave again |
//! | `nccl_windows` | registering windows with NCCL |
//! | `on_device` | how many pools this process has on each device |
//! | `on_host` | the ranks of one host among themselves |
//! | `nested` | pools of some of another pool's ranks, which are made without a word to the others |
//! | `resync` | returning to a common state after a divergence |
//! | `joint_block` | one block on every rank, or on none, without a wait for devices |
//! | `vote` | whether all ranks are ready for a step |

mod access;
mod background;
mod block;
mod builder;
mod by_address;
mod commit;
mod commit_due;
mod commit_guard;
mod committer;
mod early_handles;
mod exchange_segments;
mod free_queue;
mod host_barrier;
mod joint_block;
mod lane;
mod lane_memory;
mod nccl_windows;
mod nested;
mod on_device;
mod on_host;
mod resync;
mod shared_lane;
mod vote;

#[cfg(test)]
mod explored;
#[cfg(test)]
mod models;

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;

pub use block::Block;
pub use builder::{PoolBuilder, PreparedPool};
pub use commit::CommitReport;
pub use host_barrier::BarrierId;
pub use joint_block::JointBlock;
pub use lane::Lane;

use crate::driver::{DeviceIdentity, Driver, Stream};
use crate::fork::ProcessId;
use crate::group::Hosts;
use crate::heap::{Heap, HeapLayout};
use crate::lane::LaneStats;
use crate::rendezvous::identity::HostIdentity;
use crate::rendezvous::peers::PerRank;
use crate::rendezvous::sockets::PeerSockets;
use crate::store::StoreTraffic;
use crate::sync::{AtomicBool, Mutex, lock};
use crate::topology::Topology;
use crate::window::{Window, Windows};
use crate::{Error, Group, Result};
use commit_due::CommitDue;
use committer::Committer;
use early_handles::EarlyHandles;
use on_device::OnDevice;
use on_host::{HostRanks, RankScope};
use shared_lane::SharedLane;

/// The lane that communicators take their control memory from.
pub const CONTROL_LANE: &str = "symmpool.control";

/// Symmetric memory of one rank, and windows on its peers'. Cloning is cheap; clones are the same
/// pool.
///
/// A pool is made by all ranks of a group together ([`Pool::builder`]). Allocation is local and
/// takes no lock but its lane's. [`Pool::commit`] is collective: it checks that all ranks did the
/// same and turns new memory into windows. Blocks may outlive the pool; they keep their memory.
#[derive(Clone)]
pub struct Pool(Arc<Inner>, RankScope);

struct Inner {
    group: Group,
    /// Ranks that can map each other's memory.
    hosts: Hosts,
    on_host: HostRanks,
    heap: Arc<Heap>,
    /// Where memory begins in each slot that belongs to no lane.
    room: u64,
    /// In the order of the configuration; the control lane is last.
    lanes: Vec<Arc<SharedLane>>,
    /// Raised when a symmetric lane makes a commit due; a commit lowers it.
    due: Arc<CommitDue>,
    handles: Arc<EarlyHandles>,
    committer: Mutex<Committer>,
    /// Whether a commit (or resync) is under way.
    committing: Arc<AtomicBool>,
    /// Whether a background thread is in a commit.
    background: background::Background,
    windows: Mutex<Arc<Windows>>,
    topology: Topology,
    identities: PerRank<HostIdentity>,
    devices: PerRank<DeviceIdentity>,
    pids: Vec<Option<u32>>,
    /// See [`Pool::is_first_on_device`].
    first_on_device: bool,
    /// Whether ranks can send messages of barriers to all others, on sockets.
    has_barrier_messages: bool,
    _on_device: OnDevice,
    maker: ProcessId,
}

/// Numbers of a pool at one moment.
#[derive(Clone, Debug, Default)]
pub struct PoolStats {
    /// Each lane's name and numbers, in the order of the configuration.
    pub lanes: Vec<(String, LaneStats)>,
    /// Successful commits.
    pub commits: u64,
    /// Number of windows.
    pub windows: u64,
    /// Exchange of this rank with the store, over all groups that use it.
    pub store: StoreTraffic,
}

impl PoolStats {
    /// Bytes handed out, over all lanes.
    pub fn allocated(&self) -> u64 {
        self.lanes.iter().map(|(_, lane)| lane.allocated).sum()
    }

    /// Bytes in physical segments, over all lanes.
    pub fn reserved(&self) -> u64 {
        self.lanes.iter().map(|(_, lane)| lane.reserved).sum()
    }
}

impl Pool {
    /// Starts the description of a pool for the ranks of `group`.
    pub fn builder(group: Group) -> PoolBuilder {
        PoolBuilder::new(group)
    }

    /// Allocates `count` elements in the first lane, on the default stream; see
    /// [`Lane::alloc_on`].
    #[track_caller]
    pub fn alloc<T: Pod>(&self, count: usize) -> Result<Block<T>> {
        self.default_lane().alloc(count)
    }

    /// The first lane of the configuration.
    pub fn default_lane(&self) -> Lane {
        Lane(self.0.lanes[0].clone())
    }

    /// The lane with this name.
    pub fn lane(&self, name: &str) -> Result<Lane> {
        let found = self.0.lanes.iter().find(|lane| lane.name == name);
        let found = found.ok_or_else(|| {
            let names: Vec<_> = self.0.lanes.iter().map(|lane| lane.name.as_str()).collect();
            Error::invalid_argument(format!("no lane {name:?}; the pool has {names:?}"))
        })?;
        Ok(Lane(found.clone()))
    }

    /// All lanes in the order of the configuration.
    pub fn lanes(&self) -> impl ExactSizeIterator<Item = Lane> + '_ {
        self.0.lanes.iter().map(|lane| Lane(lane.clone()))
    }

    /// Checks that all ranks did the same, and makes windows of new memory, within the group's
    /// timeout. See [`Pool::commit_by`].
    pub fn commit(&self) -> Result<CommitReport> {
        self.commit_by(self.0.group.deadline())
    }

    /// Commits if a commit is due, which is so on all ranks or on none. Otherwise it takes nanoseconds. As
    /// for every commit, no other thread may be in the middle of a symmetric lane's sequence (see [`Lane`]).
    pub fn commit_if_due(&self) -> Result<Option<CommitReport>> {
        if self.is_commit_due() { self.commit().map(Some) } else { Ok(None) }
    }

    /// Forgets a stream that is about to be destroyed, in all lanes: see [`Lane::forget_stream`]. This is part
    /// of the sequence of every symmetric lane that knows the stream, so every rank must do it at the same
    /// place of its program. Communicators remember streams too, and forget them by themselves.
    #[track_caller]
    pub fn forget_stream(&self, stream: Stream) -> Result<()> {
        for lane in self.lanes() {
            lane.forget_stream(stream)?;
        }
        Ok(())
    }

    /// Whether a commit is due: a symmetric lane has grown since the last one, or many of its unordered frees
    /// are deferred. The latter is estimated from what the lane has allocated since and what the last commit
    /// returned, and holds from half of the lane's memory (at least 128 MiB) or 32,768 blocks. Both follow from
    /// the sequence of calls, so the answer is the same on every rank.
    pub fn is_commit_due(&self) -> bool {
        self.0.due.is_raised()
    }

    /// The windows as of the last commit. Empty in a forked child, which may not use its parent's windows.
    pub fn windows(&self) -> Arc<Windows> {
        // A thread of the parent may have held the list's lock at the fork.
        if self.check_process().is_err() {
            return Arc::new(Windows::new(self.layout(), Vec::new()));
        }
        lock(&self.0.windows).clone()
    }

    /// Whether all `bytes` from `address` lie in windows.
    pub fn is_window(&self, address: u64, bytes: u64) -> bool {
        self.windows().covers(address, bytes)
    }

    /// The window that holds `address`.
    pub fn window_of(&self, address: u64) -> Option<Window> {
        self.windows().find(address).cloned()
    }

    /// The address of `rank`'s copy of an address inside a window. `is_invalid_argument` where the rank is on another
    /// [host](Self::hosts), whose memory cannot be reached.
    pub fn peer_ptr(&self, rank: u32, address: u64) -> Result<u64> {
        self.windows().peer(self.slot_of(rank)?, address)
    }

    /// Where the memory of every rank of this host lies in this process.
    pub fn layout(&self) -> HeapLayout {
        self.0.heap.layout()
    }

    /// This process's rank.
    pub fn rank(&self) -> u32 {
        self.group().rank()
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.group().world()
    }

    /// The pool's own group: its names in the store are not shared with other pools.
    pub fn group(&self) -> &Group {
        match self.1 {
            RankScope::Group => &self.0.group,
            RankScope::Host => &self.0.on_host.group,
        }
    }

    /// The driver of the memory.
    pub fn driver(&self) -> &Driver {
        self.0.heap.driver()
    }

    /// How the ranks' devices are linked; the same on every rank. Unknown where ranks are on several
    /// [hosts](Self::hosts): [`on_host`](Self::on_host) has the links of one.
    pub fn topology(&self) -> &Topology {
        match self.1 {
            RankScope::Group => &self.0.topology,
            RankScope::Host => &self.0.on_host.topology,
        }
    }

    /// The device that `rank` uses.
    pub fn device(&self, rank: u32) -> Result<&DeviceIdentity> {
        if rank >= self.world() {
            return Err(Error::invalid_argument(format!(
                "rank {rank} of a group of {} ranks",
                self.world()
            )));
        }
        Ok(self.0.devices.get(self.group_rank(rank)))
    }

    /// Whether no rank's process had another pool on its device when this one was made; the same on every rank.
    /// Communicators can be told to take another size of memory there than on later pools. In host memory it is
    /// always so.
    pub fn is_first_on_device(&self) -> bool {
        self.0.first_on_device
    }

    /// [`Error::is_invalid_state`] in a process that was forked from the one that made the pool: what a child
    /// wrote to the pool's memory or sent to other ranks would be in its parent's name.
    pub fn check_process(&self) -> Result<()> {
        self.0.maker.check("a pool")
    }

    /// Whether a commit can succeed, as far as this rank knows: none can once ranks have lost each other, nor
    /// in a forked child. Waits for a commit that is under way.
    pub fn can_commit(&self) -> bool {
        if self.check_process().is_err() {
            return false;
        }
        let committer = lock(&self.0.committer);
        committer.broken.is_none() && committer.incomplete.is_none() && committer.peers.can_talk()
    }

    /// Peers whose processes are gone, as far as this rank can tell without waiting: on its host, those
    /// that closed their sockets. Empty while a commit is under way.
    pub fn lost_peers(&self) -> Vec<u32> {
        let Ok(committer) = self.0.committer.try_lock() else { return Vec::new() };
        let lost = committer.peers.sockets().map(PeerSockets::lost_peers).unwrap_or_default();
        lost.into_iter().filter_map(|rank| self.number_of(rank)).collect()
    }

    /// Whether `rank` is known not to use this pool's memory any more: it closed its socket without reporting
    /// a failure, as a process does that ends or drops the pool. Does not wait. False also while a commit is
    /// under way, after a commit in which ranks lost each other, if ranks have no sockets, and in a forked
    /// child, which would read what was sent to its parent.
    pub fn has_left(&self, rank: u32) -> bool {
        if self.check_process().is_err() {
            return false;
        }
        let Ok(mut committer) = self.0.committer.try_lock() else { return false };
        let rank = self.group_rank(rank);
        committer.peers.sockets_mut().is_some_and(|sockets| sockets.has_left(rank))
    }

    /// Function that [`Group::with_interrupt`](crate::Group::with_interrupt) of the pool's group was given: it
    /// returns whether waits for other ranks are to stop.
    pub fn interrupt(&self) -> Option<Arc<dyn Fn() -> bool + Send + Sync>> {
        self.0.group.interrupt().map(|interrupt| interrupt.0)
    }

    /// The process id of `rank`, if it is on the same machine and in the same pid namespace.
    pub fn peer_pid(&self, rank: u32) -> Option<u32> {
        if rank >= self.world() {
            return None;
        }
        self.0.pids.get(self.group_rank(rank) as usize).copied().flatten()
    }

    /// The pool's numbers now. Waits for a commit that is under way. [`Error::is_invalid_state`] in a
    /// forked child, and once a call panicked inside one of the lanes.
    pub fn stats(&self) -> Result<PoolStats> {
        let lanes = self.0.lanes.iter();
        let lanes = lanes.map(|lane| Ok((lane.name.clone(), lane.lock()?.state.stats())));
        Ok(PoolStats {
            lanes: lanes.collect::<Result<_>>()?,
            commits: lock(&self.0.committer).commits,
            windows: self.windows().list().len() as u64,
            store: self.0.group.store().traffic(),
        })
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("group", &self.0.group)
            .field("layout", &self.0.heap.layout())
            .finish_non_exhaustive()
    }
}
