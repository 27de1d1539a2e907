//! Contiguous peer views: peers' copies of some segments, mapped a second time, one rank's behind the other's.
//!
//! One copy of a copy engine can have many targets at equal distance, but CUDA refuses it unless all memory
//! from the first to the last is mapped (seen with driver 580). Slots of the heap lie far apart, with unmapped
//! addresses between them.

use crate::driver::{Driver, Reservation};
use crate::sync::lock;
use crate::{Error, Result};

use super::Heap;

/// How many views a heap makes at most. Each keeps its mappings until one of its segments is unmapped.
const MAX_VIEWS: usize = 256;

/// One contiguous peer view, of segments that follow each other in every slot.
#[derive(Debug)]
pub(super) struct PeerView {
    /// Where the first segment begins in a slot.
    offset: u64,
    /// Lengths of the segments.
    segments: Vec<u64>,
    /// Holds the peers' copies, in rank order.
    reservation: Reservation,
}

impl PeerView {
    fn length(&self) -> u64 {
        self.segments.iter().sum()
    }

    /// Whether the byte at `offset` of a slot is in the view.
    pub(super) fn holds(&self, offset: u64) -> bool {
        (self.offset..self.offset + self.length()).contains(&offset)
    }

    /// Unmaps the copies of the first `ranks` peers, and gives the addresses back.
    fn give_back(self, driver: &Driver, ranks: u64) -> Result<()> {
        let mut at = 0;
        for _ in 0..ranks {
            for &bytes in &self.segments {
                driver.unmap(&self.reservation, at, bytes)?;
                at += bytes;
            }
        }
        driver.unreserve(self.reservation)
    }
}

impl Heap {
    /// The address of a contiguous peer view of the windows with lengths `segments`, which follow each
    /// other from `offset` of a slot: the copies of all peers, in rank order, without this rank's. It is made
    /// by the first call and stays until one of the windows is unmapped. [`Error::is_unsupported`] if the
    /// driver cannot map memory twice, or if there are too many views.
    pub(crate) fn peer_view(&self, offset: u64, segments: &[u64]) -> Result<u64> {
        let mut views = lock(&self.peer_views);
        let same = |view: &&PeerView| view.offset == offset && view.segments == segments;
        if let Some(view) = views.iter().find(same) {
            return Ok(view.reservation.base());
        }
        if views.len() == MAX_VIEWS {
            return Err(Error::unsupported(format!(
                "more than {MAX_VIEWS} contiguous views of peers' memory"
            )));
        }
        let view = self.make_peer_view(offset, segments)?;
        let base = view.reservation.base();
        views.push(view);
        Ok(base)
    }

    fn make_peer_view(&self, offset: u64, segments: &[u64]) -> Result<PeerView> {
        let length = segments.iter().sum::<u64>();
        let peers = self.peer_count();
        let bytes = length.checked_mul(peers).filter(|bytes| *bytes > 0).ok_or_else(|| {
            Error::invalid_argument(format!(
                "a contiguous view of {length} bytes of each of {peers} peers"
            ))
        })?;
        let reservation = self.driver.reserve(bytes, self.driver.granularity())?;
        let view = PeerView { offset, segments: segments.to_vec(), reservation };
        for (nth, peer) in (0..).zip(self.peers()) {
            if let Err(error) = self.map_into(&view, nth * length, peer) {
                return Err(match view.give_back(&self.driver, nth) {
                    Ok(()) => error,
                    Err(undo) => {
                        error.context(format!("undoing a failed mapping failed, too ({undo})"))
                    }
                });
            }
        }
        Ok(view)
    }

    /// Maps a peer's segments at offset `place` of the view: all of them, or none on an error.
    fn map_into(&self, view: &PeerView, place: u64, peer: u32) -> Result<()> {
        let mut at = view.offset;
        let mut held = Vec::new();
        let mut mapped = view.segments.iter().try_for_each(|&bytes| {
            held.push(self.driver.hold_mapped(
                self.reservation(),
                self.position(peer, at),
                bytes,
            )?);
            at += bytes;
            Ok(())
        });
        mapped = mapped.and_then(|()| self.driver.map_all(&view.reservation, place, &held));
        // The mappings keep the memory alive without the handles.
        for physical in held {
            mapped = mapped.and(self.driver.release(physical));
        }
        mapped
    }

    /// Unmaps and gives back the views for which `gone` is true.
    pub(super) fn drop_peer_views(&self, gone: impl Fn(&PeerView) -> bool) -> Result<()> {
        let mut views = lock(&self.peer_views);
        let mut outcome = Ok(());
        for view in views.extract_if(.., |view| gone(view)) {
            outcome = outcome.and(view.give_back(&self.driver, self.peer_count()));
        }
        outcome
    }

    fn peer_count(&self) -> u64 {
        u64::from(self.layout.world - 1)
    }
}

#[cfg(test)]
mod tests {
    use crate::driver::{Call, Driver, Exported, FaultDriver, FaultPlan};

    use super::super::Heap;

    const UNIT: u64 = 2 << 20;

    /// Rank 1 of 3, with peers' segments of these lengths mapped from `UNIT` on.
    fn heap(segments: &[u64]) -> Heap {
        heap_on(&Driver::sim(1), segments)
    }

    fn heap_on(driver: &Driver, segments: &[u64]) -> Heap {
        let heap = Heap::reserve(driver.clone(), 1, 3, 64 * UNIT).expect("a heap");
        for peer in [0, 2] {
            let mut at = UNIT;
            for &bytes in segments {
                let physical = driver.import(Exported::Derived, bytes).expect("a handle");
                heap.map(peer, at, &physical).expect("mapped");
                driver.release(physical).expect("released");
                heap.note_peers_mapped(at, bytes);
                at += bytes;
            }
        }
        heap
    }

    #[test]
    fn a_view_is_made_once_and_goes_with_the_first_of_its_segments() {
        let heap = heap(&[UNIT, 2 * UNIT, UNIT]);
        let both = heap.peer_view(UNIT, &[UNIT, 2 * UNIT]).expect("a view");
        assert_eq!(heap.peer_view(UNIT, &[UNIT, 2 * UNIT]).expect("it is there"), both);
        assert_ne!(heap.peer_view(UNIT, &[UNIT]).expect("a shorter one"), both);
        let one = heap.peer_view(2 * UNIT, &[2 * UNIT]).expect("another view");
        let last = heap.peer_view(4 * UNIT, &[UNIT]).expect("a third");
        assert!(both != one && one != last && both != last);
        heap.unmap_peers(UNIT).expect("the first segment goes");
        assert_eq!(heap.peer_view(4 * UNIT, &[UNIT]).expect("others stay"), last);
        assert_eq!(heap.peer_view(2 * UNIT, &[2 * UNIT]).expect("others stay"), one);
        assert!(heap.peer_view(UNIT, &[UNIT, 2 * UNIT]).expect_err("gone").is_invalid_argument());
    }

    #[test]
    fn a_view_goes_with_any_of_its_segments_and_no_other() {
        let heap = heap(&[UNIT, 2 * UNIT, UNIT]);
        let view = heap.peer_view(UNIT, &[UNIT, 2 * UNIT]).expect("a view");
        heap.unmap_peers(4 * UNIT).expect("what lies behind it goes");
        assert_eq!(heap.peer_view(UNIT, &[UNIT, 2 * UNIT]).expect("it is there"), view);
        heap.unmap_peers(2 * UNIT).expect("its second segment goes");
        assert!(crate::sync::lock(&heap.peer_views).is_empty());
    }

    #[test]
    fn views_give_their_mappings_and_addresses_back() {
        let driver = FaultDriver::new(Driver::sim(1), FaultPlan::new());
        let heap = heap_on(&Driver::new(driver.clone()), &[UNIT, UNIT]);
        heap.peer_view(UNIT, &[UNIT, UNIT]).expect("a view");
        heap.peer_view(2 * UNIT, &[UNIT]).expect("another");
        heap.unmap_peers(UNIT).expect("the first goes");
        drop(heap);
        let n = |call| driver.counts().succeeded(call);
        assert_eq!(n(Call::Map), n(Call::Unmap));
        assert_eq!(n(Call::Reserve), n(Call::Unreserve));
    }

    #[test]
    fn what_cannot_be_mapped_leaves_nothing_behind() {
        let heap = heap(&[UNIT, UNIT]);
        assert!(heap.peer_view(UNIT, &[UNIT, UNIT, UNIT]).expect_err("two").is_invalid_argument());
        assert!(heap.peer_view(UNIT, &[]).expect_err("nothing").is_invalid_argument());
        assert!(
            heap.peer_view(UNIT, &[2 * UNIT]).expect_err("no such segment").is_invalid_argument()
        );
        assert!(crate::sync::lock(&heap.peer_views).is_empty());
        // The simulated driver reports mappings and handles that are left when it is dropped.
        let driver = heap.driver().clone();
        drop(heap);
        drop(driver);
    }
}
