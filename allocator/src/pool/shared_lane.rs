//! A lane with its lock, its memory, and its place in the heap.

use std::sync::atomic::Ordering;
use std::sync::{Arc, LockResult, PoisonError, TryLockError};

use super::commit_due::CommitDue;
use super::early_handles::EarlyHandles;
use super::free_queue::{FreeQueue, QueuedCall};
use super::lane_memory::{LaneInner, LaneMemory};
use crate::fork::ProcessId;
use crate::heap::Heap;
use crate::lane::{BlockKey, LaneState, Site, WindowPolicy};
use crate::sync::{AtomicBool, Mutex, MutexGuard, mutant, thread};
use crate::{Error, Result};

/// The lane itself, shared by the [`Lane`](super::Lane)s that name it and by its blocks.
pub(crate) struct SharedLane {
    pub(crate) name: String,
    /// Where the lane begins in a slot.
    pub(crate) base: u64,
    pub(super) range: u64,
    local: bool,
    policy: WindowPolicy,
    maker: ProcessId,
    heap: Arc<Heap>,
    /// Whether a commit (or resync) is under way, which holds the locks of all symmetric lanes.
    committing: Arc<AtomicBool>,
    /// Raised once a call has panicked inside the lane, so that a commit reports it to the other ranks.
    /// `None` in a local lane, which takes no part in commits.
    due: Option<Arc<CommitDue>>,
    inner: Mutex<LaneInner>,
    /// Frees without order that came while another thread, perhaps a commit, had the lock.
    pub(super) free_queue: FreeQueue,
    /// Whether a block was freed that kernels of any stream may still use: the next commit waits for the device before
    /// it reports frees.
    waits_for_device: AtomicBool,
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
        // A lane of few blocks, as communicators' are: they use a small part of them at first, and often ever.
        let lazily = state.config().grows_exactly;
        let memory = LaneMemory::new(heap.clone(), (base, lazily), due.clone(), handles);
        let inner = Mutex::new(LaneInner { state, memory });
        let (committing, free_queue) = (committing.clone(), FreeQueue::default());
        let waits_for_device = AtomicBool::new(false);
        Arc::new(Self {
            name,
            base,
            range,
            local,
            policy,
            maker: ProcessId::here(),
            heap,
            committing,
            due,
            inner,
            free_queue,
            waits_for_device,
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
                if inner.state.take_missed_uses() {
                    self.wait_for_device();
                }
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
            self.heap.rank()
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
                let freed = state.free_unordered(key, site, memory);
                if state.take_missed_uses() {
                    self.wait_for_device();
                }
                freed
            }
            None => {
                self.free_queue.push(QueuedCall::Free(key));
                Ok(())
            }
        }
    }

    /// The next commit waits for the device before it reports frees.
    pub(super) fn wait_for_device(&self) {
        self.waits_for_device.swap(true, Ordering::SeqCst);
    }

    /// Whether a commit must wait for the device first; from then on it must not, until another block is freed so.
    pub(super) fn take_waits_for_device(&self) -> bool {
        self.waits_for_device.swap(false, Ordering::SeqCst)
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
                None if self.committing.load(Ordering::Acquire)
                    && !mutant("mutant_hook_waits_for_commits") =>
                {
                    return Err(Error::invalid_state(format!(
                        "lane {:?}: a commit is under way in another thread; calls that change the \
                         lane must come before or after it",
                        self.name
                    )));
                }
                None => thread::yield_now(),
            }
        }
    }
}
