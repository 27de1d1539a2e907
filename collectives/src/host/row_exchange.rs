//! The steps of a row exchange on the CPU.
//!
//! Destinations, rows and layouts are the caller's memory, which its other threads may write while a step runs. So this
//! code holds no references to it, reads each number once where it is used, and checks it before using it as an index.

#![allow(unsafe_code)] // reads and writes memory by address

use std::ptr;

use super::numbers::Numbers;
use crate::row_exchange::RowWork;

/// The first row whose destination is neither a rank nor -1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadRow {
    pub(crate) row: usize,
    pub(crate) destination: i64,
}

impl BadRow {
    /// The text of the error: why nothing was sent.
    pub(crate) fn why(&self, rank: u32, world: u32) -> String {
        let Self { row, destination } = self;
        format!(
            "row exchange on rank {rank}: row {row} has destination {destination}; there are ranks 0 \
             to {}, and -1 for nowhere. This rank sent nothing, and the communicator stays usable",
            world - 1
        )
    }
}

/// Why a rank sent nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unsent {
    NoRank(BadRow),
    /// Destinations changed between counting the rows and packing them.
    Changed,
}

impl Unsent {
    /// The text of the error: why nothing was sent.
    pub(crate) fn why(&self, rank: u32, world: u32) -> String {
        match self {
            Self::NoRank(row) => row.why(rank, world),
            Self::Changed => format!(
                "row exchange on rank {rank}: destinations were written while they were read. This \
                 rank sent nothing, and the communicator stays usable"
            ),
        }
    }
}

/// # Safety
///
/// For all methods: the addresses are as `RowWork` describes them, in memory that stays mapped. Nobody else accesses
/// the exchange's own memory meanwhile. The parts of its blocks do not overlap (`Scratch`, `LayoutParts`).
impl RowWork {
    /// The destination of a row below `given`.
    ///
    /// # Safety
    ///
    /// As for all methods.
    unsafe fn destination(&self, row: usize) -> i64 {
        let given = self.given as usize;
        if self.wide == 0 {
            // SAFETY: the caller's promise.
            i64::from(unsafe { Numbers::<i32>::new(self.destinations, given) }.get(row))
        } else {
            // SAFETY: as above.
            unsafe { Numbers::<i64>::new(self.destinations, given) }.get(row)
        }
    }

    /// Packs rows and their indices in the order of their destinations, and counts the rows for each rank. If a
    /// destination is invalid, all counts become -1 and the reason is returned.
    pub(crate) unsafe fn order(&self, world: usize) -> Option<Unsent> {
        // SAFETY: the caller's promise, so here and below.
        let bad = unsafe { self.count(world) };
        // SAFETY: as above.
        let bad = bad.or_else(|| unsafe { self.pack(world) });
        // SAFETY: as above.
        let splits = unsafe { Numbers::<i64>::new(self.splits, world) };
        // SAFETY: as above.
        let index_splits = unsafe { Numbers::<i64>::new(self.index_splits, world) };
        for rank in 0..world {
            splits.set(rank, if bad.is_some() { -1 } else { index_splits.get(rank) });
            if bad.is_some() {
                index_splits.set(rank, 0);
            }
        }
        bad
    }

    /// Counts the rows for each rank, and marks all of them as not packed.
    unsafe fn count(&self, world: usize) -> Option<Unsent> {
        // SAFETY: the caller's promise, so here and below.
        let position = unsafe { Numbers::<u32>::new(self.position, self.rows as usize) };
        // SAFETY: as above.
        let counts = unsafe { Numbers::<i64>::new(self.index_splits, world) };
        // SAFETY: as above.
        let state = unsafe { Numbers::<u64>::new(self.state, world + 1) };
        position.fill(0);
        counts.fill(0);
        state.fill(0);
        state.set(world, self.capacity);
        for row in 0..self.given as usize {
            // SAFETY: as above.
            let destination = unsafe { self.destination(row) };
            match usize::try_from(destination).ok().filter(|rank| *rank < world) {
                Some(rank) => counts.set(rank, counts.get(rank) + 1),
                None if destination == -1 => {}
                None => return Some(Unsent::NoRank(BadRow { row, destination })),
            }
        }
        None
    }

    /// Packs the rows that were counted, in the order of their destinations.
    unsafe fn pack(&self, world: usize) -> Option<Unsent> {
        let (rows, size) = (self.rows as usize, self.row_bytes as usize);
        // SAFETY: the caller's promise, so here and below.
        let order = unsafe { Numbers::<i32>::new(self.order, rows) };
        // SAFETY: as above.
        let position = unsafe { Numbers::<u32>::new(self.position, rows) };
        // SAFETY: as above.
        let counts = unsafe { Numbers::<i64>::new(self.index_splits, world) };
        // SAFETY: as above.
        let state = unsafe { Numbers::<u64>::new(self.state, world + 1) };
        // For each rank, where its next row goes and where its last one ends. Both arrays are unused until later steps.
        // SAFETY: as above.
        let next = unsafe { Numbers::<i64>::new(self.splits, world) };
        // SAFETY: as above.
        let end = unsafe { Numbers::<i64>::new(self.returned, world) };
        let mut begin = 0;
        for rank in 0..world {
            state.set(rank, begin as u64);
            next.set(rank, begin);
            begin += counts.get(rank);
            end.set(rank, begin);
        }
        for row in 0..self.given as usize {
            // SAFETY: as above.
            let destination = unsafe { self.destination(row) };
            let Ok(rank) = usize::try_from(destination) else { continue };
            if rank >= world || next.get(rank) >= end.get(rank) {
                position.fill(0);
                return Some(Unsent::Changed);
            }
            let at = next.get(rank) as usize;
            next.set(rank, at as i64 + 1);
            order.set(at, row as i32);
            position.set(row, at as u32 + 1);
            let from = (self.input as *const u8).wrapping_add(row * size);
            let to = (self.packed as *mut u8).wrapping_add(at * size);
            // SAFETY: the input has `given` rows, and there is room for `rows` packed ones, of which no more are used
            // than were counted. They are the exchange's own memory, so they do not overlap the input.
            unsafe { ptr::copy_nonoverlapping(from, to, size) };
        }
        if (0..world).any(|rank| next.get(rank) != end.get(rank)) {
            position.fill(0);
            return Some(Unsent::Changed);
        }
        None
    }

    /// Computes how many of the rows from each rank had room, which are those that go back, and marks that no row has
    /// come back yet.
    pub(crate) unsafe fn fit(&self, world: usize) {
        // SAFETY: the caller's promise, so here and below.
        let counts = unsafe { Numbers::<i64>::new(self.counts, world) };
        // SAFETY: as above.
        let offsets = unsafe { Numbers::<i64>::new(self.offsets, world) };
        // SAFETY: as above.
        let state = unsafe { Numbers::<u64>::new(self.state, world + 1) };
        // SAFETY: as above.
        let splits = unsafe { Numbers::<i64>::new(self.splits, world) };
        // SAFETY: as above.
        let returned = unsafe { Numbers::<i64>::new(self.returned, world) };
        let capacity = state.get(world) as i64;
        for rank in 0..world {
            let room = capacity.saturating_sub(offsets.get(rank)).max(0);
            splits.set(rank, counts.get(rank).min(room));
        }
        returned.fill(-1);
    }

    /// Copies the rows that came back to their original places, and writes zeros where no row came back. Does nothing
    /// if there was no exchange.
    pub(crate) unsafe fn unpack(&self, world: usize) {
        let (rows, size) = (self.rows as usize, self.row_bytes as usize);
        // SAFETY: the caller's promise, so here and below.
        let returned = unsafe { Numbers::<i64>::new(self.returned, world) };
        if world == 0 || returned.get(0) < 0 {
            return;
        }
        // SAFETY: as above.
        let position = unsafe { Numbers::<u32>::new(self.position, rows) };
        for row in 0..self.given as usize {
            // SAFETY: as above.
            let found = unsafe { self.returned_row(position.get(row), world) };
            let to = (self.output as *mut u8).wrapping_add(row * size);
            match found {
                Some(at) => {
                    let from = (self.packed as *const u8).wrapping_add(at * size);
                    // SAFETY: both have this row, and the packed ones are the exchange's own memory.
                    unsafe { ptr::copy_nonoverlapping(from, to, size) }
                }
                // SAFETY: the output has `given` rows.
                None => unsafe { to.write_bytes(0, size) },
            }
        }
    }

    /// The index among the packed rows of the row that came back for the one that was packed at `place - 1`.
    unsafe fn returned_row(&self, place: u32, world: usize) -> Option<usize> {
        let place = u64::from(place.checked_sub(1)?);
        // SAFETY: the caller's promise, so here and below.
        let state = unsafe { Numbers::<u64>::new(self.state, world + 1) };
        // SAFETY: as above.
        let returned = unsafe { Numbers::<i64>::new(self.returned, world) };
        // SAFETY: as above.
        let returned_at = unsafe { Numbers::<i64>::new(self.returned_at, world) };
        let begins = |rank| Some((rank, place.checked_sub(state.get(rank))?));
        let (to, within) = (0..world).rev().find_map(begins)?;
        let at = (returned_at.get(to) as u64).checked_add(within)?;
        (within < returned.get(to) as u64 && at < self.rows).then_some(at as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row_exchange::{LayoutParts, Scratch};
    use crate::{DType, RowShape};

    /// Orders rows of three bytes, each of which holds its own bytes' positions.
    fn ordered(world: usize, destinations: &[i32]) -> (Option<Unsent>, Vec<i64>, Vec<u8>) {
        let shape = RowShape { rows: 6, row: 3, dtype: DType::U8 };
        let (scratch, layout) =
            (Scratch::new(&shape, world as u32), LayoutParts::new(&shape, world as u32));
        // Elements of eight bytes, so that the numbers in them are aligned.
        let mut scratch = vec![0_u64; scratch.bytes as usize / 8];
        let mut layout = vec![0_u64; layout.bytes as usize / 8];
        let (scratch_at, layout_at) = (scratch.as_mut_ptr() as u64, layout.as_mut_ptr() as u64);
        let input: Vec<u8> = (0..18).collect();
        let work = RowWork {
            destinations: destinations.as_ptr() as u64,
            input: input.as_ptr() as u64,
            given: destinations.len() as u64,
            ..RowWork::new(&shape, world as u32, scratch_at, layout_at)
        };
        // SAFETY: the vectors are as long as the parts, and nobody else accesses them.
        let bad = unsafe { work.order(world) };
        // SAFETY: as above.
        let splits = unsafe { Numbers::<i64>::new(work.splits, world) };
        // SAFETY: as above.
        let packed = unsafe { Numbers::<u8>::new(work.packed, 18) };
        let splits = (0..world).map(|rank| splits.get(rank)).collect();
        (bad, splits, (0..6).map(|row| packed.get(3 * row) / 3).collect())
    }

    #[test]
    fn the_order_is_stable_and_leaves_out_what_goes_nowhere() {
        let (bad, splits, packed) = ordered(3, &[2, 0, -1, 2, 0, 0]);
        assert_eq!((bad, splits), (None, vec![3, 0, 2]));
        assert_eq!(packed[..5], [1, 4, 5, 0, 3]);
        let (bad, splits, _) = ordered(2, &[]);
        assert_eq!((bad, splits), (None, vec![0, 0]));
    }

    #[test]
    fn a_destination_that_is_no_rank_sends_nothing() {
        for (destinations, row) in [([0, 2, 1], 1), ([-2, 5, 1], 0), ([0, 1, i32::MAX], 2)] {
            let (bad, splits, _) = ordered(2, &destinations);
            let destination = i64::from(destinations[row]);
            assert_eq!(bad, Some(Unsent::NoRank(BadRow { row, destination })));
            assert_eq!(splits, [-1, -1]);
        }
    }

    #[test]
    fn destinations_that_changed_since_they_were_counted_place_no_row() {
        let shape = RowShape { rows: 3, row: 1, dtype: DType::U8 };
        let bytes = (Scratch::new(&shape, 2).bytes, LayoutParts::new(&shape, 2).bytes);
        // Too many rows for rank 0 or rank 1, a row for a rank that does not exist, and too few rows.
        for changed in [[0, 0, 0], [1, 1, 0], [2, 0, 1], [0, -1, 0]] {
            let (mut scratch, mut layout) =
                (vec![0_u64; bytes.0 as usize / 8], vec![0_u64; bytes.1 as usize / 8]);
            let (scratch_at, layout_at) = (scratch.as_mut_ptr() as u64, layout.as_mut_ptr() as u64);
            let (input, counted) = ([7_u8; 3], [0_i32, 1, 0]);
            let work = |destinations: &[i32; 3]| RowWork {
                destinations: destinations.as_ptr() as u64,
                input: input.as_ptr() as u64,
                given: 3,
                ..RowWork::new(&shape, 2, scratch_at, layout_at)
            };
            // SAFETY: the vectors are as long as the parts, and nobody else accesses them; so below.
            assert_eq!(unsafe { work(&counted).count(2) }, None);
            // SAFETY: as above.
            assert_eq!(unsafe { work(&changed).pack(2) }, Some(Unsent::Changed), "{changed:?}");
            // SAFETY: as above.
            let position = unsafe { Numbers::<u32>::new(work(&changed).position, 3) };
            assert_eq!([0, 1, 2].map(|row| position.get(row)), [0; 3], "{changed:?}");
        }
    }
}
