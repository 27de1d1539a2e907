//! The same calls on slices of ordinary memory, which pass through the communicator's scratch.

use symmpool_allocator::{Result, Stream};

use super::Communicator;
use crate::{Element, Place, ReduceOp};

impl Communicator {
    /// Reduces every rank's `data` in place.
    pub fn all_reduce_slice<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        let host = inner.engine.host("all_reduce of a slice", stream)?;
        let place = Place::Plain(data.as_mut_ptr().cast());
        // SAFETY: the slice is borrowed exclusively until the call returns, and peers do not touch
        // ordinary memory.
        unsafe { host.all_reduce(place, place, data.len(), T::DTYPE, op, self.requested.algorithm) }
            .map_err(|error| self.requested.blame(error))
    }

    /// Reduces part `r` of every rank's `input` into rank `r`'s `out`, which has a part's length.
    pub fn reduce_scatter_slice<T: Element>(
        &self,
        out: &mut [T],
        input: &[T],
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        inner
            .engine
            .host("reduce_scatter of a slice", stream)?
            .reduce_scatter_slices(input, out, op)
    }

    /// Copies rank `r`'s `input` to part `r` of every rank's `out`, which has `world` parts.
    pub fn all_gather_slice<T: Element>(
        &self,
        out: &mut [T],
        input: &[T],
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        inner.engine.host("all_gather of a slice", stream)?.all_gather_slices(input, out)
    }

    /// Copies the root's `data` into every other rank's.
    pub fn broadcast_slice<T: Element>(
        &self,
        data: &mut [T],
        root: u32,
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        inner.engine.host("broadcast of a slice", stream)?.broadcast_slice(data, root)
    }

    /// Sends part `r` of `input` to rank `r`, where it becomes part `rank` of `out`.
    pub fn all_to_all_slice<T: Element>(
        &self,
        out: &mut [T],
        input: &[T],
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        inner.engine.host("all_to_all of a slice", stream)?.all_to_all_slices(input, out)
    }

    /// Sends `input_split_sizes[r]` elements to rank `r`, and receives `output_split_sizes[r]`
    /// from it. Each slice is as long as the sum of its parts.
    pub fn all_to_all_v_slice<T: Element>(
        &self,
        out: &mut [T],
        input: &[T],
        output_split_sizes: &[usize],
        input_split_sizes: &[usize],
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        let host = inner.engine.host("all_to_all_v of a slice", stream)?;
        host.all_to_all_v_slices(input, input_split_sizes, out, output_split_sizes)
    }
}
