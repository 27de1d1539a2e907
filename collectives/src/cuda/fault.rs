//! What a kernel tells the host when a peer is missing or differs (rules S5, S6).

#![allow(unsafe_code)] // pinned memory that the device writes

use std::ffi::c_void;
use std::ptr::{NonNull, addr_of};
use std::time::Duration;

use symmpool_allocator::Error;
use symmpool_allocator::Result;
use symmpool_allocator::driver::CudaDriver;

use super::api::Api;
use crate::host::call::{Call, mismatch_of_two};

/// `Fault` in `comm.cuh`.
#[repr(C)]
pub(super) struct Record {
    complete: u32,
    kind: u32,
    epoch: u32,
    peer: u32,
    phase: u32,
    unused: [u32; 3],
    ours: [u64; 4],
    theirs: [u64; 4],
}

const TIMEOUT: u32 = 1;
const MISMATCH: u32 = 2;
/// Phases from here on are waits on channels: `CHANNEL` in `comm.cuh`.
const CHANNEL: u32 = 16;

/// What the host knows besides.
pub(super) struct Seen<'a> {
    pub(super) rank: u32,
    /// Of collectives.
    pub(super) timeout: Duration,
    /// Whether a rank's process still runs.
    pub(super) alive: &'a dyn Fn(u32) -> bool,
}

impl Record {
    fn error(&self, seen: &Seen<'_>) -> Error {
        let Self { kind, epoch, peer, phase, ours, theirs, .. } = *self;
        let Seen { rank, timeout, alive } = *seen;
        match kind {
            TIMEOUT => {
                let (what, after) = if phase >= CHANNEL {
                    // The details of such a wait: see `CudaEngine::wait`.
                    let what = format!(
                        "waiting for a signal of rank {peer} on channel {} on the device, on rank \
                         {rank} (the number of the signal ends in {epoch}); the communicator is \
                         closed",
                        phase - CHANNEL
                    );
                    (what, Duration::from_nanos(ours[0]))
                } else {
                    let for_what = match phase {
                        0 => "to enter the call",
                        1 => "for its data",
                        2 => "for its results",
                        _ => "to leave the call",
                    };
                    let what = format!(
                        "rank {peer} in collective {epoch} on the device ({for_what}), on rank {rank}"
                    );
                    (what, timeout)
                };
                if alive(peer) {
                    Error::timeout(what, after, vec![peer])
                } else {
                    Error::peer_lost(vec![peer], what)
                }
            }
            MISMATCH => {
                let (ours, theirs) = (Call::from_words(ours), Call::from_words(theirs));
                mismatch_of_two(u64::from(epoch), rank, &ours, peer, &theirs)
            }
            kind => Error::system("reading what a kernel reported", format!("kind {kind}")),
        }
    }
}

/// A record in pinned host memory, one for each communicator.
pub(super) struct Fault(NonNull<Record>);

// SAFETY: the memory belongs to this value alone on the host's side, and is read as if another
// thread wrote it.
unsafe impl Send for Fault {}

impl Fault {
    /// Zeroed. The device's context must be current.
    pub(super) fn new(api: &Api) -> Result<Self> {
        // Visible to every context of the process; mapped into the device's addresses.
        let flags = cudarc::driver::sys::CU_MEMHOSTALLOC_PORTABLE;
        let mut address: *mut c_void = std::ptr::null_mut();
        // SAFETY: writes one pointer through a valid one.
        let code = unsafe { (api.host_alloc)(&raw mut address, size_of::<Record>(), flags) };
        CudaDriver::check(code, || "making pinned memory".to_owned())?;
        let record = NonNull::new(address.cast::<Record>()).ok_or_else(|| {
            Error::system("making pinned memory", "the driver gave a null address")
        })?;
        // SAFETY: the memory is this long, aligned to pages, and nobody else has it yet.
        unsafe { record.write_bytes(0, 1) };
        Ok(Self(record))
    }

    /// The address, which is the same for the host and, with unified addressing, the device.
    pub(super) fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    /// Whether something went wrong.
    #[inline]
    pub(super) fn is_set(&self) -> bool {
        // SAFETY: the record is mapped while `self` lives; only the word's address is taken.
        let word = unsafe { addr_of!((*self.0.as_ptr()).complete) };
        // SAFETY: as above; the device may write the word meanwhile, which a volatile read allows.
        let complete = unsafe { word.read_volatile() };
        complete != 0
    }

    /// What went wrong, as an error of this rank.
    pub(super) fn error(&self, seen: &Seen<'_>) -> Error {
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        // SAFETY: complete, so the device writes it no more.
        let record = unsafe { self.0.as_ptr().read_volatile() };
        record.error(seen)
    }

    /// Gives the memory back; nothing may run that knows of it. The context must be current.
    pub(super) fn free(self, api: &Api) {
        // SAFETY: made by `host_alloc`, and given up here.
        let code = unsafe { (api.host_free)(self.0.as_ptr().cast()) };
        if let Err(error) = CudaDriver::check(code, || "freeing pinned memory".to_owned()) {
            tracing::debug!(%error, "at the end of a communicator");
        }
    }
}

pub(super) const RECORD_BYTES: usize = size_of::<Record>();

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::call::Operation;

    fn record(kind: u32, phase: u32) -> Record {
        let (ours, theirs) = (Call::new(Operation::Barrier), Call::new(Operation::AllReduce));
        Record {
            complete: 1,
            kind,
            epoch: 7,
            peer: 2,
            phase,
            unused: [0; 3],
            ours: *ours.words(),
            theirs: *theirs.words(),
        }
    }

    #[test]
    fn records_become_the_errors_that_the_host_has_too() {
        // S5, S6
        let timeout = Duration::from_secs(3);
        let there = Seen { rank: 1, timeout, alive: &|_| true };
        let gone = Seen { rank: 1, timeout, alive: &|rank| rank != 2 };
        for phase in [0, 1, CHANNEL + 5] {
            let late = record(TIMEOUT, phase).error(&there);
            assert!(late.is_timeout() && late.ranks() == [2], "{late}");
            let lost = record(TIMEOUT, phase).error(&gone);
            assert!(lost.is_peer_lost() && lost.ranks() == [2], "{lost}");
        }
        let differs = record(MISMATCH, 0).error(&gone);
        assert!(differs.is_diverged(), "{differs}");
        assert!(differs.to_string().contains("rank 1: barrier"), "{differs}");
        let unknown = record(9, 0).error(&there);
        assert!(unknown.to_string().contains("kind 9"), "{unknown}");
    }
}
