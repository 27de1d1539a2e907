//! The steps of a row exchange on the CPU.

#![allow(unsafe_code)] // reads and writes memory by address

use std::slice;

use super::RowWork;

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

/// # Safety
///
/// `at` is aligned, and readable for `count` values, which nobody writes while the slice lives.
unsafe fn values<'a, T>(at: u64, count: usize) -> &'a [T] {
    if count == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { slice::from_raw_parts(at as *const T, count) }
}

/// # Safety
///
/// As [`values`], and nobody else reads them either.
unsafe fn values_mut<'a, T>(at: u64, count: usize) -> &'a mut [T] {
    if count == 0 {
        return &mut [];
    }
    // SAFETY: the caller's promise.
    unsafe { slice::from_raw_parts_mut(at as *mut T, count) }
}

/// # Safety
///
/// Of all methods: the addresses are as `RowWork` says, of memory that nobody else touches
/// meanwhile. Parts of blocks lie apart (`Scratch`, `LayoutParts`).
impl RowWork {
    /// Puts rows and their numbers in order by destination, and says how many there are for each
    /// rank. With a destination that is none there are -1 for all, and that row comes back.
    pub(crate) unsafe fn order(&self, world: usize) -> Option<BadRow> {
        let (given, rows, size) =
            (self.given as usize, self.rows as usize, self.row_bytes as usize);
        // SAFETY: the caller's promise; one of both is looked at, so here and below.
        let narrow: &[i32] =
            unsafe { values(self.destinations, if self.wide == 0 { given } else { 0 }) };
        // SAFETY: as above.
        let wide: &[i64] =
            unsafe { values(self.destinations, if self.wide == 0 { 0 } else { given }) };
        let destination = |row: usize| match self.wide {
            0 => i64::from(narrow[row]),
            _ => wide[row],
        };
        // SAFETY: as above.
        let input: &[u8] = unsafe { values(self.input, given * size) };
        // SAFETY: as above.
        let packed: &mut [u8] = unsafe { values_mut(self.packed, rows * size) };
        // SAFETY: as above.
        let order: &mut [i32] = unsafe { values_mut(self.order, rows) };
        // SAFETY: as above.
        let position: &mut [u32] = unsafe { values_mut(self.position, rows) };
        // SAFETY: as above.
        let splits: &mut [i64] = unsafe { values_mut(self.splits, world) };
        // SAFETY: as above.
        let index_splits: &mut [i64] = unsafe { values_mut(self.index_splits, world) };
        // SAFETY: as above.
        let state: &mut [u64] = unsafe { values_mut(self.state, world + 1) };
        state.fill(0);
        state[world] = self.capacity;
        position.fill(0);
        index_splits.fill(0);
        for row in 0..given {
            let to = destination(row);
            match usize::try_from(to).ok().filter(|rank| *rank < world) {
                Some(rank) => index_splits[rank] += 1,
                None if to == -1 => {}
                None => {
                    index_splits.fill(0);
                    splits.fill(-1);
                    return Some(BadRow { row, destination: to });
                }
            }
        }
        let mut next = 0;
        for (begin, count) in state.iter_mut().zip(&*index_splits) {
            *begin = next as u64;
            next += *count as usize;
        }
        // While rows are placed, the splits hold where each rank's next one goes.
        for (split, begin) in splits.iter_mut().zip(&*state) {
            *split = *begin as i64;
        }
        for row in 0..given {
            let Ok(rank) = usize::try_from(destination(row)) else { continue };
            let at = splits[rank] as usize;
            splits[rank] += 1;
            order[at] = row as i32;
            position[row] = at as u32 + 1;
            packed[at * size..][..size].copy_from_slice(&input[row * size..][..size]);
        }
        splits.copy_from_slice(index_splits);
        None
    }

    /// Says how many of the rows that came from each rank had room, which go back; and that nothing
    /// has come back yet.
    pub(crate) unsafe fn fit(&self, world: usize) {
        // SAFETY: the caller's promise, so here and below.
        let counts: &[i64] = unsafe { values(self.counts, world) };
        // SAFETY: as above.
        let offsets: &[i64] = unsafe { values(self.offsets, world) };
        // SAFETY: as above.
        let state: &[u64] = unsafe { values(self.state, world + 1) };
        // SAFETY: as above.
        let splits: &mut [i64] = unsafe { values_mut(self.splits, world) };
        // SAFETY: as above.
        let returned: &mut [i64] = unsafe { values_mut(self.returned, world) };
        for (split, (count, offset)) in splits.iter_mut().zip(counts.iter().zip(offsets)) {
            *split = (*count).min((state[world] as i64 - offset).max(0));
        }
        returned.fill(-1);
    }

    /// Puts rows that came back where they were, and zeros where none did. Does nothing if there was
    /// no exchange.
    pub(crate) unsafe fn spread(&self, world: usize) {
        let (given, rows, size) =
            (self.given as usize, self.rows as usize, self.row_bytes as usize);
        // SAFETY: the caller's promise, so here and below.
        let returned: &[i64] = unsafe { values(self.returned, world) };
        if returned.first().is_none_or(|count| *count < 0) {
            return;
        }
        // SAFETY: as above.
        let returned_at: &[i64] = unsafe { values(self.returned_at, world) };
        // SAFETY: as above.
        let state: &[u64] = unsafe { values(self.state, world + 1) };
        // SAFETY: as above.
        let position: &[u32] = unsafe { values(self.position, rows) };
        // SAFETY: as above.
        let packed: &[u8] = unsafe { values(self.packed, rows * size) };
        // SAFETY: as above.
        let output: &mut [u8] = unsafe { values_mut(self.output, given * size) };
        for (row, place) in position[..given].iter().enumerate() {
            let found = place.checked_sub(1).and_then(|place| {
                let place = u64::from(place);
                let to = state[..world].iter().rposition(|begin| *begin <= place)?;
                let within = place - state[to];
                let at = returned_at[to] as u64 + within;
                (within < returned[to] as u64 && at < rows as u64).then_some(at as usize)
            });
            let to = &mut output[row * size..][..size];
            match found {
                Some(at) => to.copy_from_slice(&packed[at * size..][..size]),
                None => to.fill(0),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row_exchange::{LayoutParts, Scratch};
    use crate::{DType, RowShape};

    /// Rows of three bytes, whose places alone are looked at.
    fn ordered(world: usize, destinations: &[i32]) -> (Option<BadRow>, Vec<i64>, Vec<u8>) {
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
        let splits: &[i64] = unsafe { values(work.splits, world) };
        // SAFETY: as above.
        let packed: &[u8] = unsafe { values(work.packed, 18) };
        (bad, splits.to_vec(), packed.iter().step_by(3).map(|byte| byte / 3).collect())
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
            assert_eq!(bad, Some(BadRow { row, destination }));
            assert_eq!(splits, [-1, -1]);
        }
    }
}
