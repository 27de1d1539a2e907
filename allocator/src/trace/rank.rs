//! One rank's part of a replay.

use std::time::{Duration, Instant};

use super::options::LANE;
use super::random::Random;
use super::{Op, ReplayOptions, Trace, Unordered};
use crate::driver::Stream;
use crate::lane::{Digest, UNIT};
use crate::pool::{Block, Lane};
use crate::{Error, Group, Pool, Result};

/// Rank 0 reports its progress whenever this many events have passed.
const REPORT_EVERY: u64 = 4096;

/// What one rank came to.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// What went wrong, and the number of the operation at which it was told; that of the commit
    /// at the end is the length of the trace.
    pub(super) error: Option<(u64, Error)>,
    /// Operations passed.
    pub(super) events: u64,
    /// The lane's counter and digest at the end.
    pub(super) state: (u64, Digest),
    /// Time for all operations, the commit at the end left out.
    pub(super) elapsed: Duration,
    pub(super) peak_reserved: u64,
    pub(super) peak_segments: u64,
    pub(super) windows: u64,
}

/// Replays `trace` as the rank that `group` says. Every other rank has to be doing the same.
pub(super) fn run(
    group: Group,
    trace: &Trace,
    options: &ReplayOptions,
    progress: &(dyn Fn(u64) + Sync),
) -> Report {
    let rank = group.rank();
    let build = || {
        let (driver, taken) = options.driver_of(rank)?;
        let pool = Pool::builder(group).driver(driver.clone()).lane(options.lane()).build()?;
        Ok((pool, driver, taken))
    };
    let (pool, driver, taken) = match build() {
        Ok(built) => built,
        Err(error) => return Report { error: Some((0, error)), ..Report::default() },
    };
    let lane = pool.default_lane();
    debug_assert_eq!(lane.name(), LANE);
    let mut player = Player::new(&pool, lane, trace, options);
    let started = Instant::now();
    let played = player.play(progress);
    let elapsed = started.elapsed();
    let ended = played.and_then(|()| player.finish());
    let mut report = Report { events: player.event, elapsed, ..Report::default() };
    let described = player.describe(&pool, &mut report);
    report.error = ended.and(described).err().map(|error| (player.event, error));
    if let Some(taken) = taken
        && let Err(error) = driver.unreserve(taken)
    {
        tracing::warn!(%error, rank, "giving back the range that moved the heap");
    }
    report
}

struct Player<'a> {
    pool: &'a Pool,
    lane: Lane,
    ops: &'a [Op],
    /// The operation that this rank leaves out.
    skip: Option<u64>,
    /// By the ordinals of the trace. Handles differ from rank to rank and are in no order, as
    /// real ones (rule D3).
    streams: Vec<Stream>,
    /// By slot; empty where the block was never made.
    blocks: Vec<Option<Block<u8>>>,
    unordered: Unordered,
    /// Blocks that the trace has freed without order and this rank has not.
    pending: Vec<Block<u8>>,
    random: Random,
    /// Number of the operation under way.
    event: u64,
    peak_segments: u64,
}

impl<'a> Player<'a> {
    fn new(pool: &'a Pool, lane: Lane, trace: &'a Trace, options: &ReplayOptions) -> Self {
        let rank = u64::from(pool.rank());
        let mut handles = Random::new(options.address_seed.unwrap_or(0), rank);
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
            random: Random::new(seed, rank),
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

    /// Frees what is still pending, and compares everything once more.
    fn finish(&mut self) -> Result<()> {
        self.free_pending(1, 1)?;
        self.pool.commit().map(drop)
    }

    fn step(&mut self, op: Op) -> Result<()> {
        match op {
            Op::Alloc { slot, bytes, stream } => {
                let block = match self.alloc(bytes, stream) {
                    Ok(block) => block,
                    Err(error) => return Err(self.give_up(error)),
                };
                if let Some(old) = self.blocks[slot as usize].replace(block) {
                    // This rank left out its free. Dropping it would be that free after all.
                    old.into_address();
                }
            }
            Op::Free { slot } => {
                if let Some(block) = self.blocks[slot as usize].take() {
                    block.free()?;
                }
            }
            Op::FreeUnordered { slot } => {
                if let Some(block) = self.blocks[slot as usize].take() {
                    match self.unordered {
                        Unordered::AsTraced => block.free_unordered()?,
                        Unordered::Shuffled { .. } | Unordered::Delayed { .. } => {
                            self.pending.push(block);
                        }
                    }
                }
            }
            Op::Record { slot, stream } => {
                if let Some(block) = &self.blocks[slot as usize] {
                    block.record_stream(self.streams[usize::from(stream)])?;
                }
            }
            Op::Commit => {
                match self.unordered {
                    Unordered::AsTraced => {}
                    Unordered::Shuffled { .. } => self.free_pending(1, 1)?,
                    Unordered::Delayed { .. } => self.free_pending(3, 4)?,
                }
                self.pool.commit()?;
            }
            Op::Trim => {
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

    /// An allocation failed. The commit tells the other ranks, unless it failed on all alike.
    fn give_up(&self, own: Error) -> Error {
        self.pool.commit().err().unwrap_or(own)
    }

    /// Frees pending blocks in random order, each with a chance of `take` in `of`.
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

    /// The number of segments falls only in a trim, so it is at its highest before one or at the
    /// end.
    fn note_segments(&mut self) -> Result<()> {
        self.peak_segments = self.peak_segments.max(self.lane.stats()?.segments);
        Ok(())
    }

    /// Fills in what the lane and the pool came to.
    fn describe(&mut self, pool: &Pool, report: &mut Report) -> Result<()> {
        self.note_segments()?;
        report.state = (self.lane.counter()?, self.lane.digest()?);
        report.peak_reserved = self.lane.stats()?.peak_reserved;
        report.peak_segments = self.peak_segments;
        report.windows = pool.stats()?.windows;
        Ok(())
    }
}
