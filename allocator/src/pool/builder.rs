//! The configuration of a pool, and the rendezvous that makes it.

use std::env;
use std::ffi::OsStr;
use std::fmt::{self, Write as _};
use std::sync::Arc;

use super::background::Background;
use super::commit_due::CommitDue;
use super::committer::{Committer, Unmet};
use super::early_handles::EarlyHandles;
use super::on_device::OnDevice;
use super::on_host::{HostRanks, RankScope};
use super::shared_lane::SharedLane;
use super::{CONTROL_LANE, Inner, Pool};
use crate::driver::Driver;
use crate::fork::ProcessId;
use crate::group::Hosts;
use crate::heap::Heap;
use crate::lane::{LaneConfig, LaneState, MAX_LANE_BYTES, UNIT, WindowPolicy};
use crate::rendezvous::handshake::{HandshakeConfig, HandshakeOptions, handshake};
use crate::rendezvous::identity::HostIdentity;
use crate::rendezvous::peers::Peers;
use crate::sync::{AtomicBool, Mutex};
use crate::topology::Topology;
use crate::window::Windows;
use crate::{Deadline, Error, Group, Result};

/// Bytes of address space from one rank's slot to the next, unless set: several times the memory of any
/// device, because reserving addresses costs next to nothing and running out of them is an error.
const DEFAULT_STRIDE: u64 = 1 << 40;

/// Address space for communicators' control memory.
const CONTROL_RANGE: u64 = 16 << 30;

/// Environment variable that lets the ranks of every pool use one device, to try programs on fewer devices.
const SHARED_DEVICE: &str = "SYMMPOOL_SHARED_DEVICE";

/// The configuration of a pool. Everything except the driver's device and the deadline must be the same on
/// every rank, and is compared when the pool is built (rule D8).
#[derive(Debug)]
pub struct PoolBuilder {
    group: Group,
    driver: Option<Result<Driver>>,
    stride: u64,
    lanes: Vec<LaneConfig>,
    allow_shared_device: bool,
    deadline: Option<Deadline>,
}

impl PoolBuilder {
    pub(super) fn new(group: Group) -> Self {
        Self {
            group,
            driver: None,
            stride: DEFAULT_STRIDE,
            lanes: Vec::new(),
            allow_shared_device: false,
            deadline: None,
        }
    }

    /// The driver that makes the memory; [`Driver::best`] unless set.
    #[must_use]
    pub fn driver(self, driver: Driver) -> Self {
        self.driver_or_failure(Ok(driver))
    }

    /// Sets the driver like [`driver`](Self::driver), for a driver whose construction may have failed:
    /// [`build`](Self::build) then reports the reason to the other ranks, and fails on all. If this rank returned
    /// without calling `build`, the others would wait for it, and it would count the pools of its group differently
    /// from then on. Whatever keeps a rank from building a pool may be passed here as a failure.
    ///
    /// ```
    /// use symmpool_allocator::{Driver, Group, Pool};
    ///
    /// // Rank 1 has no such device.
    /// let ranks = Group::in_process(2)?.into_iter().map(|group| {
    ///     std::thread::spawn(move || {
    ///         let driver = if group.rank() == 1 { Driver::cuda(1000) } else { Driver::host() };
    ///         Pool::builder(group).driver_or_failure(driver).build().map(drop).unwrap_err()
    ///     })
    /// });
    /// for rank in ranks.collect::<Vec<_>>() {
    ///     let error = rank.join().expect("no panic");
    ///     assert!(error.to_string().contains("rank 1 failed in the handshake"), "{error}");
    /// }
    /// # Ok::<(), symmpool_allocator::Error>(())
    /// ```
    #[must_use]
    pub fn driver_or_failure(mut self, driver: Result<Driver>) -> Self {
        self.driver = Some(driver);
        self
    }

    /// Bytes of address space for each rank; 1 TiB unless set. Must be a multiple of the driver's
    /// granularity (usually 2 MiB).
    #[must_use]
    pub fn stride(mut self, bytes: u64) -> Self {
        self.stride = bytes;
        self
    }

    /// Adds a lane. If none is added, the pool has one symmetric lane named `default`.
    #[must_use]
    pub fn lane(mut self, lane: LaneConfig) -> Self {
        self.lanes.push(lane);
        self
    }

    /// Lets several ranks use one device. Otherwise it is refused, because it is usually a mistake, unless
    /// every rank's environment has `SYMMPOOL_SHARED_DEVICE=1`. Results are correct, but calls take
    /// milliseconds, because ranks that wait for each other take turns on the device.
    #[must_use]
    pub fn allow_shared_device(mut self) -> Self {
        self.allow_shared_device = true;
        self
    }

    /// How long to wait for the other ranks; the group's timeout unless set.
    #[must_use]
    pub fn deadline(mut self, deadline: Deadline) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Connects to the other ranks and makes the pool. Collective.
    ///
    /// Ranks that cannot map each other's memory are on different [hosts](Pool::hosts): the pool has a heap on each, and
    /// its ranks are compared across all of them.
    ///
    /// Errors that concern all ranks are the same on each: different configurations
    /// ([`Error::is_diverged`]), one device used twice ([`Error::is_invalid_argument`]), missing ranks
    /// ([`Error::is_timeout`], [`Error::is_peer_lost`]). A failure of one rank, such as an invalid argument,
    /// is also reported to the others, so that they do not wait for it. Every call counts as one of the
    /// group's pools, whether it succeeds or not, so that later calls match on all ranks.
    pub fn build(self) -> Result<Pool> {
        self.prepare().meet()
    }

    /// Prepares this rank's part of the pool, and counts it as the group's next one; talks to nobody. What is wrong on
    /// this rank alone is known then, before it meets the others. [`build`](Self::build) does both.
    pub fn prepare(self) -> PreparedPool {
        let deadline = self.deadline.unwrap_or_else(|| self.group.deadline());
        let group = self.group.child("pool");
        let ready = PreparedRank::new(self, &group, 0);
        PreparedPool { group, ready, deadline }
    }
}

/// This rank's part of a pool, before it meets the other ranks; or why it has none.
#[must_use = "the other ranks wait for this one"]
pub struct PreparedPool {
    group: Group,
    ready: Result<PreparedRank>,
    deadline: Deadline,
}

impl fmt::Debug for PreparedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedPool").field("failure", &self.failure()).finish_non_exhaustive()
    }
}

impl PreparedPool {
    /// Why this rank cannot build the pool, if it cannot. [`meet`](Self::meet) reports that to the other ranks, which
    /// may take as long as they take to come.
    pub fn failure(&self) -> Option<&Error> {
        self.ready.as_ref().err()
    }

    /// Connects to the other ranks and makes the pool, or tells them why there is none. Collective. Errors are those of
    /// [`PoolBuilder::build`].
    pub fn meet(self) -> Result<Pool> {
        let Self { group, ready, deadline } = self;
        // A rank that failed reports it in the handshake, so that no other waits for it.
        let terms = ready.as_ref().map_err(Clone::clone).map(|ready| HandshakeConfig {
            driver: &ready.driver,
            config_hash: *blake3::hash(ready.text.as_bytes()).as_bytes(),
            config_text: &ready.text,
            options: HandshakeOptions { allow_shared_device: ready.allow_shared_device },
            first_on_device: ready.on_device.first,
        });
        let settle = |hosts: &Hosts| ready.as_ref().map_err(Clone::clone)?.reserve(&group, hosts);
        let (peers, heap) = handshake(&group, terms, settle, deadline)?;
        ready?.into_pool(group, heap, peers, None)
    }
}

impl PreparedRank {
    /// The pool of ranks that have met, or, with `unmet`, that meet when they first commit.
    pub(super) fn into_pool(
        self,
        group: Group,
        heap: Heap,
        peers: Peers,
        unmet: Option<Unmet>,
    ) -> Result<Pool> {
        let Self { lanes, stride, on_device, .. } = self;
        let granularity = heap.driver().granularity();
        let heap = Arc::new(heap);
        let due = Arc::new(CommitDue::new());
        let handles = EarlyHandles::new(heap.driver(), heap.layout().world);
        let committing = Arc::new(AtomicBool::new(false));
        let mut shared = Vec::with_capacity(lanes.len());
        for LanePlacement { config, base, range } in lanes {
            // Ranks have agreed on all arguments, so this fails on all of them or on none.
            let state = LaneState::new(config, range, granularity)?;
            let heap = heap.clone();
            shared.push(SharedLane::new(state, base, range, heap, &due, &handles, &committing));
        }
        let pids = visible_pids(&peers);
        let windows = Windows::new(heap.layout(), Vec::new());
        let (hosts, devices) = (peers.hosts().clone(), peers.devices().clone());
        let on_host = HostRanks::new(&group, &heap, &hosts, &peers)?;
        let topology = match hosts.count() {
            1 => peers.topology().clone(),
            _ => Topology::unknown(group.world()),
        };
        let first_on_device = peers.first_on_device();
        let identities = peers.identities().clone();
        let has_barrier_messages = peers.sockets().is_some() && hosts.count() == 1;
        let inner = Inner {
            group,
            on_host,
            hosts,
            heap,
            room: stride,
            lanes: shared,
            due,
            handles,
            committer: Mutex::new(Committer::new(peers, unmet)),
            committing,
            background: Background::default(),
            windows: Mutex::new(Arc::new(windows)),
            topology,
            identities,
            devices,
            pids,
            first_on_device,
            has_barrier_messages,
            _on_device: on_device,
            maker: ProcessId::here(),
        };
        Ok(Pool(Arc::new(inner), RankScope::Group))
    }
}

/// State that a rank prepares alone before the handshake.
pub(super) struct PreparedRank {
    driver: Driver,
    lanes: Vec<LanePlacement>,
    /// Places of the lanes in each slot.
    stride: u64,
    /// Bytes of each slot: the lanes, and what lies behind them.
    slot: u64,
    /// All settings that change placement (rule D8).
    pub(super) text: String,
    pub(super) allow_shared_device: bool,
    on_device: OnDevice,
}

impl PreparedRank {
    /// With `room` bytes behind the lanes of each slot.
    pub(super) fn new(builder: PoolBuilder, group: &Group, room: u64) -> Result<Self> {
        let PoolBuilder { driver, lanes, stride, .. } = builder;
        let allow_shared_device =
            builder.allow_shared_device || shares_device(env::var_os(SHARED_DEVICE).as_deref())?;
        let driver = driver.unwrap_or_else(Driver::best)?;
        let lanes = lay_out(lanes, stride, driver.granularity())?;
        let text = describe(stride, &lanes);
        let on_device = OnDevice::enter(&driver, group.world());
        let slot = stride.checked_add(room).ok_or_else(|| {
            Error::invalid_argument(format!("a stride of {stride} bytes and {room} more"))
        })?;
        Heap::check_stride(&driver, slot, group.world())?;
        Ok(Self { driver, lanes, stride, slot, text, allow_shared_device, on_device })
    }

    /// The heap of this rank and the others of its host.
    pub(super) fn reserve(&self, group: &Group, hosts: &Hosts) -> Result<Heap> {
        let ranks = hosts.here(group.rank());
        let place = (group.rank(), group.world());
        Heap::reserve(self.driver.clone(), place, ranks, self.slot)
    }
}

/// Reads the value of the environment variable. If it is not set, devices are not shared.
fn shares_device(value: Option<&OsStr>) -> Result<bool> {
    match value.and_then(OsStr::to_str) {
        Some("1") => Ok(true),
        Some("0" | "") => Ok(false),
        None if value.is_none() => Ok(false),
        _ => Err(Error::invalid_argument(format!(
            "environment variable {SHARED_DEVICE}={}: expected 1 (ranks may use one device) or 0",
            value.unwrap_or_default().display()
        ))),
    }
}

/// A lane, and its range in every slot.
struct LanePlacement {
    config: LaneConfig,
    base: u64,
    range: u64,
}

/// Gives every lane the range that was requested, or else an equal share of what is left.
fn lay_out(
    mut lanes: Vec<LaneConfig>,
    stride: u64,
    granularity: u64,
) -> Result<Vec<LanePlacement>> {
    if stride < granularity {
        return Err(Error::invalid_argument(format!(
            "a stride of {stride} bytes; it must be a multiple of {granularity}"
        )));
    }
    if lanes.is_empty() {
        lanes.push(LaneConfig::symmetric("default"));
    }
    let control = (stride / 8).min(CONTROL_RANGE);
    // A communicator's memory is stated, so the lane takes nothing in advance for the next one.
    let control = LaneConfig::symmetric(CONTROL_LANE).range(control).history(1024).grows_exactly();
    lanes.push(control);
    for (at, lane) in lanes.iter().enumerate() {
        lane.validate()?;
        if lanes[..at].iter().any(|other| other.name == lane.name) {
            return Err(Error::invalid_argument(format!("two lanes are called {:?}", lane.name)));
        }
    }
    let round = |bytes: u64| bytes / granularity * granularity;
    let requested = lanes.iter().filter_map(|lane| lane.range).try_fold(0_u64, |sum, range| {
        sum.checked_add(range.checked_next_multiple_of(granularity)?)
    });
    let left = requested.and_then(|requested| stride.checked_sub(requested)).ok_or_else(|| {
        Error::invalid_argument(format!(
            "the lanes' ranges do not fit in a stride of {stride} bytes; raise the stride"
        ))
    })?;
    let sharing = lanes.iter().filter(|lane| lane.range.is_none()).count().max(1) as u64;
    let share = round(left / sharing).min(MAX_LANE_BYTES);
    if share == 0 && lanes.iter().any(|lane| lane.range.is_none()) {
        return Err(Error::invalid_argument(format!(
            "a stride of {stride} bytes leaves no range for some lanes; raise it (the driver's \
             granularity is {granularity} bytes)"
        )));
    }
    let mut base = 0;
    Ok(lanes
        .into_iter()
        .map(|config| {
            let range = config.range.map_or(share, |range| range.next_multiple_of(granularity));
            let placement = LanePlacement { config, base, range };
            base += range;
            placement
        })
        .collect())
}

/// All settings that change placement, one on each line (rule D8).
fn describe(stride: u64, lanes: &[LanePlacement]) -> String {
    let mut text = format!("stride {stride}, units of {UNIT}, growth scheme 2\n");
    for LanePlacement { config, base, range } in lanes {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}, at {base}", config.describe(*range));
    }
    text
}

fn visible_pids(peers: &Peers) -> Vec<Option<u32>> {
    let own = peers.identities().get(peers.rank());
    let visible = |host: &HostIdentity| {
        (own.same_host(host) && own.pid_namespace == host.pid_namespace).then_some(host.pid)
    };
    (0..peers.world()).map(|rank| visible(peers.identities().get(rank))).collect()
}

impl WindowPolicy {
    /// Reads a policy's name: `contiguous` or `per-segment`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "contiguous" => Ok(Self::Contiguous),
            "per-segment" => Ok(Self::PerSegment),
            other => Err(Error::invalid_argument(format!(
                "window policy {other:?}; expected contiguous or per-segment"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn ranges_follow_each_other_and_share_what_is_left() {
        let lanes = vec![
            LaneConfig::symmetric("a").range(3 * MIB),
            LaneConfig::local("b"),
            LaneConfig::symmetric("c"),
        ];
        let placed = lay_out(lanes, 64 * MIB, 2 * MIB).unwrap();
        let ranges: Vec<_> =
            placed.iter().map(|lane| (lane.base / MIB, lane.range / MIB)).collect();
        assert_eq!(ranges, [(0, 4), (4, 26), (30, 26), (56, 8)]);
        assert_eq!(placed[3].config.name, CONTROL_LANE);
    }

    #[test]
    fn the_environment_may_let_ranks_share_a_device() {
        let shares = |value: &str| shares_device(Some(OsStr::new(value)));
        assert!(shares("1").unwrap());
        for value in [None, Some(""), Some("0")] {
            assert!(!shares_device(value.map(OsStr::new)).unwrap(), "{value:?}");
        }
        for value in ["yes", "2", " 1"] {
            let error = shares(value).unwrap_err();
            assert!(error.is_invalid_argument());
            assert!(error.to_string().contains(&format!("{SHARED_DEVICE}={value}")), "{error}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let twice = vec![LaneConfig::local("a"), LaneConfig::local("a")];
        let huge = vec![LaneConfig::local("a").range(1 << 50)];
        let over = vec![LaneConfig::local("a").range(60 * MIB), LaneConfig::local("b")];
        let unnamed = vec![LaneConfig::local("")];
        for lanes in [twice, huge, over, unnamed] {
            let error = lay_out(lanes, 64 * MIB, 2 * MIB).err().expect("refused");
            assert!(error.is_invalid_argument(), "{error}");
        }
        assert!(lay_out(vec![], 2 * MIB, 2 * MIB).is_err());
    }
}
