//! Asking all ranks whether they are ready for a step, before any of them begins it.

use serde::{Deserialize, Serialize};

use super::Pool;
use super::committer::{incomplete_commit, own_failure_or};
use crate::rendezvous::message::{Message, decode_all};
use crate::rendezvous::status::{Status, all_ok, encode_status};
use crate::{Deadline, Error, Result};

/// Whether a rank is ready, or why not.
#[derive(Debug, Serialize, Deserialize)]
struct Vote(Status<()>);

impl Message for Vote {
    const KIND: u16 = 12;
    const NAME: &'static str = "vote";
}

impl Pool {
    /// Succeeds if every rank passes `Ok`, and is the same error on every rank if one does not. Collective, like a commit;
    /// unlike one it changes nothing and compares nothing, so that ranks may ask before they allocate, which all of them must
    /// do or none.
    ///
    /// # Errors
    ///
    /// That of a rank that is not ready, which is named. [`Error::is_timeout`] and [`Error::is_peer_lost`], after which no
    /// commit of the pool can succeed, and [`Error::is_invalid_state`], as of [`commit_by`](Self::commit_by).
    pub fn all_ready_by(&self, ready: Result<()>, deadline: Deadline) -> Result<()> {
        self.check_process()?;
        self.await_background(deadline)?;
        let mut committer = self.committer()?;
        let ready = match &committer.incomplete {
            Some(cause) => Err(incomplete_commit(cause)),
            None => ready,
        };
        let own = ready.as_ref().err().cloned();
        let votes = encode_status(Vote, ready.map_err(|error| error.kind().clone()))
            .and_then(|vote| committer.peers.all_gather(&self.0.group, "vote", &vote, deadline))
            .map_err(|error| own_failure_or(own, error))
            .and_then(|gathered| decode_all::<Vote>(&gathered));
        let votes = votes.map_err(|error| {
            committer.stop_commits_after(&error);
            self.in_vote(error)
        })?;
        let agreed = all_ok("a vote", votes.into_iter().map(|Vote(status)| status));
        agreed.map(drop).map_err(|error| self.in_vote(error))
    }

    fn in_vote(&self, error: Error) -> Error {
        error.context(format!("rank {}, asking whether all ranks are ready", self.rank()))
    }
}
