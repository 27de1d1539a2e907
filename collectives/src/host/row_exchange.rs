//! The steps of a row exchange on the CPU.
//!
//! Destinations, rows and layouts are the caller's memory, which its other threads may write while a
//! step runs. So there are no references to it, each number is read once where it is used, and none
//! is an index before it was compared with what it indexes.

#![allow(unsafe_code)] // reads and writes memory by address

use std::ptr;

use crate::row_exchange::RowWork;

/// The first row whose destination is no rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadRow {
    pub(crate) row: usize,
    pub(crate) destination: i64,
}

impl BadRow {
    /// Why nothing was sent.
    pub(crate) fn why(&self, rank: u32, world: u32) -> String {
        let Self { row, destination } = self;
        format!(
            "row exchange on rank {rank}: row {row} has destination {destination}; there are ranks 0 \
             to {}, and -1 for nowhere. This rank sent nothing, and the communicator goes on",
            world - 1
        )
    }
}

/// Why a rank sent nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unsent {
    NoRank(BadRow),
    /// Destinations were other ones when rows were placed than when they were counted.
    Changed,
}

impl Unsent {
    /// The same in words.
    pub(crate) fn why(&self, rank: u32, world: u32) -> String {
        match self {
            Self::NoRank(row) => row.why(rank, world),
            Self::Changed => format!(
                "row exchange on rank {rank}: destinations were written while they were read. This \
                 rank sent nothing, and the communicator goes on"
            ),
        }
    }
}

/// So many numbers in memory, which others may write meanwhile.
#[derive(Clone, Copy)]
struct Numbers<T> {
    at: *mut T,
    count: usize,
}

impl<T: Copy> Numbers<T> {
    /// # Safety
    ///
    /// While the value is used, `at` is aligned and readable for `count` numbers, and writable where
    /// they are set.
    unsafe fn new(at: u64, count: usize) -> Self {
        Self { at: at as *mut T, count }
    }

    fn get(self, index: usize) -> T {
        assert!(index < self.count);
        // SAFETY: within the count (`new`). Volatile, so that what was compared is what is used.
        unsafe { self.at.wrapping_add(index).read_volatile() }
    }

    fn set(self, index: usize, value: T) {
        assert!(index < self.count);
        // SAFETY: within the count (`new`).
        unsafe { self.at.wrapping_add(index).write_volatile(value) };
    }

    fn fill(self, value: T) {
        (0..self.count).for_each(|index| self.set(index, value));
    }
}

/// # Safety
///
/// Of all methods: the addresses are as `RowWork` says, of memory that stays mapped. What is the
/// exchange's own, nobody else touches meanwhile. Parts of blocks lie apart (`Scratch`,
/// `LayoutParts`).
impl RowWork {
    /// A row's destination, among `given`.
    ///
    /// # Safety
    ///
    /// As all.
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

    /// Puts rows and their numbers in order by destination, and says how many there are for each
    /// rank. Where destinations make no sense there are -1 for all, and why comes back.
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

    /// Counts the rows for each rank, and puts down that none has been placed.
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

    /// Packs the rows that were counted.
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
        // Where each rank's next row goes, and where its last one ends: both free until later steps.
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
            // SAFETY: the input has `given` rows, and the packed rows are `rows`, of which there are
            // as many places as were counted. They are the exchange's own, so apart from the input.
            unsafe { ptr::copy_nonoverlapping(from, to, size) };
        }
        if (0..world).any(|rank| next.get(rank) != end.get(rank)) {
            position.fill(0);
            return Some(Unsent::Changed);
        }
        None
    }

    /// Says how many of the rows that came from each rank had room, which go back; and that nothing
    /// has come back yet.
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

    /// Puts rows that came back where they were, and zeros where none did. Does nothing if there was
    /// no exchange.
    pub(crate) unsafe fn spread(&self, world: usize) {
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
                    // SAFETY: both have as many rows, and the packed ones are the exchange's own.
                    unsafe { ptr::copy_nonoverlapping(from, to, size) }
                }
                // SAFETY: the output has `given` rows.
                None => unsafe { to.write_bytes(0, size) },
            }
        }
    }

    /// Which of the packed rows came back for the one that was packed at `place - 1`.
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

    /// Rows of three bytes, whose places alone are looked at.
    fn ordered(world: usize, destinations: &[i32]) -> (Option<Unsent>, Vec<i64>, Vec<u8>) {
        let shape = RowShape { rows: 6, row: 3, dtype: DType::U8 };
        let (scratch, layout) =
            (Scratch::new(&shape, world as u32), LayoutParts::new(&shape, world as u32));
        // Eight bytes each, as numbers in it are to be aligned.
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
        // SAFETY: the vectors are as long as the parts, and nobody else has them.
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
        // Too many for rank 0 or rank 1, for a rank that is none, and too few.
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
            // SAFETY: the vectors are as long as the parts, and nobody else has them; so below.
            assert_eq!(unsafe { work(&counted).count(2) }, None);
            // SAFETY: as above.
            assert_eq!(unsafe { work(&changed).pack(2) }, Some(Unsent::Changed), "{changed:?}");
            // SAFETY: as above.
            let position = unsafe { Numbers::<u32>::new(work(&changed).position, 3) };
            assert_eq!([0, 1, 2].map(|row| position.get(row)), [0; 3], "{changed:?}");
        }
    }
}
