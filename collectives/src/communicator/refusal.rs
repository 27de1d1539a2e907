//! What a communicator's calls share, and calls whose arguments the caller refuses.
//!
//! Who refuses a call has its reason at once, wherever the other ranks are. They are told by the call's
//! entry, which waits for nobody. Where a commit comes before the call, which the other ranks wait in, a
//! thread makes it, and then tells them.

use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use symmpool_allocator::{Block, Error, Pool, Result, Stream};

use super::{Communicator, Inner};

/// How long a rank that refuses a call waits for the commit before it. Ranks that are there come in less,
/// and then everything is as after any other call.
const GRACE: Duration = Duration::from_millis(100);

/// What one call at a time may use, and the memory that it needs: there until the last call has ended,
/// also one that a thread makes.
pub(super) struct Held {
    inner: Mutex<Inner>,
    /// While a thread tells of a refused call: how many were refused since, which it is to tell of, too.
    telling: Mutex<Option<u64>>,
    /// The engine's memory. `None` only while dropping.
    control: Option<Block<u8>>,
}

impl Held {
    pub(super) fn new(inner: Inner, control: Block<u8>) -> Self {
        Self { inner: Mutex::new(inner), telling: Mutex::new(None), control: Some(control) }
    }

    /// Where in a rank's slot the engine's memory begins, and how many bytes it has.
    pub(super) fn control(&self) -> Option<(u64, u64)> {
        self.control.as_ref().map(|control| (control.offset(), control.bytes()))
    }

    /// A call that panicked may have left the engine inside a call: no other can follow it.
    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| {
            let mut inner = poisoned.into_inner();
            inner.engine.abandon();
            inner
        })
    }

    /// The beginning of every call: the turn, and the commit that is due.
    pub(super) fn begin(&self, pool: &Pool, stream: &Stream) -> Result<MutexGuard<'_, Inner>> {
        let mut inner = self.lock();
        inner.commit(pool, stream)?;
        Ok(inner)
    }

    /// Tells the other ranks, which may wait in a commit for this one. Returns what to report.
    fn tell(&self, pool: &Pool, why: Error, stream: &Stream) -> Error {
        let mut inner = self.lock();
        let mut told = inner.refuse(pool, why, stream);
        loop {
            let mut telling = self.telling();
            match &mut *telling {
                Some(more) if *more > 0 => *more -= 1,
                _ => {
                    *telling = None;
                    return told;
                }
            }
            drop(telling);
            told = inner.refuse(pool, told, stream);
        }
    }

    fn telling(&self) -> MutexGuard<'_, Option<u64>> {
        // A number is whole whoever panicked.
        self.telling.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Makes the commit that is due, if one is.
    fn commit(&mut self, pool: &Pool, stream: &Stream) -> Result<()> {
        // While a graph is captured no commit can be, and none is needed: the memory's place is
        // known. It comes after the capture, before the graph runs.
        if pool.is_commit_due() && pool.driver().is_capturing(*stream) {
            return Ok(());
        }
        match pool.commit_if_due() {
            Ok(None) => Ok(()),
            Ok(Some(_)) => {
                self.windows = pool.windows();
                Ok(())
            }
            // When it failed on all ranks alike, all decline; else the others hear of it.
            Err(error) if pool.can_commit() => Err(self.engine.decline(error, stream)),
            Err(error) => Err(self.engine.give_up(error, stream)),
        }
    }

    /// Tells the other ranks that this one refuses a call. Gives back why; or why the communicator is
    /// closed, if it is.
    fn refuse(&mut self, pool: &Pool, why: Error, stream: &Stream) -> Error {
        match self.commit(pool, stream) {
            Ok(()) => self.engine.decline(why, stream),
            Err(_) if pool.can_commit() && self.engine.failure().is_none() => why,
            Err(error) => error,
        }
    }
}

impl Communicator {
    /// Stands in for the next call where the caller has found its own arguments wrong: the other
    /// ranks get an error at once instead of a wait, and all stay in step. Returns what to report:
    /// `why`, or why the communicator is closed. Does not wait for ranks that are elsewhere; the next
    /// call does.
    #[cold]
    pub fn decline(&self, why: Error, stream: &Stream) -> Error {
        let mut telling = self.held.telling();
        if let Some(more) = &mut *telling {
            *more += 1;
            return why;
        }
        if !self.pool.is_commit_due() || self.pool.driver().is_capturing(*stream) {
            drop(telling);
            return self.lock().refuse(&self.pool, why, stream);
        }
        *telling = Some(0);
        drop(telling);
        self.tell_behind(why, stream)
    }

    /// Has a thread tell the other ranks: it may have to wait for them first.
    fn tell_behind(&self, why: Error, stream: &Stream) -> Error {
        let (held, pool, reason, stream) =
            (Arc::clone(&self.held), self.pool.clone(), why.clone(), *stream);
        let (done, told) = mpsc::channel();
        let tell = move || {
            let error = held.tell(&pool, reason, &stream);
            // Nobody listens any more where it took long.
            let _ = done.send(error);
        };
        match thread::Builder::new().name("symmpool refusal".to_owned()).spawn(tell) {
            Ok(_) => told.recv_timeout(GRACE).unwrap_or(why),
            Err(error) => {
                tracing::debug!(%error, "a refused call is told of by this thread, for want of another");
                self.held.tell(&self.pool, why, &stream)
            }
        }
    }
}

impl Drop for Held {
    /// Without order: the block's place is used again only when every rank has dropped its
    /// communicator (rule D5), so no late signal meets a successor.
    fn drop(&mut self) {
        let Some(control) = self.control.take() else { return };
        if let Err(error) = control.free_unordered() {
            tracing::error!(%error, "freeing a communicator's control block");
        }
    }
}
