//! One device's memory: a lane for what is ordinary, and lanes for graphs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::{Driver, Error, Group, Lane, Pool, Result, Stream};

use crate::guard::lock;

/// How many graphs (or groups of graphs that share memory) can have memory at a time.
const GRAPHS: usize = 31;

/// Blocks start at multiples of this, as CUDA's do.
const ALIGN: u64 = 512;

/// How torch names the memory of a graph.
pub type MempoolId = (u64, u64);

/// A device's numbers at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessStats {
    /// Bytes handed out.
    pub allocated: u64,
    /// The most there were.
    pub peak_allocated: u64,
    /// Bytes of physical memory.
    pub reserved: u64,
    /// The most there were.
    pub peak_reserved: u64,
    /// Allocations so far.
    pub allocs: u64,
    /// Frees so far.
    pub frees: u64,
    /// Allocations that could not be served.
    pub ooms: u64,
    /// Allocations that were served after free segments were given back.
    pub retries: u64,
    /// Graphs that have memory.
    pub graphs: u64,
    /// Physical segments.
    pub segments: u64,
}

/// One device's allocator.
#[derive(Debug)]
pub struct Device {
    pool: Pool,
    /// Ordinary memory, then the graphs'.
    lanes: Vec<Lane>,
    total: u64,
    /// Most bytes to hand out.
    limit: AtomicU64,
    allocated: AtomicU64,
    peak_allocated: AtomicU64,
    peak_reserved: AtomicU64,
    allocs: AtomicU64,
    frees: AtomicU64,
    ooms: AtomicU64,
    retries: AtomicU64,
    /// Captures that are open: none, as a rule.
    open: AtomicUsize,
    captures: Mutex<Captures>,
    /// Blocks whose use on another stream could not be noted: their memory is not used again. None,
    /// as a rule.
    stuck: Mutex<BTreeSet<u64>>,
    any_stuck: AtomicBool,
}

#[derive(Debug, Default)]
struct Captures {
    /// The latest last.
    open: Vec<Open>,
    graphs: BTreeMap<MempoolId, Graph>,
    /// For each graph's lane, whether it has an owner, or memory in use that had one.
    taken: [bool; GRAPHS],
    /// Ordinary blocks freed meanwhile: events cannot be recorded while streams are captured.
    deferred: Vec<u64>,
}

#[derive(Debug)]
struct Open {
    id: MempoolId,
    /// The thread that began.
    thread: usize,
}

#[derive(Debug)]
struct Graph {
    lane: usize,
    uses: u32,
}

/// A number that no other live thread has.
fn thread() -> usize {
    thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.try_with(|mark| std::ptr::from_ref(mark) as usize).unwrap_or(0)
}

impl Device {
    /// The allocator of a driver's memory. `total` is the size of the memory; the device's own
    /// unless given.
    pub fn new(driver: Driver, total: Option<u64>) -> Result<Self> {
        let total = match (total, driver.as_cuda()) {
            (Some(total), _) => total,
            (None, Some(cuda)) => cuda.memory_info()?.1,
            (None, None) => 64 << 30,
        };
        let group = Group::in_process(1)?.pop();
        let group = group.ok_or_else(|| Error::invalid_state("a group of one has one"))?;
        // Address space costs nothing; segments that move use it up until the next trim.
        let range = total.next_power_of_two().clamp(1 << 30, 1 << 39);
        // Twice as much for ordinary memory, and something for the pool's own.
        let stride = range * (GRAPHS as u64 + 2) + (32 << 30);
        let mut builder = Pool::builder(group).driver(driver).stride(stride);
        // What happened is not compared with other ranks, so little of it is kept.
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

    /// Frees what [`alloc`](Self::alloc) gave; it is reused at once on its stream. Not so while a
    /// graph is captured: then when the capture has ended.
    pub fn free(&self, address: u64) -> Result<()> {
        let lane = self.lane_of(address)?;
        if self.any_stuck.load(Ordering::Acquire) && lock(&self.stuck).remove(&address) {
            return Err(Error::invalid_state(format!(
                "{address:#x} was used on a stream that could not be noted; its memory is not used \
                 again"
            )));
        }
        if lane == 0 && self.open.load(Ordering::Acquire) > 0 {
            let mut captures = lock(&self.captures);
            if !captures.open.is_empty() {
                captures.deferred.push(address);
                return Ok(());
            }
        }
        self.give_back(lane, address)?;
        if lane > 0 {
            self.reclaim(&mut lock(&self.captures), lane);
        }
        Ok(())
    }

    fn give_back(&self, lane: usize, address: u64) -> Result<()> {
        let bytes = self.lanes[lane].free_address_sized(address)?;
        self.frees.fetch_add(1, Ordering::Relaxed);
        self.allocated.fetch_sub(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Notes that a block is used on `stream` too (rule D4). Where that cannot be, because the lane
    /// knows too many streams, the block's memory is not used again.
    pub fn record_stream(&self, address: u64, stream: Stream) -> Result<()> {
        let lane = self.lane_of(address)?;
        self.lanes[lane].record_stream_address(address, stream).inspect_err(|_| {
            lock(&self.stuck).insert(address);
            self.any_stuck.store(true, Ordering::Release);
        })
    }

    /// The segment that holds `address`: its first address and its length.
    pub fn segment(&self, address: u64) -> Result<(u64, u64)> {
        let lane = &self.lanes[self.lane_of(address)?];
        let layout = self.pool.layout();
        let base = layout.address(layout.rank, lane.range().0);
        let (segments, _) = lane.map();
        let at = address - base;
        let found = segments
            .iter()
            .find(|segment| (segment.offset..segment.offset + segment.bytes).contains(&at));
        found.map(|segment| (base + segment.offset, segment.bytes)).ok_or_else(|| {
            Error::invalid_argument(format!("{address:#x} is in no segment of device memory"))
        })
    }

    /// Hands out at most this part of the device's memory from now on.
    pub fn set_fraction(&self, fraction: f64) -> Result<()> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(Error::invalid_argument(format!("a fraction of {fraction}: 0 to 1")));
        }
        self.limit.store((self.total as f64 * fraction) as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Gives wholly free segments back; returns their bytes. A graph's stay as long as the graph:
    /// its replays use them, though no tensor does. While a graph is captured it is
    /// [`Error::is_invalid_state`], as it must wait for the device.
    pub fn trim(&self) -> Result<u64> {
        // Held to the end, so that no capture begins and no graph takes a lane meanwhile.
        let captures = lock(&self.captures);
        if !captures.open.is_empty() {
            return Err(Error::invalid_state("memory is given back after the capture of a graph"));
        }
        self.note_peak();
        let taken = std::iter::once(false).chain(captures.taken);
        let lanes = self.lanes.iter().zip(taken).filter(|(_, taken)| !taken);
        lanes
            .filter(|(lane, _)| lane.reserved() > 0)
            .try_fold(0, |bytes, (lane, _)| Ok(bytes + lane.trim()?))
    }

    /// What this thread, and whoever uses streams that are captured, allocates is memory of the
    /// graph `id` from now on.
    pub fn begin(&self, id: MempoolId) -> Result<()> {
        let mut captures = lock(&self.captures);
        if let Some(graph) = captures.graphs.get_mut(&id) {
            graph.uses += 1;
        } else {
            let free = captures.taken.iter().position(|taken| !taken).ok_or_else(|| {
                Error::invalid_state(format!(
                    "{GRAPHS} graphs have memory of their own; let graphs share it (`pool=`), or \
                     let go of some"
                ))
            })?;
            captures.taken[free] = true;
            captures.graphs.insert(id, Graph { lane: free + 1, uses: 1 });
        }
        captures.open.push(Open { id, thread: thread() });
        self.open.store(captures.open.len(), Ordering::Release);
        Ok(())
    }

    /// Ends the latest [`begin`](Self::begin) of `id`.
    pub fn end(&self, id: MempoolId) -> Result<()> {
        let mut captures = lock(&self.captures);
        let at = captures.open.iter().rposition(|open| open.id == id);
        let at =
            at.ok_or_else(|| Error::invalid_state(format!("no capture into {id:?} is open")))?;
        captures.open.remove(at);
        self.open.store(captures.open.len(), Ordering::Release);
        if !captures.open.is_empty() {
            return Ok(());
        }
        let deferred = std::mem::take(&mut captures.deferred);
        drop(captures);
        deferred.into_iter().try_for_each(|address| self.give_back(0, address))
    }

    /// One graph less uses the memory of `id`.
    pub fn release(&self, id: MempoolId) -> Result<()> {
        let mut captures = lock(&self.captures);
        let graph = captures.graphs.get_mut(&id);
        let graph = graph
            .ok_or_else(|| Error::invalid_state(format!("no graph has memory called {id:?}")))?;
        graph.uses -= 1;
        if graph.uses == 0 {
            let lane = graph.lane;
            captures.graphs.remove(&id);
            self.reclaim(&mut captures, lane);
        }
        Ok(())
    }

    /// A graph's lane whose graph is gone is free for another once its last block is.
    fn reclaim(&self, captures: &mut Captures, lane: usize) {
        let owned = captures.graphs.values().any(|graph| graph.lane == lane);
        if !owned && captures.taken[lane - 1] && self.lanes[lane].live_blocks() == 0 {
            captures.taken[lane - 1] = false;
            // Its memory stays for the next graph, or goes at the next trim.
        }
    }

    /// Where an allocation on `stream` goes.
    fn lane_for(&self, stream: Stream) -> Result<usize> {
        if self.open.load(Ordering::Acquire) == 0 {
            return Ok(0);
        }
        let captures = lock(&self.captures);
        let here = thread();
        let by_thread = captures.open.iter().rev().find(|open| open.thread == here);
        let found = match by_thread {
            Some(open) => Some(open),
            // Another thread's part of a capture, such as autograd's.
            None if self.pool.driver().is_capturing(stream) => captures.open.last(),
            None => None,
        };
        Ok(found.map_or(0, |open| captures.graphs.get(&open.id).map_or(0, |graph| graph.lane)))
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

    fn note_peak(&self) -> u64 {
        let reserved = self.lanes.iter().map(Lane::reserved).sum();
        self.peak_reserved.fetch_max(reserved, Ordering::Relaxed);
        reserved
    }

    /// The numbers now.
    pub fn stats(&self) -> ProcessStats {
        let reserved = self.note_peak();
        // Lanes only shrink in `trim`, which notes the peak first.
        ProcessStats {
            allocated: self.allocated.load(Ordering::Relaxed),
            peak_allocated: self.peak_allocated.load(Ordering::Relaxed),
            reserved,
            peak_reserved: self.peak_reserved.load(Ordering::Relaxed),
            allocs: self.allocs.load(Ordering::Relaxed),
            frees: self.frees.load(Ordering::Relaxed),
            ooms: self.ooms.load(Ordering::Relaxed),
            retries: self.retries.load(Ordering::Relaxed),
            graphs: lock(&self.captures).graphs.len() as u64,
            segments: self.lanes.iter().map(|lane| lane.stats().segments).sum(),
        }
    }

    /// Forgets the peaks so far.
    pub fn reset_peaks(&self) {
        self.peak_allocated.store(self.allocated.load(Ordering::Relaxed), Ordering::Relaxed);
        self.peak_reserved.store(0, Ordering::Relaxed);
        self.note_peak();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn device() -> Device {
        Device::new(Driver::sim(1), Some(1 << 30)).unwrap()
    }

    #[test]
    fn ordinary_memory_is_reused_at_once_in_any_order() {
        let device = device();
        let a = device.alloc(1000, Stream::DEFAULT).unwrap();
        let b = device.alloc(1000, Stream::DEFAULT).unwrap();
        device.free(a).unwrap();
        assert_eq!(device.alloc(900, Stream::DEFAULT).unwrap(), a);
        assert!(device.free(b + 512).is_err() && device.free(7).is_err());
        device.free(b).unwrap();
        assert!(device.free(b).unwrap_err().is_invalid_argument());
        let stats = device.stats();
        assert_eq!((stats.allocs, stats.frees, stats.allocated), (3, 2, 1024));
        assert_eq!(stats.peak_allocated, 2048);
        let (start, bytes) = device.segment(a).unwrap();
        assert!(start <= a && a < start + bytes);
        device.reset_peaks();
        assert_eq!(device.stats().peak_allocated, 1024);
    }

    #[test]
    fn a_graphs_memory_is_its_own_until_the_graph_is_gone() {
        let device = device();
        let before = device.alloc(4096, Stream::DEFAULT).unwrap();
        device.begin((0, 1)).unwrap();
        let inside = device.alloc(4096, Stream::DEFAULT).unwrap();
        // Freed inside it is reused inside; what was ordinary waits.
        device.free(inside).unwrap();
        assert_eq!(device.alloc(4096, Stream::DEFAULT).unwrap(), inside);
        device.free(inside).unwrap();
        device.free(before).unwrap();
        assert_eq!(device.stats().frees, 2);
        assert!(device.trim().unwrap_err().is_invalid_state());
        device.end((0, 1)).unwrap();
        assert_eq!(device.stats().frees, 3);
        assert_eq!(device.alloc(4096, Stream::DEFAULT).unwrap(), before);
        assert_ne!(device.alloc(4096, Stream::DEFAULT).unwrap(), inside);
        // Another graph on the same memory, and one with memory of its own.
        device.begin((0, 1)).unwrap();
        assert_eq!(device.alloc(4096, Stream::DEFAULT).unwrap(), inside);
        device.end((0, 1)).unwrap();
        device.begin((0, 2)).unwrap();
        let other = device.alloc(4096, Stream::DEFAULT).unwrap();
        device.end((0, 2)).unwrap();
        assert_eq!(device.stats().graphs, 2);
        device.release((0, 1)).unwrap();
        device.release((0, 1)).unwrap();
        assert!(device.release((0, 1)).is_err() && device.end((0, 1)).is_err());
        // A tensor of the first graph is alive: its lane is taken still.
        device.begin((0, 3)).unwrap();
        let third = device.alloc(4096, Stream::DEFAULT).unwrap();
        assert!(third != inside && third != other);
        device.end((0, 3)).unwrap();
        device.free(inside).unwrap();
        device.begin((0, 4)).unwrap();
        assert_eq!(device.alloc(4096, Stream::DEFAULT).unwrap(), inside);
        device.end((0, 4)).unwrap();
    }

    #[test]
    fn emptying_the_cache_leaves_graphs_what_replays_use() {
        let device = device();
        let ordinary = device.alloc(4096, Stream::DEFAULT).unwrap();
        device.free(ordinary).unwrap();
        let mut segments = Vec::new();
        for graph in [(0, 1), (0, 2)] {
            // torch empties the cache before it captures.
            device.trim().unwrap();
            assert_eq!(
                device.stats().reserved,
                segments.iter().map(|(_, bytes)| bytes).sum::<u64>()
            );
            device.begin(graph).unwrap();
            let inside = device.alloc(4096, Stream::DEFAULT).unwrap();
            let segment = device.segment(inside).unwrap();
            device.free(inside).unwrap();
            device.end(graph).unwrap();
            segments.push(segment);
        }
        assert_eq!(device.trim().unwrap(), 0);
        for &(start, bytes) in &segments {
            assert_eq!(device.segment(start).unwrap(), (start, bytes));
        }
        device.release((0, 1)).unwrap();
        assert_eq!(device.trim().unwrap(), segments[0].1);
        assert!(device.segment(segments[0].0).is_err());
        device.release((0, 2)).unwrap();
        device.trim().unwrap();
        assert_eq!(device.stats().reserved, 0);
    }

    #[test]
    fn other_threads_allocate_ordinary_memory_meanwhile() {
        let device = device();
        device.begin((0, 1)).unwrap();
        let inside = device.alloc(4096, Stream::DEFAULT).unwrap();
        let outside = std::thread::scope(|scope| {
            scope.spawn(|| device.alloc(4096, Stream::DEFAULT).unwrap()).join().unwrap()
        });
        assert!(device.lane_of(inside).unwrap() > 0);
        assert_eq!(device.lane_of(outside).unwrap(), 0);
    }

    #[test]
    fn graphs_run_out_with_an_error_and_come_back() {
        let device = device();
        for graph in 0..GRAPHS as u64 {
            device.begin((0, graph)).unwrap();
            device.end((0, graph)).unwrap();
        }
        assert!(device.begin((1, 0)).unwrap_err().is_invalid_state());
        device.release((0, 5)).unwrap();
        device.begin((1, 0)).unwrap();
    }

    #[test]
    fn memory_whose_use_could_not_be_noted_is_not_used_again() {
        let device = device();
        let a = device.alloc(4096, Stream::from_raw(0)).unwrap();
        assert!((1..64).all(|stream| device.record_stream(a, Stream::from_raw(stream)).is_ok()));
        assert!(device.record_stream(a, Stream::from_raw(64)).is_err());
        assert!(device.free(a).unwrap_err().is_invalid_state());
        assert_ne!(device.alloc(4096, Stream::from_raw(0)).unwrap(), a);
    }

    #[test]
    fn a_fraction_bounds_what_is_handed_out() {
        let device = device();
        assert!(device.set_fraction(1.5).is_err() && device.set_fraction(f64::NAN).is_err());
        device.set_fraction(0.25).unwrap();
        let a = device.alloc(200 * MIB as usize, Stream::DEFAULT).unwrap();
        assert!(device.alloc(100 * MIB as usize, Stream::DEFAULT).unwrap_err().is_out_of_memory());
        assert_eq!(device.stats().ooms, 1);
        device.free(a).unwrap();
        device.alloc(250 * MIB as usize, Stream::DEFAULT).unwrap();
    }

    #[test]
    fn memory_of_two_streams_moves_between_them_and_back_to_the_device() {
        let device = device();
        let (one, two) = (Stream::from_raw(1), Stream::from_raw(2));
        for _ in 0..200 {
            let a = device.alloc(100 * MIB as usize, one).unwrap();
            device.record_stream(a, two).unwrap();
            device.free(a).unwrap();
            let b = device.alloc(100 * MIB as usize, two).unwrap();
            device.free(b).unwrap();
        }
        let stats = device.stats();
        assert!(stats.peak_reserved <= 256 * MIB, "{stats:?}");
        assert!(device.trim().unwrap() >= 100 * MIB);
        let stats = device.stats();
        assert_eq!((stats.reserved, stats.allocated), (0, 0));
        assert!(stats.peak_reserved >= 100 * MIB);
    }
}
