//! All-to-alls whose counts are in memory, and are read when the call runs.

#![allow(unsafe_code)] // reads and writes counts through the caller's pointers

use symmpool_allocator::{Error, Result};

use super::Work;
use super::traffic_matrix::{Matrix, NONSENSE};
use crate::DType;
use crate::host::call::{Call, Operation};
use crate::host::{HostEngine, InPlace, Place};

/// What an all-to-all with splits in memory moves: rows of `row` elements of `dtype`, the same on
/// every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitRows {
    /// The type of the elements.
    pub dtype: DType,
    /// Elements of a row, 1 or more.
    pub row: usize,
    /// Rows that the input has. Splits that sum to more are refused.
    pub length: usize,
    /// Rows that the output holds. What ranks send beyond that is not written.
    pub capacity: usize,
}

/// Where the counts of an all-to-all are: one for each rank, in memory of whoever runs the call
/// (the CPU in host memory, else the device). They overlap neither each other nor input and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitsAt {
    /// Rows that each rank is sent.
    pub input: *const u8,
    /// Where to write how many rows each rank sent, those that had no room included; unless null.
    pub output: *mut u8,
    /// Where to write at which row of the output each rank's begin; unless null.
    pub offsets: *mut u8,
    /// The counts' own type: `I32` or `I64`. Outputs of 2^31 rows and more need `I64`, where counts
    /// or offsets are written.
    pub dtype: DType,
}

impl SplitsAt {
    /// Bytes of the counts for `world` ranks, of which this one's output holds `capacity` rows; why
    /// they cannot be.
    pub(crate) fn bytes(&self, rank: u32, world: u32, capacity: usize) -> Result<u64> {
        let refuse = |why: &str| {
            Err(Error::invalid_argument(format!(
                "all_to_all_v on rank {rank}: splits of {} at {:?}, {:?} and {:?}: {why}",
                self.dtype.name(),
                self.input,
                self.output,
                self.offsets
            )))
        };
        if !matches!(self.dtype, DType::I32 | DType::I64) {
            return refuse("they are to be i32 or i64");
        }
        let misaligned = |address: usize| !address.is_multiple_of(self.dtype.size());
        let places = [self.input as usize, self.output as usize, self.offsets as usize];
        if self.input.is_null() || places.into_iter().any(misaligned) {
            return refuse("they must be there, and aligned to their type");
        }
        let told = !self.output.is_null() || !self.offsets.is_null();
        if told && self.dtype == DType::I32 && capacity > i32::MAX as usize {
            return refuse(&format!(
                "they cannot say where rows of an output of {capacity} begin; use i64"
            ));
        }
        Ok(self.dtype.size() as u64 * u64::from(world))
    }

    /// Another thread may write the count meanwhile, so the compiler must not look a second time.
    ///
    /// # Safety
    ///
    /// The count is readable.
    unsafe fn read(&self, rank: usize) -> i64 {
        if self.dtype == DType::I64 {
            // SAFETY: the caller's promise; aligned (`bytes`).
            unsafe { self.input.cast::<i64>().wrapping_add(rank).read_volatile() }
        } else {
            // SAFETY: as above.
            i64::from(unsafe { self.input.cast::<i32>().wrapping_add(rank).read_volatile() })
        }
    }

    /// What 32 bits do not hold becomes the most that they do: rows that had no room count, too.
    ///
    /// # Safety
    ///
    /// `to` is null, or the count there is writable.
    unsafe fn write(&self, to: *mut u8, rank: usize, value: u64) {
        if to.is_null() {
        } else if self.dtype == DType::I64 {
            // SAFETY: the caller's promise; aligned (`bytes`).
            unsafe { to.cast::<u64>().wrapping_add(rank).write(value) }
        } else {
            let value = i32::try_from(value).unwrap_or(i32::MAX);
            // SAFETY: as above.
            unsafe { to.cast::<i32>().wrapping_add(rank).write(value) }
        }
    }
}

impl HostEngine {
    /// Sends as many rows to each rank as `splits` say; rows lie in rank order, without gaps, in
    /// `input` and `output`, which must not overlap. Nobody need know what it receives: the output
    /// holds `rows.capacity` rows, and what ranks send beyond that is not written.
    ///
    /// # Errors
    ///
    /// As [`Self::all_to_all_v`]; and, on every rank, once all data is where it should be:
    /// `is_overflow` if a rank was sent more than it had room for, `is_invalid_argument` if a rank's
    /// splits are negative or more than its input, which then sent nothing.
    ///
    /// # Safety
    ///
    /// As [`Self::all_to_all_v`], of input and output for `rows.length` and `rows.capacity` rows,
    /// and of the splits for a count a rank.
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
        // SAFETY: the caller's promise.
        let sound = unsafe { self.show_splits(splits, length, size) };
        let nonsense = if sound { 0 } else { NONSENSE };
        self.set_next_row(world, (capacity * size) as u64 | nonsense);
        let call = Call::new(Operation::AllToAllV).elements(dtype, row);
        let work = Work { data, matrix: Matrix::Splits, size, rank, world };
        // SAFETY: the caller's promises about input and output, which `data` resolves.
        unsafe { work.run(self, &call) }?;
        let mut offset = 0;
        for peer in 0..world {
            let count = self.row(peer, rank) / size as u64;
            // SAFETY: the caller's promise.
            unsafe { splits.write(splits.output, peer as usize, count) };
            // SAFETY: the caller's promise.
            unsafe { splits.write(splits.offsets, peer as usize, offset) };
            offset += count;
        }
        Matrix::Splits.amiss(self, size)
    }

    /// Puts the counts into this rank's row, in bytes; zeros if they are negative or more than
    /// `length`, and then false. Each is read once: peers trust the row, so what it holds is what was
    /// checked, whoever writes the counts meanwhile.
    ///
    /// # Safety
    ///
    /// There is a readable count for every rank.
    unsafe fn show_splits(&self, splits: &SplitsAt, length: usize, size: usize) -> bool {
        let mut left = length;
        for peer in 0..self.world() {
            // SAFETY: the caller's promise.
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
