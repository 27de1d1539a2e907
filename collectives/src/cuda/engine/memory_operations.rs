//! Signals and waits that take no SM: stream memory operations.
//!
//! A stream that waits for a value in memory occupies no SM, so matrix products beside it lose none. Flags lie in the
//! control blocks: for each peer and channel a word that says whether the peer has signalled, and one that says whether the
//! peer still has to take this rank's last signal. A signal is a write into the peer's memory. The driver puts a memory
//! fence before it, so it comes behind all that the stream has written. (A copy of a word by a copy engine would come behind
//! what other streams have given that engine too.) A wait resets its flag when it has found it, so graphs replay. A channel
//! holds one signal, therefore: the next one waits until the last one was taken.
//!
//! The driver's waits have no end, so a thread watches them (rule S5). A stream writes to a word in pinned memory before
//! it waits, and clears it afterwards. The thread looks at these words 20 times a second. It records a failure in two cases: a
//! wait took longer than its timeout, or the awaited peer has departed. To see the second, it copies what peers have left in
//! this rank's control block while any stream waits. Once the communicator has failed, it writes the awaited values of all
//! waits itself, again and again, so that streams go on; kernels of the communicator do nothing from then on.

#![allow(unsafe_code)] // driver calls on raw addresses, and pinned memory that streams write

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Error, Pool, Result, Stream};

use super::failure::Failure;
use crate::cuda::driver::api::{Api, CudaHandle, cuda};
use crate::cuda::driver::pinned_words::Words;
use crate::cuda::layout::fault::FaultRecord;
use crate::cuda::layout::memory_channels::{MEMORY_CHANNELS, MemoryFlag, MemoryFlags};
use crate::cuda::layout::params::{ControlLayout, DEPARTURE, FAILED_ON_HOST, LOCAL_FAILED};

/// How often the thread looks at waits.
const LOOK: Duration = Duration::from_millis(50);
/// How often it ends all waits of a communicator that has failed.
const DRAIN: Duration = Duration::from_micros(50);
/// How long it does so after it saw the last wait: streams may have many of them still to come.
const DRAINS_FOR: Duration = Duration::from_secs(1);
/// Words of a departure.
const DEPARTURE_WORDS: usize = DEPARTURE as usize / 4;
/// Most operations of a batch, below the driver's bound of 256.
const MAX_OPS: usize = 128;

/// Word of a stream that does not wait: the stream writes it after a wait.
const IDLE: u32 = 0;
/// Word that a stream writes before it waits.
const WAITS: u32 = 1;
/// Word that the thread makes of `WAITS` when it has looked at the wait, so that it tells one wait from the next.
const SEEN: u32 = 2;

/// Whether the process ends. Held while a thread looks at waits.
static PROCESS_ENDS: Mutex<bool> = Mutex::new(false);

/// Ends the threads that watch streams' waits for peers, in all communicators. A process that ends while it has communicators
/// must call this: the driver then takes away the pinned memory that these threads read. Waits that come afterwards have no end
/// of their own.
pub fn end_watching() {
    *PROCESS_ENDS.lock().unwrap_or_else(PoisonError::into_inner) = true;
}

/// One operation of a batch.
#[derive(Clone, Copy, Debug)]
enum MemoryOp {
    Write(u64, u32),
    WaitEqual(u64, u32),
}

impl MemoryOp {
    fn params(self) -> sys::CUstreamBatchMemOpParams {
        use sys::CUstreamBatchMemOpType_enum as Kind;
        // Bytes that no member has are zero, also the space between members: each is written alone.
        let mut params = sys::CUstreamBatchMemOpParams { pad: [0; 6] };
        match self {
            Self::Write(address, value) => {
                params.writeValue.operation = Kind::CU_STREAM_MEM_OP_WRITE_VALUE_32;
                params.writeValue.address = address;
                params.writeValue.__bindgen_anon_1.value64 = value.into();
            }
            Self::WaitEqual(address, value) => {
                params.waitValue.operation = Kind::CU_STREAM_MEM_OP_WAIT_VALUE_32;
                params.waitValue.address = address;
                params.waitValue.__bindgen_anon_1.value64 = value.into();
                params.waitValue.flags =
                    sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_EQ as u32;
            }
        }
        params
    }
}

/// Puts memory operations on a stream. The device's context must be current.
///
/// # Safety
///
/// You must pass addresses of 32-bit words that the device can access until it is done with the operations, and that nothing
/// else than such operations, atomics and kernels of the communicator accesses meanwhile. The stream must be live.
unsafe fn put(api: &Api, ops: &[MemoryOp], stream: Stream) -> Result<()> {
    let mut all: Vec<_> = ops.iter().map(|op| op.params()).collect();
    // SAFETY: the array is as long. The caller promised that its addresses are words that stay, and a live stream.
    let code = unsafe {
        (api.batch_mem_op)(stream.raw() as CudaHandle, all.len() as u32, all.as_mut_ptr(), 0)
    };
    CudaDriver::check(code, || format!("putting {} memory operations on a stream", all.len()))
}

/// State that the thread and the engine share.
struct Shared {
    pool: Pool,
    api: &'static Api,
    flags: MemoryFlags,
    /// This rank's address of its control block.
    control: u64,
    /// A word for each wait, which streams write before and after it. Behind them lie the number of the last batch of the
    /// thread's that the device has done, and the last copy of the departures of all ranks.
    words: Words,
    /// Where the departures lie in this rank's control block.
    departures: u64,
    /// How long each wait may take, in nanoseconds; `u64::MAX` where there was none yet.
    timeouts: Vec<AtomicU64>,
    failure: Arc<Failure>,
    /// Stream of what the thread writes.
    stream: Stream,
    ends: Mutex<bool>,
    changed: Condvar,
}

/// The memory operations of an engine.
pub(in crate::cuda) struct MemoryOperations {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Returns the number of the wait for this flag of a peer's channel.
fn nth(peer: u32, channel: u32, flag: MemoryFlag) -> usize {
    ((peer * MEMORY_CHANNELS + channel) * 2 + u32::from(flag == MemoryFlag::Untaken)) as usize
}

/// Returns the peer, the channel and the flag that the wait of that number is for.
fn wait_of(nth: usize) -> (u32, u32, MemoryFlag) {
    let pair = nth as u32 / 2;
    let flag = if nth.is_multiple_of(2) { MemoryFlag::Arrived } else { MemoryFlag::Untaken };
    (pair / MEMORY_CHANNELS, pair % MEMORY_CHANNELS, flag)
}

impl MemoryOperations {
    /// Makes the memory operations of a control block at `control`. The device's context must be current.
    ///
    /// # Safety
    ///
    /// You must pass the address of this rank's control block of that layout, which is a window at one offset on all ranks
    /// until the value was freed, or for ever.
    pub(in crate::cuda) unsafe fn new(
        api: &'static Api,
        pool: &Pool,
        (places, control): (&ControlLayout, u64),
        failure: Arc<Failure>,
    ) -> Result<Self> {
        let count = (pool.world() * MEMORY_CHANNELS * 2) as usize;
        let shared = Shared {
            pool: pool.clone(),
            api,
            flags: places.memory_flags(pool.world()),
            control,
            words: Words::new(api, count + 2 + DEPARTURE_WORDS * pool.world() as usize)?,
            departures: control + places.departure_of(pool.world(), 0),
            timeouts: (0..count).map(|_| AtomicU64::new(u64::MAX)).collect(),
            failure,
            stream: api.stream()?,
            ends: Mutex::new(false),
            changed: Condvar::new(),
        };
        Ok(Self { shared: Arc::new(shared), thread: None })
    }

    /// Makes the stream wait for the peer's next signal, and take it; for `timeout` nanoseconds at most. With
    /// `acknowledge` the peer learns of it, which its next signal waits for.
    pub(in crate::cuda) fn wait(
        &mut self,
        (peer, channel): (u32, u32),
        timeout: u64,
        acknowledge: bool,
        stream: Stream,
    ) -> Result<()> {
        self.watch()?;
        let shared = &*self.shared;
        let arrived = shared.own(peer, channel, MemoryFlag::Arrived);
        shared.put_wait(
            (peer, channel, MemoryFlag::Arrived),
            &[MemoryOp::WaitEqual(arrived, 1), MemoryOp::Write(arrived, 0)],
            timeout,
            stream,
        )?;
        if acknowledge {
            // SAFETY: the word is a flag of the peer's control block, which stays as long as this rank's (`new`).
            unsafe {
                shared.put(&[shared.write_at((peer, channel, MemoryFlag::Untaken), 0)], stream)
            }?;
        }
        Ok(())
    }

    /// Signals the peer behind what the stream was given before. With `acknowledged` that waits until the peer has
    /// taken the last signal on this channel; else the caller knows that it has.
    pub(in crate::cuda) fn signal(
        &mut self,
        (peer, channel): (u32, u32),
        timeout: u64,
        acknowledged: bool,
        stream: Stream,
    ) -> Result<()> {
        if acknowledged {
            self.watch()?;
        }
        let shared = &*self.shared;
        if acknowledged {
            let untaken = shared.own(peer, channel, MemoryFlag::Untaken);
            let ops = [MemoryOp::WaitEqual(untaken, 0), MemoryOp::Write(untaken, 1)];
            shared.put_wait((peer, channel, MemoryFlag::Untaken), &ops, timeout, stream)?;
        }
        // SAFETY: the word is a flag of the peer's control block, which stays as long as this rank's (`new`).
        unsafe { shared.put(&[shared.write_at((peer, channel, MemoryFlag::Arrived), 1)], stream) }
    }

    /// Makes the stream write 1 to a word of this rank's, and then wait until another has a value, and set it back to 0. Only
    /// work of this rank that is sure to end may write the value: nobody ends this wait. In one batch, as each delays what
    /// comes behind it by microseconds.
    ///
    /// # Safety
    ///
    /// You must pass addresses of words of this rank's windows that stay until the device is done, and which only kernels of
    /// the communicator and these operations access meanwhile.
    pub(in crate::cuda) unsafe fn write_and_await_own(
        &self,
        written: Option<u64>,
        awaited: Option<(u64, u32)>,
        stream: Stream,
    ) -> Result<()> {
        let write = written.map(|word| MemoryOp::Write(word, 1));
        let wait = awaited
            .map(|(word, value)| [MemoryOp::WaitEqual(word, value), MemoryOp::Write(word, 0)]);
        let ops: Vec<MemoryOp> = write.into_iter().chain(wait.into_iter().flatten()).collect();
        // SAFETY: the caller promised words that stay, and a `Stream` is live.
        unsafe { self.shared.put(&ops, stream) }
    }

    /// Starts the thread that ends waits, when there is a first one.
    fn watch(&mut self) -> Result<()> {
        if self.thread.is_some() {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        let builder = std::thread::Builder::new().name("symmpool-waits".to_owned());
        let thread = builder.spawn(move || shared.look_until_the_end());
        self.thread = Some(thread.map_err(|error| {
            Error::system("starting the thread that ends waits", error.to_string())
        })?);
        Ok(())
    }

    /// Ends the thread, if there is one, and says so: its last writes may still be on the way to the device then. You
    /// must call it when nothing waits on the device any more.
    pub(in crate::cuda) fn end(&mut self) -> bool {
        *self.shared.ends.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.shared.changed.notify_all();
        let Some(thread) = self.thread.take() else { return false };
        if thread.join().is_err() {
            tracing::warn!("the thread that ends waits has panicked");
        }
        true
    }

    /// Gives back the stream and the pinned memory. The device's context must be current.
    ///
    /// # Safety
    ///
    /// You must have called [`Self::end`], the device must have done what was put on streams, and you must use the value no more.
    pub(in crate::cuda) unsafe fn free(&self) {
        let shared = &self.shared;
        let stream = shared.stream.raw() as CudaHandle;
        // SAFETY: `new` made the stream, and the caller promised that nothing uses it any more.
        let code = unsafe { (shared.api.stream_destroy)(stream) };
        if let Err(error) = CudaDriver::check(code, || "giving back memory operations".into()) {
            tracing::debug!(%error, "at the end of a communicator");
        }
        // SAFETY: the caller promised that the thread has ended, and that nothing runs on the device that uses the words.
        unsafe { shared.words.free(shared.api) };
    }
}

impl Shared {
    /// This rank's address of its own flag.
    fn own(&self, peer: u32, channel: u32, flag: MemoryFlag) -> u64 {
        self.control + self.flags.at(peer, channel, flag)
    }

    /// A write to the flag that a peer has for this rank.
    fn write_at(&self, (peer, channel, flag): (u32, u32, MemoryFlag), value: u32) -> MemoryOp {
        let layout = self.pool.layout();
        let control = self.control - layout.address(layout.rank, 0);
        let at = control + self.flags.at(layout.rank, channel, flag);
        MemoryOp::Write(layout.address(peer, at), value)
    }

    /// # Safety
    ///
    /// You must keep the promises of [`put`].
    unsafe fn put(&self, ops: &[MemoryOp], stream: Stream) -> Result<()> {
        // SAFETY: the caller promised words that stay, and a live stream.
        cuda(self.pool.driver())?.with_context(|| unsafe { put(self.api, ops, stream) })
    }

    /// Puts a wait on a stream: for the flag of a peer's channel, by operations on that flag of this rank.
    fn put_wait(
        &self,
        (peer, channel, flag): (u32, u32, MemoryFlag),
        ops: &[MemoryOp; 2],
        timeout: u64,
        stream: Stream,
    ) -> Result<()> {
        let nth = nth(peer, channel, flag);
        self.timeouts[nth].store(timeout.min(u64::MAX - 1), Ordering::Relaxed);
        let word = self.words.address(nth);
        let all = [MemoryOp::Write(word, WAITS), ops[0], ops[1], MemoryOp::Write(word, IDLE)];
        // SAFETY: both words stay until the device is done: that of pinned memory, which the value keeps until `free`, and a
        // flag of this rank's control block (`new`).
        unsafe { self.put(&all, stream) }
    }

    fn look_until_the_end(&self) {
        let mut since: Vec<Option<Instant>> = vec![None; self.timeouts.len()];
        let mut departed: Vec<Option<Instant>> = vec![None; self.pool.world() as usize];
        let mut batch = 0;
        let mut drains_until: Option<Instant> = None;
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        while !*ends {
            let drains = drains_until.is_some_and(|end| Instant::now() < end);
            let waited = self.changed.wait_timeout(ends, if drains { DRAIN } else { LOOK });
            ends = waited.unwrap_or_else(PoisonError::into_inner).0;
            let process_ends = PROCESS_ENDS.lock().unwrap_or_else(PoisonError::into_inner);
            if *process_ends {
                return;
            }
            let looked = self.look(&mut since).and_then(|waits| {
                if waits && !self.failure.is_recorded() {
                    self.look_for_departures(&since, &mut departed)?;
                }
                Ok(waits)
            });
            let ended = looked.and_then(|waits| {
                if waits && self.failure.is_recorded() {
                    drains_until = Some(Instant::now() + DRAINS_FOR);
                }
                if drains_until.is_some() { self.end_waits(&mut batch) } else { Ok(()) }
            });
            if let Err(error) = ended {
                tracing::warn!(%error, "a stream's wait for a peer could not be ended");
            }
        }
    }

    /// Records a failure if a wait takes too long. Returns whether any stream waits.
    fn look(&self, since: &mut [Option<Instant>]) -> Result<bool> {
        let mut waits = false;
        for (nth, word) in self.words.all().iter().take(self.timeouts.len()).enumerate() {
            if word.compare_exchange(WAITS, SEEN, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                since[nth] = Some(Instant::now());
            }
            let Some(begin) = since[nth] else { continue };
            if word.load(Ordering::Relaxed) == IDLE {
                since[nth] = None;
                continue;
            }
            waits = true;
            let timeout = Duration::from_nanos(self.timeouts[nth].load(Ordering::Relaxed));
            if begin.elapsed() > timeout && !self.failure.is_recorded() {
                let (peer, channel, flag) = wait_of(nth);
                let untaken = flag == MemoryFlag::Untaken;
                self.failure.find(FaultRecord::missing((peer, channel), untaken, timeout));
            }
        }
        Ok(waits)
    }

    /// Records a failure if a stream waits for a peer that has departed, and has waited since that was seen: what the peer had
    /// signalled before has arrived then.
    fn look_for_departures(
        &self,
        since: &[Option<Instant>],
        departed: &mut [Option<Instant>],
    ) -> Result<()> {
        let first = self.timeouts.len() + 2;
        let words = &self.words.all()[first..];
        let half = |peer: usize, nth: usize| {
            u64::from(words[DEPARTURE_WORDS * peer + nth].load(Ordering::Acquire))
        };
        let word = |peer: usize, nth: usize| half(peer, 2 * nth) | half(peer, 2 * nth + 1) << 32;
        for (peer, seen) in departed.iter_mut().enumerate() {
            if seen.is_none() && word(peer, 0) != 0 {
                *seen = Some(Instant::now());
                continue;
            }
            let Some(seen) = *seen else { continue };
            let missed = since.iter().enumerate().find(|(nth, begin)| {
                begin.is_some_and(|begin| begin < seen) && wait_of(*nth).0 == peer as u32
            });
            if let Some((nth, _)) = missed {
                let (_, channel, _) = wait_of(nth);
                let why = [1, 2, 3].map(|nth| word(peer, nth));
                self.failure.find(FaultRecord::departed((peer as u32, channel), why));
                return Ok(());
            }
        }
        let (api, stream, bytes) = (self.api, self.stream, 4 * words.len());
        cuda(self.pool.driver())?.with_context_unordered(|| {
            // A device whose streams share a queue may not come to the last copy while one of them waits.
            if !api.is_idle(stream)? {
                return Ok(());
            }
            let to = self.words.address(first);
            // SAFETY: the departures of all ranks are as long, as are the words; both stay until the thread has ended and
            // the device is done. The stream is live.
            let code =
                unsafe { (api.copy)(to, self.departures, bytes, stream.raw() as CudaHandle) };
            CudaDriver::check(code, || "looking whether peers have failed".to_owned())
        })
    }

    /// Has all streams go on that wait, or come to a wait next: writes the awaited value of every flag that was ever
    /// waited for. The communicator has failed, so no flag means anything any more. Does nothing while the last `batch` of
    /// such writes is under way: a device whose streams share a queue may not come to it.
    fn end_waits(&self, batch: &mut u32) -> Result<()> {
        let last = self.timeouts.len();
        if self.words.all()[last].load(Ordering::Relaxed) != *batch {
            return Ok(());
        }
        *batch = batch.wrapping_add(1);
        let used = self.timeouts.iter().enumerate();
        let used = used.filter(|(_, timeout)| timeout.load(Ordering::Relaxed) != u64::MAX);
        let writes = used.map(|(nth, _)| {
            let (peer, channel, flag) = wait_of(nth);
            MemoryOp::Write(self.own(peer, channel, flag), u32::from(flag == MemoryFlag::Arrived))
        });
        let failed = MemoryOp::Write(self.control + LOCAL_FAILED, FAILED_ON_HOST);
        let done = MemoryOp::Write(self.words.address(last), *batch);
        let ops: Vec<MemoryOp> = std::iter::once(failed).chain(writes).chain([done]).collect();
        let driver = cuda(self.pool.driver())?;
        driver.with_context_unordered(|| {
            // SAFETY: the words are flags of this rank's control block and a word of pinned memory, which stay until the thread
            // has ended; so does the stream.
            ops.chunks(MAX_OPS).try_for_each(|some| unsafe { put(self.api, some, self.stream) })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn flags_do_not_overlap_and_fit() {
        let flags = MemoryFlags::new(64);
        let mut seen = Vec::new();
        for peer in 0..8 {
            for channel in 0..MEMORY_CHANNELS {
                seen.extend(
                    [MemoryFlag::Arrived, MemoryFlag::Untaken]
                        .map(|flag| flags.at(peer, channel, flag)),
                );
            }
        }
        assert!(seen.iter().all(|at| (64..64 + MemoryFlags::bytes(8)).contains(at)));
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), count);
    }

    #[test]
    fn operations_are_laid_out_as_the_driver_reads_them() {
        for (op, words) in [
            (MemoryOp::Write(0x1234_5678_9abc, 7), [2_u64, 0x1234_5678_9abc, 7, 0]),
            (MemoryOp::WaitEqual(0x10, 1), [1, 0x10, 1, 1]),
        ] {
            let params = op.params();
            // SAFETY: every bit pattern of the union is one of these numbers.
            let found = unsafe { params.pad };
            assert_eq!(found, [words[0], words[1], words[2], words[3], 0, 0], "{op:?}");
        }
        assert_eq!(
            offset_of!(sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st, flags),
            24
        );
    }
}
