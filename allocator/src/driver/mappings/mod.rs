//! What a driver has reserved and mapped, and the checks every driver makes before it acts.
//!
//! These are the one thing between a wrong offset and memory that belongs to somebody else: the
//! host's system would map over anything, and CUDA's answers are hard to tell apart. They know
//! only numbers. A driver says what it wants and passes the system call along: it is made only when
//! the wish makes sense, and noted only when it worked. The driver's lock on [`Mappings`] is held
//! over all of that, so no other thread comes between.

#![allow(unsafe_code)] // makes reservations of ranges that drivers have just reserved

mod runs;

use std::collections::BTreeMap;

use runs::Runs;

use super::Reservation;
use crate::amount::Amount;
use crate::{Error, Result};

/// Refuses sizes that are zero or no multiple of the granularity.
pub(super) fn check_size(what: &str, bytes: u64, granularity: u64) -> Result<()> {
    if bytes == 0 || !bytes.is_multiple_of(granularity) {
        return Err(Error::invalid_argument(format!(
            "{what} of {bytes} bytes; sizes are positive multiples of the granularity, {}",
            Amount(granularity)
        )));
    }
    Ok(())
}

#[derive(Debug)]
struct Region {
    bytes: u64,
    mapped: Runs,
}

/// The reservations of one driver and what is mapped in each.
#[derive(Debug)]
pub(super) struct Mappings {
    granularity: u64,
    /// By first address.
    regions: BTreeMap<u64, Region>,
}

impl Mappings {
    /// Nothing is reserved. Offsets and sizes are to be multiples of `granularity`, a power of two.
    pub(super) fn new(granularity: u64) -> Self {
        Self { granularity, regions: BTreeMap::new() }
    }

    /// Refuses a reservation that could not be made: see
    /// [`MemoryDriver::reserve`](super::MemoryDriver::reserve).
    pub(super) fn check_reserve(bytes: u64, align: u64, granularity: u64) -> Result<()> {
        check_size("a reservation", bytes, granularity)?;
        if !align.is_power_of_two() || align < granularity {
            return Err(Error::invalid_argument(format!(
                "a reservation aligned to {align} bytes; alignments are powers of two of at least \
                 {}",
                Amount(granularity)
            )));
        }
        Ok(())
    }

    /// Whether `[base, base + bytes)` overlaps no reservation of this driver.
    pub(super) fn is_free(&self, base: u64, bytes: u64) -> bool {
        let before = self.regions.range(..base.saturating_add(bytes)).next_back();
        before.is_none_or(|(&other, region)| other + region.bytes <= base)
    }

    /// Enters a fresh reservation, which the caller knows to be free.
    pub(super) fn reserve(&mut self, base: u64, bytes: u64) -> Reservation {
        self.regions.insert(base, Region { bytes, mapped: Runs::default() });
        // SAFETY: the caller has just reserved the range, and it is entered here once.
        unsafe { Reservation::new(base, bytes) }
    }

    /// Takes out a reservation in which nothing is mapped, after `act` has given it back.
    pub(super) fn unreserve(
        &mut self,
        reservation: &Reservation,
        act: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mapped = self.region(reservation)?.mapped.len();
        if mapped > 0 {
            return Err(Error::invalid_state(format!(
                "giving back the reservation at {:#x} with {mapped} mapping(s) in it; unmap them \
                 first. It stays reserved",
                reservation.base()
            )));
        }
        act()?;
        self.regions.remove(&reservation.base());
        Ok(())
    }

    /// Enters a mapping that `act` makes, or says why it cannot be.
    pub(super) fn map(
        &mut self,
        reservation: &Reservation,
        offset: u64,
        bytes: u64,
        act: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.check_range(reservation, offset, bytes)?;
        let mapped = &mut self.region(reservation)?.mapped;
        if let Some((at, there)) = mapped.overlapping(offset, offset + bytes) {
            return Err(Error::invalid_argument(format!(
                "mapping {} at offset {offset:#x} of the reservation at {:#x} overlaps the \
                 mapping of {} at offset {at:#x}; unmap that first",
                Amount(bytes),
                reservation.base(),
                Amount(there)
            )));
        }
        act()?;
        mapped.insert(offset, bytes);
        Ok(())
    }

    /// Refuses what is not one whole mapping.
    pub(super) fn check_mapped(
        &mut self,
        reservation: &Reservation,
        offset: u64,
        bytes: u64,
    ) -> Result<()> {
        self.check_range(reservation, offset, bytes)?;
        if self.region(reservation)?.mapped.contains(offset, bytes) {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{} at offset {offset:#x} of the reservation at {:#x} are not one mapping",
            Amount(bytes),
            reservation.base()
        )))
    }

    /// Takes out a mapping, after `act` has removed it, or says why it cannot be.
    pub(super) fn unmap(
        &mut self,
        reservation: &Reservation,
        offset: u64,
        bytes: u64,
        act: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.check_range(reservation, offset, bytes)?;
        let mapped = &mut self.region(reservation)?.mapped;
        if mapped.contains(offset, bytes) {
            act()?;
            mapped.remove(offset, bytes);
            return Ok(());
        }
        let there = match mapped.overlapping(offset, offset + bytes) {
            Some((at, there)) => format!(
                "where {} are mapped at offset {at:#x}; mappings are undone whole",
                Amount(there)
            ),
            None => "where nothing is mapped".to_owned(),
        };
        Err(Error::invalid_argument(format!(
            "unmapping {} at offset {offset:#x} of the reservation at {:#x}, {there}",
            Amount(bytes),
            reservation.base()
        )))
    }

    /// Takes out every `(base, bytes)` left, mapped or not; for a driver that goes away.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = (u64, u64)> + use<> {
        std::mem::take(&mut self.regions).into_iter().map(|(base, region)| (base, region.bytes))
    }

    /// The numbers of reservations and of mappings.
    pub(super) fn counts(&self) -> (u64, u64) {
        let mappings = self.regions.values().map(|region| region.mapped.len()).sum();
        (self.regions.len() as u64, mappings)
    }

    fn region(&mut self, reservation: &Reservation) -> Result<&mut Region> {
        self.regions
            .get_mut(&reservation.base())
            .filter(|region| region.bytes == reservation.bytes())
            .ok_or_else(|| {
                Error::invalid_argument(format!(
                    "no live reservation of {} at {:#x} in this driver",
                    Amount(reservation.bytes()),
                    reservation.base()
                ))
            })
    }

    fn check_range(&self, reservation: &Reservation, offset: u64, bytes: u64) -> Result<()> {
        check_size("a mapping", bytes, self.granularity)?;
        if !offset.is_multiple_of(self.granularity) {
            return Err(Error::invalid_argument(format!(
                "a mapping at offset {offset:#x}; offsets are multiples of the granularity, {}",
                Amount(self.granularity)
            )));
        }
        if !reservation.contains(offset, bytes) {
            return Err(Error::invalid_argument(format!(
                "{} at offset {offset:#x} reach beyond the reservation of {}",
                Amount(bytes),
                Amount(reservation.bytes())
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 4096;

    fn mappings() -> (Mappings, Reservation) {
        let mut mappings = Mappings::new(G);
        let range = mappings.reserve(1 << 20, 16 * G);
        (mappings, range)
    }

    fn done() -> Result<()> {
        Ok(())
    }

    fn failed() -> Result<()> {
        Err(Error::system("a call", "no"))
    }

    fn refused(result: Result<()>, why: &str) {
        let error = result.expect_err(why);
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains(why), "{error} does not say {why:?}");
    }

    #[test]
    fn sizes_and_alignments_that_make_no_sense_are_refused() {
        let check = |bytes, align| Mappings::check_reserve(bytes, align, G);
        refused(check(0, G), "0 bytes");
        refused(check(G + 1, G), "multiples");
        refused(check(G, G / 2), "aligned");
        refused(check(G, 3 * G), "powers of two");
        check(G, 4 * G).unwrap();
    }

    #[test]
    fn a_mapping_is_undone_whole_and_once() {
        let (mut mappings, range) = mappings();
        mappings.map(&range, 2 * G, 3 * G, done).unwrap();
        refused(mappings.map(&range, 4 * G, 2 * G, done), "overlaps the mapping of 12 KiB");
        refused(mappings.unmap(&range, 2 * G, G, done), "undone whole");
        refused(mappings.unmap(&range, 3 * G, 2 * G, done), "undone whole");
        refused(mappings.unmap(&range, 5 * G, G, done), "nothing is mapped");
        assert_eq!(mappings.counts(), (1, 1));
        mappings.unmap(&range, 2 * G, 3 * G, done).unwrap();
        refused(mappings.unmap(&range, 2 * G, 3 * G, done), "nothing is mapped");
        assert_eq!(mappings.counts(), (1, 0));
    }

    #[test]
    fn a_reservation_goes_when_it_is_empty_and_has_been_given_back() {
        let (mut mappings, range) = mappings();
        mappings.map(&range, 0, G, done).unwrap();
        let early = mappings.unreserve(&range, failed).unwrap_err();
        assert!(early.is_invalid_state() && early.to_string().contains("1 mapping"), "{early}");
        mappings.unmap(&range, 0, G, done).unwrap();
        mappings.unreserve(&range, failed).unwrap_err();
        assert_eq!(mappings.counts(), (1, 0), "what was not given back stays");
        mappings.unreserve(&range, done).unwrap();
        refused(mappings.unreserve(&range, done), "no live reservation");
        assert_eq!(mappings.counts(), (0, 0));
    }

    #[test]
    fn what_the_system_refused_has_not_happened() {
        let (mut mappings, range) = mappings();
        mappings.map(&range, 0, 2 * G, failed).unwrap_err();
        assert_eq!(mappings.counts(), (1, 0));
        mappings.map(&range, 0, G, done).unwrap();
        mappings.unmap(&range, 0, G, failed).unwrap_err();
        assert_eq!(mappings.counts(), (1, 1));
        mappings.unmap(&range, 0, G, done).unwrap();
    }

    #[test]
    fn a_mapping_out_of_the_reservation_is_refused() {
        let (mut mappings, range) = mappings();
        refused(mappings.map(&range, 15 * G, 2 * G, done), "beyond the reservation");
        refused(mappings.map(&range, u64::MAX - G + 1, G, done), "beyond the reservation");
        refused(mappings.map(&range, 1, G, done), "offsets are multiples");
        for (base, bytes) in [(0, 16 * G), (range.base(), G)] {
            // SAFETY: nothing is ever mapped by these numbers.
            let stranger = unsafe { Reservation::new(base, bytes) };
            refused(mappings.map(&stranger, 0, G, done), "no live reservation");
        }
        mappings.map(&range, 15 * G, G, done).unwrap();
    }
}
