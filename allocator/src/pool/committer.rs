//! The state of commits, of which one runs at a time: connections to the peers, and whether ranks are still alike.

use crate::driver::Driver;
use crate::nccl::{Nccl, NcclComm, NcclWindow};
use crate::rendezvous::handshake::{HandshakeConfig, HandshakeOptions, handshake};
use crate::rendezvous::peers::Peers;
use crate::{Error, Group, Result};

/// A communicator of NCCL with which windows are registered.
pub(super) struct Attached {
    pub(super) nccl: Nccl,
    pub(super) comm: NcclComm,
    /// In the order in which they were registered.
    pub(super) windows: Vec<Registered>,
    /// Whether windows of later commits are registered with it. They are until a registration fails. Windows
    /// that it has stay registered until their memory is unmapped or the communicator is unregistered.
    pub(super) gets_more: bool,
}

/// A window of a segment that is registered with NCCL.
pub(super) struct Registered {
    pub(super) lane: String,
    pub(super) counter: u64,
    pub(super) window: NcclWindow,
}

/// State of commits. A [`CommitGuard`](super::commit_guard::CommitGuard) gives it to one commit at a time.
pub(super) struct Committer {
    pub(super) peers: Peers,
    /// How many commits have succeeded.
    pub(super) commits: u64,
    /// Why no further commit can succeed: a peer is gone, or ranks may differ in what they have done.
    pub(super) broken: Option<Error>,
    /// Why this rank did not complete a commit or resync that others may have completed. The next commit
    /// reports it to them.
    pub(super) incomplete: Option<String>,
    /// NCCL communicators with which windows are registered.
    pub(super) nccl: Vec<Attached>,
    /// Part of a [nested](super::Pool::nested) pool that its ranks compare when they first commit, for which they
    /// connect.
    pub(super) unmet: Option<Unmet>,
}

/// This rank's part of a pool whose ranks have not met.
pub(super) struct Unmet {
    /// All settings that change placement (rule D8).
    pub(super) text: String,
    pub(super) allow_shared_device: bool,
}

impl Committer {
    pub(super) fn new(peers: Peers, unmet: Option<Unmet>) -> Self {
        Self { peers, commits: 0, broken: None, incomplete: None, nccl: Vec::new(), unmet }
    }

    /// Connects the ranks of a pool, where they have not met. If they cannot, no commit can succeed any more.
    pub(super) fn meet(&mut self, group: &Group, driver: &Driver) -> Result<()> {
        let Some(Unmet { text, allow_shared_device }) = self.unmet.take() else { return Ok(()) };
        let terms = HandshakeConfig {
            driver,
            config_hash: *blake3::hash(text.as_bytes()).as_bytes(),
            config_text: &text,
            options: HandshakeOptions { allow_shared_device },
            first_on_device: true,
        };
        let met = handshake(group, Ok(terms), |_| Ok(()), group.deadline());
        (self.peers, ()) = met.inspect_err(|error| self.broken = Some(error.clone()))?;
        Ok(())
    }

    /// Whether the ranks are alike, and can make more commits, as far as this rank knows.
    pub(super) fn is_sound(&self) -> bool {
        self.broken.is_none() && self.incomplete.is_none()
    }

    /// Decides, after a failed exchange with the peers, whether further commits can succeed.
    ///
    /// After an error by which ranks lost each other none can, because a rank cannot know what the others
    /// will do. Connected peers are notified, so that they do not wait to find out.
    ///
    /// After an error by which only this rank missed what the others sent, the others may have completed
    /// what this rank did not. The next commit reports that to them; if that fails as well, no further
    /// commit can succeed either.
    pub(super) fn stop_commits_after(&mut self, error: &Error) {
        let missed = self.peers.take_missed();
        let final_miss = |why: &Error| ranks_lost_each_other(why) || self.incomplete.is_some();
        if ranks_lost_each_other(error) || missed.as_ref().is_some_and(final_miss) {
            self.peers.fail(error);
            self.broken = Some(error.clone());
        } else if let Some(why) = missed {
            self.mark_incomplete(&why);
        }
    }

    /// Notes that this rank did not complete what others may have completed.
    pub(super) fn mark_incomplete(&mut self, cause: &Error) {
        self.peers.fail(&incomplete_commit(&cause.message()));
        self.incomplete = Some(cause.message());
    }
}

/// Whether an error means that ranks lost each other, so that none knows what the others will do.
fn ranks_lost_each_other(error: &Error) -> bool {
    error.is_timeout() || error.is_peer_lost()
}

/// The error to return when the gather failed in which this rank reported the failure `own`. If peers are
/// gone, they may have left because of that failure, so it explains more.
pub(super) fn own_failure_or(own: Option<Error>, gather: Error) -> Error {
    own.filter(|_| ranks_lost_each_other(&gather)).unwrap_or(gather)
}

/// The error of a rank that did not complete a commit or resync which others may have completed.
pub(super) fn incomplete_commit(cause: &str) -> Error {
    Error::invalid_state(format!(
        "an earlier commit or resync went half-way on this rank ({cause}); build a new pool"
    ))
}
