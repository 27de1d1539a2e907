//! Transfers under way on one rank, and the thread that ends those that do not end by themselves.
//!
//! NCCL's kernels wait for other ranks without a bound. So a thread looks at the transfers under way, from when the first one
//! is begun until the communicators are given back. A transfer's time begins when its stream comes to it. When it is over,
//! or NCCL reports an error, both communicators are aborted: each by a thread of its own, as an abort may wait until the
//! kernels of the other communicator have ended.

#![allow(unsafe_code)] // events and streams by their handles

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Deadline, Driver, Error, Result, Stream};

use super::comm::OuterComm;
use crate::cuda::{CudaApi, CudaHandle};
use crate::outer::Ticket;

/// Time between two looks at transfers under way.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Longest wait for an abort, and for a communicator to be given back.
const MAX_END: Duration = Duration::from_secs(10);

/// A transfer under way.
struct Pending {
    ticket: Ticket,
    /// Index of its communicator.
    comm: usize,
    /// Events that mark where its stream was before it, and behind it.
    before: CudaHandle,
    done: CudaHandle,
    /// Whether NCCL has put it on the stream: until then its events mark nothing.
    is_put: bool,
    /// Moment at which NCCL was called for it, and then at which the thread saw its stream come to it.
    began: Option<Instant>,
    limit: Duration,
    what: String,
}

/// Transfers of both outer engines of a rank, and their communicators.
pub(super) struct Transfers {
    pub(super) driver: Driver,
    pub(super) api: &'static CudaApi,
    /// The rail's communicator, if there is one, and behind it that of all ranks.
    pub(super) comms: Vec<OuterComm>,
    /// Streams of the communicators' own, in the same order.
    streams: Vec<Stream>,
    failure: OnceLock<Error>,
    /// Moment by which the communicators must have ended, once they failed.
    ends_by: OnceLock<Deadline>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    pending: Vec<Pending>,
    tickets: u64,
    /// Events for later transfers.
    spare: Vec<CudaHandle>,
    /// Whether the thread was started, and whether it is to end.
    is_watched: bool,
    is_over: bool,
}

fn lock(mutex: &Mutex<State>) -> MutexGuard<'_, State> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Transfers {
    pub(super) fn new(driver: &Driver, comms: Vec<OuterComm>) -> Result<Self> {
        let api = CudaApi::get()?;
        let stream = |_: &OuterComm| in_context(driver, || api.stream());
        let streams = comms.iter().map(stream).collect::<Result<_>>()?;
        Ok(Self {
            driver: driver.clone(),
            api,
            comms,
            streams,
            failure: OnceLock::new(),
            ends_by: OnceLock::new(),
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Why no transfer is begun any more, if that is so.
    pub(super) fn failure(&self) -> Option<Error> {
        self.failure.get().cloned()
    }

    /// Begins a transfer behind what the stream was given before. `call` is given a stream, and puts the transfer on it.
    pub(super) fn begin(
        self: &Arc<Self>,
        comm: usize,
        what: &str,
        limit: Duration,
        stream: &Stream,
        call: impl FnOnce(&OuterComm, u64) -> Result<()>,
    ) -> Result<Ticket> {
        if let Some(why) = self.failure() {
            return Err(why);
        }
        let cuda = cuda(&self.driver)?;
        if cuda.capture_of(*stream).is_some() {
            return Err(Error::unsupported(format!(
                "{what} while a graph is captured: calls over hosts cannot be captured yet"
            )));
        }
        let (from, own) = (cuda.stream_handle(*stream)? as u64, self.streams[comm].raw());
        cuda.with_context(|| {
            let (ticket, [before, done]) = self.enlist(comm, what.to_owned(), limit)?;
            let deadline = Deadline::after(limit);
            // SAFETY: the event is this value's own, and the caller's stream is live.
            let begun = unsafe { self.api.record(before, from) }
                // SAFETY: event and stream are this value's own.
                .and_then(|()| unsafe { self.api.wait(own, before) })
                // Where this is done, the communicator's stream has come to the transfer.
                // SAFETY: event and stream are this value's own.
                .and_then(|()| unsafe { self.api.record(before, own) })
                .and_then(|()| call(&self.comms[comm], own))
                .and_then(|()| self.comms[comm].settle(what, deadline, || self.failure()))
                // SAFETY: event and stream are this value's own.
                .and_then(|()| unsafe { self.api.record(done, own) });
            let mut state = lock(&self.state);
            let Some(at) = state.pending.iter().position(|pending| pending.ticket == ticket) else {
                return Err(Error::invalid_state("a transfer that was begun is not under way"));
            };
            match begun {
                Ok(()) => {
                    let pending = &mut state.pending[at];
                    (pending.is_put, pending.began) = (true, None);
                    Ok(ticket)
                }
                Err(why) => {
                    state.pending.remove(at);
                    state.spare.extend([before, done]);
                    // The reason of an abort that ended the call.
                    Err(self.failure().unwrap_or(why))
                }
            }
        })
    }

    /// Makes a transfer that is to be put on its stream known to the thread. The device's context must be current.
    fn enlist(
        self: &Arc<Self>,
        comm: usize,
        what: String,
        limit: Duration,
    ) -> Result<(Ticket, [CudaHandle; 2])> {
        let mut state = lock(&self.state);
        let [before, done] = self.events(&mut state)?;
        state.tickets += 1;
        let ticket = Ticket(state.tickets);
        let began = Some(Instant::now());
        let is_put = false;
        state.pending.push(Pending { ticket, comm, before, done, is_put, began, limit, what });
        if !state.is_watched {
            self.watch()?;
            state.is_watched = true;
        }
        self.changed.notify_all();
        Ok((ticket, [before, done]))
    }

    /// Has a stream wait until a transfer has ended.
    pub(super) fn finish(&self, ticket: Ticket, stream: &Stream) -> Result<()> {
        if let Some(why) = self.failure() {
            return Err(why);
        }
        // CUDA may block where a stream's queue is full: the thread that ends transfers must not wait for that.
        let pending = lock(&self.state)
            .pending
            .iter()
            .find(|each| each.ticket == ticket)
            .map(|each| each.done);
        if let Some(done) = pending {
            let cuda = cuda(&self.driver)?;
            let to = cuda.stream_handle(*stream)? as u64;
            // SAFETY: the event is this value's own, and the caller's stream is live. It is recorded again by a later transfer of
            // this thread alone.
            return cuda.with_context(|| unsafe { self.api.wait(to, done) });
        }
        // The thread has seen its end.
        Ok(())
    }

    /// Ends all transfers under way, and the communicators. An error says that NCCL may still use the memory of transfers.
    pub(super) fn abort(&self, why: Error) -> Result<()> {
        self.fail(why);
        let deadline = *self.ends_by.get_or_init(|| Deadline::after(MAX_END));
        self.comms.iter().map(|comm| comm.await_end(deadline)).fold(Ok(()), Result::and)?;
        // NCCL's function may return before its kernels have left the device.
        let mut state = lock(&self.state);
        while in_context(&self.driver, || self.is_any_running(&state))? {
            if deadline.expired() {
                let what = "for the device to leave transfers that were aborted";
                return Err(Error::timeout(what, deadline.budget(), Vec::new()));
            }
            drop(state);
            thread::sleep(LOOK_AGAIN);
            state = lock(&self.state);
        }
        Ok(())
    }

    /// Whether the device still has a transfer under way. The device's context must be current.
    fn is_any_running(&self, state: &State) -> Result<bool> {
        for pending in state.pending.iter().filter(|pending| pending.is_put) {
            // SAFETY: the event is of a transfer that was begun.
            if !unsafe { self.api.is_done(pending.done) }? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Begins to abort both communicators: the rail first, and the other one without a wait for that.
    fn fail(&self, why: Error) {
        if self.failure.set(why).is_ok() {
            self.ends_by.get_or_init(|| Deadline::after(MAX_END));
            self.comms.iter().for_each(OuterComm::begin_abort);
        }
    }

    /// Waits until this rank's transfers have ended or failed, then gives back the communicators.
    pub(super) fn close(&self) {
        let ended = |state: &State| state.pending.is_empty() || self.failure.get().is_some();
        let mut state = lock(&self.state);
        while !ended(&state) {
            // The thread ends transfers that do not end by themselves.
            let waited = self.changed.wait_timeout(state, LOOK_AGAIN);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.is_over = true;
        self.changed.notify_all();
        drop(state);
        self.comms.iter().for_each(|comm| comm.begin_close(MAX_END / 2));
        let deadline = *self.ends_by.get_or_init(|| Deadline::after(MAX_END));
        for comm in &self.comms {
            if let Err(error) = comm.await_end(deadline) {
                tracing::warn!(%error, "at the end of a communicator over hosts");
                return;
            }
        }
        let given_back = in_context(&self.driver, || {
            let mut state = lock(&self.state);
            let pending = std::mem::take(&mut state.pending).into_iter();
            let events = pending.flat_map(|pending| [pending.before, pending.done]);
            for event in events.chain(std::mem::take(&mut state.spare)) {
                // SAFETY: no transfer has the event any more.
                unsafe { self.api.destroy_event(event) };
            }
            for stream in &self.streams {
                // SAFETY: the streams are this value's own, and its communicators have ended.
                unsafe { self.api.destroy_stream(*stream) };
            }
            Ok(())
        });
        if let Err(error) = given_back {
            tracing::debug!(%error, "at the end of a communicator over hosts");
        }
    }

    /// Events for a transfer. The device's context must be current.
    fn events(&self, state: &mut State) -> Result<[CudaHandle; 2]> {
        while state.spare.len() < 2 {
            state.spare.push(self.api.event()?);
        }
        let first = state.spare.len() - 2;
        let found = [state.spare[first], state.spare[first + 1]];
        state.spare.truncate(first);
        Ok(found)
    }

    /// Starts the thread.
    fn watch(self: &Arc<Self>) -> Result<()> {
        let transfers = Arc::clone(self);
        let body = move || transfers.look_until_the_end();
        let thread = thread::Builder::new().name("symmpool-outer".into()).spawn(body);
        thread.map(drop).map_err(|error| {
            Error::system("starting the thread that ends transfers between hosts", error)
        })
    }

    fn look_until_the_end(&self) {
        let mut state = lock(&self.state);
        while !state.is_over {
            let looked = in_context(&self.driver, || self.look(&mut state));
            if let Err(why) = looked {
                self.fail(why);
            }
            state = if state.pending.is_empty() || self.failure.get().is_some() {
                self.changed.notify_all();
                self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
            } else {
                let waited = self.changed.wait_timeout(state, LOOK_AGAIN);
                waited.unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }

    /// Looks at all transfers under way. An error ends them.
    fn look(&self, state: &mut State) -> Result<()> {
        if self.failure.get().is_some() {
            return Ok(());
        }
        for comm in &self.comms {
            comm.look()?;
        }
        let mut ended = Vec::new();
        let mut is_first = vec![true; self.comms.len()];
        for pending in &mut state.pending {
            // SAFETY: the events are those of a transfer under way.
            if pending.is_put && unsafe { self.api.is_done(pending.done) }? {
                ended.push(pending.ticket);
                continue;
            }
            // Those of a communicator run one behind the other.
            if !std::mem::replace(&mut is_first[pending.comm], false) {
                continue;
            }
            let began = match pending.began {
                Some(began) => began,
                // SAFETY: the events are those of a transfer under way.
                None if unsafe { self.api.is_done(pending.before) }? => {
                    *pending.began.insert(Instant::now())
                }
                None => continue,
            };
            if began.elapsed() > pending.limit {
                return Err(Error::timeout(format!("for {}", pending.what), pending.limit, vec![]));
            }
        }
        let (over, rest) = std::mem::take(&mut state.pending)
            .into_iter()
            .partition::<Vec<_>, _>(|pending| ended.contains(&pending.ticket));
        state.pending = rest;
        state.spare.extend(over.into_iter().flat_map(|pending| [pending.before, pending.done]));
        Ok(())
    }
}

/// The CUDA driver of a device.
fn cuda(driver: &Driver) -> Result<&CudaDriver> {
    driver.as_cuda().ok_or_else(|| {
        Error::unsupported(format!(
            "NCCL between hosts for memory of the {} driver: it carries data of GPUs",
            driver.name()
        ))
    })
}

/// Does work with the device's context, also while a graph is captured.
pub(super) fn in_context<T>(driver: &Driver, work: impl FnOnce() -> Result<T>) -> Result<T> {
    cuda(driver)?.with_context_unordered(work)
}
