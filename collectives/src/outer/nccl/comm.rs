//! One communicator of NCCL on one rank: how it is made, asked and ended, each within a deadline.

#![allow(unsafe_code)] // FFI: the calls of NCCL

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::{Deadline, Driver, Error, Result};

use super::library::{NcclLibrary, RawComm, UniqueId};

/// Time between two looks whether NCCL has done what it was asked for.
const LOOK_AGAIN: Duration = Duration::from_micros(50);
/// Longest wait of the thread that aborts for a call under way, which the abort ends where it is stuck.
const MAX_CALL: Duration = Duration::from_secs(1);

/// Place of a rank in a communicator: the id that all of its ranks have, the rank, and the number of ranks.
#[derive(Clone, Copy)]
pub(super) struct Seat {
    pub(super) id: UniqueId,
    pub(super) rank: u32,
    pub(super) world: u32,
}

/// A communicator. Calls of it are made by one thread at a time; it may be aborted by another one meanwhile.
pub(super) struct OuterComm {
    library: NcclLibrary,
    driver: Driver,
    pub(super) seat: Seat,
    raw: RawComm,
    /// Held during each call of NCCL.
    calls: Arc<Mutex<()>>,
    /// Whether the communicator is given back, by the thread of `end`: no other one uses it then.
    is_ending: AtomicBool,
    end: Mutex<End>,
}

/// How far the end of a communicator is.
enum End {
    Live,
    /// A thread ends it, and sends what came of that.
    UnderWay(Receiver<Result<()>>),
    Over(Result<()>),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does work that may block for any time on a thread with the device's context. Returns where its result comes.
fn on_a_thread<T: Send + 'static>(
    driver: &Driver,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<Receiver<Result<T>>> {
    let (done, result) = channel();
    let driver = driver.clone();
    let body = move || {
        let made = match driver.as_cuda() {
            Some(cuda) => cuda.with_context_unordered(work),
            None => work(),
        };
        // Nobody may wait for it any more.
        let _ = done.send(made);
    };
    let thread = thread::Builder::new().name("symmpool-nccl".into()).spawn(body);
    thread.map_err(|error| Error::system("starting a thread for a call of NCCL", error))?;
    Ok(result)
}

impl OuterComm {
    /// Begins to make a communicator; [`settle`](Self::settle) waits until it is there.
    pub(super) fn begin(
        library: NcclLibrary,
        driver: &Driver,
        seat: Seat,
        deadline: Deadline,
    ) -> Result<Self> {
        // It must not block, and what NCCL does in it is not ours.
        let making =
            on_a_thread(driver, move || library.init_rank(seat.id, seat.rank, seat.world))?;
        let raw = match making.recv_timeout(deadline.remaining()) {
            Ok(made) => made?,
            Err(RecvTimeoutError::Timeout) => {
                let what = "for ncclCommInitRankConfig, which did not return";
                return Err(Error::timeout(what, deadline.budget(), Vec::new()));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::system("ncclCommInitRankConfig", "its thread ended"));
            }
        };
        Ok(Self {
            library,
            driver: driver.clone(),
            seat,
            raw,
            calls: Arc::default(),
            is_ending: AtomicBool::new(false),
            end: Mutex::new(End::Live),
        })
    }

    /// Makes calls of NCCL on the communicator.
    pub(super) fn call<T>(
        &self,
        call: impl FnOnce(NcclLibrary, RawComm) -> Result<T>,
    ) -> Result<T> {
        let _one_at_a_time = lock(&self.calls);
        if self.is_ending.load(Ordering::Acquire) {
            return Err(Error::invalid_state("NCCL's communicator between hosts was ended"));
        }
        call(self.library, self.raw)
    }

    /// Whether the communicator has done what it was asked for, as far as that is the host's work. An error is its end.
    pub(super) fn is_settled(&self) -> Result<bool> {
        // SAFETY: `call` gives a communicator that was not given back.
        self.call(|library, raw| unsafe { library.is_settled(raw) })
    }

    /// Asks NCCL for an error of the communicator, unless a call of it is under way, which may block.
    pub(super) fn look(&self) -> Result<()> {
        let Ok(_one_at_a_time) = self.calls.try_lock() else { return Ok(()) };
        if self.is_ending.load(Ordering::Acquire) {
            return Err(Error::invalid_state("NCCL's communicator between hosts was ended"));
        }
        // SAFETY: the communicator was not given back, and no other call of it is under way.
        unsafe { self.library.is_settled(self.raw) }.map(drop)
    }

    /// Waits until the communicator has done what it was asked for. `stop` is asked now and then, and ends the wait by its error.
    pub(super) fn settle(
        &self,
        doing: &str,
        deadline: Deadline,
        stop: impl Fn() -> Option<Error>,
    ) -> Result<()> {
        const ASK_EVERY: Duration = Duration::from_millis(100);
        let mut asked = Instant::now();
        while !self.is_settled()? {
            if deadline.expired() {
                return Err(Error::timeout(doing, deadline.budget(), Vec::new()));
            }
            if asked.elapsed() > ASK_EVERY {
                if let Some(why) = stop() {
                    return Err(why);
                }
                asked = Instant::now();
            }
            thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    /// Begins to end the communicator and all that it does, by a thread: NCCL's function may block.
    pub(super) fn begin_abort(&self) {
        self.begin_end(|library, raw| {
            // SAFETY: nobody uses the communicator any more, as `begin_end` says, unless in a call that this ends.
            unsafe { library.abort(raw) }
        });
    }

    /// Begins to give back a communicator whose transfers have ended on this rank: it delivers the rest first, within `limit`.
    pub(super) fn begin_close(&self, limit: Duration) {
        self.begin_end(move |library, raw| {
            let deadline = Deadline::after(limit);
            // SAFETY: the communicator was not given back: this thread does that, below.
            let mut settled = unsafe { library.finalize(raw) }.and_then(|()| {
                // SAFETY: the communicator was not given back.
                unsafe { library.is_settled(raw) }
            });
            while matches!(settled, Ok(false)) && !deadline.expired() {
                thread::sleep(LOOK_AGAIN);
                // SAFETY: the communicator was not given back.
                settled = unsafe { library.is_settled(raw) };
            }
            match settled {
                // SAFETY: nobody uses the communicator any more, and it has delivered all.
                Ok(true) => unsafe { library.destroy(raw) },
                // SAFETY: nobody uses the communicator any more.
                _ => unsafe { library.abort(raw) },
            }
        });
    }

    /// Has a thread end the communicator, of which no call is begun from now on.
    fn begin_end(&self, work: impl FnOnce(NcclLibrary, RawComm) -> Result<()> + Send + 'static) {
        let mut end = lock(&self.end);
        if !matches!(*end, End::Live) {
            return;
        }
        self.is_ending.store(true, Ordering::Release);
        let (library, raw, calls) = (self.library, self.raw, Arc::clone(&self.calls));
        let body = move || {
            let until = Instant::now() + MAX_CALL;
            let mut held = calls.try_lock();
            while matches!(held, Err(TryLockError::WouldBlock)) && Instant::now() < until {
                thread::sleep(LOOK_AGAIN);
                held = calls.try_lock();
            }
            if matches!(held, Err(TryLockError::WouldBlock)) {
                // SAFETY: no call is begun any more. One that is stuck ends by this, for which NCCL has the function.
                return unsafe { library.abort(raw) };
            }
            work(library, raw)
        };
        *end = match on_a_thread(&self.driver, body) {
            Ok(result) => End::UnderWay(result),
            Err(error) => End::Over(Err(error)),
        };
    }

    /// Waits until the communicator has ended. A timeout is an error: then NCCL may still use the memory of transfers.
    pub(super) fn await_end(&self, deadline: Deadline) -> Result<()> {
        let mut end = lock(&self.end);
        if let End::UnderWay(result) = &*end {
            match result.recv_timeout(deadline.remaining()) {
                Ok(ended) => *end = End::Over(ended),
                Err(RecvTimeoutError::Timeout) => {
                    let what = "for NCCL to end a communicator between hosts";
                    return Err(Error::timeout(what, deadline.budget(), Vec::new()));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let why = Error::system("ending NCCL's communicator", "its thread panicked");
                    *end = End::Over(Err(why));
                }
            }
        }
        match &*end {
            End::Over(ended) => ended.clone(),
            End::Live | End::UnderWay(_) => Ok(()),
        }
    }
}
