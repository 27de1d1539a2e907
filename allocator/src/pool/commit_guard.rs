//! What a commit or resync holds while it runs: the turn to do so, and the symmetric lanes.

use std::ops::{Deref, DerefMut};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Committer;
use super::lane::SharedLane;
use super::lane_memory::LaneInner;
use crate::Result;

/// A symmetric lane, locked for the length of the commit.
pub(super) struct Held<'a> {
    pub(super) lane: &'a SharedLane,
    pub(super) inner: MutexGuard<'a, LaneInner>,
    /// An error once a call panicked inside the lane: then no commit may rely on what it holds.
    pub(super) sound: Result<()>,
}

/// Whether a commit can rely on all of these lanes.
pub(super) fn all_sound(held: &[Held<'_>]) -> Result<()> {
    held.iter().try_for_each(|held| held.sound.clone())
}

impl Held<'_> {
    /// Whether the lane has something to share, or to take back, that no commit has.
    pub(super) fn is_due(&self) -> bool {
        let shared = self.inner.memory.shared_below;
        self.inner.state.has_retired()
            || self.inner.state.segments().iter().any(|segment| segment.counter >= shared)
    }
}

/// The right to commit, and what commits need.
pub(super) struct Turn<'a> {
    pub(super) committer: MutexGuard<'a, Committer>,
    pub(super) committing: &'a AtomicBool,
}

impl Deref for Turn<'_> {
    type Target = Committer;

    fn deref(&self) -> &Committer {
        &self.committer
    }
}

impl DerefMut for Turn<'_> {
    fn deref_mut(&mut self) -> &mut Committer {
        &mut self.committer
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.committing.store(false, Ordering::Release);
    }
}
