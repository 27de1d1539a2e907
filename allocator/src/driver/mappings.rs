//! What a driver has reserved and mapped, so that misuse is a typed error before the system sees it.
//!
//! The table knows only numbers. A driver asks `check_*` first, makes its system call, and then
//! notes what happened; it holds its own lock over the three, so no other thread comes between.

use std::collections::BTreeMap;

use super::Reservation;
use crate::{Error, Result};

/// The live reservations of one driver and what is mapped in each.
#[derive(Debug)]
pub(crate) struct Mappings {
    granularity: u64,
    /// First address to range.
    reservations: BTreeMap<u64, Range>,
}

#[derive(Debug)]
struct Range {
    bytes: u64,
    /// Offset of a mapping to its length. Neighbours are never joined: a mapping is undone whole.
    mapped: BTreeMap<u64, u64>,
}

impl Mappings {
    /// An empty table. Offsets and sizes are to be multiples of `granularity`, a power of two.
    pub(crate) fn new(granularity: u64) -> Self {
        Self { granularity, reservations: BTreeMap::new() }
    }

    /// Refuses a length that is zero or no multiple of the granularity.
    pub(crate) fn check_size(&self, what: &str, bytes: u64) -> Result<()> {
        if bytes == 0 || !bytes.is_multiple_of(self.granularity) {
            return Err(Error::invalid_argument(format!(
                "{what} of {bytes} bytes; sizes are positive multiples of {} bytes",
                self.granularity
            )));
        }
        Ok(())
    }

    /// Refuses a reservation that could not be made: see
    /// [`MemoryDriver::reserve`](super::MemoryDriver::reserve).
    pub(crate) fn check_reserve(&self, bytes: u64, align: u64) -> Result<()> {
        self.check_size("reservation", bytes)?;
        if !align.is_power_of_two() || align < self.granularity {
            return Err(Error::invalid_argument(format!(
                "reservation aligned to {align} bytes; alignments are powers of two of at least {} \
                 bytes",
                self.granularity
            )));
        }
        Ok(())
    }

    /// Notes a reservation.
    pub(crate) fn reserved(&mut self, base: u64, bytes: u64) {
        self.reservations.insert(base, Range { bytes, mapped: BTreeMap::new() });
    }

    /// Refuses to give back what is not reserved, or has something mapped in it.
    pub(crate) fn check_unreserve(&self, reservation: &Reservation) -> Result<()> {
        let range = self.range(reservation)?;
        if let Some((offset, bytes)) = range.mapped.first_key_value() {
            return Err(Error::invalid_argument(format!(
                "the reservation at {:#x} still has {} mapping(s), the first of {bytes} bytes at \
                 offset {offset:#x}; unmap them before giving the range back",
                reservation.base(),
                range.mapped.len()
            )));
        }
        Ok(())
    }

    /// Forgets a reservation.
    pub(crate) fn unreserved(&mut self, base: u64) {
        self.reservations.remove(&base);
    }

    /// Refuses a mapping that is misaligned, out of the range, or over another.
    pub(crate) fn check_map(
        &self,
        reservation: &Reservation,
        offset: u64,
        bytes: u64,
    ) -> Result<()> {
        let range = self.range(reservation)?;
        self.check_size("mapping", bytes)?;
        if !offset.is_multiple_of(self.granularity) {
            return Err(Error::invalid_argument(format!(
                "mapping at offset {offset:#x}; offsets are multiples of {} bytes",
                self.granularity
            )));
        }
        if offset.checked_add(bytes).is_none_or(|end| end > range.bytes) {
            return Err(Error::invalid_argument(format!(
                "mapping of {bytes} bytes at offset {offset:#x} of a reservation of {} bytes",
                range.bytes
            )));
        }
        // Ranges in the table are disjoint, so only the last one that begins before the end of
        // this one can overlap it.
        let before = range.mapped.range(..offset + bytes).next_back();
        if let Some((&at, &there)) = before.filter(|&(&at, &there)| at + there > offset) {
            return Err(Error::invalid_argument(format!(
                "mapping of {bytes} bytes at offset {offset:#x} overlaps the mapping of {there} \
                 bytes at offset {at:#x}"
            )));
        }
        Ok(())
    }

    /// Notes a mapping.
    pub(crate) fn mapped(&mut self, base: u64, offset: u64, bytes: u64) {
        if let Some(range) = self.reservations.get_mut(&base) {
            range.mapped.insert(offset, bytes);
        }
    }

    /// Refuses to unmap anything but one whole mapping.
    pub(crate) fn check_unmap(
        &self,
        reservation: &Reservation,
        offset: u64,
        bytes: u64,
    ) -> Result<()> {
        match self.range(reservation)?.mapped.get(&offset) {
            Some(&there) if there == bytes => Ok(()),
            Some(there) => Err(Error::invalid_argument(format!(
                "unmapping {bytes} bytes at offset {offset:#x}, where {there} bytes are mapped; \
                 mappings are undone whole"
            ))),
            None => Err(Error::invalid_argument(format!(
                "unmapping {bytes} bytes at offset {offset:#x}, where no mapping begins"
            ))),
        }
    }

    /// Forgets a mapping.
    pub(crate) fn unmapped(&mut self, base: u64, offset: u64) {
        if let Some(range) = self.reservations.get_mut(&base) {
            range.mapped.remove(&offset);
        }
    }

    /// The numbers of live reservations and mappings.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let mappings = self.reservations.values().map(|range| range.mapped.len()).sum();
        (self.reservations.len(), mappings)
    }

    fn range(&self, reservation: &Reservation) -> Result<&Range> {
        self.reservations
            .get(&reservation.base())
            .filter(|range| range.bytes == reservation.bytes())
            .ok_or_else(|| {
                Error::invalid_argument(format!(
                    "no live reservation of {} bytes at {:#x} in this driver",
                    reservation.bytes(),
                    reservation.base()
                ))
            })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const G: u64 = 4096;

    fn table() -> (Mappings, Reservation) {
        let mut table = Mappings::new(G);
        table.reserved(1 << 20, 16 * G);
        (table, Reservation::new(1 << 20, 16 * G))
    }

    fn refused(result: Result<()>, why: &str) {
        let error = result.expect_err(why);
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains(why), "{error} does not say {why:?}");
    }

    #[test]
    fn sizes_and_alignments_that_make_no_sense_are_refused() {
        let (table, _) = table();
        refused(table.check_reserve(0, G), "0 bytes");
        refused(table.check_reserve(G + 1, G), "multiples");
        refused(table.check_reserve(G, G / 2), "aligned");
        refused(table.check_reserve(G, 3 * G), "powers of two");
        table.check_reserve(G, 4 * G).unwrap();
    }

    #[test]
    fn a_mapping_is_undone_whole_and_once() {
        let (mut table, range) = table();
        table.check_map(&range, 2 * G, 3 * G).unwrap();
        table.mapped(range.base(), 2 * G, 3 * G);
        refused(table.check_unmap(&range, 2 * G, G), "undone whole");
        refused(table.check_unmap(&range, 3 * G, 2 * G), "no mapping begins");
        refused(table.check_unreserve(&range), "still has 1 mapping");
        table.check_unmap(&range, 2 * G, 3 * G).unwrap();
        table.unmapped(range.base(), 2 * G);
        refused(table.check_unmap(&range, 2 * G, 3 * G), "no mapping begins");
        table.check_unreserve(&range).unwrap();
        table.unreserved(range.base());
        refused(table.check_unreserve(&range), "no live reservation");
        assert_eq!(table.counts(), (0, 0));
    }

    #[test]
    fn a_mapping_out_of_the_reservation_is_refused() {
        let (table, range) = table();
        refused(table.check_map(&range, 15 * G, 2 * G), "of a reservation of");
        refused(table.check_map(&range, u64::MAX - G + 1, G), "of a reservation of");
        refused(table.check_map(&range, 1, G), "offsets are multiples");
        refused(table.check_map(&Reservation::new(0, 16 * G), 0, G), "no live reservation");
        refused(table.check_map(&Reservation::new(range.base(), G), 0, G), "no live reservation");
        table.check_map(&range, 15 * G, G).unwrap();
    }

    proptest! {
        /// The table agrees with a plain array of pages about what overlaps.
        #[test]
        fn overlap_is_what_an_array_of_pages_says(
            calls in prop::collection::vec((0u64..16, 1u64..6), 1..40)
        ) {
            let (mut table, range) = table();
            let mut pages = [false; 16];
            for (at, count) in calls {
                let end = at + count;
                let fits = end <= 16 && !pages[at as usize..end as usize].contains(&true);
                let answer = table.check_map(&range, at * G, count * G);
                prop_assert_eq!(answer.is_ok(), fits);
                if fits {
                    table.mapped(range.base(), at * G, count * G);
                    pages[at as usize..end as usize].fill(true);
                }
            }
        }
    }
}
