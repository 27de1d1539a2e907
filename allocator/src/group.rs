//! Groups: the ordered set of participants that share windows.

mod env;
mod gather;
mod hosts;
mod launch;
mod launchers;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::store::{self, MemoryStore, Store, TcpServer};
use crate::{Deadline, Error, Result};

pub use env::Launch;
pub use hosts::Hosts;

/// How long a group's collectives wait by default.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// The ordered set of participants that share windows, seen from one of them.
///
/// A group is a rank, a world size and a [`Store`] through which the ranks meet. Cloning is cheap; clones are the
/// same participant and count its collectives together.
///
/// Collectives of one group (building pools on it included) are called in the same order on all
/// ranks and not from several threads at once: each takes the next number of the group, and calls with
/// equal numbers belong together. Threads that call independently use a [`child`](Group::child) each.
#[derive(Clone)]
pub struct Group {
    member: Arc<Member>,
    namespace: Arc<Namespace>,
    timeout: Duration,
    interrupt: Option<Interrupt>,
    /// Id of the host that this participant pretends to be on, instead of what its process says.
    host_id: Option<Arc<str>>,
}

/// Says whether a waiting rank is to stop; see [`Group::with_interrupt`].
#[derive(Clone)]
pub(crate) struct Interrupt(pub(crate) Arc<dyn Fn() -> bool + Send + Sync>);

impl Interrupt {
    pub(crate) fn is_requested(&self) -> bool {
        (self.0)()
    }
}

impl fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Interrupt(..)")
    }
}

/// Who this participant is; shared by a group and its children.
struct Member {
    rank: u32,
    world: u32,
    local_rank: Option<u32>,
    store: Arc<dyn Store>,
    /// Text on why ranks may not come to the store.
    doubt: Option<String>,
    /// The store's server, if this participant hosts it: it serves as long as a group of this participant
    /// lives.
    _server: Option<TcpServer>,
}

/// The part of the store's keys that belongs to one group.
struct Namespace {
    name: String,
    collectives: AtomicU64,
    children: AtomicU64,
    root: Arc<Root>,
}

/// Properties that a group shares with its children.
struct Root {
    name: String,
    hosts: hosts::KnownHosts,
}

impl Namespace {
    fn new(name: String) -> Arc<Self> {
        let root = Root { name: name.clone(), hosts: hosts::KnownHosts::default() };
        Self::below(name, Arc::new(root))
    }

    fn below(name: String, root: Arc<Root>) -> Arc<Self> {
        Arc::new(Self { name, collectives: AtomicU64::new(0), children: AtomicU64::new(0), root })
    }
}

impl Group {
    /// The most ranks of a group: as many as can take part in one gather of a store.
    pub const MAX_WORLD: u32 = store::MAX_WORLD;

    /// Participant `rank` of `world` that meet in `store`. Does not communicate.
    ///
    /// Fails with [`Error::is_invalid_argument`] unless `rank < world <= `[`Group::MAX_WORLD`].
    pub fn new(rank: u32, world: u32, store: Arc<dyn Store>) -> Result<Self> {
        Self::of(Member { rank, world, local_rank: None, store, doubt: None, _server: None })
    }

    /// `world` participants in one process, in rank order, that meet in memory: give each thread
    /// one.
    pub fn in_process(world: u32) -> Result<Vec<Self>> {
        check_world(world)?;
        let store = MemoryStore::new();
        (0..world).map(|rank| Self::new(rank, world, Arc::new(store.clone()))).collect()
    }

    fn of(member: Member) -> Result<Self> {
        check_rank(member.rank, member.world)?;
        Ok(Self {
            member: Arc::new(member),
            namespace: Namespace::new("symmpool".into()),
            timeout: DEFAULT_TIMEOUT,
            interrupt: None,
            host_id: None,
        })
    }

    /// Returns this participant with another default for how long its collectives wait.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Returns this participant, whose waits for other ranks end when `stop` returns true: in all stores but
    /// [`MemoryStore`], and on the connections of pools. The thread that waits calls it about once a second
    /// and after a signal. The call that waited then fails with [`Error::is_invalid_state`] and names the
    /// ranks that are missing; a pool that waited can commit no more.
    #[must_use]
    pub fn with_interrupt(mut self, stop: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        self.interrupt = Some(Interrupt(Arc::new(stop)));
        self
    }

    /// Returns this participant as one of a host of that name, which the group's other ranks with the same one share. Threads
    /// of one process pretend so to be on several hosts; processes have `SYMMPOOL_HOST_ID`. Set it before the group's
    /// [`hosts`](Self::hosts) are asked for and before a pool is made.
    #[must_use]
    pub fn with_host_id(mut self, id: impl Into<Arc<str>>) -> Self {
        self.host_id = Some(id.into());
        self
    }

    /// Id of the host that this participant pretends to be on, instead of what its process says.
    pub(crate) fn host_id(&self) -> Option<&str> {
        self.host_id.as_deref()
    }

    /// Function that [`with_interrupt`](Group::with_interrupt) was given.
    pub(crate) fn interrupt(&self) -> Option<Interrupt> {
        self.interrupt.clone()
    }

    /// Returns this participant under another name, which is in messages and before all keys in the
    /// store. Groups that use one store at a time need different names, equal on all ranks.
    /// Collectives count from 0 again.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.namespace = Namespace::new(name.into());
        self
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.namespace.name
    }

    /// This participant's number, below [`world`](Group::world).
    pub fn rank(&self) -> u32 {
        self.member.rank
    }

    /// The number of participants.
    pub fn world(&self) -> u32 {
        self.member.world
    }

    /// This participant's number among those of its machine, if the launcher gives it.
    pub fn local_rank(&self) -> Option<u32> {
        self.member.local_rank
    }

    /// The store through which the participants meet.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.member.store
    }

    /// How long collectives of this group wait by default; 300 s unless changed.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A deadline one [`timeout`](Group::timeout) from now.
    pub fn deadline(&self) -> Deadline {
        Deadline::after(self.timeout)
    }

    /// A group of the same participants with names of its own in the store, so that several pools
    /// live on one group. Does not communicate. Collective in that all ranks make the same children in
    /// the same order.
    #[must_use]
    pub fn child(&self, what: &str) -> Self {
        let number = self.namespace.children.fetch_add(1, Ordering::Relaxed);
        Self {
            member: self.member.clone(),
            namespace: Namespace::below(
                format!("{}/{what}.{number}", self.name()),
                self.namespace.root.clone(),
            ),
            timeout: self.timeout,
            interrupt: self.interrupt.clone(),
            host_id: self.host_id.clone(),
        }
    }

    /// Rank `rank` of `world` of a part of this group, with names of its own in the same store. The store's server is
    /// the whole group's.
    pub(crate) fn part(&self, number: u32, rank: u32, world: u32) -> Result<Self> {
        check_rank(rank, world)?;
        let Member { local_rank, store, doubt, .. } = &*self.member;
        let (local_rank, store, doubt) = (*local_rank, store.clone(), doubt.clone());
        Ok(Self {
            member: Arc::new(Member { rank, world, local_rank, store, doubt, _server: None }),
            namespace: Namespace::new(format!("{}/part.{number}", self.name())),
            timeout: self.timeout,
            interrupt: self.interrupt.clone(),
            host_id: self.host_id.clone(),
        })
    }
}

fn check_rank(rank: u32, world: u32) -> Result<()> {
    check_world(world)?;
    if rank >= world {
        return Err(Error::invalid_argument(format!(
            "rank {rank} of a group of {world} ranks; ranks count from 0"
        )));
    }
    Ok(())
}

fn check_world(world: u32) -> Result<()> {
    if world == 0 || world > Group::MAX_WORLD {
        return Err(Error::invalid_argument(format!(
            "a group of {world} ranks; groups have 1 to {} (Group::MAX_WORLD)",
            Group::MAX_WORLD
        )));
    }
    Ok(())
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("name", &self.name())
            .field("rank", &self.rank())
            .field("world", &self.world())
            .field("local_rank", &self.local_rank())
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}
