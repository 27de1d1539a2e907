//! A lane with its lock, its memory, and its place in the heap.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::sync::{Mutex, MutexGuard};

use bytemuck::Pod;

use super::Block;
use super::due::Due;
use crate::driver::{Event, Physical, Stream};
use crate::heap::Heap;
use crate::lane::{
    Backing, BlockKey, BlockView, Digest, Growth, LaneState, LaneStats, Placed, Request, Segment,
};
use crate::sync::lock;
use crate::{Error, Result};

/// A lane of a pool. Cloning is cheap; clones are the same lane.
///
/// Threads that allocate from one symmetric lane must do so in an order that is the same on every
/// rank; threads with a lane each need no order between them (rule D7).
#[derive(Clone)]
pub struct Lane(pub(super) Arc<SharedLane>);

/// What a lane's handles and blocks share.
pub(crate) struct SharedLane {
    pub(crate) name: String,
    /// Where the lane begins in a slot.
    pub(crate) base: u64,
    range: u64,
    heap: Arc<Heap>,
    inner: Mutex<LaneInner>,
}

/// What the lane's lock guards.
pub(crate) struct LaneInner {
    pub(crate) state: LaneState,
    pub(crate) memory: LaneMemory,
}

/// The physical side of a lane.
pub(crate) struct LaneMemory {
    heap: Arc<Heap>,
    base: u64,
    /// By segment counter.
    physical: BTreeMap<u64, Physical>,
    /// Segments below this counter were shared by a commit.
    pub(crate) shared_below: u64,
    /// Raised when a symmetric lane grows; the pool lowers it at a commit.
    due: Option<Arc<Due>>,
}

impl SharedLane {
    pub(super) fn new(
        state: LaneState,
        base: u64,
        range: u64,
        heap: Arc<Heap>,
        due: &Arc<Due>,
    ) -> Arc<Self> {
        let due = state.is_symmetric().then(|| due.clone());
        let name = state.config().name.clone();
        let memory = LaneMemory {
            heap: heap.clone(),
            base,
            physical: BTreeMap::new(),
            shared_below: 0,
            due,
        };
        let inner = Mutex::new(LaneInner { state, memory });
        Arc::new(Self { name, base, range, heap, inner })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, LaneInner> {
        lock(&self.inner)
    }

    pub(super) fn heap(&self) -> &Heap {
        &self.heap
    }

    pub(super) fn free(
        &self,
        key: BlockKey,
        site: Option<&'static Location<'static>>,
    ) -> Result<()> {
        let LaneInner { state, memory } = &mut *self.lock();
        state.free(key, site, memory)
    }

    pub(super) fn free_unordered(
        &self,
        key: BlockKey,
        site: Option<&'static Location<'static>>,
    ) -> Result<()> {
        let LaneInner { state, memory } = &mut *self.lock();
        state.free_unordered(key, site, memory)
    }
}

impl LaneMemory {
    /// The allocation behind a segment in use.
    pub(crate) fn physical(&self, counter: u64) -> Option<&Physical> {
        self.physical.get(&counter)
    }

    /// Unmaps a segment of this rank that nobody uses any more, and lets go of its memory unless
    /// it moved elsewhere.
    pub(crate) fn drop_segment(&mut self, segment: &Segment) -> Result<()> {
        let rank = self.heap.layout().rank;
        self.heap.unmap(rank, self.base + segment.offset, segment.bytes)?;
        match self.physical.remove(&segment.counter) {
            Some(physical) => self.heap.driver().release(physical),
            None => Ok(()),
        }
    }

    /// Puts a moved segment's memory back under the counter it had before.
    pub(crate) fn rename(&mut self, from: u64, to: u64) {
        if let Some(physical) = self.physical.remove(&from) {
            self.physical.insert(to, physical);
        }
    }

    fn try_grow(&mut self, growth: &Growth, done: &mut Vec<Done>) -> Result<()> {
        let rank = self.heap.layout().rank;
        for step in &growth.moves {
            let physical = self.physical.get(&step.from).ok_or_else(|| {
                Error::invalid_state(format!("segment {} has no memory to move", step.from))
            })?;
            self.heap.map(rank, self.base + step.to.offset, physical)?;
            done.push(Done::Moved(step.to.offset, step.to.bytes));
        }
        for new in &growth.new {
            let physical = self.heap.driver().create(new.bytes)?;
            let mapped = self.heap.map(rank, self.base + new.offset, &physical);
            done.push(Done::Made(physical, mapped.is_ok().then_some(new.offset)));
            mapped?;
        }
        Ok(())
    }

    fn undo(&mut self, done: Vec<Done>) {
        let rank = self.heap.layout().rank;
        for step in done.into_iter().rev() {
            let undone = match step {
                Done::Moved(offset, bytes) => self.heap.unmap(rank, self.base + offset, bytes),
                Done::Made(physical, mapped) => mapped
                    .map_or(Ok(()), |at| self.heap.unmap(rank, self.base + at, physical.bytes()))
                    .and_then(|()| self.heap.driver().release(physical)),
            };
            if let Err(error) = undone {
                tracing::error!(%error, "undoing a growth that failed");
            }
        }
    }
}

/// A step of a growth that may have to be undone.
enum Done {
    /// Offset and length of the second mapping.
    Moved(u64, u64),
    /// The allocation, and where it is mapped, if it is.
    Made(Physical, Option<u64>),
}

impl Backing for LaneMemory {
    fn grow(&mut self, growth: &Growth) -> Result<()> {
        let mut done = Vec::with_capacity(growth.moves.len() + growth.new.len());
        if let Err(error) = self.try_grow(growth, &mut done) {
            self.undo(done);
            return Err(error);
        }
        let targets = growth.moves.iter().map(|step| step.to).chain(growth.new.iter().copied());
        for (step, to) in done.into_iter().zip(targets) {
            match step {
                Done::Made(physical, _) => {
                    self.physical.insert(to.counter, physical);
                }
                Done::Moved(..) => {}
            }
        }
        for step in &growth.moves {
            self.rename(step.from, step.to.counter);
        }
        if let Some(due) = &self.due {
            due.raise();
        }
        Ok(())
    }

    fn record(&mut self, stream: Stream) -> Result<Event> {
        self.heap.driver().record_event(stream)
    }

    fn wait(&mut self, stream: Stream, event: &Event) -> Result<()> {
        self.heap.driver().wait_event(stream, event)
    }

    fn release(&mut self, event: Event) {
        self.heap.driver().release_event(event);
    }
}

impl Drop for LaneMemory {
    fn drop(&mut self) {
        while let Some((_, physical)) = self.physical.pop_first() {
            if let Err(error) = self.heap.driver().release(physical) {
                tracing::warn!(%error, "releasing a lane's memory");
            }
        }
    }
}

impl Lane {
    /// The lane's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Allocates `count` elements on the default stream; see [`Lane::alloc_on`].
    #[track_caller]
    pub fn alloc<T: Pod>(&self, count: usize) -> Result<Block<T>> {
        self.alloc_on(count, Stream::DEFAULT)
    }

    /// Allocates `count` elements for use on `stream`, aligned for `T` and to 512 bytes. On host
    /// memory fresh blocks hold zeros, reused ones whatever was there.
    ///
    /// Never talks to other ranks. Errors: [`Error::is_out_of_memory`] when the range, the limit
    /// or the device is used up; [`Error::is_invalid_argument`] when the size overflows. Dropping
    /// the block frees it, in order.
    #[track_caller]
    pub fn alloc_on<T: Pod>(&self, count: usize, stream: Stream) -> Result<Block<T>> {
        let align = (align_of::<T>() as u64).max(crate::lane::UNIT);
        self.place(count, align, stream, Location::caller())
    }

    /// Allocates `bytes` bytes that begin at a multiple of `align`: a power of two up to the
    /// driver's granularity.
    #[track_caller]
    pub fn alloc_bytes(&self, bytes: usize, align: u64, stream: Stream) -> Result<Block<u8>> {
        self.place(bytes, align, stream, Location::caller())
    }

    fn place<T: Pod>(
        &self,
        count: usize,
        align: u64,
        stream: Stream,
        site: &'static Location<'static>,
    ) -> Result<Block<T>> {
        let bytes = count.checked_mul(size_of::<T>()).ok_or_else(|| {
            Error::invalid_argument(format!(
                "{count} elements of {} bytes overflow the address space",
                size_of::<T>()
            ))
        })?;
        let request = Request { bytes: bytes as u64, align, stream, site: Some(site) };
        let placed = {
            let LaneInner { state, memory } = &mut *self.0.lock();
            state.alloc(request, memory)
        };
        let Placed { key, offset, .. } = placed.map_err(|error| self.named(error))?;
        Ok(Block::new(self.0.clone(), key, self.0.base + offset, count))
    }

    /// Makes sure that `bytes` more fit without growing; part of the lane's sequence.
    #[track_caller]
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        let site = Some(Location::caller());
        let LaneInner { state, memory } = &mut *self.0.lock();
        state.reserve(bytes, Stream::DEFAULT, site, memory).map_err(|error| self.named(error))
    }

    /// Releases every segment that is wholly free, and returns their bytes. Part of the lane's
    /// sequence. A symmetric lane's memory goes back at the next commit, a local lane's at once.
    #[track_caller]
    pub fn trim(&self) -> Result<u64> {
        let site = Some(Location::caller());
        let LaneInner { state, memory } = &mut *self.0.lock();
        let bytes = state.trim(site);
        if state.is_local() && bytes > 0 {
            // Kernels that were given this memory may still run.
            self.0.heap.driver().synchronize()?;
            for segment in state.take_retired() {
                memory.drop_segment(&segment)?;
            }
        }
        Ok(bytes)
    }

    /// Frees the block that begins at `address`, in order. For callers that keep addresses, not
    /// [`Block`]s (see [`Block::into_address`]). A foreign or freed address is
    /// [`Error::is_invalid_argument`].
    #[track_caller]
    pub fn free_address(&self, address: u64) -> Result<()> {
        let site = Location::caller();
        self.0.free(self.find(address)?, Some(site))
    }

    /// Frees the block that begins at `address`, without order (rule D5).
    #[track_caller]
    pub fn free_address_unordered(&self, address: u64) -> Result<()> {
        let site = Location::caller();
        self.0.free_unordered(self.find(address)?, Some(site))
    }

    fn find(&self, address: u64) -> Result<BlockKey> {
        let layout = self.0.heap.layout();
        let refuse = |why: String| {
            Error::invalid_argument(format!(
                "address {address:#x} is not a live block of lane {:?} on rank {}: {why}",
                self.0.name, layout.rank
            ))
        };
        let (rank, offset) =
            layout.locate(address).ok_or_else(|| refuse("it is outside the heap".into()))?;
        if rank != layout.rank {
            return Err(refuse(format!("it is rank {rank}'s memory, which only that rank frees")));
        }
        let inside = offset.checked_sub(self.0.base).filter(|&offset| offset < self.0.range);
        let inside = inside.ok_or_else(|| refuse("it belongs to another lane".into()))?;
        let key = self.0.lock().state.block_at(inside);
        key.ok_or_else(|| refuse("no live block begins there (freed before?)".into()))
    }

    /// The lane's numbers now.
    pub fn stats(&self) -> LaneStats {
        self.0.lock().state.stats()
    }

    /// How many events the lane has seen: its counter.
    pub fn counter(&self) -> u64 {
        self.0.lock().state.counter()
    }

    /// Digest of the lane's events. Equal on all ranks at equal counters unless they diverged.
    pub fn digest(&self) -> Digest {
        self.0.lock().state.digest()
    }

    /// The lane's segments by offset, and all its ranges in address order: a map of it.
    pub fn map(&self) -> (Vec<Segment>, Vec<BlockView>) {
        let inner = self.0.lock();
        (inner.state.segments().to_vec(), inner.state.blocks().collect())
    }

    /// Where the lane begins in a slot, and how long its range is.
    pub fn range(&self) -> (u64, u64) {
        (self.0.base, self.0.range)
    }

    fn named(&self, error: Error) -> Error {
        error.context(format!("rank {}", self.0.heap.layout().rank))
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane")
            .field("name", &self.0.name)
            .field("base", &self.0.base)
            .field("range", &self.0.range)
            .finish_non_exhaustive()
    }
}
