//! One rank of a replay.

use std::time::{Duration, Instant};

use super::options::LANE;
use super::{ReplayOptions, Trace, TraceOp, Unordered};
use crate::driver::Stream;
use crate::lane::{Digest, UNIT};
use crate::pool::{Block, Lane};
use crate::testing::SplitMix64;
use crate::{Error, Group, Pool, Result};

/// Number of events after which rank 0 reports its progress again.
const REPORT_EVERY: u64 = 4096;

/// The result of one rank.
#[derive(Debug, Default)]
pub(super) struct ReplayReport {
    /// The error, if any, and the number of the operation that returned it. The commit at the end has the
    /// number after the last operation's.
    pub(super) error: Option<(u64, Error)>,
    /// Operations done.
    pub(super) events: u64,
    /// The lane's counter and digest at the end.
    pub(super) state: (u64, Digest),
    /// Time for all operations, without the commit at the end.
    pub(super) elapsed: Duration,
    pub(super) peak_reserved: u64,
    pub(super) peak_segments: u64,
    pub(super) windows: u64,
}

/// Replays `trace` as this rank of `group`. All other ranks must do the same at the same time.
pub(super) fn run(
    group: Group,
    trace: &Trace,
    options: &ReplayOptions,
    progress: &(dyn Fn(u64) + Sync),
) -> ReplayReport {
    let rank = group.rank();
    let build = || {
        let (driver, taken) = options.driver_of(rank)?;
        let pool = Pool::builder(group).driver(driver.clone()).lane(options.lane()).build()?;
        Ok((pool, driver, taken))
    };
    let (pool, driver, taken) = match build() {
        Ok(built) => built,
        Err(error) => return ReplayReport { error: Some((0, error)), ..ReplayReport::default() },
    };
    let lane = pool.default_lane();
    debug_assert_eq!(lane.name(), LANE);
    let mut player = Player::new(&pool, lane, trace, options);
    let started = Instant::now();
    let played = player.play(progress);
    let elapsed = started.elapsed();
    let ended = played.and_then(|()| player.finish());
    let mut report = ReplayReport { events: player.event, elapsed, ..ReplayReport::default() };
    let described = player.describe(&pool, &mut report);
    report.error = ended.and(described).err().map(|error| (player.event, error));
    if let Some(taken) = taken
        && let Err(error) = driver.unreserve(taken)
    {
        tracing::warn!(%error, rank, "the reservation that moved the heap could not be given back");
    }
    report
}

struct Player<'a> {
    pool: &'a Pool,
    lane: Lane,
    ops: &'a [TraceOp],
    /// The operation that this rank leaves out.
    skip: Option<u64>,
    /// Stream handles by the ordinals of the trace. They differ from rank to rank and are in no order, like
    /// real ones (rule D3).
    streams: Vec<Stream>,
    /// Blocks by slot; `None` if there is no block, or if this rank has not made it.
    blocks: Vec<Option<Block<u8>>>,
    unordered: Unordered,
    /// Blocks that the trace has freed without order, and that this rank will free later.
    pending: Vec<Block<u8>>,
    random: SplitMix64,
    /// Number of the current operation.
    event: u64,
    peak_segments: u64,
}

impl<'a> Player<'a> {
    fn new(pool: &'a Pool, lane: Lane, trace: &'a Trace, options: &ReplayOptions) -> Self {
        let rank = u64::from(pool.rank());
        let mut handles = SplitMix64::for_participant(options.address_seed.unwrap_or(0), rank);
        let streams = (0..64).map(|ordinal| Stream::numbered(handles.next() & !63 | ordinal));
        let seed = match options.unordered {
            Unordered::AsTraced => 0,
            Unordered::Shuffled { seed } | Unordered::Delayed { seed } => seed,
        };
        Self {
            pool,
            lane,
            ops: trace.ops(),
            skip: options.diverge.and_then(|(who, event)| (who == pool.rank()).then_some(event)),
            streams: streams.collect(),
            blocks: (0..trace.slots()).map(|_| None).collect(),
            unordered: options.unordered,
            pending: Vec::new(),
            random: SplitMix64::for_participant(seed, rank),
            event: 0,
            peak_segments: 0,
        }
    }

    fn play(&mut self, progress: &(dyn Fn(u64) + Sync)) -> Result<()> {
        let reports = self.pool.rank() == 0;
        for op in self.ops {
            if self.skip != Some(self.event) {
                self.step(*op)?;
            }
            self.event += 1;
            if reports && self.event.is_multiple_of(REPORT_EVERY) {
                progress(self.event);
            }
        }
        Ok(())
    }

    /// Frees all pending blocks, and commits once more to compare all ranks.
    fn finish(&mut self) -> Result<()> {
        self.free_pending(1, 1)?;
        self.pool.commit().map(drop)
    }

    fn step(&mut self, op: TraceOp) -> Result<()> {
        match op {
            TraceOp::Alloc { slot, bytes, stream } => {
                let block = match self.alloc(bytes, stream) {
                    Ok(block) => block,
                    Err(error) => return Err(self.report_failure(error)),
                };
                if let Some(old) = self.blocks[slot as usize].replace(block) {
                    // This rank has left out its free, so dropping it must not free it either.
                    old.into_address();
                }
            }
            TraceOp::Free { slot } => {
                if let Some(block) = self.blocks[slot as usize].take() {
                    block.free()?;
                }
            }
            TraceOp::FreeUnordered { slot } => {
                if let Some(block) = self.blocks[slot as usize].take() {
                    match self.unordered {
                        Unordered::AsTraced => block.free_unordered()?,
                        Unordered::Shuffled { .. } | Unordered::Delayed { .. } => {
                            self.pending.push(block);
                        }
                    }
                }
            }
            TraceOp::Record { slot, stream } => {
                if let Some(block) = &self.blocks[slot as usize] {
                    block.record_stream(self.streams[usize::from(stream)])?;
                }
            }
            TraceOp::Commit => {
                match self.unordered {
                    Unordered::AsTraced => {}
                    Unordered::Shuffled { .. } => self.free_pending(1, 1)?,
                    Unordered::Delayed { .. } => self.free_pending(3, 4)?,
                }
                self.pool.commit()?;
            }
            TraceOp::Trim => {
                self.note_segments()?;
                self.lane.trim()?;
            }
        }
        if !self.pending.is_empty() && self.random.below(8) == 0 {
            let which = self.random.below(self.pending.len() as u64) as usize;
            self.pending.swap_remove(which).free_unordered()?;
        }
        Ok(())
    }

    fn alloc(&self, bytes: u64, stream: u16) -> Result<Block<u8>> {
        let bytes = usize::try_from(bytes).map_err(|_| {
            Error::out_of_memory(format!("{bytes} bytes are more than this machine can address"))
        })?;
        self.lane.alloc_bytes(bytes, UNIT, self.streams[usize::from(stream)])
    }

    /// Commits after a failed allocation, so that the other ranks get its error, unless it failed on all.
    fn report_failure(&self, own: Error) -> Error {
        self.pool.commit().err().unwrap_or(own)
    }

    /// Frees pending blocks in random order, each with a probability of `take` in `of`.
    fn free_pending(&mut self, take: u64, of: u64) -> Result<()> {
        let mut blocks = std::mem::take(&mut self.pending);
        self.random.shuffle(&mut blocks);
        for block in blocks {
            if self.random.below(of) < take {
                block.free_unordered()?;
            } else {
                self.pending.push(block);
            }
        }
        Ok(())
    }

    /// Updates the peak number of segments. It falls only in a trim, so it is enough to look before each
    /// trim and at the end.
    fn note_segments(&mut self) -> Result<()> {
        self.peak_segments = self.peak_segments.max(self.lane.stats()?.segments);
        Ok(())
    }

    /// Adds the final state of lane and pool to the report.
    fn describe(&mut self, pool: &Pool, report: &mut ReplayReport) -> Result<()> {
        self.note_segments()?;
        report.state = (self.lane.counter()?, self.lane.digest()?);
        report.peak_reserved = self.lane.stats()?.peak_reserved;
        report.peak_segments = self.peak_segments;
        report.windows = pool.stats()?.windows;
        Ok(())
    }
}
