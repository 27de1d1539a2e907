//! Calls that a rank declines because its arguments are wrong.
//!
//! A rank that declines a call returns its error at once, wherever the other ranks are. They are notified by
//! the call's handshake, which does not wait for them. If a commit is due before the call, in which the other ranks
//! wait, a background thread makes the commit and then notifies them.

use std::mem;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use symmpool_allocator::{Error, Pool, Stream};

use super::call_lock::CallLock;
use super::{Communicator, Inner};
use crate::sync::{Condvar, Mutex, MutexGuard, mutant, thread};

/// How long a rank that declines a call waits for the commit before it. It takes less if the other ranks are in
/// the commit too, and then everything is as after any other call.
const GRACE: Duration = Duration::from_millis(100);

/// How far a background thread is that declines a call.
enum Stage {
    Waits,
    /// No other call can come before it.
    Begun,
    Done(Option<Error>),
}

/// The stage of a background thread, and whoever waits for it.
struct ThreadProgress {
    stage: Mutex<Stage>,
    changed: Condvar,
}

impl ThreadProgress {
    fn lock(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, stage: Stage) {
        *self.lock() = stage;
        self.changed.notify_all();
    }

    fn await_begin(&self) {
        let mut stage = self.lock();
        while matches!(*stage, Stage::Waits) {
            stage = self.changed.wait(stage).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Report of the thread, if it comes in time.
    fn await_report(&self, limit: Duration) -> Option<Error> {
        let goes_on = |stage: &mut Stage| !matches!(stage, Stage::Done(_));
        let waited = self.changed.wait_timeout_while(self.lock(), limit, goes_on);
        let (mut stage, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &mut *stage {
            Stage::Done(reported) => reported.take(),
            Stage::Waits | Stage::Begun => None,
        }
    }
}

/// Ends the waits for a thread, also if it panics.
struct EndsWaits(Arc<ThreadProgress>);

impl Drop for EndsWaits {
    fn drop(&mut self) {
        let stage = mem::replace(&mut *self.0.lock(), Stage::Waits);
        let done = match stage {
            Stage::Done(reported) => Stage::Done(reported),
            Stage::Waits | Stage::Begun => Stage::Done(None),
        };
        self.0.set(done);
    }
}

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
    /// Declines a call. You must call this in place of a call whose arguments you have found wrong: the other ranks get an
    /// error at once instead of waiting, and all ranks have made as many calls. Returns what to report: `why`, or why the
    /// communicator has failed. Does not wait for ranks that have not come to the call; the next call does.
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
        self.decline_in_background(why, stream, pending)
    }

    /// Lets a background thread decline the call, as it may have to wait for the other ranks first. Other threads that
    /// decline calls wait until that has begun, as their next calls must come behind it.
    fn decline_in_background(
        &self,
        why: Error,
        stream: &Stream,
        pending: MutexGuard<'_, Option<u64>>,
    ) -> Error {
        let (shared, pool, reason, stream) =
            (Arc::clone(&self.shared), self.pool.clone(), why.clone(), *stream);
        let (stage, changed) = (Mutex::new(Stage::Waits), Condvar::new());
        let progress = Arc::new(ThreadProgress { stage, changed });
        let theirs = Arc::clone(&progress);
        let decline = move || {
            let ends = EndsWaits(theirs);
            let begin = || ends.0.set(Stage::Begun);
            let error = shared.decline_pending(&pool, reason, &stream, begin);
            ends.0.set(Stage::Done(Some(error)));
        };
        let pending = Some(pending).filter(|_| !mutant("mutant_declines_unordered"));
        match thread::Builder::new().name("symmpool decline".to_owned()).spawn(decline) {
            Ok(_) => {
                // This rank's next call must come behind the one that is declined.
                progress.await_begin();
                drop(pending);
                progress.await_report(GRACE).unwrap_or(why)
            }
            Err(error) => {
                drop(pending);
                tracing::debug!(%error, "no thread could be started; this thread declines the call itself");
                self.shared.decline_pending(&self.pool, why, &stream, || ())
            }
        }
    }
}

#[cfg(test)]
mod models {
    use symmpool_allocator::models::prove;
    use symmpool_allocator::{Driver, Group, Pool};

    use super::*;
    use crate::communicator::engine::AnyEngine;

    fn calls_made(communicator: &Communicator) -> u64 {
        match &communicator.lock().engine {
            AnyEngine::Host(host) => host.next_epoch(),
            _ => unreachable!("memory of the host"),
        }
    }

    /// Two threads decline calls while a commit is due. Whatever a thread calls next comes behind what it declined.
    fn threads_decline_calls() {
        let group = Group::in_process(1).unwrap().remove(0);
        let pool = Pool::builder(group).driver(Driver::host().unwrap()).build().unwrap();
        let communicator = Arc::new(Communicator::new(&pool).unwrap());
        communicator.barrier(&Stream::DEFAULT).unwrap();
        let _block = pool.alloc::<u8>(1 << 16).unwrap();
        assert!(pool.is_commit_due());
        let begin = calls_made(&communicator);
        let decline = |communicator: &Communicator| {
            let why = Error::invalid_argument("a fault");
            assert!(communicator.decline(why, &Stream::DEFAULT).is_invalid_argument());
        };
        let theirs = Arc::clone(&communicator);
        let other = thread::spawn(move || {
            decline(&theirs);
            assert!(calls_made(&theirs) > begin, "a call comes before one that was declined");
        });
        decline(&communicator);
        other.join().unwrap();
        communicator.barrier(&Stream::DEFAULT).unwrap();
        assert_eq!(calls_made(&communicator) - begin, 3);
    }

    #[test]
    fn loom_calls_come_behind_those_that_were_declined() {
        prove(1, &["mutant_declines_unordered"], threads_decline_calls);
    }
}
