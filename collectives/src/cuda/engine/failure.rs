//! Why a communicator on devices fails, once it does. Any thread may ask, also while another one is in a call.

#![allow(unsafe_code)] // pinned memory that the device writes

use std::ptr::{NonNull, addr_of};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::Duration;

use symmpool_allocator::{Error, Pool, Result};

use crate::cuda::driver::api::Api;
use crate::cuda::layout::fault::{FaultRecord, HostView};

/// Says whether a rank's process still runs.
pub(crate) type Alive = Box<dyn Fn(u32) -> bool + Send + Sync>;

/// Failures that the device has recorded in pinned host memory or the host has found, and the error that calls return.
pub(crate) struct Failure {
    /// Kernels alone write it; the first of them to fail does so.
    record: NonNull<FaultRecord>,
    /// Whether the record's memory was given back.
    is_freed: AtomicBool,
    /// Record of what the thread that ends streams' waits has found.
    found: OnceLock<FaultRecord>,
    /// Why all calls fail.
    why: OnceLock<Error>,
    /// How many asynchronous errors were returned.
    returned: AtomicU64,
    /// The timeout that the latest kernels were launched with, in nanoseconds; it may have been changed since.
    timeout: AtomicU64,
    rank: u32,
    world: u32,
    alive: Alive,
    /// The name of the communicator, the same on all ranks. Errors need it as they are found in later calls.
    communicator: String,
    /// Whether the device may still use the communicator's memory at its end.
    leaks: AtomicBool,
}

// SAFETY: the record is read as if another thread wrote it, and freed once, when the engine is dropped. Who still has this value
// then reads no record: that it is freed is noted before, and no thread is within a call while the engine is dropped.
unsafe impl Send for Failure {}
// SAFETY: threads read the record as if another thread wrote it, and change only atomics and cells that are written
// once.
unsafe impl Sync for Failure {}

impl Failure {
    /// Makes the state of the communicator whose control block is at `offset` of every slot. The device's context must be
    /// current.
    pub(in crate::cuda) fn new(api: &Api, pool: &Pool, offset: u64, alive: Alive) -> Result<Self> {
        let record = api.pinned(size_of::<FaultRecord>())?.cast();
        let name = format!("pool {:?}, communicator at offset {offset:#x}", pool.group().name());
        Ok(Self::of(record, name, (pool.rank(), pool.world()), alive))
    }

    fn of(
        record: NonNull<FaultRecord>,
        communicator: String,
        (rank, world): (u32, u32),
        alive: Alive,
    ) -> Self {
        Self {
            record,
            is_freed: AtomicBool::new(false),
            found: OnceLock::new(),
            why: OnceLock::new(),
            returned: AtomicU64::new(0),
            timeout: AtomicU64::new(0),
            rank,
            world,
            alive,
            communicator,
            leaks: AtomicBool::new(false),
        }
    }

    /// The record's address, which is the same for the host and, with unified addressing, the device.
    pub(in crate::cuda) fn address(&self) -> u64 {
        self.record.as_ptr() as u64
    }

    /// Notes the timeout of kernels, in nanoseconds. You must call this before you launch them.
    #[inline]
    pub(in crate::cuda) fn note_timeout(&self, nanoseconds: u64) {
        self.timeout.store(nanoseconds, Ordering::Relaxed);
    }

    /// Whether a kernel has failed, or a wait of a stream.
    #[inline]
    pub(in crate::cuda) fn is_recorded(&self) -> bool {
        self.found.get().is_some() || self.is_complete()
    }

    #[inline]
    fn is_complete(&self) -> bool {
        if self.is_freed.load(Ordering::Acquire) {
            return false;
        }
        // SAFETY: the record is mapped until it is freed; only the word's address is taken.
        let word = unsafe { addr_of!((*self.record.as_ptr()).complete) };
        // SAFETY: the record is mapped until it is freed. The device may write the word meanwhile, which a volatile
        // read allows.
        let complete = unsafe { word.read_volatile() };
        complete != 0
    }

    /// Why all calls fail, if they do.
    #[inline]
    pub(crate) fn get(&self) -> Option<&Error> {
        match self.why.get() {
            None if self.is_recorded() => Some(self.why.get_or_init(|| self.recorded())),
            why => why,
        }
    }

    #[cold]
    fn recorded(&self) -> Error {
        let timeout = Duration::from_nanos(self.timeout.load(Ordering::Relaxed));
        let Self { rank, world, .. } = *self;
        let view = HostView { rank, world, timeout, alive: &*self.alive };
        if !self.is_complete()
            && let Some(found) = self.found.get()
        {
            return found.error(&view).context(&self.communicator);
        }
        fence(Ordering::Acquire);
        // SAFETY: complete, so the device writes it no more, but for the asynchronous error, whose copy is not used.
        let record = unsafe { self.record.as_ptr().read_volatile() };
        record.error(&view).context(&self.communicator)
    }

    /// Makes that the reason why all calls fail, unless there is one.
    pub(in crate::cuda) fn set(&self, why: &Error) {
        let _ = self.why.set(why.clone());
    }

    /// Records what the thread that ends streams' waits has found, unless it has found something before.
    pub(in crate::cuda) fn find(&self, found: FaultRecord) {
        let _ = self.found.set(found);
    }

    /// Returns what calls reported without failing since the last time this was asked. While kernels of the
    /// communicator run, what is read may be mixed from two calls.
    pub(in crate::cuda) fn take_async_error(&self) -> Option<Error> {
        fence(Ordering::Acquire);
        // SAFETY: the record is mapped until it is freed, by whoever calls this; only the part's address is taken.
        let part = unsafe { addr_of!((*self.record.as_ptr()).async_error) };
        // SAFETY: the record is mapped until it is freed, by whoever calls this. A volatile read allows for the
        // device's writes.
        let async_error = unsafe { part.read_volatile() };
        let calls = async_error
            .calls
            .wrapping_sub(self.returned.swap(async_error.calls, Ordering::Relaxed));
        (calls > 0).then(|| async_error.error(self.rank, calls).context(&self.communicator))
    }

    /// Says that the device may still use the communicator's memory, which is not given back then.
    pub(in crate::cuda) fn leak(&self) {
        self.leaks.store(true, Ordering::Relaxed);
    }

    /// Whether the communicator's memory must not be given back.
    pub(crate) fn leaks(&self) -> bool {
        self.leaks.load(Ordering::Relaxed)
    }

    /// Frees the record. No kernel that uses it may run, and the context must be current.
    pub(in crate::cuda) fn free(&self, api: &Api) {
        if !self.is_freed.swap(true, Ordering::AcqRel) {
            // SAFETY: `new` made the record by `pinned`, and it is freed once. The caller made sure that no kernel runs
            // that uses it.
            unsafe { api.free_pinned(self.record.cast()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::layout::fault::tests::{async_error, record};

    fn failure(record: &mut FaultRecord) -> Failure {
        let name = "pool \"a\", communicator".to_owned();
        let failure = Failure::of(NonNull::from(record), name, (1, 3), Box::new(|_| true));
        failure.note_timeout(3_000_000_000);
        failure
    }

    #[test]
    fn errors_found_later_name_their_communicator() {
        let mut found = record(true);
        found.async_error = async_error();
        let failure = failure(&mut found);
        assert!(failure.is_recorded());
        let late = failure.get().expect("a timeout").clone();
        let async_error = failure.take_async_error().expect("one");
        assert!(late.is_timeout() && late.ranks() == [2], "{late}");
        assert!(async_error.is_overflow() && failure.take_async_error().is_none(), "{async_error}");
        for error in [late, async_error] {
            assert!(
                error.to_string().starts_with("symmpool: pool \"a\", communicator: "),
                "{error}"
            );
        }
    }

    #[test]
    fn what_is_found_first_stays() {
        let of_rank_0 = || {
            let mut found = record(true);
            found.peer = 0;
            found
        };
        let (mut none, mut device) = (record(false), record(true));
        let failed = failure(&mut none);
        assert!(!failed.is_recorded() && failed.get().is_none());
        failed.set(&Error::invalid_state("the host"));
        failed.find(record(true));
        assert!(failed.get().is_some_and(Error::is_invalid_state));
        // The thread that ends waits, where no kernel has failed.
        let mut none = record(false);
        let waits = failure(&mut none);
        waits.find(of_rank_0());
        waits.find(record(true));
        assert_eq!(waits.get().expect("an error").ranks(), [0]);
        // Both at once: neither writes where the other does.
        let both = failure(&mut device);
        both.find(of_rank_0());
        assert_eq!(both.get().expect("an error").ranks(), [2]);
    }
}
