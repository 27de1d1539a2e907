//! One rank: pools that work, and pools on which one rank diverges.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};
use symmpool_allocator::driver::{Driver, Physical, Reservation};
use symmpool_allocator::lane::{LaneConfig, WindowPolicy};
use symmpool_allocator::store::tcp::TcpOptions;
use symmpool_allocator::store::{Store, TcpStore};
use symmpool_allocator::{Block, Deadline, Error, Group, Pool, PoolBuilder};

use super::access::ForeignAccess;
use super::blocks::{self, PseudoRandom};
use super::report_key;
use crate::{CheckOptions, text};

/// How often a commit is timed.
const TIMES: usize = 15;

/// More bytes than any device has.
const TOO_MUCH: usize = 1 << 39;

/// Runs rank `rank` with the store at `address`, and stores its report there.
pub(crate) fn run(
    rank: u32,
    address: &str,
    options: &CheckOptions,
    deadline: Deadline,
) -> ExitCode {
    let with = TcpOptions::default();
    let store: Arc<dyn Store> = match TcpStore::connect_as(address, with, rank, deadline) {
        Ok(store) => Arc::new(store),
        Err(error) => {
            eprintln!("cuda_check: rank {rank}: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = Rank::start(rank, options, &store, deadline).and_then(Rank::exchange);
    let (report, code) = match outcome {
        Ok(report) => (report, ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("cuda_check: rank {rank}: {error}");
            (json!({ "rank": rank, "error": error }), ExitCode::FAILURE)
        }
    };
    // After a timeout, this is within the time that the parent grants for reports.
    match store.set(&report_key(rank), report.to_string().as_bytes(), Deadline::seconds(2)) {
        Ok(()) => code,
        Err(error) => {
            eprintln!("cuda_check: rank {rank}: {error}");
            ExitCode::FAILURE
        }
    }
}

struct Rank {
    group: Group,
    driver: Driver,
    access: ForeignAccess,
    deadline: Deadline,
    /// Memory and addresses that differ from rank to rank, so that ranks have different addresses.
    _holes: Vec<(Reservation, Physical)>,
}

impl Rank {
    fn start(
        rank: u32,
        options: &CheckOptions,
        store: &Arc<dyn Store>,
        deadline: Deadline,
    ) -> Result<Self, String> {
        let (driver, access) = ForeignAccess::open(options.driver, rank).map_err(text)?;
        let group = Group::new(rank, options.ranks, store.clone()).map_err(text)?;
        let mut numbers = PseudoRandom(u64::from(rank) + 1);
        let mut holes = Vec::new();
        for _ in 0..8 + numbers.below(24) {
            let unit = driver.granularity();
            let bytes = (1 + numbers.below(12) as u64) * unit;
            let range = driver.reserve(2 * bytes, unit).map_err(text)?;
            let physical = driver.create(bytes).map_err(text)?;
            driver.map(&range, numbers.below(2) as u64 * bytes, &physical).map_err(text)?;
            if numbers.below(3) > 0 {
                holes.push((range, physical));
            } else {
                // Released but still mapped: only the handle is gone.
                driver.release(physical).map_err(text)?;
            }
        }
        Ok(Self { group, driver, access, deadline, _holes: holes })
    }

    fn exchange(self) -> Result<Value, String> {
        let pool = self.pool(Vec::new())?;
        let layout = pool.layout();
        let (rounds, bytes) = self.work(&pool)?;
        let times = self.times(&pool)?;
        let stats = format!("{:?}", pool.stats().map_err(text)?);
        drop(pool);
        let (diverged, out_of_memory) = match self.group.world() {
            1 => (None, None),
            _ => (Some(self.diverge()?), Some(self.run_out()?)),
        };
        Ok(json!({
            "rank": self.group.rank(),
            "device": self.driver.device(),
            "transport": self.driver.transport(),
            "heap_base": format!("{:#x}", layout.base),
            "rounds": rounds,
            "bytes_checked": bytes,
            "times_us": times,
            "diverged": diverged,
            "out_of_memory": out_of_memory,
            "stats": stats,
        }))
    }

    fn pool(&self, lanes: Vec<LaneConfig>) -> Result<Pool, String> {
        // If every rank has its own device, permission to share one changes nothing.
        let builder = Pool::builder(self.group.clone())
            .driver(self.driver.clone())
            .deadline(self.deadline)
            .allow_shared_device();
        lanes.into_iter().fold(builder, PoolBuilder::lane).build().map_err(text)
    }

    fn commit(&self, pool: &Pool) -> Result<f64, String> {
        let start = Instant::now();
        pool.commit_by(self.deadline).map_err(text)?;
        Ok(start.elapsed().as_secs_f64() * 1e6)
    }

    /// Several rounds of allocating, committing, writing through every window, and checking.
    fn work(&self, pool: &Pool) -> Result<(u64, u64), String> {
        const ROUNDS: u64 = 4;
        let mut numbers = PseudoRandom(2026);
        let mut live = Vec::new();
        let mut bytes = 0;
        for round in 0..ROUNDS {
            blocks::churn(pool, &mut live, &mut numbers, 60)?;
            self.commit(pool)?;
            if let Some(outside) = live.iter().find(|b| !pool.is_window(b.address(), b.bytes())) {
                return Err(format!("{outside:?} is in no window after a commit"));
            }
            blocks::write(pool, &self.access, &live, round)?;
            // At this commit all ranks have written; at the next all have read.
            self.commit(pool)?;
            blocks::check(pool, &self.access, &live, round)?;
            self.commit(pool)?;
            bytes += live.iter().map(Block::bytes).sum::<u64>();
        }
        live.into_iter().try_for_each(Block::free).map_err(text)?;
        pool.default_lane().trim().map_err(text)?;
        self.commit(pool)?;
        Ok((ROUNDS, bytes))
    }

    /// Times of commits with one new block of 64 MiB, with 64 blocks of 8 MiB, and without new memory.
    fn times(&self, pool: &Pool) -> Result<Value, String> {
        let lane = pool.default_lane();
        let give_back = |blocks| -> Result<(), String> {
            drop::<Vec<_>>(blocks);
            lane.trim().map_err(text)?;
            self.commit(pool).map(|_| ())
        };
        let (mut large, mut many, mut empty) = (Vec::new(), Vec::new(), Vec::new());
        for time in 0..TIMES {
            let block = lane.alloc::<u8>(64 << 20).map_err(text)?;
            large.push(self.together(pool)?);
            give_back(vec![block])?;
            empty.push(self.together(pool)?);
            if time < 3 {
                let count = pool.windows().list().len();
                let blocks = (0..64).map(|_| lane.alloc::<u8>(8 << 20)).collect::<Result<_, _>>();
                many.push(self.together(pool)?);
                let made = pool.windows().list().len() - count;
                // A segment of a small lane holds several such blocks.
                if !(1..=20).contains(&made) {
                    return Err(format!("{made} new windows, expected 1 to 20"));
                }
                give_back(blocks.map_err(text)?)?;
            }
        }
        Ok(json!({ "commit_64_mib": large, "commit_64_blocks": many, "empty_commit": empty }))
    }

    /// Times a commit that all ranks begin at the same time.
    fn together(&self, pool: &Pool) -> Result<f64, String> {
        self.group.all_gather("begin", &[], self.deadline).map_err(text)?;
        self.commit(pool)
    }

    /// The last rank allocates another size. Returns the error, which must be the same on all ranks.
    fn diverge(&self) -> Result<String, String> {
        let pool = self.pool(Vec::new())?;
        let _same = pool.alloc::<u8>(3 << 20).map_err(text)?;
        self.commit(&pool)?;
        let odd = self.is_last();
        let _other = pool.alloc::<u8>(if odd { 2 << 20 } else { 1 << 20 }).map_err(text)?;
        self.refusal(&pool, Error::is_diverged)
    }

    /// The last rank runs out of memory. Returns the error, which must be the same on all ranks.
    fn run_out(&self) -> Result<String, String> {
        // One segment for each block, so that the device is asked for all of it in one call.
        let lane = LaneConfig::symmetric("large").window_policy(WindowPolicy::PerSegment);
        let pool = self.pool(vec![lane])?;
        let _same = pool.alloc::<u8>(3 << 20).map_err(text)?;
        // The other ranks get their memory, and so are one event ahead of the last rank.
        let wanted = if self.is_last() { TOO_MUCH } else { 48 << 20 };
        let _held = match pool.alloc::<u8>(wanted) {
            Ok(block) if !self.is_last() => Some(block),
            Err(error) if self.is_last() && error.is_out_of_memory() => None,
            other => return Err(format!("{wanted} bytes requested: {other:?}")),
        };
        self.refusal(&pool, Error::is_out_of_memory)
    }

    fn is_last(&self) -> bool {
        self.group.rank() + 1 == self.group.world()
    }

    /// The error of a commit, which must be of the right kind, without the name of this rank.
    fn refusal(&self, pool: &Pool, kind: fn(&Error) -> bool) -> Result<String, String> {
        match pool.commit_by(self.deadline) {
            Ok(report) => {
                Err(format!("committed ({report:?}), but expected an error on all ranks"))
            }
            Err(error) if kind(&error) => {
                let error = error.to_string();
                let own = format!("symmpool: rank {}, ", self.group.rank());
                Ok(error.strip_prefix(&own).unwrap_or(&error).to_owned())
            }
            Err(error) => Err(format!("an error of another kind: {error}")),
        }
    }
}
