//! Models of a segment: what one rank has written and counted, the other one reads, and no wake-up is lost.

use std::cell::UnsafeCell;
use std::sync::Arc;

use loom::sync::atomic::{AtomicU32, AtomicU64};
use loom::sync::{Condvar, Mutex};
use symmpool_allocator::models::{Watched, prove};

use super::*;
use crate::signal::tests::Loom;

/// A segment's memory, and what stands for the bytes of its entries: loom watches no memory of the system.
struct Memory {
    counts: Counts<Loom>,
    rings: UnsafeCell<Vec<u8>>,
    entries: [Watched<u64>; 2],
    /// Whether a sleeper was woken, which stays so until it has seen that.
    woken: Mutex<bool>,
    socket: Condvar,
}

// SAFETY: the protocol under test orders accesses to the rings, and loom runs one thread at a time.
unsafe impl Sync for Memory {}

impl Memory {
    fn new() -> Arc<Self> {
        let count = || PaddedWord(AtomicU64::new(0));
        let flags = || [0, 1].map(|_| PaddedWord(AtomicU32::new(0)));
        let counts = Counts {
            entries_written: count(),
            entries_read: count(),
            bulk_written: count(),
            bulk_read: count(),
            released: count(),
            asleep: flags(),
            ended: flags(),
        };
        Arc::new(Self {
            counts,
            rings: UnsafeCell::new(vec![0; (ENTRIES + BULK) as usize]),
            entries: [0, 1].map(Watched::new),
            woken: Mutex::new(false),
            socket: Condvar::new(),
        })
    }

    fn segment(&self, end: SegmentEnd) -> RingSegment<Loom> {
        // SAFETY: the memory lives longer than both segments, and its address does not change.
        let rings = NonNull::new(unsafe { (*self.rings.get()).as_mut_ptr() }).unwrap();
        let counts = NonNull::from(&self.counts);
        RingSegment { counts, rings, _mapping: None, end, entries: 0, bulk: 0 }
    }

    fn wake(&self, segment: &RingSegment<Loom>) {
        if segment.wakes() {
            *self.woken.lock().unwrap() = true;
            self.socket.notify_all();
        }
    }

    fn sleep(&self) {
        let mut woken = self.woken.lock().unwrap();
        while !*woken {
            woken = self.socket.wait(woken).unwrap();
        }
        *woken = false;
    }
}

fn entry(number: u64, bytes: u64) -> EntryHeader {
    EntryHeader { kind: EntryKind::Whole, number, tag: number, payload: 7, bytes }
}

/// A sender writes two entries, for which a receiver sleeps.
fn entries_arrive() {
    let memory = Memory::new();
    let theirs = Arc::clone(&memory);
    let sender = loom::thread::spawn(move || {
        let mut segment = theirs.segment(SegmentEnd::Sender);
        for number in 0..2 {
            theirs.entries[number].set(number as u64 + 5);
            let data = (number as u64 + 5).to_ne_bytes();
            // SAFETY: `data` has eight bytes.
            assert!(unsafe { segment.write(entry(number as u64, 8), data.as_ptr()) });
            theirs.wake(&segment);
        }
    });
    let mut segment = memory.segment(SegmentEnd::Receiver);
    for number in 0..2 {
        let (found, at) = loop {
            if let Some(found) = segment.next().unwrap() {
                break found;
            }
            segment.fall_asleep();
            before_sleep::<Loom>();
            if segment.next().unwrap().is_none() {
                memory.sleep();
            }
            segment.wake_up();
        };
        assert_eq!((found.number, found.tag, found.payload, found.bytes), (number, number, 7, 8));
        // SAFETY: the entry says that eight bytes lie there.
        assert_eq!(unsafe { at.cast::<u64>().read() }, number + 5);
        assert_eq!(memory.entries[number as usize].get(), number + 5);
        segment.pass(&found);
    }
    sender.join().unwrap();
}

/// A sender writes over an entry once the receiver is done with it.
fn a_full_ring_goes_on() {
    let memory = Memory::new();
    let (theirs, data) = (Arc::clone(&memory), vec![1_u8; 1 << 16]);
    let mut segment = theirs.segment(SegmentEnd::Sender);
    for number in 0..15 {
        // SAFETY: `data` has this length.
        assert!(unsafe { segment.write(entry(number, 1 << 16), data.as_ptr()) });
    }
    let sender = loom::thread::spawn(move || {
        // SAFETY: `data` has this length.
        while !unsafe { segment.write(entry(15, 1 << 16), data.as_ptr()) } {
            loom::thread::yield_now();
        }
        // It lies where the first one did.
        theirs.entries[0].set(9);
    });
    let mut segment = memory.segment(SegmentEnd::Receiver);
    let (found, _) = segment.next().unwrap().unwrap();
    assert_eq!((found.number, memory.entries[0].get()), (0, 0));
    segment.pass(&found);
    sender.join().unwrap();
}

/// Rule S3.
#[test]
fn loom_entries_arrive_whole_and_wake_their_receiver() {
    let mutants = ["mutant_relaxed_entry", "mutant_ring_wake_unfenced"];
    prove(2, &mutants, entries_arrive);
}

#[test]
fn loom_no_entry_is_written_over_before_it_is_read() {
    prove(2, &["mutant_relaxed_pass", "mutant_ring_overrun"], a_full_ring_goes_on);
}
