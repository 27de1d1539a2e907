//! A lane with its lock, its memory, and its place in the heap.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LockResult, Mutex, MutexGuard, PoisonError, TryLockError};

use bytemuck::Pod;

use super::Block;
use super::commit_due::Due;
use super::early_handles::Handles;
use super::free_queue::{Late, LateFrees};
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
/// Threads that use one symmetric lane must do so in an order that is the same on every rank;
/// threads with a lane each need no order between them (rule D7). A commit, a resync and a
/// collective that commits are part of every symmetric lane's sequence, so all threads must have
/// come to the same place of theirs when one begins: wait for them, as before a fork. Frees without
/// order are outside the sequence and may come at any time, from any thread; they never wait for a
/// commit under way.
#[derive(Clone)]
pub struct Lane(pub(super) Arc<SharedLane>);

/// What a lane's handles and blocks share.
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
    /// Raised once calls are refused, so that the other ranks hear of it in a commit. `None` in a
    /// local lane, of which they know nothing.
    due: Option<Arc<Due>>,
    inner: Mutex<LaneInner>,
    /// Frees without order that came while the lane was locked, for a commit under way perhaps.
    pub(super) late: LateFrees,
}

impl SharedLane {
    pub(super) fn new(
        state: LaneState,
        base: u64,
        range: u64,
        heap: Arc<Heap>,
        due: &Arc<Due>,
        handles: &Arc<Handles>,
        committing: &Arc<AtomicBool>,
    ) -> Arc<Self> {
        let due = state.is_symmetric().then(|| due.clone());
        let handles = state.is_symmetric().then(|| handles.clone());
        let name = state.config().name.clone();
        let (local, policy) = (state.is_local(), state.config().policy);
        let memory = LaneMemory::new(heap.clone(), base, due.clone(), handles);
        let inner = Mutex::new(LaneInner { state, memory });
        let (committing, late, maker) = (committing.clone(), LateFrees::default(), Maker::here());
        Arc::new(Self {
            name,
            base,
            range,
            local,
            policy,
            maker,
            heap,
            committing,
            due,
            inner,
            late,
        })
    }

    /// The locked lane. Refused in a forked child, whose copy of the lane would hand out memory that
    /// its parent hands out as well, and where another thread of the parent may have had the lock at
    /// the fork, so that waiting for it would not end: hence asked first. Refused also once a call
    /// panicked inside the lane.
    #[inline]
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, LaneInner>> {
        self.own_process()?;
        self.caught_up(self.inner.lock())
    }

    /// The locked lane for a commit, which tells the other ranks when a call panicked inside it: then
    /// with the error that all get. The caller is in the process that made the pool.
    pub(super) fn lock_for_commit(&self) -> (MutexGuard<'_, LaneInner>, Result<()>) {
        match self.inner.lock() {
            Ok(mut inner) => {
                self.late.take(&self.name, &mut inner);
                (inner, Ok(()))
            }
            Err(poisoned) => (poisoned.into_inner(), Err(self.half_changed())),
        }
    }

    /// The locked lane, once it has done what others left for whoever has the lock.
    #[inline]
    fn caught_up<'a>(
        &self,
        locked: LockResult<MutexGuard<'a, LaneInner>>,
    ) -> Result<MutexGuard<'a, LaneInner>> {
        let mut inner = locked.map_err(|_: PoisonError<_>| self.half_changed())?;
        self.late.take(&self.name, &mut inner);
        Ok(inner)
    }

    #[cold]
    fn half_changed(&self) -> Error {
        if let Some(due) = &self.due {
            // Without the lane's lock: no commit settles it any more, because none succeeds.
            due.raise();
        }
        Error::invalid_state(format!(
            "lane {:?} of rank {}: an earlier call panicked inside it and left it half changed, so \
             that nothing it says can be relied on; build a new pool",
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

    /// Whether this is the process that made it.
    pub(super) fn is_here(&self) -> bool {
        self.maker.is_here()
    }

    pub(super) fn free(&self, key: BlockKey, site: Site) -> Result<()> {
        let LaneInner { state, memory } = &mut *self.lock()?;
        state.free(key, site, memory)
    }

    pub(super) fn free_unordered(&self, key: BlockKey, site: Site) -> Result<()> {
        match self.unlocked()? {
            Some(mut inner) => {
                let LaneInner { state, memory } = &mut *inner;
                state.free_unordered(key, site, memory)
            }
            None => {
                self.late.push(Late::Block(key));
                Ok(())
            }
        }
    }

    /// Lets whoever knows a live block's address free it.
    pub(super) fn give_up(&self, key: BlockKey) {
        match self.unlocked() {
            // It lives, as its owner says so; else there is nothing to free.
            Ok(Some(mut inner)) => drop(inner.state.give_up(key)),
            Ok(None) => self.late.push(Late::GiveUp(key)),
            // Whoever frees it by its address is refused, too.
            Err(_) => {}
        }
    }

    /// Refuses in a process that was forked from the one that made the pool.
    #[inline]
    fn own_process(&self) -> Result<()> {
        self.maker.check("a pool")
    }

    /// The lane's lock without waiting, `None` while another thread has it. A local lane is in no
    /// commit, so there waiting is short. Refused as [`lock`](Self::lock).
    pub(super) fn unlocked(&self) -> Result<Option<MutexGuard<'_, LaneInner>>> {
        if self.local {
            return self.lock().map(Some);
        }
        self.own_process()?;
        match self.inner.try_lock() {
            Ok(inner) => self.caught_up(Ok(inner)).map(Some),
            Err(TryLockError::Poisoned(poisoned)) => self.caught_up(Err(poisoned)).map(Some),
            Err(TryLockError::WouldBlock) => Ok(None),
        }
    }

    /// The lane's lock, waiting for other threads' calls but never for a commit under way, which
    /// may take as long as other ranks do.
    pub(super) fn lock_unless_committing(&self) -> Result<MutexGuard<'_, LaneInner>> {
        loop {
            match self.unlocked()? {
                Some(inner) => return Ok(inner),
                // Raised before the lanes are locked, lowered after: while it is down, whoever has
                // the lock is about to let go of it.
                None if self.committing.load(Ordering::Acquire) => {
                    return Err(Error::invalid_state(format!(
                        "lane {:?}: a commit is under way in another thread, and calls that change \
                         the lane come before or after it on every rank",
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

    /// Allocates `count` elements for use on `stream`, aligned for `T` and to 512 bytes. On host
    /// memory fresh blocks hold zeros, reused ones whatever was there.
    ///
    /// Never talks to other ranks. Errors: [`Error::is_out_of_memory`] when the range, the limit
    /// or the device is used up; [`Error::is_invalid_argument`] when the size overflows;
    /// [`Error::is_invalid_state`] in a forked child, and for good once a call panicked inside the
    /// lane: both hold for every call of a lane that can fail. Dropping the block frees it, in order.
    #[track_caller]
    pub fn alloc_on<T: Pod>(&self, count: usize, stream: Stream) -> Result<Block<T>> {
        let align = (align_of::<T>() as u64).max(crate::lane::UNIT);
        self.place(count, align, stream, here())
    }

    /// Allocates `bytes` bytes whose address is a multiple of `align`, on every rank: a power of two
    /// up to the driver's granularity (2 MiB as a rule), by which heaps are aligned. Anything else
    /// is [`Error::is_invalid_argument`].
    #[track_caller]
    pub fn alloc_bytes(&self, bytes: usize, align: u64, stream: Stream) -> Result<Block<u8>> {
        self.place(bytes, align, stream, here())
    }

    /// As [`alloc_bytes`](Self::alloc_bytes), but it never waits for a commit that another thread is
    /// in: that is [`Error::is_invalid_state`]. Any other failure makes a commit due, as
    /// [`note_failure`](Self::note_failure) does. For allocator hooks, whose callers hold locks and
    /// cannot be told why.
    #[track_caller]
    pub fn try_alloc_bytes(&self, bytes: usize, align: u64, stream: Stream) -> Result<Block<u8>> {
        let site = here();
        let request = Request { bytes: bytes as u64, align, stream, site };
        let placed = {
            let mut inner = self.0.lock_unless_committing().map_err(|error| self.named(error))?;
            let LaneInner { state, memory } = &mut *inner;
            state.alloc(request, memory).inspect_err(|error| {
                // The caller's caller may go on as if nothing was, where other ranks did get memory.
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

    /// Reserves on the default stream; see [`Lane::reserve_on`].
    #[track_caller]
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        self.reserve_on(bytes, Stream::DEFAULT)
    }

    /// Makes sure that `bytes` more fit on `stream` without growing, as one block. Part of the
    /// lane's sequence; errors as for [`Lane::alloc_on`].
    #[track_caller]
    pub fn reserve_on(&self, bytes: u64, stream: Stream) -> Result<()> {
        let site = here();
        let LaneInner { state, memory } = &mut *self.0.lock()?;
        state.reserve(bytes, stream, site, memory).map_err(|error| self.named(error))
    }

    /// Forgets a stream that is about to be destroyed, in this lane: it is not touched any more. The next
    /// stream that is new to the lane takes its place, and goes on in its memory, behind its work; so a lane
    /// serves any number of streams, of which it can know 64 at a time. Part of the lane's sequence. Blocks
    /// that were allocated on the stream stay as they are. Nothing happens if the lane does not know it.
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
                "stream {:#x} is being captured into a graph; have it forgotten after the capture",
                stream.raw()
            ))));
        }
        state.forget_stream(stream, site, memory).map_err(|error| self.named(error))
    }

    /// Notes that this rank cannot do what all ranks are about to do in this lane, and why. A commit
    /// is then due; if the others went on, it fails on all ranks with `why`, which is more than
    /// that their sequences differ. If no rank could, nothing differs and nothing is wrong.
    ///
    /// Notes nothing where calls of the lane are refused: a forked child has nothing to say to other
    /// ranks, and a lane in which a call panicked is an error of every commit already.
    pub fn note_failure(&self, why: &Error) {
        let Ok(mut inner) = self.0.lock() else { return };
        let LaneInner { state, memory } = &mut *inner;
        memory.due();
        state.note_failure(why);
    }

    /// Releases every segment that is wholly free, and returns their bytes. Part of the lane's
    /// sequence. A symmetric lane's memory goes back at the next commit, a local lane's at once.
    #[track_caller]
    pub fn trim(&self) -> Result<u64> {
        let site = here();
        let LaneInner { state, memory } = &mut *self.0.lock()?;
        if state.is_local() {
            // Kernels that were given this memory may still run.
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

    /// The lane's numbers now. This, and each of the questions that follow, is
    /// [`Error::is_invalid_state`] where calls of the lane are refused (see [`Lane::alloc_on`]).
    pub fn stats(&self) -> Result<LaneStats> {
        Ok(self.0.lock()?.state.stats())
    }

    /// Bytes of physical memory that it holds: one number of [`stats`](Self::stats), at once.
    pub fn reserved(&self) -> Result<u64> {
        Ok(self.0.lock()?.state.reserved())
    }

    /// Blocks that were not freed: one number of [`stats`](Self::stats), at once.
    pub fn live_blocks(&self) -> Result<u64> {
        Ok(self.0.lock()?.state.live())
    }

    /// How many events the lane has seen: its counter.
    pub fn counter(&self) -> Result<u64> {
        Ok(self.0.lock()?.state.counter())
    }

    /// Digest of the lane's events. Equal on all ranks at equal counters unless they diverged.
    pub fn digest(&self) -> Result<Digest> {
        Ok(self.0.lock()?.state.digest())
    }

    /// The lane's segments by offset, and all its ranges in address order: a map of it.
    pub fn map(&self) -> Result<(Vec<Segment>, Vec<BlockView>)> {
        let inner = self.0.lock()?;
        Ok((inner.state.segments().to_vec(), inner.state.blocks().collect()))
    }

    /// Where the lane begins in a slot, and how long its range is.
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
