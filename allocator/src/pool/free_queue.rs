//! Frees that are queued because another thread has the lane's lock.
//!
//! Whoever frees without order may be a garbage collector and must not wait for a commit under way. Such a
//! free is queued here, and whoever next gets the lane's lock applies the queue before anything else. Until
//! then the blocks stay live, so a queued free cannot hit a later block at the same place. Deferring a free
//! is no event of the lane, so it does not matter when it happens (rule D5).

use std::mem;
use std::sync::atomic::Ordering;

use super::lane_memory::LaneInner;
use crate::lane::BlockKey;
use crate::sync::{AtomicBool, Mutex, lock, mutant};
use crate::{Error, Result};

/// A call that is queued.
pub(super) enum QueuedCall {
    /// Lets a block be freed by its address.
    AllowFreeByAddress(BlockKey),
    /// Frees a block without order.
    Free(BlockKey),
    /// Frees the block that begins at this offset of the lane, without order.
    FreeAt(u64),
}

/// The calls that wait for a lane's lock, in the order in which they came.
#[derive(Default)]
pub(super) struct FreeQueue {
    /// Whether the queue may be non-empty, so that checking an empty queue costs one load.
    pending: AtomicBool,
    queue: Mutex<Vec<QueuedCall>>,
}

impl FreeQueue {
    pub(super) fn push(&self, call: QueuedCall) {
        let mut queue = lock(&self.queue);
        queue.push(call);
        if !mutant("mutant_queued_unseen") {
            self.pending.store(true, Ordering::Release);
        }
    }

    /// Applies the queue to a lane that the caller has locked.
    #[inline]
    pub(super) fn apply(&self, lane: &str, inner: &mut LaneInner) {
        if self.pending.load(Ordering::Acquire) {
            self.apply_all(lane, inner);
        }
    }

    #[cold]
    fn apply_all(&self, lane: &str, inner: &mut LaneInner) {
        let queued = {
            let mut queue = lock(&self.queue);
            self.pending.store(false, Ordering::Relaxed);
            mem::take(&mut *queue)
        };
        if mutant("mutant_queue_forgotten") {
            self.pending.store(false, Ordering::Relaxed);
        }
        for call in queued {
            // The call has returned success, because it could not look at the lane.
            if let Err(error) = call.apply(inner) {
                tracing::error!(%error, lane, "a queued free was refused");
            }
        }
    }
}

impl QueuedCall {
    fn apply(self, LaneInner { state, memory }: &mut LaneInner) -> Result<()> {
        match self {
            Self::AllowFreeByAddress(key) => state.allow_free_by_address(key),
            Self::Free(key) => state.free_unordered(key, None, memory),
            Self::FreeAt(offset) => match state.block_at(offset) {
                Some(key) if state.may_free_by_address(key) => {
                    state.free_unordered(key, None, memory)
                }
                Some(_) => Err(Error::invalid_argument(format!(
                    "a Block owns the memory at byte {offset} of the lane"
                ))),
                None => Err(Error::invalid_argument(format!(
                    "no live block begins at byte {offset} of the lane (freed before?)"
                ))),
            },
        }
    }
}
