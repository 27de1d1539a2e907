//! A lane with its lock, its memory, and its place in the heap.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LockResult, Mutex, MutexGuard, PoisonError, TryLockError};

use bytemuck::Pod;

use super::Block;
use super::commit_due::CommitDue;
use super::early_handles::EarlyHandles;
use super::free_queue::{FreeQueue, QueuedCall};
use super::lane_memory::{LaneInner, LaneMemory};
use crate::driver::Stream;
use crate::fork::Maker;
use crate::heap::Heap;
use crate::lane::{
    Backing, BlockKey, BlockView, Digest, LaneState, LaneStats, Placed, Request, Segment, Site,
    WindowPolicy, here,
};
use crate::{Error, Result};

/// A lane of a pool. Cloning is cheap; clones are the same lane.
///
/// Threads that share a symmetric lane must use it in an order that is the same on every rank; threads with
/// a lane each need no order between them (rule D7). A commit, a resync and a collective that commits are part
/// of every symmetric lane's sequence. When one begins, all threads must have reached the same place of their
/// sequences as on other ranks, so wait for them first. Frees without order are outside the sequence: they may
/// come at any time and from any thread, and never wait for a commit under way.
#[derive(Clone)]
pub struct Lane(pub(super) Arc<SharedLane>);

/// The lane itself, shared by the [`Lane`]s that name it and by its blocks.
pub(crate) struct SharedLane {
    pub(crate) name: String,
    /// Where the lane begins in a slot.
    pub(crate) base: u64,
    pub(super) range: u64,
    local: bool,
    policy: WindowPolicy,
    maker: Maker,
    heap: Arc<Heap>,
    /// Whether a commit (or resync) is under way, which holds the locks of all symmetric lanes.
    committing: Arc<AtomicBool>,
    /// Raised once a call has panicked inside the lane, so that a commit reports it to the other ranks.
    /// `None` in a local lane, which takes no part in commits.
    due: Option<Arc<CommitDue>>,
    inner: Mutex<LaneInner>,
    /// Frees without order that came while another thread, perhaps a commit, had the lock.
    pub(super) free_queue: FreeQueue,
}

impl SharedLane {
    pub(super) fn new(
        state: LaneState,
        base: u64,
        range: u64,
        heap: Arc<Heap>,
        due: &Arc<CommitDue>,
        handles: &Arc<EarlyHandles>,
        committing: &Arc<AtomicBool>,
    ) -> Arc<Self> {
        let due = state.is_symmetric().then(|| due.clone());
        let handles = state.is_symmetric().then(|| handles.clone());
        let name = state.config().name.clone();
        let (local, policy) = (state.is_local(), state.config().policy);
        let memory = LaneMemory::new(heap.clone(), base, due.clone(), handles);
        let inner = Mutex::new(LaneInner { state, memory });
        let (committing, free_queue) = (committing.clone(), FreeQueue::default());
        Arc::new(Self {
            name,
            base,
            range,
            local,
            policy,
            maker: Maker::here(),
            heap,
            committing,
            due,
            inner,
            free_queue,
        })
    }

    /// Locks the lane. An error in a forked child, whose copy of the lane would give out memory that its
    /// parent gives out too. This is checked before locking, because another thread of the parent may have held
    /// the lock at the fork. An error also once a call has panicked inside the lane.
    #[inline]
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, LaneInner>> {
        self.check_process()?;
        self.with_queue_applied(self.inner.lock())
    }

    /// Locks the lane for a commit. If a call has panicked inside it, the lane comes with the error that the
    /// commit reports to all ranks. The caller is in the process that made the pool.
    pub(super) fn lock_for_commit(&self) -> (MutexGuard<'_, LaneInner>, Result<()>) {
        match self.inner.lock() {
            Ok(mut inner) => {
                self.free_queue.apply(&self.name, &mut inner);
                (inner, Ok(()))
            }
            Err(poisoned) => (poisoned.into_inner(), Err(self.half_changed())),
        }
    }

    /// Applies the queued frees to the locked lane.
    #[inline]
    fn with_queue_applied<'a>(
        &self,
        locked: LockResult<MutexGuard<'a, LaneInner>>,
    ) -> Result<MutexGuard<'a, LaneInner>> {
        let mut inner = locked.map_err(|_: PoisonError<_>| self.half_changed())?;
        self.free_queue.apply(&self.name, &mut inner);
        Ok(inner)
    }

    #[cold]
    fn half_changed(&self) -> Error {
        if let Some(due) = &self.due {
            // The lane's lock is not needed here, because no commit succeeds and lowers it any more.
            due.raise();
        }
        Error::invalid_state(format!(
            "lane {:?} of rank {}: an earlier call panicked inside it and left it half changed, so \
             its state cannot be relied on; build a new pool",
            self.name,
            self.heap.layout().rank
        ))
    }

    pub(super) fn heap(&self) -> &Heap {
        &self.heap
    }

    /// Whether commits share its segments.
    pub(super) fn is_symmetric(&self) -> bool {
        !self.local
    }

    pub(super) fn policy(&self) -> WindowPolicy {
        self.policy
    }

    /// Whether this is the process that made the lane.
    pub(super) fn is_here(&self) -> bool {
        self.maker.is_here()
    }

    pub(super) fn free(&self, key: BlockKey, site: Site) -> Result<()> {
        let LaneInner { state, memory } = &mut *self.lock()?;
        state.free(key, site, memory)
    }

    pub(super) fn free_unordered(&self, key: BlockKey, site: Site) -> Result<()> {
        match self.try_lock()? {
            Some(mut inner) => {
                let LaneInner { state, memory } = &mut *inner;
                state.free_unordered(key, site, memory)
            }
            None => {
                self.free_queue.push(QueuedCall::Free(key));
                Ok(())
            }
        }
    }

    /// Lets a live block be freed by its address.
    pub(super) fn allow_free_by_address(&self, key: BlockKey) {
        match self.try_lock() {
            // Cannot fail, because the caller owns the block.
            Ok(Some(mut inner)) => drop(inner.state.allow_free_by_address(key)),
            Ok(None) => self.free_queue.push(QueuedCall::AllowFreeByAddress(key)),
            // Freeing it by its address will be refused for the same reason.
            Err(_) => {}
        }
    }

    /// An error in a process that was forked from the one that made the pool.
    #[inline]
    fn check_process(&self) -> Result<()> {
        self.maker.check("a pool")
    }

    /// Locks the lane without waiting for a commit; `None` while another thread has the lock. A local lane
    /// takes no part in commits, so its lock is simply taken. Errors as for [`lock`](Self::lock).
    pub(super) fn try_lock(&self) -> Result<Option<MutexGuard<'_, LaneInner>>> {
        if self.local {
            return self.lock().map(Some);
        }
        self.check_process()?;
        match self.inner.try_lock() {
            Ok(inner) => self.with_queue_applied(Ok(inner)).map(Some),
            Err(TryLockError::Poisoned(poisoned)) => {
                self.with_queue_applied(Err(poisoned)).map(Some)
            }
            Err(TryLockError::WouldBlock) => Ok(None),
        }
    }

    /// Locks the lane, waiting for other threads' calls but never for a commit under way, which may take as
    /// long as the slowest rank.
    pub(super) fn lock_unless_committing(&self) -> Result<MutexGuard<'_, LaneInner>> {
        loop {
            match self.try_lock()? {
                Some(inner) => return Ok(inner),
                // The flag is raised before a commit locks the lanes and lowered after it unlocks them.
                // While it is down, the lock is held by a short call.
                None if self.committing.load(Ordering::Acquire) => {
                    return Err(Error::invalid_state(format!(
                        "lane {:?}: a commit is under way in another thread; calls that change the \
                         lane must come before or after it",
                        self.name
                    )));
                }
                None => std::thread::yield_now(),
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

    /// Allocates `count` elements for use on `stream`, aligned for `T` and to 512 bytes. In host memory, new
    /// memory holds zeros and reused memory holds its old contents. Dropping the block frees it, in order.
    ///
    /// Never communicates with other ranks.
    ///
    /// # Errors
    ///
    /// [`Error::is_out_of_memory`] if the lane's range, its limit or the device is used up;
    /// [`Error::is_invalid_argument`] if the size overflows or the lane knows 64 other streams. Every call of a
    /// lane that can fail gives [`Error::is_invalid_state`] in a forked child, and for ever once a call has
    /// panicked inside the lane.
    #[track_caller]
    pub fn alloc_on<T: Pod>(&self, count: usize, stream: Stream) -> Result<Block<T>> {
        let align = (align_of::<T>() as u64).max(crate::lane::UNIT);
        self.place(count, align, stream, here())
    }

    /// Allocates `bytes` bytes for use on `stream`, at an address that is a multiple of `align` on every rank.
    /// `align` must be a power of two of at most the driver's granularity (usually 2 MiB), to which heaps are
    /// aligned; else [`Error::is_invalid_argument`]. Other errors as for [`alloc_on`](Self::alloc_on).
    #[track_caller]
    pub fn alloc_bytes(&self, bytes: usize, align: u64, stream: Stream) -> Result<Block<u8>> {
        self.place(bytes, align, stream, here())
    }

    /// As [`alloc_bytes`](Self::alloc_bytes), but never waits for a commit under way in another thread: that is
    /// [`Error::is_invalid_state`]. Any other failure makes a commit due, as [`note_failure`](Self::note_failure)
    /// does. For allocator hooks, whose callers hold locks and get no error message.
    #[track_caller]
    pub fn try_alloc_bytes(&self, bytes: usize, align: u64, stream: Stream) -> Result<Block<u8>> {
        let site = here();
        let request = Request { bytes: bytes as u64, align, stream, site };
        let placed = {
            let mut inner = self.0.lock_unless_committing().map_err(|error| self.named(error))?;
            let LaneInner { state, memory } = &mut *inner;
            state.alloc(request, memory).inspect_err(|error| {
                // The program may go on without the memory, while other ranks did get it.
                memory.due();
                state.note_failure(error);
            })
        };
        let Placed { key, offset, .. } = placed.map_err(|error| self.named(error))?;
        Ok(Block::new(self.0.clone(), key, self.0.base + offset, bytes))
    }

    fn place<T: Pod>(
        &self,
        count: usize,
        align: u64,
        stream: Stream,
        site: Site,
    ) -> Result<Block<T>> {
        let bytes = count.checked_mul(size_of::<T>()).ok_or_else(|| {
            Error::invalid_argument(format!(
                "{count} elements of {} bytes overflow the address space",
                size_of::<T>()
            ))
        })?;
        let request = Request { bytes: bytes as u64, align, stream, site };
        let placed = {
            let LaneInner { state, memory } = &mut *self.0.lock()?;
            state.alloc(request, memory)
        };
        let Placed { key, offset, .. } = placed.map_err(|error| self.named(error))?;
        Ok(Block::new(self.0.clone(), key, self.0.base + offset, count))
    }

    /// Reserves memory on the default stream; see [`Lane::reserve_on`].
    #[track_caller]
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        self.reserve_on(bytes, Stream::DEFAULT)
    }

    /// Makes sure that one more block of `bytes` can be allocated on `stream` without growing. Part of the
    /// lane's sequence. Errors as for [`Lane::alloc_on`].
    #[track_caller]
    pub fn reserve_on(&self, bytes: u64, stream: Stream) -> Result<()> {
        let site = here();
        let LaneInner { state, memory } = &mut *self.0.lock()?;
        state.reserve(bytes, stream, site, memory).map_err(|error| self.named(error))
    }

    /// Forgets a stream that is about to be destroyed: the lane does not use it any more. The next stream that
    /// is new to the lane takes over its memory, after waiting for its work. A lane so serves any number of
    /// streams, of which it can know 64 at a time. Part of the lane's sequence. Blocks that were allocated on
    /// the stream stay as they are. Does nothing if the lane does not know the stream.
    ///
    /// # Errors
    ///
    /// [`Error::is_invalid_state`] while the stream is being captured, and in a forked child.
    #[track_caller]
    pub fn forget_stream(&self, stream: Stream) -> Result<()> {
        let site = here();
        let LaneInner { state, memory } = &mut *self.0.lock()?;
        if state.knows(stream) && self.0.heap.driver().is_capturing(stream) {
            return Err(self.named(Error::invalid_state(format!(
                "stream {:#x} is being captured into a graph; call forget_stream after the capture",
                stream.raw()
            ))));
        }
        state.forget_stream(stream, site, memory).map_err(|error| self.named(error))
    }

    /// Notes that this rank cannot do what all ranks are about to do in this lane, and why. This makes a
    /// commit due. If other ranks went on, that commit fails on all ranks with `why`, which explains more than
    /// that their sequences differ. If no rank could do it, sequences are equal and the commit succeeds.
    ///
    /// Does nothing in a forked child, and in a lane in which a call has panicked: that is an error of every
    /// commit already.
    pub fn note_failure(&self, why: &Error) {
        let Ok(mut inner) = self.0.lock() else { return };
        let LaneInner { state, memory } = &mut *inner;
        memory.due();
        state.note_failure(why);
    }

    /// Releases every segment that is wholly free, and returns their bytes. Part of the lane's sequence. The
    /// memory of a symmetric lane is given back by the next commit, that of a local lane immediately, after
    /// waiting for the device.
    #[track_caller]
    pub fn trim(&self) -> Result<u64> {
        let site = here();
        let LaneInner { state, memory } = &mut *self.0.lock()?;
        if state.is_local() {
            // Kernels that use this memory may still run.
            self.0.heap.driver().synchronize()?;
        }
        let bytes = state.trim(site);
        if state.is_local() && state.has_retired() {
            let mut outcome = Ok(());
            for segment in state.take_retired() {
                outcome = outcome.and(memory.drop_segment(&segment));
            }
            outcome?;
        }
        Ok(bytes)
    }

    /// The lane's present numbers. This and the queries below give [`Error::is_invalid_state`] as every call of
    /// the lane does (see [`Lane::alloc_on`]).
    pub fn stats(&self) -> Result<LaneStats> {
        Ok(self.0.lock()?.state.stats())
    }

    /// Bytes of physical memory that the lane holds. The same number as in [`stats`](Self::stats), found faster.
    pub fn reserved(&self) -> Result<u64> {
        Ok(self.0.lock()?.state.reserved())
    }

    /// Blocks that are not free. The same number as in [`stats`](Self::stats), found faster.
    pub fn live_blocks(&self) -> Result<u64> {
        Ok(self.0.lock()?.state.live())
    }

    /// The lane's counter: how many events its sequence has so far.
    pub fn counter(&self) -> Result<u64> {
        Ok(self.0.lock()?.state.counter())
    }

    /// Digest of the lane's events: equal on all ranks at equal counters, unless they have diverged.
    pub fn digest(&self) -> Result<Digest> {
        Ok(self.0.lock()?.state.digest())
    }

    /// A map of the lane: its segments by offset, and all its ranges in address order.
    pub fn map(&self) -> Result<(Vec<Segment>, Vec<BlockView>)> {
        let inner = self.0.lock()?;
        Ok((inner.state.segments().to_vec(), inner.state.blocks().collect()))
    }

    /// Where the lane begins in a slot, and the length of its range, in bytes.
    pub fn range(&self) -> (u64, u64) {
        (self.0.base, self.0.range)
    }

    pub(super) fn named(&self, error: Error) -> Error {
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
