//! All-to-alls whose counts are in memory and are read when the call runs: on a device when the
//! stream comes to the call, so that each replay of a captured graph uses the counts of that moment.

#![allow(unsafe_code)] // passes on blocks as raw memory that the pool keeps mapped

use symmpool_allocator::{Block, Error, Result, Stream};

use super::Communicator;
use crate::{Element, SplitRows, SplitsAt};

/// The counts of an all-to-all, as blocks of `i32` or `i64`, each for all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Splits<'a, S: Element> {
    /// Rows that each rank is sent.
    pub input: &'a Block<S>,
    /// Where to write how many rows each rank sent, including those that the output had no room for.
    pub output: Option<&'a Block<S>>,
    /// Where to write at which row of the output each rank's rows begin.
    pub offsets: Option<&'a Block<S>>,
    /// Elements of a row, 1 or more. The same on every rank.
    pub row: usize,
}

impl Communicator {
    /// Sends `splits.input[r]` rows to rank `r`. The splits are read when the call runs; the host does not wait for
    /// them, and no rank needs to know what it will receive. Parts lie in rank order, without gaps, in `input`
    /// and in `out`. Rows that do not fit into `out` are not written.
    ///
    /// # Errors
    ///
    /// Besides those of every call: `is_overflow`, on every rank, if a rank was sent more than its
    /// output holds, and `is_invalid_argument`, on every rank, if a rank's splits were negative or
    /// more than its input has, in which case that rank sent nothing. All other data is where it
    /// should be, and the communicator stays usable. In host memory the call itself returns the error; on a
    /// device [`Self::synchronize`] returns it once, for all calls since the last time. Later calls do not
    /// fail because of it, as ranks would then no longer make the same calls.
    ///
    /// On several hosts only the rank whose output is too short gets `is_overflow`. A rank whose splits are wrong declines the
    /// call there: no data moves, and the others get `is_diverged`.
    pub fn all_to_all_v<T: Element, S: Element>(
        &self,
        out: &Block<T>,
        input: &Block<T>,
        splits: &Splits<'_, S>,
        stream: &Stream,
    ) -> Result<()> {
        let world = self.world() as usize;
        let given = [Some(splits.input), splits.output, splits.offsets];
        if splits.row == 0 || given.into_iter().flatten().any(|block| block.len() != world) {
            let lengths = given.map(|block| block.map(Block::len));
            let why = Error::invalid_argument(format!(
                "all_to_all_v on rank {}: rows of {} elements and {lengths:?} splits: a row has at \
                 least one, and each kind of splits one for each of {world} ranks",
                self.rank(),
                splits.row
            ));
            return Err(self.decline(why, stream));
        }
        let mut blocks = given.into_iter().flatten();
        blocks
            .try_for_each(|block| self.check_own("all_to_all_v", block))
            .map_err(|why| self.decline(why, stream))?;
        let rows = SplitRows {
            dtype: T::DTYPE,
            row: splits.row,
            length: input.len() / splits.row,
            capacity: out.len() / splits.row,
        };
        let at = |block: Option<&Block<S>>| {
            block.map_or(std::ptr::null_mut(), |block| block.as_ptr().cast::<u8>())
        };
        let splits = SplitsAt {
            input: at(Some(splits.input)),
            output: at(splits.output),
            offsets: at(splits.offsets),
            dtype: S::DTYPE,
        };
        let mut inner = self.begin(stream)?;
        let places = self.places(&mut inner, input, out, stream)?;
        self.grow_for_splits(&mut inner, T::DTYPE, stream)?;
        // SAFETY: all blocks are borrowed, so live and mapped; rows are as many as both blocks have, and each block
        // of splits has a count for every rank. There are no references into blocks: whoever else touches them does
        // so through raw pointers as well.
        unsafe { inner.engine.all_to_all_splits(places, &rows, &splits, stream) }
    }

    /// [`Self::all_to_all_v`] on addresses.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::all_to_all_v`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Request::at`](super::Request::at), of `input` and `output` for `rows.length`
    /// and `rows.capacity` rows, and of the splits for one count for each rank.
    pub unsafe fn all_to_all_v_splits_at(
        &self,
        output: *mut u8,
        input: *const u8,
        rows: &SplitRows,
        splits: &SplitsAt,
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        let bytes = |count: usize| count.saturating_mul(rows.row).saturating_mul(rows.dtype.size());
        let from = self.place_at(&mut inner, input.cast_mut(), bytes(rows.length), stream)?;
        let to = self.place_at(&mut inner, output, bytes(rows.capacity), stream)?;
        self.grow_for_splits(&mut inner, rows.dtype, stream)?;
        // SAFETY: the caller promised that `input` is readable and `output` writable for `rows.length` and
        // `rows.capacity` rows, and the splits for a count for each rank, until `stream` is past the call; `place_at`
        // has found that windows cover them.
        unsafe { inner.engine.all_to_all_splits((from, to), rows, splits, stream) }
    }
}
