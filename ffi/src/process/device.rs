//! One device's memory: a lane for ordinary memory, and lanes for CUDA graphs.

mod captures;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::{Driver, Error, Group, Lane, Pool, Result, Stream};

pub use self::captures::MempoolId;
use self::captures::{Captures, GRAPHS};
use crate::guard::lock;

/// Blocks start at multiples of this, as CUDA's do.
const ALIGN: u64 = 512;

/// The statistics of a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessStats {
    /// Bytes that are allocated.
    pub allocated: u64,
    /// The maximum of `allocated`.
    pub peak_allocated: u64,
    /// Bytes of physical memory.
    pub reserved: u64,
    /// The maximum of `reserved`.
    pub peak_reserved: u64,
    /// The number of allocations so far.
    pub allocs: u64,
    /// The number of frees so far.
    pub frees: u64,
    /// The number of allocations that failed.
    pub ooms: u64,
    /// The number of allocations that succeeded only after free segments were released.
    pub retries: u64,
    /// The number of graphs that have memory.
    pub graphs: u64,
    /// The number of physical segments.
    pub segments: u64,
}

/// One device's allocator.
#[derive(Debug)]
pub struct DeviceAllocator {
    pool: Pool,
    /// The lane of ordinary memory, then the lanes of graphs.
    lanes: Vec<Lane>,
    total: u64,
    /// The most bytes that may be allocated.
    limit: AtomicU64,
    allocated: AtomicU64,
    peak_allocated: AtomicU64,
    peak_reserved: AtomicU64,
    allocs: AtomicU64,
    frees: AtomicU64,
    ooms: AtomicU64,
    retries: AtomicU64,
    /// The number of captures that are running, which is usually 0.
    open: AtomicUsize,
    captures: Mutex<Captures>,
    /// Blocks whose use on another stream could not be recorded, which is rare. Their memory is never reused.
    stuck: Mutex<BTreeSet<u64>>,
    any_stuck: AtomicBool,
}

impl DeviceAllocator {
    /// The allocator of a driver's memory. `total` is the size of the memory; by default it is that of the device.
    pub fn new(driver: Driver, total: Option<u64>) -> Result<Self> {
        let total = match (total, driver.as_cuda()) {
            (Some(total), _) => total,
            (None, Some(cuda)) => cuda.memory_info()?.1,
            (None, None) => 64 << 30,
        };
        let group = Group::in_process(1)?.pop();
        let group = group.ok_or_else(|| Error::invalid_state("a group of one rank has no rank"))?;
        // Address space costs nothing, but segments that move use it up until the next trim, so there is plenty.
        let range = total.next_power_of_two().clamp(1 << 30, 1 << 39);
        // Twice as much for ordinary memory, and some for the pool's own lane.
        let stride = range * (GRAPHS as u64 + 2) + (32 << 30);
        let mut builder = Pool::builder(group).driver(driver).stride(stride);
        // The history of events is not compared with other ranks, so little of it is kept.
        let local = |name: String| LaneConfig::local(name).history(16);
        builder = builder.lane(local("ordinary".to_owned()).range(2 * range));
        for graph in 0..GRAPHS {
            builder = builder.lane(local(format!("graph {graph}")).range(range));
        }
        let pool = builder.build()?;
        let lanes = pool.lanes().take(GRAPHS + 1).collect();
        Ok(Self {
            pool,
            lanes,
            total,
            limit: AtomicU64::new(u64::MAX),
            allocated: AtomicU64::new(0),
            peak_allocated: AtomicU64::new(0),
            peak_reserved: AtomicU64::new(0),
            allocs: AtomicU64::new(0),
            frees: AtomicU64::new(0),
            ooms: AtomicU64::new(0),
            retries: AtomicU64::new(0),
            open: AtomicUsize::new(0),
            captures: Mutex::default(),
            stuck: Mutex::default(),
            any_stuck: AtomicBool::new(false),
        })
    }

    /// Whether `address` is in this device's memory.
    pub fn owns(&self, address: u64) -> bool {
        self.pool.layout().locate(address).is_some()
    }

    /// Allocates for use on `stream`.
    pub fn alloc(&self, bytes: usize, stream: Stream) -> Result<u64> {
        self.own_process()?;
        let lane = self.lane_for(stream)?;
        let size = (bytes as u64).div_ceil(ALIGN).max(1).saturating_mul(ALIGN);
        let limit = self.limit.load(Ordering::Relaxed);
        let now = self.allocated.load(Ordering::Relaxed);
        if now.saturating_add(size) > limit {
            self.ooms.fetch_add(1, Ordering::Relaxed);
            return Err(Error::out_of_memory(format!(
                "{bytes} bytes more than the {now} in use would exceed the fraction of the \
                 device's memory that was set, {limit} bytes"
            )));
        }
        let placed = self.lanes[lane].try_alloc_bytes(bytes, ALIGN, stream).or_else(|error| {
            if !error.is_out_of_memory() || self.trim().unwrap_or(0) == 0 {
                return Err(error);
            }
            self.retries.fetch_add(1, Ordering::Relaxed);
            self.lanes[lane].try_alloc_bytes(bytes, ALIGN, stream)
        });
        let block = placed.inspect_err(|_| {
            self.ooms.fetch_add(1, Ordering::Relaxed);
        })?;
        self.allocs.fetch_add(1, Ordering::Relaxed);
        let now = self.allocated.fetch_add(size, Ordering::Relaxed) + size;
        self.peak_allocated.fetch_max(now, Ordering::Relaxed);
        Ok(block.into_address())
    }

    /// Frees what [`alloc`](Self::alloc) returned. The memory can be reused at once on its stream; ordinary memory that
    /// is freed while a graph is captured can be reused when the capture has ended.
    pub fn free(&self, address: u64) -> Result<()> {
        self.own_process()?;
        let lane = self.lane_of(address)?;
        if self.any_stuck.load(Ordering::Acquire) && lock(&self.stuck).remove(&address) {
            return Err(Error::invalid_state(format!(
                "{address:#x} was used on a stream that could not be recorded; its memory is not \
                 reused"
            )));
        }
        if lane == 0 && self.open.load(Ordering::Acquire) > 0 && lock(&self.captures).defer(address)
        {
            return Ok(());
        }
        self.give_back(lane, address)?;
        if lane > 0 {
            self.reclaim(&mut lock(&self.captures), lane);
        }
        Ok(())
    }

    /// Begins a capture: from now on, allocations of this thread, and allocations of other threads on streams that are
    /// being captured, are memory of the graph `id`.
    pub fn begin(&self, id: MempoolId) -> Result<()> {
        self.own_process()?;
        let mut captures = lock(&self.captures);
        captures.begin(id)?;
        self.open.store(captures.running(), Ordering::Release);
        Ok(())
    }

    /// Ends the capture of the latest [`begin`](Self::begin) of `id`.
    pub fn end(&self, id: MempoolId) -> Result<()> {
        self.own_process()?;
        let mut captures = lock(&self.captures);
        let deferred = captures.end(id)?;
        self.open.store(captures.running(), Ordering::Release);
        drop(captures);
        deferred.into_iter().try_for_each(|address| self.give_back(0, address))
    }

    /// Notes that one of the graphs that use the memory of `id` was destroyed.
    pub fn release(&self, id: MempoolId) -> Result<()> {
        self.own_process()?;
        let mut captures = lock(&self.captures);
        if let Some(lane) = captures.release(id)? {
            self.reclaim(&mut captures, lane);
        }
        Ok(())
    }

    /// Makes a lane free for another graph if its graph was destroyed and its last block is freed. If that cannot be found
    /// out, it is not given to another graph.
    fn reclaim(&self, captures: &mut Captures, lane: usize) {
        captures.reclaim(lane, || self.lanes[lane].live_blocks().is_ok_and(|live| live == 0));
    }

    /// The lane for an allocation on `stream`.
    fn lane_for(&self, stream: Stream) -> Result<usize> {
        if self.open.load(Ordering::Acquire) == 0 {
            return Ok(0);
        }
        let is_captured = || self.pool.driver().is_capturing(stream);
        Ok(lock(&self.captures).lane(is_captured))
    }

    fn give_back(&self, lane: usize, address: u64) -> Result<()> {
        let bytes = self.lanes[lane].free_address_sized(address)?;
        self.frees.fetch_add(1, Ordering::Relaxed);
        self.allocated.fetch_sub(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Records that a block is used on `stream` too (rule D4). If that fails, because the lane has too many streams,
    /// the block's memory is never reused.
    pub fn record_stream(&self, address: u64, stream: Stream) -> Result<()> {
        self.own_process()?;
        let lane = self.lane_of(address)?;
        self.lanes[lane].record_stream_address(address, stream).inspect_err(|_| {
            lock(&self.stuck).insert(address);
            self.any_stuck.store(true, Ordering::Release);
        })
    }

    /// The segment that contains `address`: its first address and its length.
    pub fn segment(&self, address: u64) -> Result<(u64, u64)> {
        let lane = &self.lanes[self.lane_of(address)?];
        let layout = self.pool.layout();
        let base = layout.address(layout.rank, lane.range().0);
        let (segments, _) = lane.map()?;
        let at = address - base;
        let found = segments
            .iter()
            .find(|segment| (segment.offset..segment.offset + segment.bytes).contains(&at));
        found.map(|segment| (base + segment.offset, segment.bytes)).ok_or_else(|| {
            Error::invalid_argument(format!("{address:#x} is in no segment of device memory"))
        })
    }

    /// Limits allocations to this fraction of the device's memory.
    pub fn set_fraction(&self, fraction: f64) -> Result<()> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Error::invalid_argument(format!(
                "a fraction of {fraction}: 0 to 1 are possible"
            )));
        }
        self.limit.store((self.total as f64 * fraction) as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Releases segments that are wholly free, and returns how many bytes that were. A graph's segments stay as long as
    /// the graph, because its replays use them even if no tensor does. While a graph is captured, the error is
    /// [`Error::is_invalid_state`], because releasing memory has to wait for the device.
    pub fn trim(&self) -> Result<u64> {
        self.own_process()?;
        // The lock is held to the end, so that no capture begins and no graph takes a lane meanwhile.
        let captures = lock(&self.captures);
        if captures.running() > 0 {
            return Err(Error::invalid_state(
                "memory cannot be released while a graph is captured; do so after the capture",
            ));
        }
        self.update_peak()?;
        let mut lanes = self.lanes.iter().enumerate().filter(|(nth, _)| !captures.is_taken(*nth));
        lanes.try_fold(0, |bytes, (_, lane)| {
            Ok(bytes + if lane.reserved()? > 0 { lane.trim()? } else { 0 })
        })
    }

    /// Refuses calls in a forked child, where any of the locks may be held by a thread that exists in the parent only.
    fn own_process(&self) -> Result<()> {
        self.pool.check_process()
    }

    fn lane_of(&self, address: u64) -> Result<usize> {
        let located = self.pool.layout().locate(address);
        let found = located.and_then(|(_, offset)| {
            self.lanes.iter().position(|lane| {
                let (base, range) = lane.range();
                (base..base + range).contains(&offset)
            })
        });
        found.ok_or_else(|| {
            Error::invalid_argument(format!("{address:#x} is no memory of this allocator"))
        })
    }

    fn update_peak(&self) -> Result<u64> {
        let reserved = self.lanes.iter().map(Lane::reserved).sum::<Result<_>>()?;
        self.peak_reserved.fetch_max(reserved, Ordering::Relaxed);
        Ok(reserved)
    }

    /// The statistics now. [`Error::is_invalid_state`] in a forked child.
    pub fn stats(&self) -> Result<ProcessStats> {
        let reserved = self.update_peak()?;
        let segments = self.lanes.iter().map(|lane| Ok(lane.stats()?.segments));
        // Lanes shrink only in `trim`, which updates the peak first.
        Ok(ProcessStats {
            allocated: self.allocated.load(Ordering::Relaxed),
            peak_allocated: self.peak_allocated.load(Ordering::Relaxed),
            reserved,
            peak_reserved: self.peak_reserved.load(Ordering::Relaxed),
            allocs: self.allocs.load(Ordering::Relaxed),
            frees: self.frees.load(Ordering::Relaxed),
            ooms: self.ooms.load(Ordering::Relaxed),
            retries: self.retries.load(Ordering::Relaxed),
            graphs: lock(&self.captures).graphs() as u64,
            segments: segments.sum::<Result<_>>()?,
        })
    }

    /// Resets the peaks to the current values. [`Error::is_invalid_state`] in a forked child.
    pub fn reset_peaks(&self) -> Result<()> {
        self.own_process()?;
        self.peak_allocated.store(self.allocated.load(Ordering::Relaxed), Ordering::Relaxed);
        self.peak_reserved.store(0, Ordering::Relaxed);
        self.update_peak().map(drop)
    }
}
