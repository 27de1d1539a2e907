//! Records of calls on devices, by which hosts compare them.
//!
//! On devices calls are work on streams, and the host does not wait for other hosts. So they are compared behind their backs:
//! every rank gathers the records of all ranks, on the call's stream in front of its data, and the host looks
//! at them when it makes its next call, or synchronises. A record has the call's number and description, and a digest of all
//! calls before. Calls of 64 KiB or more have a record each, and one call in [`INTERVAL`] of the others. Different calls end
//! the communicator on all ranks. Inside a host the engine's handshakes compare calls, too.

#![allow(unsafe_code)] // hands staging and pinned memory to the engines

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use symmpool_allocator::{Driver, Result, Stream};

use super::staging::{RECORD_BYTES, StagingPart};
use crate::call::CallDescription;
use crate::cuda::{CudaApi, CudaHandle, PinnedWords, cuda};
use crate::outer::Ticket;
use crate::signal::DESCRIPTION_WORDS;

/// Bytes of a call from which on it has a record of its own.
const RECORDED_BYTES: u64 = 64 << 10;
/// Calls among which one has a record, where they are smaller.
const INTERVAL: u64 = 16;
/// Words of 32 bits of a record.
const WORDS: usize = RECORD_BYTES / 4;
/// Records that may be on their way at once.
const DEPTH: usize = 64;

const _: () = assert!(8 * (2 + DESCRIPTION_WORDS) <= RECORD_BYTES);

/// A call as hosts compare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallRecord {
    pub(super) number: u64,
    /// Digest of all calls before it.
    before: u64,
    pub(super) call: CallDescription,
}

/// A record on its way.
struct PendingRecord {
    record: CallRecord,
    slot: usize,
    /// An event behind it on the stream.
    arrived: CudaHandle,
}

/// A record whose gathering was begun, in front of the call's data.
#[derive(Clone, Copy)]
pub(super) struct BegunRecord {
    pub(super) record: CallRecord,
    pub(super) slot: usize,
    pub(super) ticket: Ticket,
}

/// Records of other ranks, by rank.
pub(super) type OtherRecords = Vec<(u32, CallRecord)>;

/// Records of the calls so far.
pub(super) struct CallRecords {
    driver: Driver,
    api: &'static CudaApi,
    /// Pinned memory, of which each slot has this rank's record and those of all ranks.
    pinned: PinnedWords,
    /// Staging for them, once: streams keep calls in order.
    pub(super) own: StagingPart,
    pub(super) all: StagingPart,
    pub(super) world: usize,
    /// Calls so far, and their digest.
    number: u64,
    digest: u64,
    /// Records so far.
    records: u64,
    pending: VecDeque<PendingRecord>,
    spare: Vec<CudaHandle>,
}

// SAFETY: the parts of staging are addresses of windows that outlive the value, and no other value uses them.
unsafe impl Send for CallRecords {}

impl CallRecords {
    pub(super) fn new(
        driver: &Driver,
        world: usize,
        (own, all): (StagingPart, StagingPart),
    ) -> Result<Self> {
        let api = CudaApi::get()?;
        let words = DEPTH * (1 + world) * WORDS;
        let pinned = cuda(driver)?.with_context_unordered(|| PinnedWords::new(api, words))?;
        Ok(Self {
            driver: driver.clone(),
            api,
            pinned,
            own,
            all,
            world,
            number: 0,
            digest: 0,
            records: 0,
            pending: VecDeque::new(),
            spare: Vec::new(),
        })
    }

    /// Counts a call. Returns its record, if it has one.
    pub(super) fn count(&mut self, call: CallDescription, bytes: u64) -> Option<CallRecord> {
        self.number += 1;
        let record = CallRecord { number: self.number, before: self.digest, call };
        // Digests have 32 bits: two, with different salts.
        let (first, second) = (call.digest(self.digest), call.digest(!self.digest));
        self.digest = u64::from(first) << 32 | u64::from(second);
        (bytes >= RECORDED_BYTES || self.number % INTERVAL == 1).then_some(record)
    }

    /// Pinned words of a slot: of this rank's record, or from that of a rank on.
    fn word(&self, slot: usize, rank: Option<usize>) -> usize {
        (slot * (1 + self.world) + rank.map_or(0, |rank| 1 + rank)) * WORDS
    }

    fn write(&self, slot: usize, record: &CallRecord) {
        let numbers = [record.number, record.before];
        let words = numbers.iter().chain(record.call.words());
        let halves = words.flat_map(|word| [*word as u32, (*word >> 32) as u32]);
        let begin = self.word(slot, None);
        for (place, half) in self.pinned.all()[begin..].iter().zip(halves) {
            place.store(half, Ordering::Relaxed);
        }
    }

    fn read(&self, slot: usize, rank: usize) -> CallRecord {
        let words = &self.pinned.all()[self.word(slot, Some(rank))..][..WORDS];
        let word = |nth: usize| {
            let half = |at: usize| u64::from(words[at].load(Ordering::Relaxed));
            half(2 * nth) | half(2 * nth + 1) << 32
        };
        let call = CallDescription::from_words(std::array::from_fn(|nth| word(2 + nth)));
        CallRecord { number: word(0), before: word(1), call }
    }

    /// Whether as many records are on their way as there is room for.
    pub(super) fn is_full(&self) -> bool {
        self.pending.len() == DEPTH
    }

    /// Writes a record to pinned memory, in a slot that no record on its way has. Returns the slot, and where the record is.
    pub(super) fn put(&mut self, record: &CallRecord) -> (usize, *const u8) {
        let slot = (self.records % DEPTH as u64) as usize;
        self.records += 1;
        self.write(slot, record);
        let address = self.pinned.address(self.word(slot, None));
        (slot, std::ptr::with_exposed_provenance(address as usize))
    }

    /// Pinned memory for the gathered records of a slot.
    pub(super) fn room(&self, slot: usize) -> *mut u8 {
        let address = self.pinned.address(self.word(slot, Some(0)));
        std::ptr::with_exposed_provenance_mut(address as usize)
    }

    /// Notes that a record arrives in its slot when the stream has done what it was given.
    pub(super) fn await_arrival(
        &mut self,
        (record, slot): (CallRecord, usize),
        stream: &Stream,
    ) -> Result<()> {
        let (api, driver) = (self.api, cuda(&self.driver)?);
        let raw = driver.stream_handle(*stream)? as u64;
        let spare = self.spare.pop();
        let arrived = driver.with_context(|| {
            let event = spare.map_or_else(|| api.event(), Ok)?;
            // SAFETY: the event is this value's own, and the caller's stream is live.
            unsafe { api.record(event, raw) }?;
            Ok(event)
        })?;
        self.pending.push_back(PendingRecord { record, slot, arrived });
        Ok(())
    }

    /// Takes the first record on its way, if it has arrived, with those of other ranks that differ from it.
    pub(super) fn take_arrived(&mut self) -> Result<Option<(CallRecord, OtherRecords)>> {
        let Some(first) = self.pending.front() else { return Ok(None) };
        let event = first.arrived;
        // SAFETY: the event is this value's own, and was recorded.
        let is_done = || unsafe { self.api.is_done(event) };
        if !cuda(&self.driver)?.with_context_unordered(is_done)? {
            return Ok(None);
        }
        let Some(PendingRecord { record, slot, arrived }) = self.pending.pop_front() else {
            return Ok(None);
        };
        self.spare.push(arrived);
        let all = (0_u32..).zip((0..self.world).map(|rank| self.read(slot, rank)));
        Ok(Some((record, all.filter(|(_, other)| *other != record).collect())))
    }

    /// Gives back what the value has of the device. You must call this when no work of it is under way.
    pub(super) fn end(&mut self) {
        let Ok(driver) = cuda(&self.driver) else { return };
        let pending = std::mem::take(&mut self.pending).into_iter().map(|pending| pending.arrived);
        let events: Vec<CudaHandle> = pending.chain(std::mem::take(&mut self.spare)).collect();
        let ended = driver.with_context_unordered(|| {
            // SAFETY: the events are this value's own, and nothing waits for them.
            events.iter().for_each(|event| unsafe { self.api.destroy_event(*event) });
            // SAFETY: the device has done all copies to and from the words, and `self` ends here.
            unsafe { self.pinned.free(self.api) };
            Ok(())
        });
        if let Err(error) = ended {
            tracing::debug!(%error, "at the end of a communicator over hosts");
        }
    }
}
