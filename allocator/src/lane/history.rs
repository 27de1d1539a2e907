//! A lane's event log: its rolling digest, the last events in full (the ring), and digests of older
//! prefixes at growing distances (the checkpoints).
//!
//! When digests differ at a commit, ranks compare digests of prefixes to find the first event that
//! differs. The digest of every prefix that ends inside the ring is known. Before the ring only the
//! checkpoints are, so an old divergence is known to lie between two of them.

use super::lane_event::Packed;
use super::{EventKind, LaneEvent, Site};

/// Rolling hash over a lane's events. Equal digests at equal counters mean equal sequences.
pub type Digest = u64;

/// Every second checkpoint is dropped when there would be more than this.
const MAX_CHECKPOINTS: usize = 256;

/// Half a cache line, because the ring is written once for each event and should not evict data that is
/// read.
#[derive(Clone, Copy, Debug)]
struct HistoryEntry {
    kind: Packed,
    site: Site,
    /// Digest of all events up to and including this one.
    after: Digest,
}

/// The digest after one more event. Each word is combined with the digest and multiplied to 128 bits,
/// whose halves are then combined, so that every bit of the event and of all events before reaches the
/// whole digest. It finds mistakes between ranks that trust each other; it does not resist a forger. The
/// counter is part of it through the chaining.
fn chain(digest: Digest, event: Packed) -> Digest {
    let mix = |value: u64, by: u64| {
        let product = u128::from(value) * u128::from(by);
        product as u64 ^ (product >> 64) as u64
    };
    // Fractional bits of pi; odd.
    let first = mix(digest ^ event[0] ^ 0x2437_6a88_85a3_08d3, 0x1319_8a2e_0370_7345);
    mix(first ^ event[1] ^ 0xa409_3822_299f_31d1, 0x082e_fa98_ec4e_6c89)
}

#[derive(Debug)]
pub(super) struct History {
    /// Counter of the last state on which all ranks agreed.
    base: u64,
    counter: u64,
    digest: Digest,
    capacity: usize,
    /// Filled up to `capacity`; after that the oldest entry is overwritten.
    ring: Vec<HistoryEntry>,
    /// Index of the oldest entry of a full ring, which the next event overwrites.
    head: usize,
    /// Digest of the prefix that ends where the ring begins.
    floor: Digest,
    /// Digests of prefixes that end before the ring: `(counter, digest)`, ascending.
    checkpoints: Vec<(u64, Digest)>,
    /// Checkpoints are at multiples of this counter, a power of two.
    spacing: u64,
}

impl History {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            base: 0,
            counter: 0,
            digest: 0,
            capacity,
            ring: Vec::new(),
            head: 0,
            floor: 0,
            checkpoints: vec![(0, 0)],
            spacing: 1024,
        }
    }

    /// The number of events so far, which is the next event's number.
    pub(super) fn counter(&self) -> u64 {
        self.counter
    }

    pub(super) fn digest(&self) -> Digest {
        self.digest
    }

    /// Adds an event. Inlined, so that packing one of a known kind takes no branches.
    #[inline(always)]
    pub(super) fn push(&mut self, kind: EventKind, site: Site) {
        self.push_packed(kind.pack(), site);
    }

    fn push_packed(&mut self, kind: Packed, site: Site) {
        self.digest = chain(self.digest, kind);
        let entry = HistoryEntry { kind, site, after: self.digest };
        if self.ring.len() < self.capacity {
            self.ring.push(entry);
        } else {
            self.floor = std::mem::replace(&mut self.ring[self.head], entry).after;
            self.head = if self.head + 1 < self.capacity { self.head + 1 } else { 0 };
            let oldest = self.counter + 1 - self.capacity as u64;
            // The spacing is a power of two.
            if oldest & (self.spacing - 1) == 0 {
                self.checkpoint(oldest, self.floor);
            }
        }
        self.counter += 1;
    }

    /// The entry that comes `after_oldest` entries after the oldest.
    fn entry(&self, after_oldest: u64) -> Option<&HistoryEntry> {
        let at = usize::try_from(after_oldest).ok().filter(|&at| at < self.ring.len())?;
        let at = self.head + at;
        self.ring.get(if at < self.ring.len() { at } else { at - self.ring.len() })
    }

    #[cold]
    fn checkpoint(&mut self, counter: u64, digest: Digest) {
        self.checkpoints.push((counter, digest));
        if self.checkpoints.len() > MAX_CHECKPOINTS {
            self.spacing *= 2;
            let spacing = self.spacing;
            self.checkpoints.retain(|(counter, _)| counter.is_multiple_of(spacing));
        }
    }

    /// Starts over from an agreed state: earlier events are forgotten, and numbers continue from `counter`.
    pub(super) fn restart(&mut self, counter: u64, digest: Digest) {
        self.base = counter;
        self.counter = counter;
        self.digest = digest;
        self.ring.clear();
        self.head = 0;
        self.floor = digest;
        self.checkpoints = vec![(counter, digest)];
    }

    /// All ranks agree on everything so far, so the next divergence can only come after this.
    pub(super) fn mark_agreed(&mut self) {
        self.base = self.counter;
    }

    /// The number of the oldest event that is kept in full.
    pub(super) fn oldest(&self) -> u64 {
        self.counter - self.ring.len() as u64
    }

    /// The event with this number, if it is kept.
    pub(super) fn event(&self, counter: u64) -> Option<LaneEvent> {
        let at = counter.checked_sub(self.oldest())?;
        let entry = self.entry(at)?;
        Some(LaneEvent { counter, kind: EventKind::unpack(entry.kind), site: entry.site })
    }

    /// The digests of prefixes that are known.
    pub(super) fn checkpoints(&self) -> Checkpoints<'_> {
        Checkpoints(self)
    }
}

/// The known digests of prefixes of a lane's sequence.
pub(crate) struct Checkpoints<'a>(&'a History);

impl Checkpoints<'_> {
    /// Digest of the first `counter` events, if known.
    pub(crate) fn digest(&self, counter: u64) -> Option<Digest> {
        let history = self.0;
        if counter == history.counter {
            return Some(history.digest);
        }
        if counter == history.oldest() {
            return Some(history.floor);
        }
        if counter > history.oldest() && counter < history.counter {
            return history.entry(counter - history.oldest() - 1).map(|entry| entry.after);
        }
        let at =
            history.checkpoints.binary_search_by_key(&counter, |&(counter, _)| counter).ok()?;
        Some(history.checkpoints[at].1)
    }

    /// Counter of the last state on which all ranks agreed.
    pub(crate) fn base(&self) -> u64 {
        self.0.base
    }

    /// From this counter on, the digest of every prefix is known.
    pub(crate) fn oldest(&self) -> u64 {
        self.0.oldest()
    }

    /// Before [`oldest`](Self::oldest), the digests of prefixes whose counter is a multiple of this power of
    /// two are known.
    pub(crate) fn spacing(&self) -> u64 {
        self.0.spacing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(block: u64) -> EventKind {
        EventKind::Free { block }
    }

    #[test]
    fn equal_sequences_have_equal_digests_and_order_matters() {
        let mut a = History::new(16);
        let mut b = History::new(16);
        a.push(free(1), None);
        a.push(free(2), None);
        b.push(free(2), None);
        b.push(free(1), None);
        assert_ne!(a.digest(), b.digest());
        let mut c = History::new(1024);
        c.push(free(1), None);
        c.push(free(2), None);
        assert_eq!(a.digest(), c.digest(), "how much is remembered does not matter");
    }

    // One bit of an event changes about half of the digest, immediately and after more events.
    #[test]
    fn every_bit_of_an_event_reaches_the_whole_digest() {
        for start in [0, 1, u64::MAX, 0x0123_4567_89ab_cdef] {
            for bit in 0..128 {
                let mut changed = [1, 0];
                changed[bit / 64] ^= 1 << (bit % 64);
                let (mut a, mut b) = (chain(start, [1, 0]), chain(start, changed));
                for _ in 0..3 {
                    let different = (a ^ b).count_ones();
                    assert!((8..=56).contains(&different), "bit {bit}: {different} of 64");
                    (a, b) = (chain(a, [2, 7]), chain(b, [2, 7]));
                }
            }
        }
    }

    #[test]
    fn prefixes_are_found_near_and_far() {
        // A capacity at which the ring's oldest entry is not at the start of its buffer.
        let mut history = History::new(96);
        let mut digests = vec![history.digest()];
        for n in 0..10_000_u64 {
            history.push(free(n), None);
            digests.push(history.digest());
        }
        assert_eq!(history.oldest(), 9_904);
        assert_eq!(history.event(9_904).map(|event| event.kind), Some(free(9_904)));
        assert_eq!(history.event(9_903), None);
        for counter in (0..=9_904).step_by(1024).chain(9_904..=10_000) {
            let digest = history.checkpoints().digest(counter);
            assert_eq!(digest, Some(digests[counter as usize]), "prefix of {counter}");
        }
        assert_eq!(history.checkpoints().digest(1_000), None);
        assert_eq!(history.checkpoints().digest(10_001), None);
    }

    #[test]
    fn checkpoints_thin_out_instead_of_growing() {
        let mut history = History::new(16);
        for n in 0..2_000_000_u64 {
            history.push(free(n), None);
        }
        assert!(history.checkpoints.len() <= MAX_CHECKPOINTS);
        let spacing = history.checkpoints().spacing();
        assert!(history.checkpoints().digest(1_000_000 / spacing * spacing).is_some());
        assert!(spacing < 2_000_000 / 64, "old divergences are still narrowed down");
    }
}
