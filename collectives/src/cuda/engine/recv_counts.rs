//! How many rows a dispatch to experts receives, which the host learns before they have arrived.
//!
//! The leader block of the kernel knows sizes when it has the counts of all ranks, long before many rows are there. It
//! writes them to pinned memory, and then the number of the call. The host looks for that number, so that it can go on,
//! and give the device what follows, while rows are on their way.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use symmpool_allocator::{Error, Result, Stream};

use super::CudaEngine;
use crate::ReceivedSizes;
use crate::cuda::driver::api::Api;
use crate::cuda::driver::pinned_words::Words;
use crate::experts::MOST_EXPERTS;

// Which word has what: as in `experts/work.cuh`.
const NUMBER: usize = 0;
const ROWS: usize = 1;
const BY_EXPERT: usize = 2;
const COUNTS: usize = 4;

/// How often the host looks at the stream, and at the clock, while it waits for sizes.
const LOOK: Duration = Duration::from_micros(100);
/// How many looks at sizes there are to one at the clock.
const LOOKS: u32 = 64;
/// After how long it sleeps between looks: a wait that takes so long is one for work that the stream does before.
const SPINS_FOR: Duration = Duration::from_millis(2);
/// How often it asks whether the wait is to stop, as after Ctrl-C.
const ASK_EVERY: Duration = Duration::from_millis(20);
/// How long it sleeps.
const PAUSE: Duration = Duration::from_micros(20);

/// Where dispatches of a communicator tell the host sizes, one at a time.
pub(in crate::cuda) struct Sizes {
    words: Words,
    /// The number of the last call that was asked.
    number: u32,
}

impl Sizes {
    /// The device's context must be current.
    pub(in crate::cuda) fn new(api: &Api) -> Result<Self> {
        Ok(Self { words: Words::new(api, COUNTS + MOST_EXPERTS as usize)?, number: 0 })
    }

    /// Where the next call writes sizes, and the number with which it says that it has.
    pub(in crate::cuda) fn next_call(&mut self) -> (u64, u32) {
        self.number = self.number.wrapping_add(1).max(1);
        (self.words.address(0), self.number)
    }

    /// What the call of this number has written, if it has.
    fn written(&self, number: u32, local_experts: usize) -> Option<ReceivedSizes> {
        let words = self.words.all();
        if words[NUMBER].load(Ordering::Acquire) != number {
            return None;
        }
        let word = |nth: usize| words[nth].load(Ordering::Relaxed) as usize;
        Some(ReceivedSizes {
            rows: word(ROWS),
            rows_by_expert: word(BY_EXPERT),
            expert_counts: (0..local_experts).map(|expert| word(COUNTS + expert)).collect(),
        })
    }

    /// Frees the memory.
    ///
    /// # Safety
    ///
    /// No kernel runs that was given it, and the device's context is current.
    #[allow(unsafe_code)] // passes on the caller's promise
    pub(in crate::cuda) unsafe fn free(self, api: &Api) {
        // SAFETY: the caller's promise; `self` ends here.
        unsafe { self.words.free(api) };
    }
}

impl CudaEngine {
    /// Waits until the call of this number, on this stream, has written sizes. Returns what it reported besides as an error.
    pub(in crate::cuda) fn await_sizes(
        &mut self,
        number: u32,
        local_experts: u32,
        stream: Stream,
    ) -> Result<ReceivedSizes> {
        let written = |engine: &Self| {
            let sizes = engine.sizes.as_ref()?;
            sizes.written(number, local_experts as usize)
        };
        let since = Instant::now();
        let (mut looks, mut next, mut ask_at) = (0_u32, LOOK, ASK_EVERY);
        let interrupted = self.pool.interrupt();
        loop {
            if let Some(sizes) = written(self) {
                // Counts come from ranks that call something else too. The device has said so by now.
                self.ready()?;
                self.take_notice()?;
                return Ok(sizes);
            }
            looks = looks.wrapping_add(1);
            if !looks.is_multiple_of(LOOKS) {
                std::hint::spin_loop();
                continue;
            }
            let waited = since.elapsed();
            if waited < next {
                continue;
            }
            next = waited + LOOK;
            self.ready()?;
            if waited > ask_at && interrupted.as_ref().is_some_and(|interrupted| interrupted()) {
                return Err(Error::interrupted(format!(
                    "interrupted while rank {} waited for the sizes of a dispatch to experts, which goes on",
                    self.rank()
                )));
            }
            if waited > ask_at {
                ask_at = waited + ASK_EVERY;
            }
            // A kernel that failed, or never ran, tells nothing: the stream says so.
            if self.is_idle(stream)? && written(self).is_none() {
                self.synchronize(stream)?;
                return Err(Error::invalid_state(
                    "a dispatch to experts ended without telling how many rows it received",
                ));
            }
            if waited > SPINS_FOR {
                std::thread::sleep(PAUSE);
            }
        }
    }
}
