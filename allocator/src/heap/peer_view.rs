//! Rows: peers' copies of some segments a second time, one rank's behind the other's.
//!
//! One copy by a copy engine may have many targets at equal distance, but CUDA refuses it where the
//! memory from the first to the last is not all mapped (seen with driver 580), and slots of the heap lie
//! far apart with nothing between them.

use crate::driver::{Driver, Reservation};
use crate::sync::lock;
use crate::{Error, Result};

use super::Heap;

/// So many at once: each holds its mappings until a segment in it goes.
const MOST: usize = 256;

/// Segments one behind the other in every slot, and where peers' copies of all of them are once more.
#[derive(Debug)]
pub(super) struct Row {
    offset: u64,
    segments: Vec<u64>,
    reservation: Reservation,
}

impl Row {
    fn length(&self) -> u64 {
        self.segments.iter().sum()
    }

    pub(super) fn holds(&self, offset: u64) -> bool {
        (self.offset..self.offset + self.length()).contains(&offset)
    }

    /// Unmaps the copies of `ranks` ranks, and gives the addresses back.
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
    /// Where peers' copies of windows of these lengths, which follow each other from `offset` on, lie
    /// one behind the other, by rank, without this one. Made when first asked for; stays until one of
    /// the windows goes. `is_unsupported` where the driver cannot.
    pub(crate) fn row(&self, offset: u64, segments: &[u64]) -> Result<u64> {
        let mut rows = lock(&self.rows);
        let same = |row: &&Row| row.offset == offset && row.segments == segments;
        if let Some(row) = rows.iter().find(same) {
            return Ok(row.reservation.base());
        }
        if rows.len() == MOST {
            return Err(Error::unsupported(format!("more than {MOST} rows of peers' memory")));
        }
        let row = self.make_row(offset, segments)?;
        let base = row.reservation.base();
        rows.push(row);
        Ok(base)
    }

    fn make_row(&self, offset: u64, segments: &[u64]) -> Result<Row> {
        let length = segments.iter().sum::<u64>();
        let peers = self.peer_count();
        let bytes = length.checked_mul(peers).filter(|bytes| *bytes > 0).ok_or_else(|| {
            Error::invalid_argument(format!("a row of {length} bytes of each of {peers} peers"))
        })?;
        let reservation = self.driver.reserve(bytes, self.driver.granularity())?;
        let row = Row { offset, segments: segments.to_vec(), reservation };
        for (nth, peer) in (0..).zip(self.peers()) {
            if let Err(error) = self.map_into(&row, nth * length, peer) {
                return Err(match row.give_back(&self.driver, nth) {
                    Ok(()) => error,
                    Err(undo) => error.context(format!("which could not be undone ({undo})")),
                });
            }
        }
        Ok(row)
    }

    /// Maps a peer's segments, all or none.
    fn map_into(&self, row: &Row, place: u64, peer: u32) -> Result<()> {
        let mut at = row.offset;
        let mut held = Vec::new();
        let mut mapped = row.segments.iter().try_for_each(|&bytes| {
            held.push(self.driver.hold_mapped(
                self.reservation(),
                self.position(peer, at),
                bytes,
            )?);
            at += bytes;
            Ok(())
        });
        mapped = mapped.and_then(|()| self.driver.map_all(&row.reservation, place, &held));
        // Mappings keep the memory.
        for physical in held {
            mapped = mapped.and(self.driver.release(physical));
        }
        mapped
    }

    /// Gives back the rows that are `gone`.
    pub(super) fn drop_rows(&self, gone: impl Fn(&Row) -> bool) -> Result<()> {
        let mut rows = lock(&self.rows);
        let mut outcome = Ok(());
        for row in rows.extract_if(.., |row| gone(row)) {
            outcome = outcome.and(row.give_back(&self.driver, self.peer_count()));
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
    fn a_row_is_made_once_and_goes_with_the_first_of_its_segments() {
        let heap = heap(&[UNIT, 2 * UNIT, UNIT]);
        let both = heap.row(UNIT, &[UNIT, 2 * UNIT]).expect("a row");
        assert_eq!(heap.row(UNIT, &[UNIT, 2 * UNIT]).expect("it is there"), both);
        assert_ne!(heap.row(UNIT, &[UNIT]).expect("a shorter one"), both);
        let one = heap.row(2 * UNIT, &[2 * UNIT]).expect("another row");
        let last = heap.row(4 * UNIT, &[UNIT]).expect("a third");
        assert!(both != one && one != last && both != last);
        heap.unmap_peers(UNIT).expect("the first segment goes");
        assert_eq!(heap.row(4 * UNIT, &[UNIT]).expect("others stay"), last);
        assert_eq!(heap.row(2 * UNIT, &[2 * UNIT]).expect("others stay"), one);
        assert!(heap.row(UNIT, &[UNIT, 2 * UNIT]).expect_err("gone").is_invalid_argument());
    }

    #[test]
    fn a_row_goes_with_any_of_its_segments_and_no_other() {
        let heap = heap(&[UNIT, 2 * UNIT, UNIT]);
        let row = heap.row(UNIT, &[UNIT, 2 * UNIT]).expect("a row");
        heap.unmap_peers(4 * UNIT).expect("what lies behind it goes");
        assert_eq!(heap.row(UNIT, &[UNIT, 2 * UNIT]).expect("it is there"), row);
        heap.unmap_peers(2 * UNIT).expect("its second segment goes");
        assert!(crate::sync::lock(&heap.rows).is_empty());
    }

    #[test]
    fn rows_give_their_mappings_and_addresses_back() {
        let driver = FaultDriver::new(Driver::sim(1), FaultPlan::new());
        let heap = heap_on(&Driver::new(driver.clone()), &[UNIT, UNIT]);
        heap.row(UNIT, &[UNIT, UNIT]).expect("a row");
        heap.row(2 * UNIT, &[UNIT]).expect("another");
        heap.unmap_peers(UNIT).expect("the first goes");
        drop(heap);
        let n = |call| driver.counts().succeeded(call);
        assert_eq!(n(Call::Map), n(Call::Unmap));
        assert_eq!(n(Call::Reserve), n(Call::Unreserve));
    }

    #[test]
    fn what_cannot_be_mapped_leaves_nothing_behind() {
        let heap = heap(&[UNIT, UNIT]);
        assert!(heap.row(UNIT, &[UNIT, UNIT, UNIT]).expect_err("two").is_invalid_argument());
        assert!(heap.row(UNIT, &[]).expect_err("nothing").is_invalid_argument());
        assert!(heap.row(UNIT, &[2 * UNIT]).expect_err("no such segment").is_invalid_argument());
        assert!(crate::sync::lock(&heap.rows).is_empty());
        // Dropped with mappings or handles of rows, the simulated driver would say so.
        let driver = heap.driver().clone();
        drop(heap);
        drop(driver);
    }
}
