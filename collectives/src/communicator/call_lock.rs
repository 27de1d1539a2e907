//! State that a communicator's calls share: what one call at a time may use, and the memory that it needs.

use std::sync::{Arc, OnceLock, PoisonError, TryLockError};

use symmpool_allocator::{Block, Error, Pool, Result, Stream};

use super::Inner;
use crate::engine::FailureHandle;
use crate::host::subgroup_memory::NestedMemory;
use crate::sync::{Mutex, MutexGuard};

/// State that one call at a time may use, and the memory that it needs. It lives until the last call has ended, also
/// one that a background thread makes.
pub(super) struct CallLock {
    inner: Mutex<Inner>,
    failure: Arc<dyn FailureHandle>,
    /// While a background thread declines a call: how many more calls were declined since, which it must decline
    /// as well.
    pending: Mutex<Option<u64>>,
    /// Dropped behind the engine, which waits for the device.
    memory: EngineMemory,
}

/// Where an engine's control block lies.
pub(super) enum ControlMemory {
    Block(Block<u8>),
    /// In the memory of a communicator of more ranks.
    Nested(Arc<NestedMemory>),
}

impl ControlMemory {
    fn offset(&self) -> u64 {
        match self {
            Self::Block(block) => block.offset(),
            Self::Nested(memory) => memory.offset(),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Block(block) => block.bytes(),
            Self::Nested(memory) => memory.bytes(),
        }
    }
}

/// An engine's memory.
struct EngineMemory {
    /// `None` only while dropping.
    control: Option<ControlMemory>,
    /// Block that the memory has grown by.
    grown: OnceLock<Block<u8>>,
    failure: Arc<dyn FailureHandle>,
}

impl CallLock {
    pub(super) fn new(inner: Inner, control: ControlMemory) -> Self {
        let failure = inner.engine.failure_handle();
        let memory = EngineMemory {
            control: Some(control),
            grown: OnceLock::new(),
            failure: failure.clone(),
        };
        Self { inner: Mutex::new(inner), failure, pending: Mutex::new(None), memory }
    }

    /// Why all calls fail, if they do. It waits for no call.
    pub(super) fn failure(&self) -> Option<Error> {
        if self.inner.is_poisoned()
            && let Err(TryLockError::Poisoned(poisoned)) = self.inner.try_lock()
        {
            poisoned.into_inner().engine.fail_after_panic();
        }
        self.failure.get().cloned()
    }

    /// Where in a rank's slot the engine's memory lies: where each block begins, and how many bytes it has.
    pub(super) fn memory(&self) -> impl Iterator<Item = (u64, u64)> {
        let control = self.memory.control.iter().map(|control| (control.offset(), control.bytes()));
        control.chain(self.memory.grown.get().map(|block| (block.offset(), block.bytes())))
    }

    /// See [`Communicator::is_nested`](super::Communicator::is_nested).
    pub(super) fn is_nested(&self) -> bool {
        matches!(&self.memory.control, Some(ControlMemory::Nested(_)))
    }

    /// See [`Communicator::all_are_here`](super::Communicator::all_are_here).
    pub(super) fn take_entry_back(&self) {
        if let Some(ControlMemory::Nested(memory)) = &self.memory.control {
            memory.take_entry_back();
        }
    }

    /// Keeps the block that the engine's memory has grown by, which it does once.
    pub(super) fn keep_grown(&self, block: Block<u8>) {
        let kept = self.memory.grown.set(block);
        debug_assert!(kept.is_ok(), "memory grows once");
    }

    /// A panic may have left the engine inside a call; then no other call can follow.
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| {
            let mut inner = poisoned.into_inner();
            inner.engine.fail_after_panic();
            inner
        })
    }

    /// Begins a call: waits for other threads' calls, and commits if a commit is due.
    pub(super) fn begin(&self, pool: &Pool, stream: &Stream) -> Result<MutexGuard<'_, Inner>> {
        let mut inner = self.lock();
        inner.commit(pool, stream)?;
        Ok(inner)
    }

    pub(super) fn pending(&self) -> MutexGuard<'_, Option<u64>> {
        // The number is valid even if a thread panicked.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Makes the commit that is due, if one is.
    pub(super) fn commit(&mut self, pool: &Pool, stream: &Stream) -> Result<()> {
        // While a graph is captured no commit can be made, and none is needed yet: the memory's place is
        // known. The commit must come after the capture, before the graph runs.
        if pool.is_commit_due() && pool.driver().is_capturing(*stream) {
            return Ok(());
        }
        match pool.commit_if_due() {
            Ok(None) => Ok(()),
            Ok(Some(_)) => {
                self.windows = pool.windows();
                Ok(())
            }
            // A commit that failed failed on all ranks alike, and all decline the call. If no commit is possible any
            // more, the other ranks are notified that this one gave up.
            Err(error) if pool.can_commit() => Err(self.engine.decline(error, stream)),
            Err(error) => Err(self.engine.decline_and_fail(error, stream)),
        }
    }
}

impl Drop for EngineMemory {
    /// An unordered free: the block's place is used again only when every rank has dropped its
    /// communicator (rule D5), so no late signal reaches a later communicator. What kernels may still use stays, and keeps
    /// the pool.
    fn drop(&mut self) {
        let leaks = self.failure.leaks();
        let control = match self.control.take() {
            Some(ControlMemory::Block(block)) => Some(block),
            // Says to the other ranks by itself that this one has let go of it.
            Some(ControlMemory::Nested(_)) | None => None,
        };
        for block in control.into_iter().chain(self.grown.take()) {
            if leaks {
                std::mem::forget(block);
                continue;
            }
            if let Err(error) = block.free_unordered() {
                tracing::error!(%error, "freeing a communicator's memory");
            }
        }
    }
}
