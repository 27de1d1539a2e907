//! What is done to a lane without waiting for its lock, while another thread has it.
//!
//! Whoever frees without order may be a garbage collector and must not wait for a commit under way. So
//! it leaves word here, and whoever next has the lane's lock does it before anything else. Until then
//! none of the blocks meant goes to anybody else, and what comes later cannot be taken for what was
//! meant. Setting a block aside is no event, so when it happens is nobody's concern (rule D5).

use std::mem;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::lane_memory::LaneInner;
use crate::lane::BlockKey;
use crate::sync::lock;
use crate::{Error, Result};

/// What waits for its lane.
pub(super) enum Late {
    /// A block is given up to its address.
    GiveUp(BlockKey),
    /// A free without order.
    Block(BlockKey),
    /// The same of the block that begins at this offset of the lane.
    At(u64),
}

/// What waits for a lane's lock, in the order in which it came.
#[derive(Default)]
pub(super) struct LateFrees {
    /// Whether there is any: all that it costs those who find none.
    some: AtomicBool,
    queue: Mutex<Vec<Late>>,
}

impl LateFrees {
    pub(super) fn push(&self, late: Late) {
        let mut queue = lock(&self.queue);
        queue.push(late);
        self.some.store(true, Ordering::Release);
    }

    /// Does what waits, in a lane that the caller has locked.
    #[inline]
    pub(super) fn take(&self, lane: &str, inner: &mut LaneInner) {
        if self.some.load(Ordering::Acquire) {
            self.take_all(lane, inner);
        }
    }

    #[cold]
    fn take_all(&self, lane: &str, inner: &mut LaneInner) {
        let late = {
            let mut queue = lock(&self.queue);
            self.some.store(false, Ordering::Relaxed);
            mem::take(&mut *queue)
        };
        for free in late {
            // Its caller was told that all was well, for want of a look.
            if let Err(error) = free.apply(inner) {
                tracing::error!(%error, lane, "a free that came beside another call");
            }
        }
    }
}

impl Late {
    fn apply(self, LaneInner { state, memory }: &mut LaneInner) -> Result<()> {
        match self {
            Self::GiveUp(key) => state.give_up(key),
            Self::Block(key) => state.free_unordered(key, None, memory),
            Self::At(offset) => match state.block_at(offset) {
                Some(key) if state.is_given_up(key) => state.free_unordered(key, None, memory),
                Some(_) => Err(Error::invalid_argument(format!(
                    "a Block holds what begins at byte {offset} of the lane"
                ))),
                None => Err(Error::invalid_argument(format!(
                    "no live block begins at byte {offset} of the lane (freed before?)"
                ))),
            },
        }
    }
}
