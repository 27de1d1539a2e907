//! A block that all ranks allocate together, or none, without a wait for any device: also while streams are captured.
//!
//! It is a commit of new segments of one lane. It looks at no stream, returns no block that was freed, and unmaps
//! nothing: the next commit of all lanes does that, whenever it comes. Until then segments that were moved are mapped at
//! their old places too. A rank without memory takes part all the same, so that ranks stay alike. Then all of them free
//! the block again, and its segments are retired.

use std::sync::Arc;

use super::Pool;
use super::block::Block;
use super::commit::Covers;
use super::commit_guard::LockedLane;
use super::committer::Committer;
use super::exchange_segments::fresh_segments;
use super::lane::Lane;
use super::lane_memory::LaneInner;
use crate::lane::here;
use crate::{Deadline, Error, Result};

/// A block that all ranks allocate together.
#[derive(Clone, Copy, Debug)]
pub struct JointBlock {
    /// Its length.
    pub bytes: u64,
    /// Its address is a multiple of this on every rank.
    pub align: u64,
    /// Purpose of the block: a number that all ranks have alike, as in [`Pool::commit_together`].
    pub subject: u64,
    /// Whether a stream is captured on this rank or may be on others. Then no rank waits for its device. Where ranks give the
    /// block up, the memory that they have for it returns only with the next commit.
    pub captures: bool,
}

impl Pool {
    /// Allocates a block of the lane on every rank, as a window, or on none. Collective. `fill` is called before any peer can
    /// reach the block; it is never called on a rank that is not `ready`, nor where another one is not.
    ///
    /// Returns the block, or why no rank has one, which is the same on every rank: the error of a rank that is not ready, has no
    /// memory, or cannot fill or map it. Then all ranks may try again.
    ///
    /// # Errors
    ///
    /// The errors of [`commit_together`](Self::commit_together).
    #[track_caller]
    pub fn alloc_together(
        &self,
        lane: &Lane,
        joint: JointBlock,
        ready: Result<()>,
        deadline: Deadline,
        fill: impl FnOnce(&Block<u8>) -> Result<()>,
    ) -> Result<Result<Block<u8>>> {
        let site = here();
        self.check_process()?;
        self.await_background(deadline)?;
        let mut committer = self.committer_by(deadline)?;
        if let Err(why) = self.vote(&mut committer, joint.subject, ready, deadline)? {
            return Ok(Err(why));
        }
        let (block, made) = lane.alloc_at_once(joint.bytes, joint.align, site);
        let filled = match (&block, made) {
            (Some(block), Ok(())) => fill(block),
            (_, Err(why)) => Err(why),
            (None, Ok(())) => Err(Error::invalid_state("a lane gave no block and no reason")),
        };
        let shared = self.share_new(&mut committer, lane, filled, deadline);
        let why = match (shared, block) {
            (Ok(()), Some(block)) => return Ok(Ok(block)),
            (Ok(()), None) => Error::invalid_state("ranks shared a block that this one lacks"),
            (Err(why), block) => {
                drop(block);
                why
            }
        };
        if !committer.is_sound() || why.is_diverged() {
            return Err(why);
        }
        if self.retire_unshared(|other| std::ptr::eq(other, &*lane.0)) && !joint.captures {
            self.give_back_retired(&mut committer, deadline)?;
        }
        Ok(Err(why))
    }

    /// Makes windows of a lane's new segments. `filled` is an error if this rank has failed already.
    fn share_new(
        &self,
        committer: &mut Committer,
        lane: &Lane,
        filled: Result<()>,
        deadline: Deadline,
    ) -> Result<()> {
        let mut locked = self.lock_lanes();
        let outcome = self.share_new_locked(committer, &mut locked, lane, filled, deadline);
        outcome.map_err(|error| {
            committer.stop_commits_after(&error);
            let number = committer.commits + 1;
            error.context(format!("rank {}, commit {number}, of new memory", self.rank()))
        })
    }

    fn share_new_locked(
        &self,
        committer: &mut Committer,
        locked: &mut [LockedLane<'_>],
        lane: &Lane,
        filled: Result<()>,
        deadline: Deadline,
    ) -> Result<()> {
        let of_lane = |locked: &LockedLane<'_>| std::ptr::eq(locked.lane, Arc::as_ptr(&lane.0));
        let at = locked.iter().position(of_lane);
        let at = at.ok_or_else(|| Error::invalid_argument("a lane that is not shared"))?;
        let own = &mut locked[at..=at];
        // All ranks have filled their blocks when they have agreed.
        let covers = filled.map(|()| Covers::NewMemory);
        self.agree(committer, own, covers, deadline)?;
        let fresh = fresh_segments(own);
        if !fresh.is_empty() {
            self.exchange_segments(committer, own, &fresh, Ok(()), deadline)?;
        }
        let LaneInner { state, memory } = &mut *own[0].inner;
        memory.shared_below = state.next_segment();
        state.mark_agreed();
        committer.commits += 1;
        self.publish_windows(locked);
        Ok(())
    }
}
