//! Groups: the ordered set of participants that share windows.

mod env;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use env::EnvConfig;

use crate::store::{self, Gathered, MemoryStore, Store, TcpServer};
use crate::{Deadline, Error, Result};

/// How long a group's collectives wait when nobody says otherwise.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// How often a rank that waits for others looks whether they are still there.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The ordered set of participants that share windows, seen from one of them.
///
/// A group is a rank, a world size and a [`Store`] to meet in. Cloning is cheap; clones are the
/// same participant and count its collectives together.
///
/// Collectives of one group (building pools on it included) are called in the same order on all
/// ranks and not from several threads at once: each takes the next number of the group, and equal
/// numbers meet. Threads that want to go their own ways use a [`child`](Group::child) each.
#[derive(Clone)]
pub struct Group {
    member: Arc<Member>,
    namespace: Arc<Namespace>,
    timeout: Duration,
    interrupt: Option<Interrupt>,
}

/// Says whether a rank that waits for others is to stop; see [`Group::with_interrupt`].
#[derive(Clone)]
pub(crate) struct Interrupt(Arc<dyn Fn() -> bool + Send + Sync>);

impl Interrupt {
    pub(crate) fn asked(&self) -> bool {
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
    /// The store's server, where this participant hosts it: it serves as long as a group of this
    /// participant lives.
    _server: Option<TcpServer>,
}

/// The part of the store's keys that belongs to one group.
struct Namespace {
    name: String,
    collectives: AtomicU64,
    children: AtomicU64,
}

impl Namespace {
    fn new(name: String) -> Arc<Self> {
        Arc::new(Self { name, collectives: AtomicU64::new(0), children: AtomicU64::new(0) })
    }
}

impl Group {
    /// The most ranks of a group: as many as can take part in one gather of a store.
    pub const MAX_WORLD: u32 = store::MAX_WORLD;

    /// Participant `rank` of `world` that meet in `store`. Talks to nobody yet.
    ///
    /// Fails with [`Error::is_invalid_argument`] unless `rank < world <= `[`Group::MAX_WORLD`].
    pub fn new(rank: u32, world: u32, store: Arc<dyn Store>) -> Result<Self> {
        Self::of(Member { rank, world, local_rank: None, store, _server: None })
    }

    /// `world` participants in one process, in rank order, that meet in memory: give each thread
    /// one.
    pub fn in_process(world: u32) -> Result<Vec<Self>> {
        check_world(world)?;
        let store = MemoryStore::new();
        (0..world).map(|rank| Self::new(rank, world, Arc::new(store.clone()))).collect()
    }

    /// The group that torchrun (or another launcher that sets its variables) describes to this
    /// process. Rank 0 serves the store, for as long as its group or a child of it lives; all
    /// connect to it.
    ///
    /// | variable | meaning |
    /// | --- | --- |
    /// | `RANK`, `WORLD_SIZE` | this process's number and how many there are |
    /// | `LOCAL_RANK` | its number on its machine; may be absent |
    /// | `MASTER_ADDR`, `MASTER_PORT` | the machine of rank 0, by an address that it can listen on, and a port |
    /// | `SYMMPOOL_PORT` | the port to use in place of `MASTER_PORT`; may be absent |
    /// | `SYMMPOOL_SECRET` | what all ranks have to know; may be absent where `MASTER_ADDR` is a loopback address |
    ///
    /// Without `SYMMPOOL_PORT`, the port after `MASTER_PORT` is used when
    /// `TORCHELASTIC_USE_AGENT_STORE=True` says that torchrun's own store holds that one.
    ///
    /// A variable that is missing or makes no sense is an [`Error::is_invalid_argument`] that
    /// names it and its value.
    pub fn from_env(deadline: Deadline) -> Result<Self> {
        Self::from_config(&EnvConfig::from_env()?, deadline, None)
    }

    /// [`from_env`](Group::from_env) and [`with_interrupt`](Group::with_interrupt), which then holds
    /// while ranks wait for the store, too.
    pub fn from_env_with_interrupt(
        deadline: Deadline,
        asked: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Self> {
        let asked = Interrupt(Arc::new(asked));
        Self::from_config(&EnvConfig::from_env()?, deadline, Some(asked))
    }

    /// Participant `rank` of `world` that meet over TCP at `address`: a host and a port there, as in
    /// `127.0.0.1:29500`. Rank 0 serves the store, as in [`from_env`](Group::from_env); `secret` is
    /// what all ranks have to know, and may be absent on a loopback address.
    ///
    /// Fails with [`Error::is_invalid_argument`] unless `rank < world <= `[`Group::MAX_WORLD`] and the
    /// address has a port.
    pub fn over_tcp(
        rank: u32,
        world: u32,
        address: &str,
        secret: Option<&str>,
        deadline: Deadline,
    ) -> Result<Self> {
        let config = Self::config_of(rank, world, address, secret)?;
        Self::from_config(&config, deadline, None)
    }

    /// [`over_tcp`](Group::over_tcp) and [`with_interrupt`](Group::with_interrupt), which then holds
    /// while ranks wait for the store, too.
    pub fn over_tcp_with_interrupt(
        rank: u32,
        world: u32,
        address: &str,
        secret: Option<&str>,
        deadline: Deadline,
        asked: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Self> {
        let config = Self::config_of(rank, world, address, secret)?;
        Self::from_config(&config, deadline, Some(Interrupt(Arc::new(asked))))
    }

    fn config_of(rank: u32, world: u32, address: &str, secret: Option<&str>) -> Result<EnvConfig> {
        check_rank(rank, world)?;
        let parts = address.rsplit_once(':').and_then(|(host, port)| {
            let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
            Some((host, port.parse().ok().filter(|port: &u16| *port != 0)?))
        });
        let Some((host, port)) = parts.filter(|(host, _)| !host.is_empty()) else {
            return Err(Error::invalid_argument(format!(
                "store address {address:?}: a host and a port from 1 to 65535 are needed, as in \
                 127.0.0.1:29500"
            )));
        };
        let secret = secret.map(str::to_owned);
        let address = host.to_owned();
        Ok(EnvConfig { rank, world, local_rank: None, address, port, secret })
    }

    fn from_config(
        config: &EnvConfig,
        deadline: Deadline,
        interrupt: Option<Interrupt>,
    ) -> Result<Self> {
        let EnvConfig { rank, world, local_rank, .. } = *config;
        let (store, server) = config.meet(deadline, interrupt.as_ref()).map_err(|error| {
            let EnvConfig { address, port, .. } = config;
            error.context(format!("meeting at {address}:{port} as rank {rank} of {world}"))
        })?;
        let member = Member { rank, world, local_rank, store: Arc::new(store), _server: server };
        Ok(Self { interrupt, ..Self::of(member)? })
    }

    fn of(member: Member) -> Result<Self> {
        check_rank(member.rank, member.world)?;
        Ok(Self {
            member: Arc::new(member),
            namespace: Namespace::new("symmpool".into()),
            timeout: DEFAULT_TIMEOUT,
            interrupt: None,
        })
    }

    /// The same participant with another default for how long its collectives wait.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The same participant, whose waits for other ranks end when `asked` returns true, in stores that
    /// ask (all but [`MemoryStore`]) and on the connections of pools: it is called by the thread that
    /// waits, about once a second and after a signal. The call that waited then fails with
    /// [`Error::is_invalid_state`] and says who is missing; a pool that waited can commit no more.
    #[must_use]
    pub fn with_interrupt(mut self, asked: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        self.interrupt = Some(Interrupt(Arc::new(asked)));
        self
    }

    /// What [`with_interrupt`](Group::with_interrupt) was given.
    pub(crate) fn interrupt(&self) -> Option<Interrupt> {
        self.interrupt.clone()
    }

    /// The same participant under another name, which is in messages and before all keys in the
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

    /// This participant's number among those of its machine, where the launcher said it.
    pub fn local_rank(&self) -> Option<u32> {
        self.member.local_rank
    }

    /// Where participants meet.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.member.store
    }

    /// How long collectives of this group wait when nobody says otherwise; 300 s at first.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A deadline one [`timeout`](Group::timeout) from now.
    pub fn deadline(&self) -> Deadline {
        Deadline::after(self.timeout)
    }

    /// A group of the same participants with names of its own in the store, so that several pools
    /// live on one group. Talks to nobody. Collective in that all ranks make the same children in
    /// the same order.
    #[must_use]
    pub fn child(&self, what: &str) -> Self {
        let number = self.namespace.children.fetch_add(1, Ordering::Relaxed);
        Self {
            member: self.member.clone(),
            namespace: Namespace::new(format!("{}/{what}.{number}", self.name())),
            timeout: self.timeout,
            interrupt: self.interrupt.clone(),
        }
    }

    /// Every rank's `value`. Collective; `what` says in messages, and in the key, what is
    /// gathered. A timeout names the ranks that are missing. A value longer than
    /// [`store::MAX_VALUE`] is refused here, and not told to the other ranks: they wait.
    pub fn all_gather(&self, what: &str, value: &[u8], deadline: Deadline) -> Result<Gathered> {
        self.gather(what, |store, key, rank, world| {
            self.gather_unless_interrupted(store, (key, rank, world), value, deadline)
        })
    }

    /// The same among ranks of which some can be seen to be gone: while others are waited for, it asks
    /// `gone` about once a second, and ends with [`Error::is_peer_lost`] when a rank that is missing is
    /// among them. Most stores do not know whether a rank that has yet to come still exists.
    pub(crate) fn all_gather_from_living(
        &self,
        what: &str,
        value: &[u8],
        deadline: Deadline,
        gone: impl Fn() -> Vec<u32>,
    ) -> Result<Gathered> {
        self.gather(what, |store, key, rank, world| {
            loop {
                let turn = deadline.min(Deadline::after(LOOK_EVERY));
                let place = (key, rank, world);
                let error = match self.gather_unless_interrupted(store, place, value, turn) {
                    Err(error) if error.is_timeout() => error,
                    decided => return decided,
                };
                let missing = error.ranks();
                let lost: Vec<u32> =
                    gone().into_iter().filter(|rank| missing.contains(rank)).collect();
                if !lost.is_empty() {
                    return Err(Error::peer_lost(lost, "gone while others waited for it"));
                }
                if deadline.expired() {
                    return Err(error.waited_for(deadline.budget()));
                }
            }
        })
    }

    fn gather_unless_interrupted(
        &self,
        store: &dyn Store,
        (key, rank, world): (&str, u32, u32),
        value: &[u8],
        deadline: Deadline,
    ) -> Result<Gathered> {
        match &self.interrupt {
            Some(interrupt) => {
                let stop = || interrupt.asked();
                store.all_gather_until(key, rank, world, value, deadline, &stop)
            }
            None => store.all_gather(key, rank, world, value, deadline),
        }
    }

    /// Makes the group's next gather by `gather`, which is told the key, the rank and the world.
    fn gather(
        &self,
        what: &str,
        gather: impl FnOnce(&dyn Store, &str, u32, u32) -> Result<Gathered>,
    ) -> Result<Gathered> {
        let number = self.namespace.collectives.fetch_add(1, Ordering::Relaxed);
        let key = format!("{}/{what}/{number}", self.name());
        let Member { rank, world, .. } = *self.member;
        let gathered = gather(&*self.member.store, &key, rank, world);
        let gathered = gathered.map_err(|error| {
            error.context(format!("group {:?}, rank {rank} of {world}", self.name()))
        })?;
        if gathered.world() != world {
            return Err(Error::system(
                format!("gathering {key:?} as rank {rank}"),
                format!("the store returned {} parts for {world} ranks", gathered.world()),
            ));
        }
        Ok(gathered)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::testing::on_ranks;

    #[test]
    fn a_store_serves_the_largest_group_there_can_be() {
        let (rank, world) = (Group::MAX_WORLD - 1, Group::MAX_WORLD);
        store::check_gather("key", rank, world, b"value").unwrap();
        let error = Group::in_process(world + 1).unwrap_err();
        assert!(error.is_invalid_argument());
        assert!(error.to_string().contains("65537 ranks; groups have 1 to 65536"), "{error}");
    }

    #[test]
    fn impossible_groups_are_refused() {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        for (rank, world) in [(0, 0), (1, 1), (9, 8), (0, Group::MAX_WORLD + 1)] {
            let error = Group::new(rank, world, store.clone()).unwrap_err();
            assert!(error.is_invalid_argument(), "{rank} of {world}");
        }
        let group = Group::new(7, 8, store).unwrap();
        assert_eq!((group.rank(), group.world(), group.local_rank()), (7, 8, None));
        assert_eq!(group.timeout(), Duration::from_secs(300));
    }

    #[test]
    fn everybody_gets_everybodys_part() {
        on_ranks(3, |group| {
            for round in 0..3 {
                let mine = format!("{round}:{}", group.rank());
                let all = group.all_gather("part", mine.as_bytes(), group.deadline()).unwrap();
                for (rank, part) in all.parts().enumerate() {
                    assert_eq!(part, format!("{round}:{rank}").as_bytes());
                }
            }
        });
    }

    #[test]
    fn children_do_not_meet_each_other_or_their_parent() {
        on_ranks(2, |group| {
            let (first, second) = (group.child("pool"), group.child("pool"));
            assert_ne!(first.name(), second.name());
            // Ranks use the three in different orders; each keeps its own count.
            let mut order = [&group, &first, &second];
            if group.rank() == 1 {
                order.rotate_left(1);
            }
            std::thread::scope(|scope| {
                for member in order {
                    scope.spawn(|| {
                        let name = member.name().as_bytes();
                        let all = member.all_gather("x", name, group.deadline()).unwrap();
                        assert!(all.is_uniform());
                    });
                }
            });
        });
    }

    #[test]
    fn clones_count_together() {
        on_ranks(2, |group| {
            let clone = group.clone();
            for member in [&group, &clone, &group] {
                assert!(member.all_gather("x", b"same", group.deadline()).unwrap().is_uniform());
            }
        });
    }

    #[test]
    fn a_missing_rank_is_named_with_the_group() {
        let store = Arc::new(MemoryStore::new());
        let group = Group::new(1, 3, store).unwrap().with_name("trainer");
        let error =
            group.all_gather("hello", b"", Deadline::after(Duration::from_millis(20))).unwrap_err();
        assert!(error.is_timeout());
        assert_eq!(error.ranks(), [0, 2]);
        assert!(error.to_string().contains("group \"trainer\", rank 1 of 3"), "{error}");
    }

    #[test]
    fn groups_from_a_launcher_meet_over_tcp() {
        // A port that is free now; nobody else asks for this very one meanwhile.
        let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = probe.local_addr().unwrap().port();
        drop(probe);
        std::thread::scope(|scope| {
            for rank in 0..3 {
                scope.spawn(move || {
                    let config = EnvConfig {
                        rank,
                        world: 3,
                        local_rank: Some(rank),
                        address: "127.0.0.1".into(),
                        port,
                        secret: Some("a secret of this test".into()),
                    };
                    let group = Group::from_config(&config, Deadline::seconds(60), None).unwrap();
                    assert_eq!(group.local_rank(), Some(rank));
                    let child = group.child("pool");
                    drop(group);
                    let all = child.all_gather("rank", &[rank as u8], Deadline::seconds(60));
                    assert_eq!(
                        all.unwrap().parts().flatten().copied().collect::<Vec<_>>(),
                        [0, 1, 2]
                    );
                    // Rank 0 goes when all have their parts.
                    let _ = child.all_gather("bye", b"", Deadline::seconds(60));
                });
            }
        });
    }

    #[test]
    fn ranks_meet_at_an_address() {
        let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = probe.local_addr().unwrap().to_string();
        drop(probe);
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let address = &address;
                scope.spawn(move || {
                    let deadline = Deadline::seconds(60);
                    let group = Group::over_tcp(rank, 2, address, Some("a secret here"), deadline);
                    let all = group.unwrap().all_gather("rank", &[rank as u8], deadline).unwrap();
                    assert_eq!(all.parts().flatten().copied().collect::<Vec<_>>(), [0, 1]);
                });
            }
        });
        for wrong in ["", "127.0.0.1", ":1", "127.0.0.1:0", "127.0.0.1:65536", "host:x"] {
            let error = Group::over_tcp(0, 1, wrong, None, Deadline::seconds(5)).unwrap_err();
            assert!(error.is_invalid_argument(), "{wrong}: {error}");
        }
        let error = Group::over_tcp(2, 2, &address, None, Deadline::seconds(5)).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
    }

    #[test]
    fn a_store_for_the_network_needs_a_secret() {
        let config = EnvConfig {
            rank: 0,
            world: 2,
            local_rank: None,
            address: "0.0.0.0".into(),
            port: 1,
            secret: None,
        };
        let error = Group::from_config(&config, Deadline::seconds(5), None).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains("SYMMPOOL_SECRET"), "{error}");
    }

    #[test]
    fn a_rank_that_is_seen_to_be_gone_is_not_waited_for() {
        let ends = on_ranks(3, |group| {
            if group.rank() == 1 {
                return None;
            }
            let started = std::time::Instant::now();
            // Others are gone, too, which does not matter here: they are not missing.
            let gone = || vec![0, 1, 2];
            let deadline = Deadline::seconds(60);
            let error = group.all_gather_from_living("part", b"x", deadline, gone).unwrap_err();
            assert!(error.is_peer_lost(), "{error}");
            assert!(started.elapsed() < Duration::from_secs(20), "{error}");
            Some(error.ranks().to_vec())
        });
        assert_eq!(ends, [Some(vec![1]), None, Some(vec![1])]);
    }

    #[test]
    fn those_who_live_are_waited_for_until_the_deadline() {
        let mut groups = Group::in_process(2).unwrap();
        let deadline = Deadline::after(Duration::from_millis(1500));
        let late = groups.remove(1);
        std::thread::scope(|scope| {
            let (none, groups) = (Vec::new, &groups);
            let error = groups[0].all_gather_from_living("part", b"x", deadline, none).unwrap_err();
            assert!(error.is_timeout() && error.ranks() == [1], "{error}");
            assert!(error.to_string().contains("after 1.5s"), "{error}");
            // The part was taken back each time, so that a later gather is complete.
            let soon = || Deadline::seconds(30);
            let first =
                scope.spawn(move || groups[0].all_gather_from_living("p", b"0", soon(), none));
            std::thread::sleep(Duration::from_millis(1200));
            let gathered = {
                late.all_gather_from_living("part", b"1", deadline, none).unwrap_err();
                late.all_gather_from_living("p", b"1", soon(), none).unwrap()
            };
            assert_eq!(gathered.parts().collect::<Vec<_>>(), [b"0", b"1"]);
            assert_eq!(first.join().unwrap().unwrap().world(), 2);
        });
    }
}
