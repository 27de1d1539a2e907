//! All-to-alls whose counts lie in memory, and are read when the call runs.

#![allow(unsafe_code)] // reads and writes counts through the caller's pointers

use symmpool_allocator::Result;

use super::AllToAllCall;
use super::traffic_matrix::{BAD_SPLITS, TrafficMatrix};
use crate::algorithm::AUTO;
use crate::call::splits::{SplitRows, SplitsAt};
use crate::call::{CallDescription, OpType};
use crate::host::HostEngine;
use crate::host::layout::place::InPlace;
use crate::types::place::Place;

impl HostEngine {
    /// Sends to each rank the number of rows that `splits` gives for it. Rows lie in rank order, without gaps, in
    /// `input` and `output`, which must not overlap. A rank need not know how much it receives: the output has room
    /// for `rows.capacity` rows, and rows beyond that are not written.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::all_to_all_v`]; and, on every rank, after all data that has room has arrived:
    /// `is_overflow` if a rank was sent more than it had room for, `is_invalid_argument` if a rank's splits are
    /// negative or more than its input, in which case that rank sent nothing.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::all_to_all_v`], where input and output have `rows.length` and
    /// `rows.capacity` rows, and the arrays of `splits` have a count for each rank.
    pub unsafe fn all_to_all_splits(
        &mut self,
        input: Place,
        output: Place,
        rows: &SplitRows,
        splits: &SplitsAt,
    ) -> Result<()> {
        self.ready()?;
        let SplitRows { dtype, row, length, capacity } = *rows;
        let (rank, world) = (self.rank(), self.world());
        let data = splits.bytes(rank, world, capacity).and_then(|_| {
            let size = row.checked_mul(dtype.size()).filter(|size| *size > 0);
            let bytes = |count: usize| size.and_then(|size| size.checked_mul(count));
            let (input, output) = ((input, bytes(length)), (output, bytes(capacity)));
            Ok((self.resolve(input, output, InPlace::Never)?, size.unwrap_or(1)))
        });
        let (data, size) = self.or_decline(data)?;
        // SAFETY: the caller promised that `splits.input` is readable for a count for each rank.
        let sound = unsafe { self.publish_splits(splits, length, size) };
        let nonsense = if sound { 0 } else { BAD_SPLITS };
        self.set_next_row(world, (capacity * size) as u64 | nonsense);
        let call = CallDescription::new(OpType::AllToAllV).elements(dtype, row);
        let work = AllToAllCall::new(self, AUTO, data, TrafficMatrix::Splits, size);
        // SAFETY: the caller promised that input and output have `length` and `capacity` rows; `data` has their
        // resolved places.
        unsafe { work.run(self, &call) }?;
        let mut offset = 0;
        for peer in 0..world {
            let count = self.row(peer, rank) / size as u64;
            // SAFETY: the caller promised that the array is null or writable for a count for each rank.
            unsafe { splits.write(splits.output, peer as usize, count) };
            // SAFETY: the caller promised that the array is null or writable for a count for each rank.
            unsafe { splits.write(splits.offsets, peer as usize, offset) };
            offset += count;
        }
        TrafficMatrix::Splits.outcome(self, size)
    }

    /// Publishes the counts in this rank's row, in bytes. If they are negative or more than `length`, it publishes
    /// zeros and returns false. Each count is read once, because peers trust the row: it holds exactly what was
    /// checked, even if another thread writes the counts meanwhile.
    ///
    /// # Safety
    ///
    /// `splits.input` is readable for one count for each rank.
    unsafe fn publish_splits(&self, splits: &SplitsAt, length: usize, size: usize) -> bool {
        let mut left = length;
        for peer in 0..self.world() {
            // SAFETY: the caller promised that `splits.input` is readable for a count for each rank.
            let count = usize::try_from(unsafe { splits.read(peer as usize) });
            let Some(after) = count.ok().and_then(|count| left.checked_sub(count)) else {
                (0..self.world()).for_each(|peer| self.set_next_row(peer, 0));
                return false;
            };
            self.set_next_row(peer, ((left - after) * size) as u64);
            left = after;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn what_32_bits_do_not_hold_becomes_the_most_that_they_do() {
        let mut counts = [0_i32; 3];
        let output: *mut u8 = counts.as_mut_ptr().cast();
        let splits = SplitsAt { input: output, output, offsets: output, dtype: DType::I32 };
        for (rank, value) in [7, 1 << 31, u64::MAX].into_iter().enumerate() {
            // SAFETY: there are three counts.
            unsafe { splits.write(output, rank, value) };
        }
        assert_eq!(counts, [7, i32::MAX, i32::MAX]);
    }

    #[test]
    fn offsets_of_32_bits_are_refused_where_rows_may_begin_beyond() {
        let at = std::ptr::without_provenance_mut::<u8>(64);
        let (most, null) = (i32::MAX as usize, std::ptr::null_mut());
        let splits = |dtype, offsets| SplitsAt { input: at, output: null, offsets, dtype };
        assert_eq!(splits(DType::I32, at).bytes(0, 3, most).unwrap(), 3 * 4);
        assert_eq!(splits(DType::I64, at).bytes(0, 3, most + 1).unwrap(), 3 * 8);
        assert!(splits(DType::I32, null).bytes(0, 2, most + 1).is_ok());
        let error = splits(DType::I32, at).bytes(0, 2, most + 1).unwrap_err();
        assert!(error.is_invalid_argument() && error.to_string().contains("use i64"), "{error}");
    }

    #[test]
    fn splits_of_other_types_are_refused() {
        let at = std::ptr::without_provenance_mut::<u8>(64);
        for dtype in DType::REDUCED.into_iter().chain(DType::MOVED) {
            let splits = SplitsAt { input: at, output: at, offsets: at, dtype };
            let fine = matches!(dtype, DType::I32 | DType::I64);
            let bytes = splits.bytes(0, 2, 8);
            assert_eq!(bytes.is_err_and(|error| error.is_invalid_argument()), !fine, "{dtype:?}");
        }
    }
}
