//! What a pool is made of, and the rendezvous that makes it.

use std::env;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use super::commit_due::Due;
use super::early_handles::Handles;
use super::lane::SharedLane;
use super::{CONTROL_LANE, Committer, Inner, Pool};
use crate::driver::Driver;
use crate::fork::Maker;
use crate::heap::Heap;
use crate::lane::{LaneConfig, LaneState, MAX_LANE_BYTES, UNIT, WindowPolicy};
use crate::rendezvous::handshake::{HandshakeOptions, Terms, handshake};
use crate::window::Windows;
use crate::{Deadline, Error, Group, Result};

/// Bytes of address space from one rank's slot to the next, unless set. Several times the memory
/// of any device: reserving addresses is nearly free, running out of them is not.
const DEFAULT_STRIDE: u64 = 1 << 40;

/// Address space for communicators' control memory.
const CONTROL_RANGE: u64 = 16 << 30;

/// Lets the ranks of every pool use one device, for programs that are tried where there are fewer.
const SHARED_DEVICE: &str = "SYMMPOOL_SHARED_DEVICE";

/// The description of a pool. Everything here must be the same on every rank, and is compared
/// when the pool is built (rule D8), except the driver's device and the deadline.
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

    /// Where memory comes from; [`Driver::best`] unless set.
    #[must_use]
    pub fn driver(self, driver: Driver) -> Self {
        self.driver_or_failure(Ok(driver))
    }

    /// [`driver`](Self::driver) where making one may have failed: [`build`](Self::build) then tells
    /// the other ranks why, and fails on all. A rank that returned without building would be waited
    /// for, and count the pools of its group differently from then on. So whatever keeps a rank from
    /// building may be passed here as a failure.
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

    /// Bytes of address space for each rank; 1 TiB unless set. A multiple of the driver's
    /// granularity (2 MiB as a rule).
    #[must_use]
    pub fn stride(mut self, bytes: u64) -> Self {
        self.stride = bytes;
        self
    }

    /// Adds a lane. Without any, the pool has one symmetric lane called `default`.
    #[must_use]
    pub fn lane(mut self, lane: LaneConfig) -> Self {
        self.lanes.push(lane);
        self
    }

    /// Lets several ranks use one device. Refused otherwise, because it is a mistake as a rule, unless
    /// every rank's environment says `SYMMPOOL_SHARED_DEVICE=1`. Results are right, and calls take
    /// milliseconds: ranks that wait for each other there do so by turns.
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

    /// Meets the other ranks and makes the pool. Collective.
    ///
    /// Errors that concern all ranks are the same on each: different configurations
    /// ([`Error::is_diverged`]), one device used twice ([`Error::is_invalid_argument`]), ranks on
    /// hosts between which memory cannot travel ([`Error::is_unsupported`]), missing ranks
    /// ([`Error::is_timeout`], [`Error::is_peer_lost`]). So is what one rank cannot do or was told
    /// to do in vain: it stays to tell the others, and they do not wait for it. Every call counts as
    /// one of the group's pools, made or not, so later ones meet.
    pub fn build(self) -> Result<Pool> {
        let deadline = self.deadline.unwrap_or_else(|| self.group.deadline());
        let group = self.group.child("pool");
        // A rank that fails here says so in the handshake, so that none waits for it.
        let ready = Ready::new(self, &group);
        let terms = ready.as_ref().map_err(Clone::clone).map(|ready| Terms {
            driver: ready.heap.driver(),
            config_hash: *blake3::hash(ready.text.as_bytes()).as_bytes(),
            config_text: &ready.text,
            options: HandshakeOptions { allow_shared_device: ready.allow_shared_device },
        });
        let peers = handshake(&group, terms, deadline)?;
        let Ready { heap, lanes, .. } = ready?;
        let granularity = heap.driver().granularity();
        let heap = Arc::new(heap);
        let due = Arc::new(Due::new());
        let handles = Handles::new(heap.driver(), group.world());
        let committing = Arc::new(AtomicBool::new(false));
        let mut shared = Vec::with_capacity(lanes.len());
        for Placement { config, base, range } in lanes {
            // Ranks have agreed on everything in this, so it fails on all of them or on none.
            let state = LaneState::new(config, range, granularity)?;
            let heap = heap.clone();
            shared.push(SharedLane::new(state, base, range, heap, &due, &handles, &committing));
        }
        let pids = visible_pids(&peers);
        let windows = Windows::new(heap.layout(), Vec::new());
        let topology = peers.topology().clone();
        let devices = peers.devices().clone();
        Ok(Pool(Arc::new(Inner {
            group,
            heap,
            lanes: shared,
            due,
            handles,
            committer: Mutex::new(Committer {
                peers,
                commits: 0,
                broken: None,
                unfinished: None,
                nccl: Vec::new(),
            }),
            committing,
            windows: Mutex::new(Arc::new(windows)),
            topology,
            devices,
            pids,
            maker: Maker::here(),
        })))
    }
}

/// What a rank can do alone before it meets the others.
struct Ready {
    heap: Heap,
    lanes: Vec<Placement>,
    /// Everything that changes placement (rule D8).
    text: String,
    allow_shared_device: bool,
}

impl Ready {
    fn new(builder: PoolBuilder, group: &Group) -> Result<Self> {
        let PoolBuilder { driver, lanes, stride, .. } = builder;
        let allow_shared_device =
            builder.allow_shared_device || shares_device(env::var_os(SHARED_DEVICE).as_deref())?;
        let driver = driver.unwrap_or_else(Driver::best)?;
        let lanes = lay_out(lanes, stride, driver.granularity())?;
        let text = describe(stride, &lanes);
        let heap = Heap::reserve(driver, group.rank(), group.world(), stride)?;
        Ok(Self { heap, lanes, text, allow_shared_device })
    }
}

/// What the environment's variable says. Not set, it says no.
fn shares_device(said: Option<&OsStr>) -> Result<bool> {
    match said.and_then(OsStr::to_str) {
        Some("1") => Ok(true),
        Some("0" | "") => Ok(false),
        None if said.is_none() => Ok(false),
        _ => Err(Error::invalid_argument(format!(
            "environment variable {SHARED_DEVICE}={}: expected 1, where ranks may use one device, or 0",
            said.unwrap_or_default().display()
        ))),
    }
}

/// A lane and its part of every slot.
struct Placement {
    config: LaneConfig,
    base: u64,
    range: u64,
}

/// Gives every lane its range: as asked, else an equal share of what is left.
fn lay_out(mut lanes: Vec<LaneConfig>, stride: u64, granularity: u64) -> Result<Vec<Placement>> {
    if lanes.is_empty() {
        lanes.push(LaneConfig::symmetric("default"));
    }
    let control = (stride / 8).min(CONTROL_RANGE);
    lanes.push(LaneConfig::symmetric(CONTROL_LANE).range(control).history(1024));
    for (at, lane) in lanes.iter().enumerate() {
        lane.validate()?;
        if lanes[..at].iter().any(|other| other.name == lane.name) {
            return Err(Error::invalid_argument(format!("two lanes are called {:?}", lane.name)));
        }
    }
    let round = |bytes: u64| bytes / granularity * granularity;
    let asked = lanes.iter().filter_map(|lane| lane.range).try_fold(0_u64, |sum, range| {
        sum.checked_add(range.checked_next_multiple_of(granularity)?)
    });
    let left = asked.and_then(|asked| stride.checked_sub(asked)).ok_or_else(|| {
        Error::invalid_argument(format!(
            "the lanes' ranges do not fit a stride of {stride} bytes; raise the stride"
        ))
    })?;
    let sharing = lanes.iter().filter(|lane| lane.range.is_none()).count().max(1) as u64;
    let share = round(left / sharing).min(MAX_LANE_BYTES);
    if share == 0 && lanes.iter().any(|lane| lane.range.is_none()) {
        return Err(Error::invalid_argument(format!(
            "a stride of {stride} bytes leaves no room for all lanes; raise it (the driver's \
             granularity is {granularity})"
        )));
    }
    let mut base = 0;
    Ok(lanes
        .into_iter()
        .map(|config| {
            let range = config.range.map_or(share, |range| range.next_multiple_of(granularity));
            let placement = Placement { config, base, range };
            base += range;
            placement
        })
        .collect())
}

/// Everything that changes placement, one setting a line (rule D8).
fn describe(stride: u64, lanes: &[Placement]) -> String {
    let mut text = format!("stride {stride}, units of {UNIT}, growth scheme 2\n");
    for Placement { config, base, range } in lanes {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}, at {base}", config.describe(*range));
    }
    text
}

fn visible_pids(peers: &crate::rendezvous::peers::Peers) -> Vec<Option<u32>> {
    let own = peers.hosts().get(peers.rank());
    let visible = |host: &crate::rendezvous::identity::HostIdentity| {
        (own.same_host(host) && own.pid_namespace == host.pid_namespace).then_some(host.pid)
    };
    (0..peers.world()).map(|rank| visible(peers.hosts().get(rank))).collect()
}

impl WindowPolicy {
    /// Reads a policy's name: `contiguous` or `per-segment`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "contiguous" => Ok(Self::Contiguous),
            "per-segment" => Ok(Self::PerSegment),
            other => Err(Error::invalid_argument(format!(
                "window policy {other:?}; known are contiguous and per-segment"
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
        let said = |value: &str| shares_device(Some(OsStr::new(value)));
        assert!(said("1").unwrap());
        for value in [None, Some(""), Some("0")] {
            assert!(!shares_device(value.map(OsStr::new)).unwrap(), "{value:?}");
        }
        for value in ["yes", "2", " 1"] {
            let error = said(value).unwrap_err();
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
