//! The guard of a running commit or resync: it holds the right to commit, and the locked symmetric lanes.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;

use super::committer::Committer;
use super::lane_memory::LaneInner;
use super::shared_lane::SharedLane;
use crate::Result;
use crate::sync::{AtomicBool, MutexGuard};

/// A symmetric lane, locked for the duration of a commit.
pub(super) struct LockedLane<'a> {
    pub(super) lane: &'a SharedLane,
    pub(super) inner: MutexGuard<'a, LaneInner>,
    /// An error if a call has panicked inside the lane: no commit may rely on its state then.
    pub(super) sound: Result<()>,
}

/// Succeeds if a commit can rely on the state of all of these lanes.
pub(super) fn all_sound(locked: &[LockedLane<'_>]) -> Result<()> {
    locked.iter().try_for_each(|locked| locked.sound.clone())
}

impl LockedLane<'_> {
    /// Whether the lane has segments that were made or retired since the last commit.
    pub(super) fn is_due(&self) -> bool {
        let shared = self.inner.memory.shared_below;
        self.inner.state.has_retired()
            || self.inner.state.segments().iter().any(|segment| segment.counter >= shared)
    }
}

/// The right to commit, and the state that commits need.
pub(super) struct CommitGuard<'a> {
    pub(super) committer: MutexGuard<'a, Committer>,
    pub(super) committing: &'a AtomicBool,
}

impl Deref for CommitGuard<'_> {
    type Target = Committer;

    fn deref(&self) -> &Committer {
        &self.committer
    }
}

impl DerefMut for CommitGuard<'_> {
    fn deref_mut(&mut self) -> &mut Committer {
        &mut self.committer
    }
}

impl Drop for CommitGuard<'_> {
    fn drop(&mut self) {
        self.committing.store(false, Ordering::Release);
    }
}
