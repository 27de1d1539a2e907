//! Reservations and mappings of a driver, and the checks that every driver makes before it acts.
//!
//! The checks protect memory that belongs to others from a wrong offset: the host's kernel would map over
//! anything, and CUDA's error codes are hard to tell apart. They know only numbers. A driver passes the
//! system call as a closure, which is called only if the request makes sense, and recorded only if it
//! succeeds. During the call the range is marked as *changing*, which keeps other threads away from it, and
//! nothing is locked: a call may take long, and the growth of one lane must not wait for what a commit maps
//! for another (rule D7).

#![allow(unsafe_code)] // makes reservations of ranges that drivers have just reserved

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Reservation;
use crate::byte_size::ByteSize;
use crate::sync::lock_leaf;
use crate::{Error, Result};

/// Refuses sizes that are zero or no multiple of the granularity.
pub(super) fn check_size(what: &str, bytes: u64, granularity: u64) -> Result<()> {
    if bytes == 0 || !bytes.is_multiple_of(granularity) {
        return Err(Error::invalid_argument(format!(
            "{what} of {bytes} bytes; sizes are positive multiples of the granularity, {}",
            ByteSize(granularity)
        )));
    }
    Ok(())
}

/// Refuses a reservation that could not be made: see
/// [`MemoryDriver::reserve`](super::MemoryDriver::reserve).
pub(super) fn check_reserve(bytes: u64, align: u64, granularity: u64) -> Result<()> {
    check_size("a reservation", bytes, granularity)?;
    if !align.is_power_of_two() || align < granularity {
        return Err(Error::invalid_argument(format!(
            "a reservation aligned to {align} bytes; alignments are powers of two of at least {}",
            ByteSize(granularity)
        )));
    }
    Ok(())
}

/// The mapped ranges of one reservation, none of which overlap.
pub(super) trait Ranges: Default {
    /// The number of ranges.
    fn len(&self) -> u64;

    /// Offset and length of a range that has a byte in `[offset, end)`, if there is one.
    fn overlapping(&self, offset: u64, end: u64) -> Option<(u64, u64)>;

    /// Whether exactly `[offset, offset + bytes)` is one of the ranges.
    fn contains(&self, offset: u64, bytes: u64) -> bool;

    /// Adds `[offset, offset + bytes)`, which overlaps no other range. The end must not overflow and
    /// `bytes` must not be zero.
    fn insert(&mut self, offset: u64, bytes: u64);

    /// Removes `[offset, offset + bytes)`, which is one of the ranges.
    fn remove(&mut self, offset: u64, bytes: u64);
}

/// Lengths by offset.
impl Ranges for BTreeMap<u64, u64> {
    fn len(&self) -> u64 {
        self.len() as u64
    }

    fn overlapping(&self, offset: u64, end: u64) -> Option<(u64, u64)> {
        let (&at, &bytes) = self.range(..end).next_back()?;
        (at + bytes > offset).then_some((at, bytes))
    }

    fn contains(&self, offset: u64, bytes: u64) -> bool {
        self.get(&offset) == Some(&bytes)
    }

    fn insert(&mut self, offset: u64, bytes: u64) {
        self.insert(offset, bytes);
    }

    fn remove(&mut self, offset: u64, _bytes: u64) {
        self.remove(&offset);
    }
}

#[derive(Debug)]
struct MappedRegion<R> {
    bytes: u64,
    mapped: R,
    /// Offset and length of ranges that a thread is mapping or unmapping at the moment.
    changing: Vec<(u64, u64)>,
}

impl<R: Ranges> MappedRegion<R> {
    /// Offset and length of a range, mapped or changing, that has a byte in `[offset, end)`.
    fn overlapping(&self, offset: u64, end: u64) -> Option<(u64, u64)> {
        let changing = || {
            let mut all = self.changing.iter().copied();
            all.find(|&(at, bytes)| at < end && at + bytes > offset)
        };
        self.mapped.overlapping(offset, end).or_else(changing)
    }
}

/// Regions by their first address.
type Regions<R> = BTreeMap<u64, MappedRegion<R>>;

/// The reservations of one driver and what is mapped in each.
#[derive(Debug)]
pub(super) struct Mappings<R = BTreeMap<u64, u64>> {
    granularity: u64,
    regions: Mutex<Regions<R>>,
}

impl<R: Ranges> Mappings<R> {
    /// Nothing is reserved. Offsets and sizes are to be multiples of `granularity`, a power of two.
    pub(super) fn new(granularity: u64) -> Self {
        Self { granularity, regions: Mutex::default() }
    }

    /// Whether `[base, base + bytes)` overlaps no reservation of this driver.
    #[cfg(feature = "testing")] // elsewhere the system chooses the addresses
    pub(super) fn is_free(&self, base: u64, bytes: u64) -> bool {
        let regions = lock_leaf(&self.regions);
        let before = regions.range(..base.saturating_add(bytes)).next_back();
        before.is_none_or(|(&other, region)| other + region.bytes <= base)
    }

    /// Records a new reservation.
    pub(super) fn reserve(&self, base: u64, bytes: u64) -> Reservation {
        let (mapped, changing) = (R::default(), Vec::new());
        lock_leaf(&self.regions).insert(base, MappedRegion { bytes, mapped, changing });
        // SAFETY: the caller has just reserved the range, and it is recorded here once.
        unsafe { Reservation::new(base, bytes) }
    }

    /// Removes a reservation in which nothing is mapped, and has `act` give it back to the system.
    pub(super) fn unreserve(
        &self,
        reservation: &Reservation,
        act: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut regions = lock_leaf(&self.regions);
        let region = region(&mut regions, reservation)?;
        let mapped = region.mapped.len() + region.changing.len() as u64;
        if mapped > 0 {
            return Err(Error::invalid_state(format!(
                "giving back the reservation at {:#x} with {mapped} mapping(s) in it; unmap them \
                 first. It stays reserved",
                reservation.base()
            )));
        }
        // Removed before it is given back: after that, another reservation may have the same addresses.
        let region = regions.remove(&reservation.base());
        drop(regions);
        act().inspect_err(|_| {
            if let Some(region) = region {
                lock_leaf(&self.regions).insert(reservation.base(), region);
            }
        })
    }

    /// Has `act` make a mapping and records it, or says why it is refused.
    pub(super) fn map(
        &self,
        reservation: &Reservation,
        offset: u64,
        bytes: u64,
        act: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.check_range(reservation, offset, bytes)?;
        let mut regions = lock_leaf(&self.regions);
        let place = region(&mut regions, reservation)?;
        if let Some((at, there)) = place.overlapping(offset, offset + bytes) {
            return Err(Error::invalid_argument(format!(
                "mapping {} at offset {offset:#x} of the reservation at {:#x} overlaps the \
                 mapping of {} at offset {at:#x}; unmap that first",
                ByteSize(bytes),
                reservation.base(),
                ByteSize(there)
            )));
        }
        place.changing.push((offset, bytes));
        drop(regions);
        let done = act();
        self.end_change(reservation, (offset, bytes), done.is_ok())?;
        done
    }

    /// Ends the change of a range, which is or is not mapped afterwards.
    fn end_change(
        &self,
        reservation: &Reservation,
        (offset, bytes): (u64, u64),
        mapped: bool,
    ) -> Result<()> {
        let mut regions = lock_leaf(&self.regions);
        let place = region(&mut regions, reservation)?;
        place.changing.retain(|&(at, _)| at != offset);
        if mapped {
            place.mapped.insert(offset, bytes);
        }
        Ok(())
    }

    /// Has `act` remove a mapping and forgets it, or says why it is refused.
    pub(super) fn unmap(
        &self,
        reservation: &Reservation,
        offset: u64,
        bytes: u64,
        act: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.check_range(reservation, offset, bytes)?;
        let mut regions = lock_leaf(&self.regions);
        let place = region(&mut regions, reservation)?;
        if place.mapped.contains(offset, bytes) {
            place.mapped.remove(offset, bytes);
            place.changing.push((offset, bytes));
            drop(regions);
            let done = act();
            self.end_change(reservation, (offset, bytes), done.is_err())?;
            return done;
        }
        let there = match place.overlapping(offset, offset + bytes) {
            Some((at, there)) => format!(
                "where {} are mapped at offset {at:#x}; mappings are undone whole",
                ByteSize(there)
            ),
            None => "where nothing is mapped".to_owned(),
        };
        Err(Error::invalid_argument(format!(
            "unmapping {} at offset {offset:#x} of the reservation at {:#x}, {there}",
            ByteSize(bytes),
            reservation.base()
        )))
    }

    /// Removes every reservation that is left, mapped or not, as `(base, bytes)`; for a driver that is dropped.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = (u64, u64)> + use<R> {
        let regions = self.regions.get_mut().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(regions).into_iter().map(|(base, region)| (base, region.bytes))
    }

    /// The numbers of reservations and of mappings.
    pub(super) fn counts(&self) -> (u64, u64) {
        let regions = lock_leaf(&self.regions);
        let mappings = regions.values().map(|region| region.mapped.len()).sum();
        (regions.len() as u64, mappings)
    }

    fn check_range(&self, reservation: &Reservation, offset: u64, bytes: u64) -> Result<()> {
        check_size("a mapping", bytes, self.granularity)?;
        if !offset.is_multiple_of(self.granularity) {
            return Err(Error::invalid_argument(format!(
                "a mapping at offset {offset:#x}; offsets are multiples of the granularity, {}",
                ByteSize(self.granularity)
            )));
        }
        if !reservation.contains(offset, bytes) {
            return Err(Error::invalid_argument(format!(
                "{} at offset {offset:#x} reach beyond the reservation of {}",
                ByteSize(bytes),
                ByteSize(reservation.bytes())
            )));
        }
        Ok(())
    }
}

/// The region that a reservation is, if it is one of these.
fn region<'a, R>(
    regions: &'a mut MutexGuard<'_, Regions<R>>,
    reservation: &Reservation,
) -> Result<&'a mut MappedRegion<R>> {
    regions
        .get_mut(&reservation.base())
        .filter(|region| region.bytes == reservation.bytes())
        .ok_or_else(|| {
            Error::invalid_argument(format!(
                "no live reservation of {} at {:#x} in this driver",
                ByteSize(reservation.bytes()),
                reservation.base()
            ))
        })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    const G: u64 = 4096;

    fn mappings() -> (Mappings, Reservation) {
        let mappings = Mappings::new(G);
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
        let check = |bytes, align| check_reserve(bytes, align, G);
        refused(check(0, G), "0 bytes");
        refused(check(G + 1, G), "multiples");
        refused(check(G, G / 2), "aligned");
        refused(check(G, 3 * G), "powers of two");
        check(G, 4 * G).unwrap();
    }

    #[test]
    fn a_mapping_is_undone_whole_and_once() {
        let (mappings, range) = mappings();
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
        let (mappings, range) = mappings();
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
        let (mappings, range) = mappings();
        mappings.map(&range, 0, 2 * G, failed).unwrap_err();
        assert_eq!(mappings.counts(), (1, 0));
        mappings.map(&range, 0, G, done).unwrap();
        mappings.unmap(&range, 0, G, failed).unwrap_err();
        assert_eq!(mappings.counts(), (1, 1));
        mappings.unmap(&range, 0, G, done).unwrap();
    }

    #[test]
    fn a_mapping_out_of_the_reservation_is_refused() {
        let (mappings, range) = mappings();
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

    /// Rule D7.
    #[test]
    fn d7_a_call_that_takes_long_keeps_nobody_else_from_mapping() {
        let (mappings, range) = mappings();
        let other = mappings.reserve(1 << 30, 4 * G);
        mappings.map(&range, 0, G, done).unwrap();
        let (begun, at_it) = mpsc::channel();
        let (end, held) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let slow = scope.spawn(|| {
                mappings.map(&range, 2 * G, 2 * G, move || {
                    begun.send(()).unwrap();
                    held.recv_timeout(Duration::from_secs(20))
                        .map_err(|_| Error::system("a slow call", "others waited for it"))
                })
            });
            at_it.recv().unwrap();
            // Elsewhere everything goes on.
            mappings.map(&range, G, G, done).unwrap();
            mappings.unmap(&range, 0, G, done).unwrap();
            mappings.map(&other, 0, G, done).unwrap();
            let third = mappings.reserve(1 << 31, G);
            mappings.unreserve(&third, done).unwrap();
            // A range that is changing belongs to the thread that changes it.
            refused(mappings.map(&range, 3 * G, G, done), "overlaps the mapping of 8 KiB");
            refused(mappings.unmap(&range, 2 * G, 2 * G, done), "undone whole");
            mappings.unmap(&range, G, G, done).unwrap();
            assert!(mappings.unreserve(&range, done).unwrap_err().is_invalid_state());
            end.send(()).unwrap();
            slow.join().unwrap().unwrap();
        });
        mappings.unmap(&range, 2 * G, 2 * G, done).unwrap();
        mappings.unreserve(&range, done).unwrap();
    }
}
