//! What a driver has reserved and mapped, and the checks every driver makes before it acts.
//!
//! The table is the one thing between a wrong offset and memory that belongs to somebody else:
//! the system would map over anything. A driver asks the table first and acts only on `Ok`; it
//! owns the table behind a lock and keeps that lock while it acts.

mod runs;

use std::collections::BTreeMap;

use runs::Runs;

use super::Reservation;
use super::amount::Amount;
use crate::{Error, Result};

/// Refuses sizes that are zero or no multiple of the granularity.
pub(super) fn check_size(what: &str, bytes: u64, granularity: u64) -> Result<()> {
    if bytes == 0 || !bytes.is_multiple_of(granularity) {
        return Err(Error::invalid_argument(format!(
            "{what} of {bytes} bytes; expected a multiple of the granularity, {}, and not zero",
            Amount(granularity)
        )));
    }
    Ok(())
}

/// Refuses alignments that are no power of two or below the granularity.
pub(super) fn check_align(align: u64, granularity: u64) -> Result<()> {
    if !align.is_power_of_two() || align < granularity {
        return Err(Error::invalid_argument(format!(
            "reservation aligned to {align} bytes; expected a power of two of at least {}",
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
pub(super) struct Table {
    granularity: u64,
    regions: BTreeMap<u64, Region>,
}

impl Table {
    pub(super) fn new(granularity: u64) -> Self {
        Self { granularity, regions: BTreeMap::new() }
    }

    /// Whether `[base, base + bytes)` overlaps no reservation of this driver.
    pub(super) fn is_free(&self, base: u64, bytes: u64) -> bool {
        let before = self.regions.range(..base.saturating_add(bytes)).next_back();
        before.is_none_or(|(&other, region)| other + region.bytes <= base)
    }

    /// Enters a fresh reservation, which the caller knows to be free.
    pub(super) fn reserve(&mut self, base: u64, bytes: u64) -> Reservation {
        self.regions.insert(base, Region { bytes, mapped: Runs::default() });
        Reservation::new(base, bytes)
    }

    /// Removes a reservation in which nothing is mapped.
    pub(super) fn unreserve(&mut self, reservation: &Reservation) -> Result<()> {
        let mapped = self.region(reservation)?.mapped.len();
        if mapped > 0 {
            return Err(Error::invalid_state(format!(
                "giving back the reservation at {:#x} with {mapped} mappings in it; unmap them \
                 first. It stays reserved",
                reservation.base()
            )));
        }
        self.regions.remove(&reservation.base());
        Ok(())
    }

    /// Enters a mapping, or says why it cannot be.
    pub(super) fn map(&mut self, reservation: &Reservation, offset: u64, bytes: u64) -> Result<()> {
        self.check_range(reservation, offset, bytes)?;
        if !self.region(reservation)?.mapped.insert(offset, bytes) {
            return Err(Error::invalid_argument(format!(
                "mapping {} at offset {offset:#x} of the reservation at {:#x}, where something is \
                 mapped already; unmap that first",
                Amount(bytes),
                reservation.base()
            )));
        }
        Ok(())
    }

    /// Removes a mapping, or says why it cannot be.
    pub(super) fn unmap(
        &mut self,
        reservation: &Reservation,
        offset: u64,
        bytes: u64,
    ) -> Result<()> {
        self.check_range(reservation, offset, bytes)?;
        if !self.region(reservation)?.mapped.remove(offset, bytes) {
            return Err(Error::invalid_argument(format!(
                "unmapping {} at offset {offset:#x} of the reservation at {:#x}, which is not \
                 exactly one mapping",
                Amount(bytes),
                reservation.base()
            )));
        }
        Ok(())
    }

    /// Takes out every `(base, bytes)` left, mapped or not; for a driver that goes away.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = (u64, u64)> + use<> {
        std::mem::take(&mut self.regions).into_iter().map(|(base, region)| (base, region.bytes))
    }

    fn region(&mut self, reservation: &Reservation) -> Result<&mut Region> {
        self.regions
            .get_mut(&reservation.base())
            .filter(|region| region.bytes == reservation.bytes())
            .ok_or_else(|| {
                Error::invalid_argument(format!(
                    "no reservation of {} at {:#x} in this driver",
                    Amount(reservation.bytes()),
                    reservation.base()
                ))
            })
    }

    fn check_range(&self, reservation: &Reservation, offset: u64, bytes: u64) -> Result<()> {
        check_size("a mapping", bytes, self.granularity)?;
        if !offset.is_multiple_of(self.granularity) {
            return Err(Error::invalid_argument(format!(
                "a mapping at offset {offset:#x}; expected a multiple of the granularity, {}",
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
