//! A commit that a background thread makes, so that a rank that failed returns before the other ranks come.

use std::sync::PoisonError;
use std::time::Duration;

use super::Pool;
use crate::sync::{Condvar, Mutex, lock, mutant, thread};
use crate::{Deadline, Error, Result};

/// How often a thread that waits for the background commit asks whether it is to stop.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// Whether a background thread is in a commit.
#[derive(Debug, Default)]
pub(super) struct Background {
    running: Mutex<bool>,
    ended: Condvar,
}

impl Background {
    /// Waits until no background thread is in a commit, at most for `limit`. Returns whether there is none.
    fn wait(&self, limit: Duration) -> bool {
        let running = lock(&self.running);
        let waited = self.ended.wait_timeout_while(running, limit, |running| *running);
        !*waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn end(&self) {
        *lock(&self.running) = false;
        self.ended.notify_all();
    }
}

impl Pool {
    /// Makes the commit that tells the other ranks of this rank's failure (see [`note_failure`]), in a background
    /// thread if that takes longer than `grace`: the caller has its error already, and the others may be anywhere.
    /// This rank's next commit or resync comes behind it. The other ranks count a commit like any other.
    ///
    /// [`note_failure`]: super::Lane::note_failure
    pub fn commit_in_background(&self, grace: Duration) {
        // A commit that was left before comes first.
        if self.await_background(self.0.group.deadline()).is_err() {
            return;
        }
        let pool = self.clone();
        *lock(&self.0.background.running) = !mutant("mutant_background_unmarked");
        let commit = move || {
            if mutant("mutant_background_ends_early") {
                pool.0.background.end();
            }
            // An error here was reported by the caller, or ends the next commit too.
            if let Err(error) = pool.commit_now(pool.group().deadline()) {
                tracing::debug!(%error, "a commit in the background");
            }
            pool.0.background.end();
        };
        if let Err(error) = thread::Builder::new().name("symmpool commit".to_owned()).spawn(commit)
        {
            tracing::debug!(%error, "no thread could be started; this one commits itself");
            self.0.background.end();
            let _ = self.commit_now(self.0.group.deadline());
        }
        self.0.background.wait(grace);
    }

    /// Waits until no commit is under way in the background.
    pub(super) fn await_background(&self, deadline: Deadline) -> Result<()> {
        let interrupt = self.0.group.interrupt();
        let what =
            || format!("rank {}: an earlier commit, of a call that failed here", self.rank());
        while !self.0.background.wait(deadline.remaining().min(ASK_EVERY)) {
            if interrupt.as_ref().is_some_and(crate::group::Interrupt::is_requested) {
                return Err(Error::interrupted(format!("interrupted: {}", what())));
            }
            if deadline.expired() {
                let text = format!("{}, still waits for the other ranks", what());
                return Err(Error::timeout(text, deadline.budget(), Vec::new()));
            }
        }
        Ok(())
    }
}
