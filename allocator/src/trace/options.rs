//! What a replay is made with.

use std::time::Duration;

use super::random::Random;
use crate::driver::{Driver, HostDriver, HostOptions, Reservation};
use crate::lane::{LaneConfig, WindowPolicy};
use crate::{Error, Result};

/// Name of the lane that a trace is replayed in.
pub(super) const LANE: &str = "replay";

/// Where a replay's memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayDriver {
    /// Addresses without memory.
    Sim,
    /// Memory files of this machine, mapped by all ranks. A replay never touches their pages, so
    /// none are committed: it costs addresses and system calls, not memory.
    Host,
}

impl ReplayDriver {
    /// Reads a driver's name: `sim` or `host`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "sim" => Ok(Self::Sim),
            "host" => Ok(Self::Host),
            other => Err(Error::invalid_argument(format!(
                "driver {other:?}; a trace can be replayed with sim and host"
            ))),
        }
    }
}

/// When each rank frees the blocks that the trace frees without order (rule D5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unordered {
    /// Where the trace says so, on every rank alike.
    #[default]
    AsTraced,
    /// Later, before the next commit, at times and in an order that differ from rank to rank.
    /// Nothing else changes: placement is that of [`Unordered::AsTraced`].
    Shuffled {
        /// Another seed, other orders.
        seed: u64,
    },
    /// Likewise, but a rank may also hold a block past commits, as a garbage collector does. It
    /// comes back when the last rank has freed it, so placement depends on the seed, and still is
    /// the same on every rank.
    Delayed {
        /// Another seed, other orders.
        seed: u64,
    },
}

/// How to replay a trace.
#[derive(Clone, Debug)]
pub struct ReplayOptions {
    /// Ranks, each a thread with a pool of its own. At least 1.
    pub ranks: u32,
    /// Where memory comes from.
    pub driver: ReplayDriver,
    /// How blocks relate to segments.
    pub policy: WindowPolicy,
    /// Most bytes of physical memory a rank may use; unlimited if `None`.
    pub limit: Option<u64>,
    /// Gives every rank other addresses, which follow from this seed and the rank. Placement must
    /// not notice (rule D1). Without it simulated ranks all have the same addresses.
    pub address_seed: Option<u64>,
    /// `(rank, event)`: this rank leaves out the operation with this number, counted from 0 over
    /// the lines of the trace, and whatever later concerns a block that it never made.
    pub diverge: Option<(u32, u64)>,
    /// When unordered frees happen.
    pub unordered: Unordered,
    /// Events that the lane keeps in full, so that a divergence is told exactly.
    pub history: usize,
    /// How long a commit waits for other ranks. Bounds the whole replay's waits.
    pub timeout: Duration,
}

impl ReplayOptions {
    /// `ranks` simulated ranks, a contiguous lane without limit, and the trace as it is.
    pub fn new(ranks: u32) -> Self {
        Self {
            ranks,
            driver: ReplayDriver::Sim,
            policy: WindowPolicy::Contiguous,
            limit: None,
            address_seed: None,
            diverge: None,
            unordered: Unordered::AsTraced,
            history: 16 << 10,
            timeout: Duration::from_secs(120),
        }
    }

    pub(super) fn lane(&self) -> LaneConfig {
        let lane = LaneConfig::symmetric(LANE).window_policy(self.policy).history(self.history);
        match self.limit {
            Some(limit) => lane.limit(limit),
            None => lane,
        }
    }

    /// The driver of one rank, and a range that moves its heap elsewhere while it is reserved.
    pub(super) fn driver_of(&self, rank: u32) -> Result<(Driver, Option<Reservation>)> {
        let random = self.address_seed.map(|seed| Random::new(seed, u64::from(rank)));
        match (self.driver, random) {
            (ReplayDriver::Sim, None) => Ok((Driver::sim(0), None)),
            (ReplayDriver::Sim, Some(mut random)) => Ok((Driver::sim(random.next()), None)),
            (ReplayDriver::Host, random) => {
                let options =
                    HostOptions { check_available: false, huge_pages: false, populate: false };
                let driver = Driver::new(HostDriver::with_options(options)?);
                // The kernel chooses addresses; it goes around what is taken.
                let taken = random.map(|mut random| {
                    let unit = driver.granularity();
                    driver.reserve((1 + random.below(1 << 16)) * unit, unit)
                });
                Ok((driver, taken.transpose()?))
            }
        }
    }

    /// Checks the options against each other and against a trace of `events` operations.
    pub(super) fn validate(&self, events: u64) -> Result<()> {
        if self.ranks == 0 {
            return Err(Error::invalid_argument("a replay needs at least one rank"));
        }
        if let Some((rank, event)) = self.diverge
            && (rank >= self.ranks || event >= events)
        {
            return Err(Error::invalid_argument(format!(
                "rank {rank} cannot leave out event {event}: the replay has {} ranks, the trace \
                 {events} events, and both count from 0",
                self.ranks
            )));
        }
        Ok(())
    }
}
