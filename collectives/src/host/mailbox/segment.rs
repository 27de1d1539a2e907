//! Memory through which one rank sends to another, made by the sender and mapped by both.
//!
//! It holds two queues, each with one writer and one reader: a ring of *entries* (small messages, and what the ranks
//! say about large ones), and a ring of the bytes of large messages, which the receiver has asked for.
//!
//! A writer fills a part of a ring, then stores its count of bytes written with release; the reader loads that with
//! acquire, and stores its count of bytes read when it is done with them.

#![allow(unsafe_code)] // views of shared memory

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use symmpool_allocator::{Error, Result};

use crate::signal::{Atomics, Native, Word};
use crate::sync::{mutant, weakened};

/// Bytes of the ring of entries, and of the ring of large messages.
const ENTRIES: u64 = 1 << 20;
const BULK: u64 = 1 << 18;
/// Where the rings begin: behind the counts.
const RINGS: u64 = 4096;
const BYTES: u64 = RINGS + ENTRIES + BULK;
/// A receiver sees the first part of a large message when so much of it is there.
const CHUNK: u64 = 1 << 16;
/// Entries lie at multiples of this, and begin with a header of this length.
pub(super) const HEADER: u64 = 64;

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryKind {
    /// A message whose bytes follow.
    Whole = 1,
    /// A message whose bytes come when the receiver asks for them.
    Offer,
    /// The receiver asks for the bytes of a message of that number.
    Want,
    /// The receiver expects something else than the message of that number, which came whole. Its payload is what it
    /// expects.
    Refusal,
    /// The receiver expects something else than the message of that number, which was offered. Its payload is what it
    /// expects.
    Decline,
    /// The sender no longer offers the message of that number.
    Cancellation,
    /// The writer has given up a large message whose bytes were passing, and with it all messages of the pair. Its tag is
    /// 1 where a wait was interrupted, and 0 where it took too long.
    Failure,
    /// Nothing: what follows lies at the beginning of the ring.
    Skip,
}

/// An entry's header.
#[derive(Clone, Copy, Debug)]
pub(super) struct EntryHeader {
    pub(super) kind: EntryKind,
    /// Number of the message among those of its sender.
    pub(super) number: u64,
    pub(super) tag: u64,
    /// The word of a [`Payload`](crate::call::p2p::Payload).
    pub(super) payload: u64,
    /// Bytes that follow.
    pub(super) bytes: u64,
}

impl EntryHeader {
    /// An entry that says something about a message, without bytes.
    pub(super) fn about(kind: EntryKind, number: u64) -> Self {
        Self { kind, number, tag: 0, payload: 0, bytes: 0 }
    }
}

/// One word alone on its cache lines.
#[repr(C, align(128))]
struct PaddedWord<T>(T);

/// The counts and flags in front of the rings.
#[repr(C)]
struct Counts<A: Atomics> {
    entries_written: PaddedWord<A::U64>,
    entries_read: PaddedWord<A::U64>,
    bulk_written: PaddedWord<A::U64>,
    bulk_read: PaddedWord<A::U64>,
    /// Bytes of small messages that the receiver has taken for good.
    released: PaddedWord<A::U64>,
    /// Whether the sender, and the receiver, sleeps until it is woken.
    asleep: [PaddedWord<A::U32>; 2],
    /// Whether the sender, and the receiver, has ended in good order.
    ended: [PaddedWord<A::U32>; 2],
}

const _: () = assert!(size_of::<Counts<Native>>() as u64 <= RINGS);

/// Which end of a segment a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SegmentEnd {
    Sender = 0,
    Receiver = 1,
}

impl SegmentEnd {
    fn other(self) -> Self {
        match self {
            Self::Sender => Self::Receiver,
            Self::Receiver => Self::Sender,
        }
    }
}

/// A mapped segment.
#[derive(Debug)]
pub(super) struct RingSegment<A: Atomics = Native> {
    counts: NonNull<Counts<A>>,
    /// Where the rings begin.
    rings: NonNull<u8>,
    /// Owner of the memory, where this one has mapped it.
    _mapping: Option<MappedMemory>,
    end: SegmentEnd,
    /// This end's own counts, which a faulty peer cannot change.
    entries: u64,
    bulk: u64,
}

// SAFETY: the memory is mapped until the value is dropped, whichever thread uses it. Shared words are atomics, and rings are
// written and read through `&mut self` alone.
unsafe impl<A: Atomics> Send for RingSegment<A> {}

/// The memory of a segment, mapped for as long as this lives.
#[derive(Debug)]
struct MappedMemory(NonNull<u8>);

impl Drop for MappedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nobody has a view of it any more.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), BYTES as usize) };
    }
}

impl RingSegment {
    /// A new segment, and the file to hand to the receiver.
    pub(super) fn create() -> Result<(Self, OwnedFd)> {
        let failed = |error| Error::system("making memory for messages", error);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("symmpool-messages", flags).map_err(failed)?;
        rustix::fs::ftruncate(&file, BYTES).map_err(failed)?;
        rustix::fs::fcntl_add_seals(&file, SEALS).map_err(failed)?;
        Ok((Self::map(file.as_fd(), SegmentEnd::Sender)?, file))
    }

    /// The segment that a sender has handed over.
    pub(super) fn open(file: &OwnedFd) -> Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(file).unwrap_or(SealFlags::empty());
        let bytes = rustix::fs::fstat(file).map_or(0, |found| found.st_size);
        if !seals.contains(SEALS) || u64::try_from(bytes) != Ok(BYTES) {
            return Err(Error::refused(format!(
                "a peer handed over {bytes} bytes sealed as {seals:?} for its messages; {BYTES} sealed as {SEALS:?} are \
                 needed"
            )));
        }
        Self::map(file.as_fd(), SegmentEnd::Receiver)
    }

    fn map(file: BorrowedFd<'_>, end: SegmentEnd) -> Result<Self> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the kernel chooses an address where nothing lies.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), BYTES as usize, access, flags, file, 0)
        };
        let base = base.map_err(|error| Error::system("mapping memory for messages", error))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| Error::invalid_state("mapped at 0"))?;
        let counts = base.cast();
        // SAFETY: inside the mapping.
        let rings = unsafe { base.add(RINGS as usize) };
        Ok(Self { counts, rings, _mapping: Some(MappedMemory(base)), end, entries: 0, bulk: 0 })
    }
}

impl<A: Atomics> RingSegment<A> {
    fn counts(&self) -> &Counts<A> {
        // SAFETY: mapped, aligned to a page, zero at first, and made of atomics.
        unsafe { self.counts.as_ref() }
    }

    /// Where an entry of that count begins.
    fn entry_at(&self, count: u64) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.rings.as_ptr().add((count % ENTRIES) as usize) }
    }

    /// How many bytes of the ring a writer skips before it puts an entry with `bytes` bytes there. `None` if the ring has no
    /// room for that now.
    fn room(&self, bytes: u64) -> Option<u64> {
        let read = self.counts().entries_read.0.load(Ordering::Acquire);
        let (at, used) = (self.entries % ENTRIES, self.entries.wrapping_sub(read));
        let length = HEADER + bytes.next_multiple_of(HEADER);
        // The beginning of an empty ring is in the caches of both ranks.
        let skip = match () {
            () if used == 0 && at > 0 && length <= at => ENTRIES - at,
            () if at + length > ENTRIES => ENTRIES - at,
            () => 0,
        };
        (used + skip + length <= ENTRIES || mutant("mutant_ring_overrun")).then_some(skip)
    }

    /// Writes an entry, and `entry.bytes` bytes from `data` on. Returns false if there is no room for it. [`Self::wakes`]
    /// must follow.
    ///
    /// # Safety
    ///
    /// `data` must be readable for these bytes, and nobody may write them meanwhile.
    pub(super) unsafe fn write(&mut self, entry: EntryHeader, data: *const u8) -> bool {
        let Some(skip) = self.room(entry.bytes) else { return false };
        if skip > 0 {
            self.write_header(EntryHeader::about(EntryKind::Skip, 0));
            self.entries += skip;
        }
        self.write_header(entry);
        let to = self.entry_at(self.entries).wrapping_add(HEADER as usize);
        // SAFETY: the caller promised that `data` is readable for the entry's bytes; the ring has room for them, in
        // one piece, which the reader does not read before it is counted.
        unsafe { std::ptr::copy_nonoverlapping(data, to, entry.bytes as usize) };
        self.entries += HEADER + entry.bytes.next_multiple_of(HEADER);
        let order = weakened("mutant_relaxed_entry", Ordering::Release);
        self.counts().entries_written.0.store(self.entries, order);
        true
    }

    fn write_header(&self, entry: EntryHeader) {
        let words = [entry.kind as u64, entry.number, entry.tag, entry.payload, entry.bytes];
        let to = self.entry_at(self.entries).cast::<[u64; 5]>();
        // SAFETY: a header's bytes are left at every multiple of one, and the reader reads none before it is counted.
        unsafe { to.write(words) };
    }

    /// The next entry, and where its bytes lie, until [`Self::pass`] is called; `None` if there is none.
    pub(super) fn next(&mut self) -> Result<Option<(EntryHeader, *const u8)>> {
        loop {
            let written = self.counts().entries_written.0.load(Ordering::Acquire);
            if written == self.entries {
                return Ok(None);
            }
            let at = self.entry_at(self.entries);
            // SAFETY: inside the mapping, as entries begin at multiples of a header's length. The writer has counted it.
            let [kind, number, tag, payload, bytes] = unsafe { at.cast::<[u64; 5]>().read() };
            let kind = match kind {
                1 => EntryKind::Whole,
                2 => EntryKind::Offer,
                3 => EntryKind::Want,
                4 => EntryKind::Refusal,
                5 => EntryKind::Decline,
                6 => EntryKind::Cancellation,
                7 => EntryKind::Failure,
                8 => EntryKind::Skip,
                _ => return Err(damaged()),
            };
            if kind == EntryKind::Skip && !self.entries.is_multiple_of(ENTRIES) {
                self.entries = self.entries.next_multiple_of(ENTRIES);
                self.counts().entries_read.0.store(self.entries, Ordering::Release);
                continue;
            }
            if kind == EntryKind::Skip || bytes > ENTRIES - HEADER - self.entries % ENTRIES {
                return Err(damaged());
            }
            let entry = EntryHeader { kind, number, tag, payload, bytes };
            return Ok(Some((entry, at.wrapping_add(HEADER as usize))));
        }
    }

    /// The reader is done with an entry.
    pub(super) fn pass(&mut self, entry: &EntryHeader) {
        self.entries += HEADER + entry.bytes.next_multiple_of(HEADER);
        let order = weakened("mutant_relaxed_pass", Ordering::Release);
        self.counts().entries_read.0.store(self.entries, order);
    }

    /// Writes as much of `bytes` bytes from `data` on as there is room for. Returns how much. [`Self::wakes`] must
    /// follow.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::write`].
    pub(super) unsafe fn write_bulk(&mut self, data: *const u8, bytes: u64) -> u64 {
        let read = self.counts().bulk_read.0.load(Ordering::Acquire);
        let room = BULK - self.bulk.wrapping_sub(read).min(BULK);
        let part = room.min(bytes).min(CHUNK).min(BULK - self.bulk % BULK);
        // SAFETY: the caller promised that `data` is readable for `bytes`, of which this is a part; the part of the
        // ring is free, in one piece, and inside the mapping.
        unsafe { std::ptr::copy_nonoverlapping(data, self.bulk_at(), part as usize) };
        self.bulk += part;
        self.counts().bulk_written.0.store(self.bulk, Ordering::Release);
        part
    }

    /// How many bytes of large messages were ever written. Entries that were written before these bytes are there for
    /// whoever looks for entries afterwards.
    pub(super) fn bulk_written(&self) -> u64 {
        self.counts().bulk_written.0.load(Ordering::Acquire)
    }

    /// Reads what is there of `bytes` bytes, in one piece, where `written` were ever written. Returns how much that was.
    /// [`Self::wakes`] must follow.
    ///
    /// # Safety
    ///
    /// `to` is writable for these bytes, and nobody else touches them.
    pub(super) unsafe fn read_bulk(&mut self, to: *mut u8, bytes: u64, written: u64) -> u64 {
        let there = written.wrapping_sub(self.bulk).min(BULK);
        let part = there.min(bytes).min(BULK - self.bulk % BULK);
        // SAFETY: the caller promised that `to` is writable for `bytes`, of which this is a part; the part of the
        // ring is written, in one piece, and inside the mapping.
        unsafe { std::ptr::copy_nonoverlapping(self.bulk_at().cast_const(), to, part as usize) };
        self.bulk += part;
        self.counts().bulk_read.0.store(self.bulk, Ordering::Release);
        part
    }

    fn bulk_at(&self) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.rings.as_ptr().add((ENTRIES + self.bulk % BULK) as usize) }
    }

    /// Bytes of small messages that the receiver has taken.
    pub(super) fn released(&self) -> u64 {
        self.counts().released.0.load(Ordering::Relaxed)
    }

    /// Says that the receiver has taken small messages of `bytes` bytes together.
    pub(super) fn release(&self, bytes: u64) {
        self.counts().released.0.add(bytes, Ordering::Relaxed);
    }

    /// Whether the other end sleeps and is to be woken, by whoever has written or read. Says so once.
    pub(super) fn wakes(&self) -> bool {
        // Pairs with the fence in `before_sleep`.
        if !mutant("mutant_ring_wake_unfenced") {
            A::fence();
        }
        let asleep = &self.counts().asleep[self.end.other() as usize].0;
        asleep.load(Ordering::Relaxed) != 0 && asleep.replace(1, 0)
    }

    /// This end is about to sleep. It must look once more at what is there before it does, behind a fence
    /// ([`before_sleep`]).
    pub(super) fn fall_asleep(&self) {
        self.counts().asleep[self.end as usize].0.store(1, Ordering::Relaxed);
    }

    /// This end is awake.
    pub(super) fn wake_up(&self) {
        self.counts().asleep[self.end as usize].0.store(0, Ordering::Relaxed);
    }

    /// This end takes no part any more.
    pub(super) fn end_here(&self) {
        self.counts().ended[self.end as usize].0.store(1, Ordering::Release);
    }

    /// Whether the other end has said that it takes no part any more.
    pub(super) fn has_ended(&self) -> bool {
        self.counts().ended[self.end.other() as usize].0.load(Ordering::Acquire) != 0
    }
}

/// Orders a sleeper's flags before what it looks at.
pub(super) fn before_sleep<A: Atomics>() {
    A::fence();
}

#[cold]
fn damaged() -> Error {
    Error::mismatch("the memory that a peer sends messages through is damaged")
}

#[cfg(test)]
mod models;

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (RingSegment, RingSegment) {
        let (sender, file) = RingSegment::create().unwrap();
        (sender, RingSegment::open(&file).unwrap())
    }

    fn entry(number: u64, bytes: u64) -> EntryHeader {
        EntryHeader { kind: EntryKind::Whole, number, tag: number * 3, payload: !number, bytes }
    }

    #[test]
    fn entries_of_all_lengths_arrive_in_order_and_whole() {
        let (mut from, mut to) = pair();
        let data: Vec<u8> = (0..1 << 17).map(|i| (i % 251) as u8).collect();
        let (mut sent, mut taken, mut random) = (0_u64, 0_u64, 7_u64);
        let length = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 47;
        while taken < 4000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Bursts of writes and of reads, so that the ring is empty, full, and between.
            for _ in 0..random >> 60 {
                // SAFETY: `data` is as long as the longest message.
                if !unsafe { from.write(entry(sent, length(sent)), data.as_ptr()) } {
                    break;
                }
                sent += 1;
            }
            for _ in 0..(random >> 56) & 15 {
                let Some((found, at)) = to.next().unwrap() else { break };
                assert_eq!(
                    (found.kind, found.number, found.tag),
                    (EntryKind::Whole, taken, taken * 3)
                );
                assert_eq!((found.payload, found.bytes), (!taken, length(taken)));
                // SAFETY: the entry says that so many bytes lie there, and it is not passed yet.
                let bytes = unsafe { std::slice::from_raw_parts(at, found.bytes as usize) };
                assert_eq!(bytes, &data[..bytes.len()]);
                to.pass(&found);
                taken += 1;
            }
        }
        assert!(to.next().unwrap().is_some() || sent == taken);
    }

    #[test]
    fn a_full_ring_takes_nothing_and_an_empty_one_begins_anew() {
        let (mut from, mut to) = pair();
        let data = vec![1_u8; 1 << 16];
        let mut number = 0;
        // SAFETY: `data` has this length.
        while unsafe { from.write(entry(number, 1 << 16), data.as_ptr()) } {
            number += 1;
        }
        assert_eq!(number, 15, "each takes a header more than 64 KiB");
        for _ in 0..number {
            let (found, _) = to.next().unwrap().unwrap();
            to.pass(&found);
        }
        assert!(to.next().unwrap().is_none());
        for _ in 0..100 {
            // SAFETY: `data` is longer than 64 bytes.
            assert!(unsafe { from.write(entry(0, 64), data.as_ptr()) });
            let (found, at) = to.next().unwrap().unwrap();
            assert_eq!(at as u64 - to.rings.as_ptr() as u64, HEADER, "at the beginning");
            to.pass(&found);
        }
    }

    #[test]
    fn large_messages_pass_in_parts() {
        let (mut from, mut to) = pair();
        let data: Vec<u8> = (0..3_000_001_u32).map(|i| (i % 251) as u8).collect();
        let mut came = vec![0_u8; data.len()];
        let (mut written, mut read) = (0, 0);
        while read < data.len() {
            let rest = &data[written..];
            // SAFETY: `rest` is a slice of this length.
            written += unsafe { from.write_bulk(rest.as_ptr(), rest.len() as u64) } as usize;
            assert!(written - read <= BULK as usize);
            if written % 3 != 0 || written == data.len() || written - read > BULK as usize / 2 {
                let (rest, there) = (&mut came[read..], to.bulk_written());
                let length = rest.len() as u64;
                // SAFETY: `rest` is a mutable slice of this length.
                read += unsafe { to.read_bulk(rest.as_mut_ptr(), length, there) } as usize;
            }
        }
        assert!(came == data);
    }

    #[test]
    fn a_sleeper_is_woken_once_and_damage_is_an_error() {
        let (mut from, mut to) = pair();
        assert!(!from.wakes());
        to.fall_asleep();
        assert!(from.wakes() && !from.wakes() && !to.wakes());
        from.end_here();
        assert!(to.has_ended() && !from.has_ended());
        let odd = EntryHeader { bytes: 0, ..entry(1, 0) };
        // SAFETY: no bytes are read.
        assert!(unsafe { from.write(odd, std::ptr::null()) });
        // SAFETY: the header of the first entry.
        unsafe { to.entry_at(0).cast::<u64>().write(99) };
        assert!(to.next().unwrap_err().is_diverged());
        assert!(
            RingSegment::open(&rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap())
                .is_err()
        );
    }
}
