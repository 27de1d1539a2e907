//! Calls that a rank declines because its arguments are wrong.
//!
//! A rank that declines a call returns its error at once, wherever the other ranks are. They are notified by
//! the call's handshake, which does not wait for them. If a commit is due before the call, in which the other ranks
//! wait, a background thread makes the commit and then notifies them.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use symmpool_allocator::{Error, Pool, Stream};

use super::call_lock::CallLock;
use super::{Communicator, Inner};

/// How long a rank that declines a call waits for the commit before it. It takes less if the other ranks are in
/// the commit too, and then everything is as after any other call.
const GRACE: Duration = Duration::from_millis(100);

impl CallLock {
    /// Declines the calls that are pending, after the commit that the other ranks may wait in. Returns what to
    /// report. `on_begin` is called when no other call can come before them.
    fn decline_pending(
        &self,
        pool: &Pool,
        why: Error,
        stream: &Stream,
        on_begin: impl FnOnce(),
    ) -> Error {
        let mut inner = self.lock();
        on_begin();
        let mut reported = inner.decline(pool, why, stream);
        loop {
            let mut pending = self.pending();
            match &mut *pending {
                Some(more) if *more > 0 => *more -= 1,
                _ => {
                    *pending = None;
                    return reported;
                }
            }
            drop(pending);
            reported = inner.decline(pool, reported, stream);
        }
    }
}

impl Inner {
    /// Declines a call, so that the other ranks get an error too. Returns why it was declined, or why the
    /// communicator has failed, if it has.
    fn decline(&mut self, pool: &Pool, why: Error, stream: &Stream) -> Error {
        match self.commit(pool, stream) {
            Ok(()) => self.engine.decline(why, stream),
            Err(_) if pool.can_commit() && self.engine.failure().is_none() => why,
            Err(error) => error,
        }
    }
}

impl Communicator {
    /// To be called instead of a call whose arguments the caller has found wrong: the other
    /// ranks get an error at once instead of waiting, and all ranks have made as many calls. Returns what to report:
    /// `why`, or why the communicator has failed. Does not wait for ranks that have not come to the call; the next
    /// call does.
    #[cold]
    pub fn decline(&self, why: Error, stream: &Stream) -> Error {
        let mut pending = self.shared.pending();
        if let Some(more) = &mut *pending {
            *more += 1;
            return why;
        }
        if !self.pool.is_commit_due() || self.pool.driver().is_capturing(*stream) {
            drop(pending);
            return self.lock().decline(&self.pool, why, stream);
        }
        *pending = Some(0);
        drop(pending);
        self.decline_in_background(why, stream)
    }

    /// Lets a background thread decline the call, as it may have to wait for the other ranks first.
    fn decline_in_background(&self, why: Error, stream: &Stream) -> Error {
        let (shared, pool, reason, stream) =
            (Arc::clone(&self.shared), self.pool.clone(), why.clone(), *stream);
        let (begins, begun) = mpsc::channel();
        let (done, reported) = mpsc::channel();
        let decline = move || {
            // The receiver waits.
            let begin = || {
                let _ = begins.send(());
            };
            let error = shared.decline_pending(&pool, reason, &stream, begin);
            // After `GRACE` the receiver is gone.
            let _ = done.send(error);
        };
        match thread::Builder::new().name("symmpool decline".to_owned()).spawn(decline) {
            Ok(_) => {
                // This rank's next call must come behind the one that is declined.
                let _ = begun.recv();
                reported.recv_timeout(GRACE).unwrap_or(why)
            }
            Err(error) => {
                tracing::debug!(%error, "no thread could be started; this thread declines the call itself");
                self.shared.decline_pending(&self.pool, why, &stream, || ())
            }
        }
    }
}
