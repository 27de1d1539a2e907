//! Calls on addresses, for callers whose memory is no [`Block`](symmpool_allocator::Block), such as tensors of
//! another language.
//!
//! Memory inside a window is used where it lies; other memory is staged through scratch, as slices are. Which of
//! the two it is follows from the address alone.

#![allow(unsafe_code)] // callers hand over raw memory, and promise what it is

use symmpool_allocator::{Error, Result, Stream, Windows};

use super::request::Request;
use super::{Communicator, Inner};
use crate::{DType, Place, ReduceOp, StandardCollective};

impl Communicator {
    /// [`Self::barrier`] that adds to `waits`, an `i64` for each rank, how long this rank waited for that one: in host
    /// memory in nanoseconds, on a device in clock cycles of an SM, from when the stream came to the call. Over many calls
    /// that shows which ranks are late. Ranks may make either form.
    ///
    /// # Errors
    ///
    /// Those of a barrier; `is_invalid_argument` for an address that is null or no multiple of 8.
    ///
    /// # Safety
    ///
    /// `waits` is readable and writable for a number for each rank, by whoever runs the call (the CPU in host memory, else
    /// the device), from now until `stream` is past the call.
    pub unsafe fn measured_barrier_at(&self, waits: *mut i64, stream: &Stream) -> Result<()> {
        if waits.is_null() || !waits.is_aligned() {
            let why = format!(
                "a barrier on rank {}: waits at {waits:p}: an address of i64 is needed",
                self.rank()
            );
            return Err(self.decline(Error::invalid_argument(why), stream));
        }
        let mut inner = self.begin(stream)?;
        // SAFETY: the caller promised that `waits` can be read and written for a number for each rank until `stream`
        // is past the call.
        unsafe { inner.engine.measured_barrier(waits, stream) }
    }

    /// Reduces `count` elements of every rank's `input` into every rank's `output`; in place if
    /// both are one address. Otherwise as [`Self::all_reduce_into`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Request::at`].
    #[inline]
    pub unsafe fn all_reduce_at(
        &self,
        output: *mut u8,
        input: *const u8,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that `input` is readable and `output` writable for these elements until
        // `stream` is past the call.
        let request =
            unsafe { Request::at(StandardCollective::AllReduce, output, input, count, dtype) };
        self.call(&request.op(op), stream)
    }

    /// Reduces part `r` of every rank's `input` into rank `r`'s `output` of `count` elements; the
    /// input has `world` times as many. Otherwise as [`Self::reduce_scatter_into`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Request::at`].
    #[inline]
    pub unsafe fn reduce_scatter_at(
        &self,
        output: *mut u8,
        input: *const u8,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that `input` is readable and `output` writable for the elements of all parts
        // until `stream` is past the call.
        let request =
            unsafe { Request::at(StandardCollective::ReduceScatter, output, input, count, dtype) };
        self.call(&request.op(op), stream)
    }

    /// Copies rank `r`'s `input` of `count` elements to part `r` of every rank's `output`, which
    /// has `world` parts. Otherwise as [`Self::all_gather_into`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Request::at`].
    #[inline]
    pub unsafe fn all_gather_at(
        &self,
        output: *mut u8,
        input: *const u8,
        count: usize,
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that `input` is readable and `output` writable for the elements of all parts
        // until `stream` is past the call.
        let request =
            unsafe { Request::at(StandardCollective::AllGather, output, input, count, dtype) };
        self.call(&request, stream)
    }

    /// Copies the root's `count` elements at `data` into every other rank's. Otherwise as
    /// [`Self::broadcast`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Request::at`]; `data` is written to on ranks other than the root.
    #[inline]
    pub unsafe fn broadcast_at(
        &self,
        data: *mut u8,
        count: usize,
        dtype: DType,
        root: u32,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that `data` is readable, and on ranks other than the root writable, until
        // `stream` is past the call.
        let request =
            unsafe { Request::at(StandardCollective::Broadcast, data, data, count, dtype) };
        self.call(&request.root(root), stream)
    }

    /// Sends part `r` of `input` to rank `r`, where it becomes part `rank` of `output`. Both have
    /// `world` parts of `count` elements. Otherwise as [`Self::all_to_all_into`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Request::at`].
    #[inline]
    pub unsafe fn all_to_all_at(
        &self,
        output: *mut u8,
        input: *const u8,
        count: usize,
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that `input` is readable and `output` writable for the elements of all parts
        // until `stream` is past the call.
        let request =
            unsafe { Request::at(StandardCollective::AllToAll, output, input, count, dtype) };
        self.call(&request, stream)
    }

    /// Sends `input_split_sizes[r]` elements to rank `r`, and receives `output_split_sizes[r]` from
    /// it. Otherwise as [`Self::all_to_all_v_into`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Request::at`], of `input` and `output` for the sums of their split sizes.
    pub unsafe fn all_to_all_v_at(
        &self,
        output: *mut u8,
        input: *const u8,
        output_split_sizes: &[usize],
        input_split_sizes: &[usize],
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        let bytes = |sizes: &[usize]| {
            let count = sizes.iter().fold(0_usize, |sum, size| sum.saturating_add(*size));
            count.saturating_mul(dtype.size())
        };
        let from = self.place_at(&mut inner, input.cast_mut(), bytes(input_split_sizes), stream)?;
        let to = self.place_at(&mut inner, output, bytes(output_split_sizes), stream)?;
        let sizes = (input_split_sizes, output_split_sizes);
        self.grow_for_splits(&mut inner, dtype, stream)?;
        // SAFETY: the caller promised that `input` is readable and `output` writable for the sums of the split sizes
        // until `stream` is past the call; `place_at` has found that windows cover them.
        unsafe { inner.engine.all_to_all_v((from, to), sizes, dtype, stream) }
    }

    /// Where memory lies, for the engine: as [`Self::place_block`], for memory that may be no block of the pool.
    pub(super) fn place_at(
        &self,
        inner: &mut Inner,
        pointer: *mut u8,
        bytes: usize,
        stream: &Stream,
    ) -> Result<Place> {
        let address = pointer as u64;
        let Some((slot, offset)) = self.pool.layout().locate(address) else {
            return Ok(Place::Unregistered(pointer));
        };
        if slot != self.pool.layout().rank {
            let why = format!(
                "address {address:#x} on rank {} lies in rank {slot}'s slot; a rank passes memory \
                 of its own",
                self.rank()
            );
            return Err(inner.engine.decline(Error::invalid_argument(why), stream));
        }
        if !inner.windows.covers(address, bytes as u64) {
            inner.windows = self.pool.windows();
            if !inner.windows.covers(address, bytes as u64) {
                return match self.may_be_plain(&inner.windows, address, bytes as u64) {
                    Ok(()) => Ok(Place::Unregistered(pointer)),
                    Err(why) => Err(inner.engine.decline(why, stream)),
                };
            }
        }
        Ok(Place::Window(offset))
    }

    /// Refuses memory that begins in this rank's slot but is neither covered by windows nor memory of a lane that
    /// is not shared: it begins in a window and ends outside, or ends outside the lane that it begins in.
    fn may_be_plain(&self, windows: &Windows, address: u64, bytes: u64) -> Result<()> {
        let layout = self.pool.layout();
        let Some((slot, offset)) = layout.locate(address).filter(|_| bytes > 0) else {
            return Ok(());
        };
        let in_lane = self.pool.lanes().any(|lane| {
            let (base, range) = lane.range();
            offset
                .checked_sub(base)
                .is_some_and(|from| from.checked_add(bytes).is_some_and(|end| end <= range))
        });
        // While a graph is captured, no commit can be made, so only the beginning of a block may be in a window.
        let leaves = windows.find(address).is_some() && !self.pool.is_commit_due();
        if in_lane && !leaves {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{bytes} bytes from address {address:#x} on begin in rank {slot}'s slot, {offset:#x} into \
             it, and are no memory of the pool: no block there is that long"
        )))
    }
}
