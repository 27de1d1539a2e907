//! All-to-alls whose counts lie in memory: their data, and where the counts are.

#![allow(unsafe_code)] // reads and writes counts through the caller's pointers

use symmpool_allocator::{Error, Result};

use crate::DType;

/// The data of an all-to-all with splits in memory: rows of `row` elements of `dtype`. `dtype` and `row` are the
/// same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitRows {
    /// The type of the elements.
    pub dtype: DType,
    /// Elements in a row, 1 or more.
    pub row: usize,
    /// Rows in the input. Splits that sum to more are refused.
    pub length: usize,
    /// Rows that the output has room for. Rows beyond that are not written.
    pub capacity: usize,
}
/// Where the counts of an all-to-all lie: arrays with one count for each rank, in memory that the CPU or, on
/// devices, the device can access. They overlap neither each other nor input and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitsAt {
    /// How many rows each rank is sent.
    pub input: *const u8,
    /// Where the call writes how many rows each rank sent, including those that had no room; null if that is not
    /// wanted.
    pub output: *mut u8,
    /// Where the call writes at which row of the output the rows of each rank begin; null if that is not wanted.
    pub offsets: *mut u8,
    /// The type of the counts: `I32` or `I64`. Where counts or offsets are written, outputs of 2^31 rows and more
    /// need `I64`.
    pub dtype: DType,
}
impl SplitsAt {
    /// Bytes of an array of counts for `world` ranks, where this rank's output has room for `capacity` rows. Refuses
    /// arrays that cannot be right.
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
            return refuse("their type must be i32 or i64");
        }
        let misaligned = |address: usize| !address.is_multiple_of(self.dtype.size());
        let places = [self.input as usize, self.output as usize, self.offsets as usize];
        if self.input.is_null() || places.into_iter().any(misaligned) {
            return refuse(
                "the input splits must not be null, and all must be aligned to their type",
            );
        }
        let is_written = !self.output.is_null() || !self.offsets.is_null();
        if is_written && self.dtype == DType::I32 && capacity > i32::MAX as usize {
            return refuse(&format!(
                "32 bits cannot hold the offsets of an output of {capacity} rows; use i64"
            ));
        }
        Ok(self.dtype.size() as u64 * u64::from(world))
    }

    /// Reads a count. Another thread may write it meanwhile, so the compiler must not read it a second time.
    ///
    /// # Safety
    ///
    /// The count is readable.
    pub(crate) unsafe fn read(&self, rank: usize) -> i64 {
        if self.dtype == DType::I64 {
            // SAFETY: the caller promised that the count is readable; `bytes` has checked that counts are aligned.
            unsafe { self.input.cast::<i64>().wrapping_add(rank).read_volatile() }
        } else {
            // SAFETY: the caller promised that the count is readable; `bytes` has checked that counts are aligned.
            i64::from(unsafe { self.input.cast::<i32>().wrapping_add(rank).read_volatile() })
        }
    }

    /// Writes a count unless `to` is null. A count that does not fit into 32 bits becomes the largest that does;
    /// there can be such, because rows that had no room are counted too.
    ///
    /// # Safety
    ///
    /// `to` is null, or the count there is writable.
    pub(crate) unsafe fn write(&self, to: *mut u8, rank: usize, value: u64) {
        if to.is_null() {
        } else if self.dtype == DType::I64 {
            // SAFETY: the caller promised that the count is writable, as `to` is not null; `bytes` has checked that
            // counts are aligned.
            unsafe { to.cast::<u64>().wrapping_add(rank).write(value) }
        } else {
            let value = i32::try_from(value).unwrap_or(i32::MAX);
            // SAFETY: the caller promised that the count is writable, as `to` is not null; `bytes` has checked that
            // counts are aligned.
            unsafe { to.cast::<i32>().wrapping_add(rank).write(value) }
        }
    }
}
