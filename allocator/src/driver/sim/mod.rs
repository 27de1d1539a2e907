//! Addresses without memory: thousands of ranks in one process.
//!
//! Every driver has its own base addresses, random but fixed by the seed, as address space
//! randomisation gives every rank different ones: code that leaks an address into a decision
//! (rule D1) then differs from rank to rank in simulation too.
//!
//! Misuse is refused as by the real drivers. The bookkeeping is small: mappings at equal distances are kept
//! as one entry (`runs`), and held segments of peers are only counted.

#![allow(unsafe_code)] // says what its memory is: none

mod runs;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use runs::Runs;

use super::mappings::{Mappings, check_reserve, check_size};
use super::{DeviceIdentity, Exported, MemoryDriver, Physical, Reservation, Transport};
use crate::byte_size::ByteSize;
use crate::testing::SplitMix64;
use crate::{Error, Result};

/// Simulated addresses lie in `[LOWEST, HIGHEST)`: they are never small, and there is room for 4096 slots
/// of several TiB, which no real process has.
const LOWEST: u64 = 1 << 40;
const HIGHEST: u64 = 1 << 56;

/// [`Physical::raw`] of a segment that a peer made. Our own are numbered from 1.
const IMPORTED: u64 = 0;

/// A driver that gives addresses and no memory. Nothing may be read or written at them.
///
/// Equal seeds and equal calls give equal addresses.
#[derive(Debug)]
pub struct SimDriver {
    granularity: u64,
    /// Most bytes of physical memory that this driver's own segments may take together.
    limit: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    random: SplitMix64,
    mappings: Mappings<Runs>,
    /// Our own segments that are not yet released, or mapped still.
    segments: BTreeMap<u64, SimSegment>,
    /// Where our own segments are mapped.
    places: BTreeMap<u64, u64>,
    created: u64,
    used: u64,
    imported: u64,
}

#[derive(Debug)]
struct SimSegment {
    bytes: u64,
    mappings: u64,
    released: bool,
}

impl SimDriver {
    /// A device without bounds, of 2 MiB granularity.
    pub fn new(seed: u64) -> Self {
        Self::with_limit(seed, u64::MAX)
    }

    /// A device with `bytes` of physical memory. Segments count until they are released and their
    /// last mapping in this driver is gone; peers' segments do not count.
    pub fn with_limit(seed: u64, bytes: u64) -> Self {
        Self::build(seed, bytes, 2 << 20)
    }

    /// Makes a driver with another granularity, a power of two, for tests that want small segments.
    pub fn with_granularity(seed: u64, bytes: u64, granularity: u64) -> Result<Self> {
        if !granularity.is_power_of_two() || granularity > LOWEST {
            return Err(Error::invalid_argument(format!(
                "a granularity of {granularity} bytes; expected a power of two of at most {}",
                ByteSize(LOWEST)
            )));
        }
        Ok(Self::build(seed, bytes, granularity))
    }

    fn build(seed: u64, limit: u64, granularity: u64) -> Self {
        let state = State {
            random: SplitMix64::new(seed),
            mappings: Mappings::new(granularity),
            segments: BTreeMap::new(),
            places: BTreeMap::new(),
            created: 0,
            used: 0,
            imported: 0,
        };
        Self { granularity, limit, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every method leaves the state whole before it can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn own(&mut self, physical: &Physical) -> Result<&mut SimSegment> {
        let (raw, bytes) = (physical.raw(), physical.bytes());
        self.segments
            .get_mut(&raw)
            .filter(|segment| segment.bytes == bytes && !segment.released)
            .ok_or_else(|| {
                Error::invalid_argument(format!("no segment {raw} of {} here", ByteSize(bytes)))
            })
    }

    /// Forgets a segment that is released and not mapped.
    fn forget_unused(&mut self, raw: u64) {
        if let Some(segment) = self.segments.get(&raw)
            && segment.released
            && segment.mappings == 0
        {
            self.used -= segment.bytes;
            self.segments.remove(&raw);
        }
    }
}

// SAFETY: nobody can read or write its memory, as there is none.
unsafe impl MemoryDriver for SimDriver {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn device(&self) -> DeviceIdentity {
        DeviceIdentity { kind: "sim".into(), name: "simulated device".into(), uuid: String::new() }
    }

    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn transport(&self) -> Transport {
        Transport::Derived
    }

    fn host_accessible(&self) -> bool {
        false
    }

    fn reserve(&self, bytes: u64, align: u64) -> Result<Reservation> {
        check_reserve(bytes, align, self.granularity)?;
        let mut state = self.state();
        // Places for the base, counted in alignments.
        let first = LOWEST.div_ceil(align);
        let places =
            HIGHEST.checked_sub(bytes).map_or(0, |last| (last / align + 1).saturating_sub(first));
        for _ in 0..if places > 0 { 64 } else { 0 } {
            let base = (first + state.random.next() % places) * align;
            if state.mappings.is_free(base, bytes) {
                return Ok(state.mappings.reserve(base, bytes));
            }
        }
        Err(Error::out_of_memory(format!(
            "no room for {} of addresses aligned to {} among the {} that are simulated",
            ByteSize(bytes),
            ByteSize(align),
            ByteSize(HIGHEST - LOWEST)
        )))
    }

    fn unreserve(&self, reservation: Reservation) -> Result<()> {
        self.state().mappings.unreserve(&reservation, || Ok(()))
    }

    fn create(&self, bytes: u64) -> Result<Physical> {
        check_size("a segment", bytes, self.granularity)?;
        let mut state = self.state();
        if bytes > self.limit - state.used {
            return Err(Error::out_of_memory(format!(
                "{} asked for, {} of the simulated {} in use",
                ByteSize(bytes),
                ByteSize(state.used),
                ByteSize(self.limit)
            )));
        }
        state.used += bytes;
        state.created += 1;
        let raw = state.created;
        state.segments.insert(raw, SimSegment { bytes, mappings: 0, released: false });
        // SAFETY: there is no memory, and the number is new.
        Ok(unsafe { Physical::new(raw, bytes) })
    }

    fn export(&self, physical: &Physical) -> Result<Exported> {
        if physical.raw() != IMPORTED {
            self.state().own(physical)?;
        }
        Ok(Exported::Derived)
    }

    fn import(&self, exported: Exported, bytes: u64) -> Result<Physical> {
        check_size("a peer's segment", bytes, self.granularity)?;
        let Exported::Derived = exported else {
            return Err(Error::invalid_argument(
                "a handle to real memory handed to a simulated device; all ranks of a group must \
                 use the same driver",
            ));
        };
        self.state().imported += 1;
        // SAFETY: there is no memory.
        Ok(unsafe { Physical::new(IMPORTED, bytes) })
    }

    fn map(&self, reservation: &Reservation, offset: u64, physical: &Physical) -> Result<()> {
        let mut state = self.state();
        if physical.raw() == IMPORTED {
            return state.mappings.map(reservation, offset, physical.bytes(), || Ok(()));
        }
        state.own(physical)?;
        state.mappings.map(reservation, offset, physical.bytes(), || Ok(()))?;
        state.own(physical)?.mappings += 1;
        state.places.insert(reservation.base() + offset, physical.raw());
        Ok(())
    }

    fn unmap(&self, reservation: &Reservation, offset: u64, bytes: u64) -> Result<()> {
        let mut state = self.state();
        state.mappings.unmap(reservation, offset, bytes, || Ok(()))?;
        if let Some(raw) = state.places.remove(&(reservation.base() + offset)) {
            if let Some(segment) = state.segments.get_mut(&raw) {
                segment.mappings -= 1;
            }
            state.forget_unused(raw);
        }
        Ok(())
    }

    fn release(&self, physical: Physical) -> Result<()> {
        let mut state = self.state();
        if physical.raw() == IMPORTED {
            state.imported = state.imported.checked_sub(1).ok_or_else(|| {
                Error::invalid_argument("releasing a peer's segment that was never imported here")
            })?;
            return Ok(());
        }
        state.own(&physical)?.released = true;
        state.forget_unused(physical.raw());
        Ok(())
    }
}
