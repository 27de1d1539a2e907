//! The options of a replay.

use std::time::Duration;

use crate::driver::{Driver, HostDriver, HostOptions, Reservation};
use crate::lane::{LaneConfig, WindowPolicy};
use crate::testing::SplitMix64;
use crate::{Error, Result};

/// Name of the lane that a trace is replayed in.
pub(super) const LANE: &str = "replay";

/// The driver of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayDriver {
    /// Simulated: addresses without memory.
    Sim,
    /// Memory files of this machine, mapped by all ranks. A replay never accesses their pages, so none are
    /// allocated: it costs addresses and system calls, but no memory.
    Host,
}

impl ReplayDriver {
    /// Reads a driver's name: `sim` or `host`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "sim" => Ok(Self::Sim),
            "host" => Ok(Self::Host),
            other => Err(Error::invalid_argument(format!(
                "driver {other:?}; a trace can be replayed with sim or host"
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
    /// Later, but before the next commit, at times and in an order that differ from rank to rank. Placement
    /// is that of [`Unordered::AsTraced`].
    Shuffled {
        /// Determines the orders.
        seed: u64,
    },
    /// Likewise, but a rank may also keep a block past commits, as a garbage collector does. The block
    /// returns when the last rank has freed it, so placement depends on the seed, and is still the same on
    /// every rank.
    Delayed {
        /// Determines the orders.
        seed: u64,
    },
}

/// How to replay a trace.
#[derive(Clone, Debug)]
pub struct ReplayOptions {
    /// Number of ranks, at least 1. Each is a thread with its own pool.
    pub ranks: u32,
    /// The driver of every rank's memory.
    pub driver: ReplayDriver,
    /// How blocks relate to segments.
    pub policy: WindowPolicy,
    /// Limit on the bytes of physical memory that a rank may use; unlimited if `None`.
    pub limit: Option<u64>,
    /// Gives every rank different addresses, which follow from this seed and the rank. Placement must not
    /// depend on them (rule D1). Without a seed all simulated ranks have the same addresses.
    pub address_seed: Option<u64>,
    /// `(rank, event)`: this rank leaves out the operation with this number, counted from 0 over the lines of
    /// the trace, and all later operations on a block that it so never made.
    pub diverge: Option<(u32, u64)>,
    /// When ranks do the trace's unordered frees.
    pub unordered: Unordered,
    /// How many events the lane keeps in full, so that a divergence is located exactly.
    pub history: usize,
    /// How long each wait for other ranks may take.
    pub timeout: Duration,
}

impl ReplayOptions {
    /// `ranks` simulated ranks and a contiguous lane without limit, which replay the trace as it is.
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

    /// The driver of one rank, and a reservation that moves its heap to other addresses while it exists.
    pub(super) fn driver_of(&self, rank: u32) -> Result<(Driver, Option<Reservation>)> {
        let random =
            self.address_seed.map(|seed| SplitMix64::for_participant(seed, u64::from(rank)));
        match (self.driver, random) {
            (ReplayDriver::Sim, None) => Ok((Driver::sim(0), None)),
            (ReplayDriver::Sim, Some(mut random)) => Ok((Driver::sim(random.next()), None)),
            (ReplayDriver::Host, random) => {
                let options =
                    HostOptions { check_available: false, huge_pages: false, populate: false };
                let driver = Driver::new(HostDriver::with_options(options)?);
                // The kernel chooses addresses, and avoids the reserved range.
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
