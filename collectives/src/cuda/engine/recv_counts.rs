//! How many rows a dispatch to experts receives, which the host learns before they have arrived.
//!
//! The leader block of the kernel knows sizes when it has the counts of all ranks, long before many rows are there. It
//! writes them to pinned memory, and then the number of the call. The host looks for that number, so that it can go on,
//! and give the device what follows, while rows are on their way.

use std::sync::atomic::Ordering;

use symmpool_allocator::Result;

use crate::ReceivedSizes;
use crate::call::experts::MAX_EXPERTS;
use crate::cuda::driver::api::Api;
use crate::cuda::driver::pinned_words::Words;

// Which word has what: as in `experts/params.cuh`.
const NUMBER: usize = 0;
const ROWS: usize = 1;
const BY_EXPERT: usize = 2;
const COUNTS: usize = 4;

/// Words in which dispatches of a communicator tell the host how many rows arrive, one dispatch at a time.
pub(in crate::cuda) struct RecvCounts {
    words: Words,
    /// The number of the last call that was asked.
    number: u32,
}

impl RecvCounts {
    /// The device's context must be current.
    pub(in crate::cuda) fn new(api: &Api) -> Result<Self> {
        Ok(Self { words: Words::new(api, COUNTS + MAX_EXPERTS as usize)?, number: 0 })
    }

    /// Where the next call writes sizes, and the number with which it says that it has.
    pub(in crate::cuda) fn next_call(&mut self) -> (u64, u32) {
        self.number = self.number.wrapping_add(1).max(1);
        (self.words.address(0), self.number)
    }

    /// Returns what the call of this number has written, if it has.
    pub(in crate::cuda) fn written(
        &self,
        number: u32,
        local_experts: usize,
    ) -> Option<ReceivedSizes> {
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
        // SAFETY: the caller promised that no kernel runs that was given the words; `self`, through which the host
        // reads them, ends here.
        unsafe { self.words.free(api) };
    }
}
