//! The public face: a pool of symmetric memory, its lanes, blocks and commits.
//!
//! | file | holds |
//! | --- | --- |
//! | `builder` | configuration, and the rendezvous that makes a pool |
//! | `lane` | a lane's lock and its physical memory |
//! | `by_address` | the same for callers that keep addresses |
//! | `free_queue` | frees that find the lane locked |
//! | `block` | a range in its owner's hands |
//! | `access` | copies between blocks and ordinary memory |
//! | `commit` | the collective step that makes windows |
//! | `early_handles` | descriptors of segments, where making and closing them takes long |
//! | `commit_guard` | what a commit holds while it runs |
//! | `commit_due` | whether a commit is due |
//! | `share` | making windows of new segments, on all ranks or none |
//! | `nccl_windows` | windows that are NCCL's too |
//! | `resync` | agreeing on a state again after a divergence |

mod access;
mod block;
mod builder;
mod by_address;
mod commit;
mod commit_due;
mod commit_guard;
mod early_handles;
mod free_queue;
mod lane;
mod lane_memory;
mod nccl_windows;
mod resync;
mod share;

use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use bytemuck::Pod;

pub use block::Block;
pub use builder::PoolBuilder;
pub use commit::CommitReport;
pub use lane::Lane;

use crate::driver::{DeviceIdentity, Driver, Stream};
use crate::fork::Maker;
use crate::heap::{Heap, HeapLayout};
use crate::lane::LaneStats;
use crate::rendezvous::mesh::Mesh;
use crate::rendezvous::peers::{Peers, PerRank};
use crate::store::Traffic;
use crate::sync::lock;
use crate::topology::Topology;
use crate::window::{Window, Windows};
use crate::{Error, Group, Result};
use commit_due::Due;
use early_handles::Handles;
use lane::SharedLane;

/// The lane that communicators take their control memory from.
pub const CONTROL_LANE: &str = "symmpool.control";

/// Symmetric memory of one rank, and windows on its peers'. Cloning is cheap; clones are the same
/// pool.
///
/// A pool is made by all ranks of a group together ([`Pool::builder`]). Allocation is local and
/// takes no lock but its lane's. [`Pool::commit`] is collective: it checks that all ranks did the
/// same and turns new memory into windows. Blocks may outlive the pool; they keep their memory.
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

struct Inner {
    group: Group,
    heap: Arc<Heap>,
    /// In the order of the configuration; the control lane is last.
    lanes: Vec<Arc<SharedLane>>,
    /// Raised when a symmetric lane grows; a commit lowers it.
    due: Arc<Due>,
    handles: Arc<Handles>,
    committer: Mutex<Committer>,
    /// Whether a commit (or resync) is under way.
    committing: Arc<AtomicBool>,
    windows: Mutex<Arc<Windows>>,
    topology: Topology,
    devices: PerRank<DeviceIdentity>,
    pids: Vec<Option<u32>>,
    maker: Maker,
}

/// What commits need, and what only one of them may use at a time.
struct Committer {
    peers: Peers,
    commits: u64,
    /// Why no further commit can work: a peer is gone, or ranks may have come apart.
    broken: Option<Error>,
    /// Why this rank did not get to the end of a commit that others may have finished. Told to
    /// them at the next.
    unfinished: Option<String>,
    /// Communicators of NCCL that get every window.
    nccl: Vec<nccl_windows::Attached>,
}

impl Committer {
    /// After an error by which ranks lost each other, no commit can work any more, as they cannot know
    /// what the others will do: connected peers are told, and need not wait to learn it.
    ///
    /// After one by which this rank alone did not hear the others, they may have finished what it did
    /// not. They are told at the next commit; if that is in vain, there is nobody left to tell.
    fn give_up_if_apart(&mut self, error: &Error) {
        let missed = self.peers.take_missed();
        let in_vain = |why: &Error| is_apart(why) || self.unfinished.is_some();
        if is_apart(error) || missed.as_ref().is_some_and(in_vain) {
            self.peers.give_up(error);
            self.broken = Some(error.clone());
        } else if let Some(why) = missed {
            self.leave_unfinished(&why);
        }
    }

    /// This rank did not get to the end of what others may have finished.
    fn leave_unfinished(&mut self, cause: &Error) {
        self.peers.give_up(&half_way(&cause.to_string()));
        self.unfinished = Some(cause.to_string());
    }
}

/// Whether ranks lost each other, and cannot know what the others will do.
fn is_apart(error: &Error) -> bool {
    error.is_timeout() || error.is_peer_lost()
}

/// The error of a gather that failed, in which this rank had a failure of its own to tell: that is
/// why the others came no more, if they did not.
fn untold(own: Option<Error>, gather: Error) -> Error {
    own.filter(|_| is_apart(&gather)).unwrap_or(gather)
}

/// What a rank says that is no longer like the others.
fn half_way(cause: &str) -> Error {
    Error::invalid_state(format!(
        "an earlier commit or resync went half-way on this rank ({cause}); build a new pool"
    ))
}

/// Peers' copies of a stretch of windows, by rank, this rank's left out: see
/// [`Pool::peers_in_a_row`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerRow {
    /// Where the first peer's begins.
    pub first: u64,
    /// Bytes from there to the next peer's.
    pub distance: u64,
}

/// Numbers of a pool at one moment.
#[derive(Clone, Debug, Default)]
pub struct PoolStats {
    /// Each lane's name and numbers, in the order of the configuration.
    pub lanes: Vec<(String, LaneStats)>,
    /// Successful commits.
    pub commits: u64,
    /// Windows now.
    pub windows: u64,
    /// What this rank exchanged with the store, all groups on it together.
    pub store: Traffic,
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

    /// Commits when a commit is due, which all ranks see alike. Costs nanoseconds otherwise. As for
    /// every commit, no other thread may be in the middle of a symmetric lane's sequence (see
    /// [`Lane`]).
    pub fn commit_if_due(&self) -> Result<Option<CommitReport>> {
        if self.is_commit_due() { self.commit().map(Some) } else { Ok(None) }
    }

    /// Forgets a stream that is about to be destroyed, in all lanes: see [`Lane::forget_stream`]. Part of the
    /// sequence of every symmetric lane that knows it, so every rank does so at the same place. Communicators
    /// remember streams too, and forget them by themselves.
    #[track_caller]
    pub fn forget_stream(&self, stream: Stream) -> Result<()> {
        for lane in self.lanes() {
            lane.forget_stream(stream)?;
        }
        Ok(())
    }

    /// Whether a symmetric lane has grown since the last commit, or has allocated so much that, by what the
    /// last one returned, half of its memory (128 MiB at least) or 32,768 blocks wait to be taken back
    /// after unordered frees. Follows from the sequence of calls, so it is the same on every rank.
    pub fn is_commit_due(&self) -> bool {
        self.0.due.is_raised()
    }

    /// The windows as of the last commit. None in a forked child, which may not use its parent's, and
    /// in which a thread that it lacks may have been replacing the list.
    pub fn windows(&self) -> Arc<Windows> {
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

    /// `rank`'s copy of an address inside a window.
    pub fn peer_ptr(&self, rank: u32, address: u64) -> Result<u64> {
        self.windows().peer(rank, address)
    }

    /// Where peers' copies of `[address, address + bytes)`, which lies in windows of this rank's slot,
    /// are once more, one behind the other: what one copy by a copy engine can write. Made when first
    /// asked for, while a graph is captured too, and there until one of the windows goes.
    ///
    /// `is_unsupported` where the driver cannot, or there are too many of them.
    pub fn peers_in_a_row(&self, address: u64, bytes: u64) -> Result<PeerRow> {
        let layout = self.layout();
        let around = self.windows().around(address, bytes);
        let (Some((first, lengths)), Some((rank, offset))) = (around, layout.locate(address))
        else {
            return Err(Error::invalid_argument(format!(
                "{bytes} bytes at {address:#x} are not all in windows of rank {}",
                self.rank()
            )));
        };
        if rank != self.rank() {
            return Err(Error::invalid_argument(format!(
                "address {address:#x} is in the slot of rank {rank}, not of rank {}",
                self.rank()
            )));
        }
        let base = self.0.heap.row(first, &lengths)?;
        Ok(PeerRow { first: base + (offset - first), distance: lengths.iter().sum() })
    }

    /// Where every rank's memory lies in this process.
    pub fn layout(&self) -> HeapLayout {
        self.0.heap.layout()
    }

    /// This process's rank.
    pub fn rank(&self) -> u32 {
        self.0.group.rank()
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.0.group.world()
    }

    /// The pool's own group: its names in the store are not shared with other pools.
    pub fn group(&self) -> &Group {
        &self.0.group
    }

    /// The driver of the memory.
    pub fn driver(&self) -> &Driver {
        self.0.heap.driver()
    }

    /// How the ranks' devices are linked; the same on every rank.
    pub fn topology(&self) -> &Topology {
        &self.0.topology
    }

    /// The device that `rank` uses.
    pub fn device(&self, rank: u32) -> Result<&DeviceIdentity> {
        if rank >= self.world() {
            return Err(Error::invalid_argument(format!(
                "rank {rank} of a group of {} ranks",
                self.world()
            )));
        }
        Ok(self.0.devices.get(rank))
    }

    /// Refuses in a process that was forked from the one that made the pool: [`Error::is_invalid_state`].
    /// What a child wrote to the pool's memory, or told the other ranks, would be its parent's.
    pub fn check_process(&self) -> Result<()> {
        self.0.maker.check("a pool")
    }

    /// Whether a commit can work, as far as this rank knows: none can once ranks have lost each other,
    /// nor in a forked child. Waits for a commit that is under way.
    pub fn can_commit(&self) -> bool {
        if self.check_process().is_err() {
            return false;
        }
        let committer = lock(&self.0.committer);
        committer.broken.is_none() && committer.unfinished.is_none() && committer.peers.can_talk()
    }

    /// Peers whose processes are gone, as far as this rank can see without waiting: on one
    /// machine, those that closed their sockets. Empty while a commit is under way.
    pub fn lost_peers(&self) -> Vec<u32> {
        let Ok(committer) = self.0.committer.try_lock() else { return Vec::new() };
        committer.peers.mesh().map(Mesh::lost_peers).unwrap_or_default()
    }

    /// Whether `rank` is known to use this pool's memory no more: it hung up without saying that it gave
    /// up, as a process does that ends or lets go of the pool. Does not wait: false also while a commit
    /// is under way, after one in which ranks lost each other, where ranks have no sockets, and in a
    /// forked child, which would read what was sent to its parent.
    pub fn has_left(&self, rank: u32) -> bool {
        if self.check_process().is_err() {
            return false;
        }
        let Ok(mut committer) = self.0.committer.try_lock() else { return false };
        committer.peers.mesh_mut().is_some_and(|mesh| mesh.has_left(rank))
    }

    /// The process id of `rank` where this process can see it: on the same machine and in the
    /// same pid namespace.
    pub fn peer_pid(&self, rank: u32) -> Option<u32> {
        self.0.pids.get(rank as usize).copied().flatten()
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
