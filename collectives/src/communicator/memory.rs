//! Memory that a communicator holds, and where its time has gone.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::Communicator;
use super::engine::AnyEngine;
use crate::cuda::{communicator_bytes, growing_bytes};
use crate::{CommunicatorMemory, PhaseTimes};

impl CommunicatorMemory {
    /// Bytes that a communicator of several ranks takes of a device at most where its options leave it open: the first one
    /// of a process, and each further one. The environment may say so (`SYMMPOOL_DEVICE_MEMORY`).
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` if the environment's value is none.
    pub fn by_default() -> symmpool_allocator::Result<[u64; 2]> {
        Ok([communicator_bytes(true)?, communicator_bytes(false)?])
    }

    /// Bytes that a communicator whose memory [grows](super::CommunicatorOptions::device_memory_grows) takes of a device at
    /// most where its options leave it open: before and after its first large call. `None` where the environment says how
    /// much it is, as then it does not grow.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::by_default`].
    pub fn growing() -> symmpool_allocator::Result<Option<[u64; 2]>> {
        growing_bytes()
    }
}

impl Communicator {
    /// Memory that this communicator holds now. Talks to nobody and waits for no call.
    pub fn memory(&self) -> CommunicatorMemory {
        *self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time of this rank's calls by phase, where the ranks are on several hosts; `None` on one host, whose calls have no such
    /// phases. Waits for calls under way of other threads, and talks to nobody.
    pub fn phase_times(&self) -> Option<PhaseTimes> {
        match &self.lock().engine {
            AnyEngine::Spanning(spanning) => Some(spanning.phase_times()),
            AnyEngine::Host(_) | AnyEngine::Cuda(_) => None,
        }
    }

    /// Whether a device had no room for the memory of large calls since this was asked last: [`memory`](Self::memory) then says
    /// how much is [`wanted`](CommunicatorMemory::wanted). For programs that tell their users.
    #[inline]
    pub fn take_shortage(&self) -> bool {
        // Most often there is none, and that costs a load.
        self.shortage.load(Ordering::Relaxed) && self.shortage.swap(false, Ordering::Relaxed)
    }

    /// Notes that a device had no room.
    pub(super) fn note_shortage(&self) {
        self.shortage.store(true, Ordering::Relaxed);
    }

    /// Sets what the communicator holds from now on.
    pub(super) fn set_memory(&self, memory: CommunicatorMemory) {
        *self.memory.lock().unwrap_or_else(PoisonError::into_inner) = memory;
    }
}
